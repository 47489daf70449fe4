"""meshfeed audit: what a job drew of each source, from the recipe alone, with a digest to compare."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

import meshfeed as mf
from meshfeed.cli import recipes
from meshfeed.cli.command import OK, Console, Table, print_json, say
from meshfeed.cli.options import Command, argument, option
from meshfeed.cli.recipes import RecipeOptions, until_of
from meshfeed.errors import AccessError, MeshfeedError, StoreError
from meshfeed.files import Cache, Folder
from meshfeed.files.url import is_remote, parent
from meshfeed.formats.parquet import RawStream
from meshfeed.formats.prepared import VALUES, values_name
from meshfeed.recipe import entered
from meshfeed.report.drawn import drawn_by_value, drawn_of_sources
from meshfeed.store import DatasetStore, StreamStore
from meshfeed.summary import digest_of

_SHOWN = 50  # rows of the table by value

_Values = tuple[list[str], npt.NDArray[np.int64]]
"""Values, each once, and the number of that of each document; [num_documents]."""


@dataclass(frozen=True, kw_only=True)
class Audit(Command, RecipeOptions):
    """sequences and tokens that a job drew of each source, with a digest to compare

    Work out from recipe and index alone what the steps before --until drew. Two people who get the same
    digest have the same data, the same recipe up to that step, and the same figures. --by adds the tokens by
    a value of each document, such as its licence or its year; of a mixture, for each source that has it.
    """

    examples = """
        meshfeed audit recipe.py --until 120000
        meshfeed audit corpus --until 500 --sequences 512 --window 4096
        meshfeed audit recipe.py --until 120000 --by license
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
        "a column that `meshfeed prepare --keep` has kept, or a file with a value of each document: a line "
        "of text for each, or .npy; for one source of a mixture NAME=COLUMN or NAME=FILE; may be repeated",
        metavar="COLUMN",
    )

    def run(self) -> int:
        recipe = self.recipe_of(self.recipe)
        until = until_of(recipe, self.until, "does not count")
        with entered(recipe):
            sequences, tokens = drawn_of_sources(recipe, until)
            sizes = [recipe.sequence.num_sequences(store) for store in recipe.sources]
            by = None if self.by is None else self._by_value(recipe, until, self.by)
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
        for each, size in zip(sources, sizes):
            each["epochs"] = each["sequences"] / size
        if self.json:
            print_json(told)
        else:
            _print(told)
        return OK

    def _by_value(self, recipe: mf.Recipe, until: int, given: list[str]) -> list[dict[str, Any]]:
        """Tokens drawn by source and by a value of its documents. given: as --by gives them."""
        names, found = recipe.source_names, dict[int, _Values]()
        for text in given:
            for source, folder, name in self._files_of(recipe, text):
                if source in found:
                    whose = repr(names[source]) if names[source] else "the store"
                    raise MeshfeedError(f"--by {text}: {whose} has values already; ask for each column alone")
                found[source] = _values_in(text, folder, name, recipe.sources[source])
        known = sorted(set().union(*(values for values, _ in found.values())))
        at = {value: number for number, value in enumerate(known)}
        of_source = {
            source: np.array([at[value] for value in values], np.int64)[numbers]
            for source, (values, numbers) in found.items()
        }
        drawn = drawn_by_value(recipe, until, of_source, len(known))
        return [
            {"source": names[source], "value": known[value], "tokens": int(drawn[source, value])}
            for source in sorted(found)
            for value in np.argsort(-drawn[source], kind="stable").tolist()
            if drawn[source, value]
        ]

    def _files_of(self, recipe: mf.Recipe, text: str) -> list[tuple[int, Folder, str]]:
        """(source, folder, file of values there) of --by COLUMN, FILE, NAME=COLUMN or NAME=FILE."""
        if not text:
            raise MeshfeedError(
                f"--by {text!r}: give a column that `meshfeed prepare --keep` has kept, or a file"
            )
        names, sources = recipe.source_names, [*enumerate(recipe.sources)]
        kept = [(source, *place) for source, store in sources if (place := _kept_in(store, text)) is not None]
        if kept:
            return kept
        if names == ("",):
            if not is_remote(text) and not Path(text).exists():
                raise MeshfeedError(
                    f"--by {text}: no such file; a store alone takes FILE, without NAME=, or a column that "
                    f"`meshfeed prepare --keep` has kept{_columns_kept(recipe.sources)}"
                )
            return [(0, *self._place_of(text))]
        name, _, path = text.partition("=")
        if name not in names or not path:
            raise MeshfeedError(
                f"--by {text}: no store has kept such a column by `meshfeed prepare --keep`"
                f"{_columns_kept(recipe.sources)}; or write NAME=FILE, where NAME is one of "
                f"{', '.join(names[:8])}"
            )
        source = names.index(name)
        return [(source, *(_kept_in(recipe.sources[source], path) or self._place_of(path)))]

    def _place_of(self, path: str) -> tuple[Folder, str]:
        folder, name = parent(path)
        return Folder(folder, None if self.cache is None else Cache(self.cache), self.storage_options), name


def _kept_in(store: StreamStore, column: str) -> tuple[Folder, str] | None:
    """The file that has the values of a column, if `meshfeed prepare` kept it beside the store."""
    if not isinstance(store, DatasetStore) or not column:
        return None
    try:
        return (store.folder, name) if store.folder.holds(name := values_name(column)) else None
    except AccessError:  # as S3 answers for what is missing where the bucket may not be listed
        return None


def _columns_kept(stores: Sequence[StreamStore]) -> str:
    """The columns that stores have kept, as a clause of a message; a web server does not list its files."""
    found = set[str]()
    for store in stores:
        if isinstance(store, DatasetStore):
            with contextlib.suppress(StoreError):
                found |= {
                    name for name, _ in store.folder.names() if name.endswith(VALUES) and "/" not in name
                }
    return f" (there are {', '.join(name.removesuffix(VALUES) for name in sorted(found))})" if found else ""


def _values_in(given: str, folder: Folder, name: str, store: StreamStore) -> _Values:
    """The value of each document of a store. Raises MeshfeedError unless there is one of each."""
    try:
        if name.endswith(".npy"):
            with _stream(folder, name) as stream:
                array = np.lib.format.read_array(stream, allow_pickle=False)
            each_once, numbers = np.unique(array, return_inverse=True)
            values, shape = each_once.astype(str).tolist(), array.shape
        else:
            known = dict[str, int]()
            numbers = np.fromiter(
                (known.setdefault(line, len(known)) for line in _lines(folder, name)), np.int64
            )
            values, shape = [*known], numbers.shape
    except StoreError as bad:
        raise MeshfeedError(f"--by {given}: {bad}") from bad
    except (OSError, ValueError) as bad:
        raise MeshfeedError(f"--by {given}: {bad}; give a text file, or .npy of numbers or text") from bad
    if shape != (store.num_documents,):
        has = f"{numbers.size} values" if len(shape) == 1 else f"an array of shape {shape}"
        raise MeshfeedError(
            f"--by {given}: {has}; {store!r} has {store.num_documents} documents, one for each"
        )
    return values, numbers


@contextlib.contextmanager
def _stream(folder: Folder, name: str) -> Generator[IO[bytes]]:
    """A file to read, here or in storage."""
    with folder.file(name) as file, io.BufferedReader(RawStream(file), 1 << 20) as stream:
        yield stream


def _lines(folder: Folder, name: str) -> Iterator[str]:
    """The lines of a file of text."""
    with _stream(folder, name) as stream:
        for line in io.TextIOWrapper(stream, "utf-8"):
            yield line.removesuffix("\n")


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
            table.add_row(
                each["source"] or "-",
                each["value"].strip() or "(blank)",
                f"{each['tokens']:,}",
                f"{share:.4%}",
            )
        Console().print("", table)
        if len(told["by"]) > _SHOWN:
            say(f"... and {len(told['by']) - _SHOWN:,} more: --json prints all")
    say(f"\nbefore step {told['until']}; digest {told['digest']}")
