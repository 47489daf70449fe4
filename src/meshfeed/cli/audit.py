"""meshfeed audit: what a job drew of each source, from the recipe alone, with a digest to compare."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import meshfeed as mf
from meshfeed.cli import recipes
from meshfeed.cli.command import OK, Console, Table, print_json, say
from meshfeed.cli.options import Command, argument, option
from meshfeed.cli.recipes import RecipeOptions, until_of
from meshfeed.errors import MeshfeedError
from meshfeed.sequence.drawn import drawn_by_value, drawn_of_sources
from meshfeed.store import StreamStore
from meshfeed.summary import digest_of

_SHOWN = 50  # rows of the table by value


@dataclass(frozen=True, kw_only=True)
class Audit(Command, RecipeOptions):
    """sequences and tokens that a job drew of each source, with a digest to compare

    Work out from recipe and index alone what the steps before --until drew. Two people who get the same
    digest have the same data, the same recipe up to that step, and the same figures. --by adds the tokens by
    a value of each document, such as its licence or its year.
    """

    examples = """
        meshfeed audit recipe.py --until 120000
        meshfeed audit recipe.py --until 120000 --json
        meshfeed audit corpus --until 500 --sequences 512 --window 4096
        meshfeed audit recipe.py --until 120000 --by code=licences.txt --by web=years.npy
    """
    keys = {
        "until": "the first step that does not count",
        "recipe": "digest of all that decides the steps before it, and of no later change",
        "sources": "one object for each, with the keys below",
        "source, data": "its name, '' for a store alone; its fingerprint",
        "sequences, epochs, tokens": "drawn of it; tokens before a packing pads or truncates any",
        "sequences, tokens": "of all sources",
        "by": "with --by: source, value and tokens of each, the most tokens of a source first",
        "digest": "of everything above but the epochs, which are rounded",
    }

    recipe: str = argument("RECIPE", recipes.HELP)
    until: int | None = option("only steps before this one (all)")
    by: list[str] | None = option(
        "a file with a value of each document: a line of text for each, or .npy; for a source of a mixture "
        "NAME=FILE, and may be repeated",
        metavar="FILE",
    )

    def run(self) -> int:
        recipe = self.recipe_of(self.recipe)
        until = until_of(recipe, self.until, "does not count")
        with contextlib.ExitStack() as stack:
            for store in recipe.sources:
                stack.enter_context(store)
            sequences, tokens = drawn_of_sources(recipe, until)
            sizes = [recipe.sequence.num_sequences(store) for store in recipe.sources]
            by = None if self.by is None else _by_value(recipe, until, self.by)
        columns = recipe.source_names, recipe.sources, sequences.tolist(), tokens.tolist()
        sources: list[dict[str, Any]] = [
            {"source": name, "data": store.fingerprint, "sequences": count, "tokens": held}
            for name, store, count, held in zip(*columns)
        ]
        told: dict[str, Any] = {
            "until": until,
            "recipe": digest_of(recipe.summary(until)),
            "sources": sources,
            "sequences": int(sequences.sum()),
            "tokens": int(tokens.sum()),
        }
        if by is not None:
            told["by"] = by
        told["digest"] = digest_of(told)
        rows = recipe.sequence.row_lengths  # of several lengths, an epoch is counted in the longest
        unit = rows[0][1] * recipe.sequence.pieces[0][1] if len(rows) > 1 else 0
        for each, size in zip(sources, sizes):
            each["epochs"] = each["tokens"] / (size * unit) if unit else each["sequences"] / size
        if self.json:
            print_json(told)
        else:
            _print(told)
        return OK


def _by_value(recipe: mf.Recipe, until: int, given: list[str]) -> list[dict[str, Any]]:
    """Tokens drawn by source and by a value of its documents. given: as --by gives them."""
    names, values = recipe.source_names, dict[int, npt.NDArray[Any]]()
    for text in given:
        is_alone = names == ("",)
        if is_alone and "=" in text and not Path(text).exists():
            raise MeshfeedError(f"--by {text}: no such file; a store alone takes FILE, without NAME=")
        name, path = ("", text) if is_alone else text.partition("=")[::2]
        if name not in names or not path:
            raise MeshfeedError(f"--by {text}: write NAME=FILE, where NAME is one of {', '.join(names[:8])}")
        source = names.index(name)
        values[source] = _values_in(path, recipe.sources[source])
    known, numbers = np.unique(np.concatenate([*values.values()]), return_inverse=True)
    ends = np.cumsum([each.size for each in values.values()])
    drawn = drawn_by_value(recipe, until, dict(zip(values, np.split(numbers, ends[:-1]))), known.size)
    return [
        {"source": names[source], "value": str(known[value]), "tokens": int(drawn[source, value])}
        for source in sorted(values)
        for value in np.argsort(-drawn[source], kind="stable").tolist()
        if drawn[source, value]
    ]


def _values_in(path: str, store: StreamStore) -> npt.NDArray[Any]:
    """The value of each document of a store, as text. Raises MeshfeedError unless there is one of each."""
    try:
        if path.endswith(".npy"):
            found = np.load(path, allow_pickle=False).astype(str)
        else:
            found = np.array(Path(path).read_text(encoding="utf-8").splitlines(), str)
    except (OSError, ValueError) as bad:
        raise MeshfeedError(f"--by {path}: {bad}; give a text file, or .npy of numbers or text") from bad
    if found.shape != (store.num_documents,):
        has = f"{found.size} values" if found.ndim == 1 else f"an array of shape {found.shape}"
        raise MeshfeedError(
            f"--by {path}: {has}; {store!r} has {store.num_documents} documents, one for each"
        )
    return found


def _print(told: dict[str, Any]) -> None:
    table = Table("source", "sequences", "epochs", "tokens", "of all tokens")
    for each in told["sources"]:
        share = each["tokens"] / max(told["tokens"], 1)
        figures = f"{each['sequences']:,}", f"{each['epochs']:.3f}", f"{each['tokens']:,}", f"{share:.4%}"
        table.add_row(each["source"] or "-", *figures)
    table.add_row("all", f"{told['sequences']:,}", "", f"{told['tokens']:,}", "")
    Console().print(table)
    if "by" in told:
        tokens = {each["source"]: each["tokens"] for each in told["sources"]}
        table = Table("source", "value", "tokens", "of the source's")
        for each in told["by"][:_SHOWN]:
            share = each["tokens"] / tokens[each["source"]]
            table.add_row(each["source"] or "-", each["value"], f"{each['tokens']:,}", f"{share:.4%}")
        Console().print("", table)
        if len(told["by"]) > _SHOWN:
            say(f"... and {len(told['by']) - _SHOWN:,} more: --json prints all")
    say(f"\nbefore step {told['until']}; digest {told['digest']}")
