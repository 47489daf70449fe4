"""A recipe as a command's argument: a Python file that makes one, or a token store by its path."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

import meshfeed as mf
from meshfeed.errors import MeshfeedError

HELP = (
    "FILE.py or FILE.py:NAME that makes a mf.Recipe (NAME: recipe), or a token store, whose documents it is"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of a store that is given without a recipe."""
    parser.add_argument("--sequences", type=int, default=256, help="sequences per step of a store (256)")
    parser.add_argument("--seed", type=int, default=0, help="of a store's shuffle (0)")


def recipe_of(text: str, args: argparse.Namespace) -> mf.Recipe:
    """The recipe that the argument means. Raises MeshfeedError where it means none."""
    path, colon, name = text.rpartition(":") if ".py:" in text else (text, "", "")
    if not path.endswith(".py"):
        return mf.Recipe(
            data=mf.open(text),
            sequence=mf.Documents(),
            batch=mf.Batch(sequences=args.sequences),
            seed=args.seed,
        )
    if not Path(path).is_file():
        raise MeshfeedError(f"{path}: no such file; give {HELP}")
    try:
        made = runpy.run_path(path, run_name="meshfeed_recipe")
    except MeshfeedError:
        raise
    except Exception as error:
        raise MeshfeedError(f"{path}: {type(error).__name__}: {error}") from error
    recipe = made.get(name if colon else "recipe")
    if not isinstance(recipe, mf.Recipe):
        raise MeshfeedError(f"{path} makes no mf.Recipe called {name or 'recipe'!r}")
    return recipe
