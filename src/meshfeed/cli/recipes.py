"""A recipe as a command's argument: a Python file that makes one, or a token store by its path."""

from __future__ import annotations

import runpy
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import meshfeed as mf
from meshfeed.cli.options import option, refuse_given
from meshfeed.cli.rule_names import rule_named
from meshfeed.errors import MeshfeedError
from meshfeed.order import num_steps
from meshfeed.store import StreamStore, open_store
from meshfeed.store.base import LabelsAre
from meshfeed.store.tokenizer import KNOWN

HELP = (
    "FILE.py or FILE.py:NAME that makes a mf.Recipe (NAME: recipe), or the path or URL of a token store, "
    "whose documents are its sequences"
)
NUM_POSITIONS = 2**62
"""Sequences of a stream at most; the numbers of further ones do not fit."""
OF_STORE = (
    *("sequences", "tokens", "seed", "rule", "window"),
    *("column", "dtype", "tokenizer", "eod", "eod_token", "labels", "ignore", "cache", "storage"),
)


@dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """Options of remote storage, and of the cache."""

    cache: str | None = option(
        "the node's cache (default: $MESHFEED_CACHE, else a temporary one)", metavar="DIR"
    )
    storage: list[str] | None = option(
        "option of the storage client, such as endpoint=http://host:9000; may be repeated",
        metavar="NAME=VALUE",
    )

    @property
    def storage_options(self) -> dict[str, str]:
        """--storage NAME=VALUE as a mapping. Raises MeshfeedError."""
        options: dict[str, str] = {}
        for text in self.storage or ():
            name, equals, value = text.partition("=")
            if not (name and equals):
                raise MeshfeedError(f"--storage {text}: write NAME=VALUE, such as region=eu-west-1")
            options[name] = value
        return options


@dataclass(frozen=True, kw_only=True)
class StoreOptions(StorageOptions):
    """Options of `mf.open`."""

    column: str | None = option("the column of tokens or text, if there are several", metavar="NAME")
    dtype: str | None = option(
        "dtype of raw tokens, such as uint16: of a file without an index, or an MDS column of plain bytes",
        metavar="TYPE",
    )
    tokenizer: str | None = option(f"tokenizer of a text column: {KNOWN}", metavar="FILE")
    eod: bool = option("of text: end each document with the tokenizer's EOS token", default=False)
    eod_token: str | None = option("of text: end each document with this token or token id", metavar="TOKEN")
    labels: str | None = option(
        "whether a column of labels is shifted: has at a token what it predicts, not its own label",
        choices=get_args(LabelsAre),
    )
    ignore: list[str] | None = option(
        "a column that is not used: labels, loss_mask, attention_mask, completion_mask, ...; may be repeated",
        metavar="NAME",
    )

    def open(self, path: str, **replaced: Any) -> StreamStore:
        """The store at a path, read as the options say. Raises StoreError."""
        names = ("column", "dtype", "tokenizer", "labels", "cache")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        eod = (self.eod or None) if self.eod_token is None else self.eod_token
        options |= {"eod": eod} | replaced
        return open_store(path, **options, ignore=self.ignore or (), options=self.storage_options)


@dataclass(frozen=True, kw_only=True)
class AmendmentOptions:
    """Options of a job that was amended."""

    title = "of a job that was amended while it trained"

    amendments: Path | None = option("the ledger that the job has kept", metavar="LEDGER")


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(StoreOptions, AmendmentOptions):
    """Options of a store that is given without a recipe."""

    title = "for a store given by its path (a recipe sets these itself)"

    sequences: int | None = option("sequences per step (256)")
    tokens: int | None = option("instead of --sequences: about so many tokens per step")
    seed: int | None = option("seed of the shuffle (0)", least=0)
    rule: str | None = option(
        "sequence rule, such as 'masked(512, vocab_size=33, mask_token=32)' (documents)", metavar="RULE"
    )
    window: int | None = option("the same as --rule 'windows(N)'")

    def recipe_of(self, text: str, until: int | None = None) -> mf.Recipe:
        """The recipe that the argument means, amended. Raises MeshfeedError where it means none.

        until: the steps before it are asked for; None for all. What later amendments name need not exist any
        more.
        """
        recipe = self._unamended(text)
        if self.amendments is None:
            return recipe
        ledger = mf.amendments.Ledger.read(self.amendments)
        return recipe.amended(each for each in ledger if until is None or each.step < until)

    def _unamended(self, text: str) -> mf.Recipe:
        path, colon, name = text.rpartition(":") if ".py:" in text else (text, "", "")
        if not path.endswith(".py"):
            return self._of_store(text)
        if not Path(path).is_file():
            raise MeshfeedError(f"{path}: no such file; give {HELP}")
        refuse_given(self, OF_STORE, f"is of a store given by its path; {path} says it itself")
        made = _made_by(path)
        recipe = made.get(name if colon else "recipe")
        if not isinstance(recipe, mf.Recipe):
            others = [other for other, value in made.items() if isinstance(value, mf.Recipe)]
            hint = f"it has {', '.join(f'{path}:{each}' for each in others)}" if others else f"give {HELP}"
            raise MeshfeedError(f"{path} makes no mf.Recipe called {name or 'recipe'!r}; {hint}")
        return recipe

    def _of_store(self, path: str) -> mf.Recipe:
        if self.window is not None:
            refuse_given(self, ["rule"], "and --window are two rules; give one of them")
        if self.tokens is not None:
            refuse_given(self, ["sequences"], "and --tokens are two batches; give one of them")
        return mf.Recipe(
            data=self.open(path),
            sequence=rule_named(self.rule or "documents") if self.window is None else mf.Windows(self.window),
            batch=mf.Batch(self.sequences or 256) if self.tokens is None else mf.Batch(tokens=self.tokens),
            seed=self.seed or 0,
        )


def until_of(recipe: mf.Recipe, until: int | None, meaning: str) -> int:
    """The step that --until gives, or else the end of the stream. Raises MeshfeedError if it has none.

    meaning: what the step is to the command, for the message.
    """
    found = num_steps(recipe) if until is None else until
    if found is None:
        raise MeshfeedError(f"this recipe never ends; give --until STEP, the first step that {meaning}")
    if recipe.batch.position(found) >= NUM_POSITIONS:
        raise MeshfeedError(
            f"--until {found}: beyond the 2**62 positions of the stream; name an earlier step"
        )
    return found


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
