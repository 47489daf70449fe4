"""A recipe as a command's argument: a Python file that makes one, or a token store by its path."""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import meshfeed as mf
from meshfeed.cli.command import refuse_given, whole
from meshfeed.errors import MeshfeedError
from meshfeed.formats.tokenizer import KNOWN
from meshfeed.sequence.named import rule_named
from meshfeed.store import StreamStore, open_store

HELP = (
    "FILE.py or FILE.py:NAME that makes a mf.Recipe (NAME: recipe), or the path or URL of a token store, "
    "whose documents are its sequences"
)
OF_STORE = ("sequences", "seed", "rule", "window", "column", "dtype", "tokenizer", "cache", "storage")


def add_options(parser: argparse.ArgumentParser, *, rules: bool = True) -> None:
    """Options of a store that is given without a recipe. rules: whether its sequences may be chosen."""
    group = parser.add_argument_group("for a store given by its path (a recipe sets these itself)")
    group.add_argument("--sequences", type=whole(1), metavar="N", help="sequences per step (256)")
    group.add_argument("--seed", type=whole(0), metavar="N", help="seed of the shuffle (0)")
    if rules:
        group.add_argument(
            "--rule",
            metavar="RULE",
            help="sequence rule, such as 'masked(512, vocab_size=33, mask_token=32)' (documents)",
        )
        group.add_argument("--window", type=whole(1), metavar="N", help="the same as --rule 'windows(N)'")
    parser.set_defaults(rule=None, window=None)
    add_store_options(group)


def add_store_options(parser: Any) -> None:
    """Options of `mf.open`."""
    parser.add_argument("--column", metavar="NAME", help="the column of tokens or text, if there are several")
    parser.add_argument(
        "--dtype", metavar="TYPE", help="dtype of tokens in an MDS column of plain bytes, such as uint16"
    )
    parser.add_argument("--tokenizer", metavar="FILE", help=f"tokenizer of a text column: {KNOWN}")
    add_storage_options(parser)


def add_storage_options(parser: Any) -> None:
    """Options of remote storage, and of the cache."""
    parser.add_argument(
        "--cache", metavar="DIR", help="the node's cache (default: $MESHFEED_CACHE, else a temporary one)"
    )
    parser.add_argument(
        "--storage",
        metavar="NAME=VALUE",
        action="append",
        help="option of the storage client, such as endpoint=http://host:9000; may be repeated",
    )


def opened(path: str, args: argparse.Namespace, **replaced: Any) -> StreamStore:
    """The store at a path, read as the options say. Raises StoreError."""
    options: dict[str, Any] = {
        name: getattr(args, name) for name in ("column", "dtype", "tokenizer", "cache")
    }
    return open_store(path, **(options | replaced), options=storage_options(args.storage))


def storage_options(given: list[str] | None) -> dict[str, str]:
    """--storage NAME=VALUE as a mapping. Raises MeshfeedError."""
    options: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise MeshfeedError(f"--storage {text}: write NAME=VALUE, such as region=eu-west-1")
        options[name] = value
    return options


def recipe_of(text: str, args: argparse.Namespace) -> mf.Recipe:
    """The recipe that the argument means. Raises MeshfeedError where it means none."""
    path, colon, name = text.rpartition(":") if ".py:" in text else (text, "", "")
    if not path.endswith(".py"):
        return _of_store(text, args)
    if not Path(path).is_file():
        raise MeshfeedError(f"{path}: no such file; give {HELP}")
    refuse_given(args, OF_STORE, f"is of a store given by its path; {path} says it itself")
    made = _made_by(path)
    recipe = made.get(name if colon else "recipe")
    if not isinstance(recipe, mf.Recipe):
        others = [other for other, value in made.items() if isinstance(value, mf.Recipe)]
        hint = f"it has {', '.join(f'{path}:{each}' for each in others)}" if others else f"give {HELP}"
        raise MeshfeedError(f"{path} makes no mf.Recipe called {name or 'recipe'!r}; {hint}")
    return recipe


def _of_store(path: str, args: argparse.Namespace) -> mf.Recipe:
    if args.window is not None:
        refuse_given(args, ["rule"], "and --window are two rules; give one of them")
    return mf.Recipe(
        data=opened(path, args),
        sequence=rule_named(args.rule or "documents") if args.window is None else mf.Windows(args.window),
        batch=mf.Batch(sequences=256 if args.sequences is None else args.sequences),
        seed=args.seed or 0,
    )


def _made_by(path: str) -> dict[str, Any]:
    """What a user's file defines; it may import what lies beside it. Its own errors name its line."""
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        return runpy.run_path(path, run_name="meshfeed_recipe")
    except (Exception, SystemExit) as error:
        raise MeshfeedError(_told(path, error)) from error
    finally:
        sys.path.pop(0)


def _told(path: str, error: BaseException) -> str:
    """An error of a user's file in a line, and the line of the file where it arose."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{path}:{error.lineno}: {error.msg}: {(error.text or '').strip()}"
    kind = "" if isinstance(error, MeshfeedError) else f"{type(error).__name__}: "
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename == path]
    if not frames:
        return f"{path}: {kind}{error}"
    return f"{path}:{frames[-1].lineno}: {kind}{error}\n    {frames[-1].line}"
