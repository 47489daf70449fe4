"""meshfeed inspect: what a token store holds, and whether it is whole."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from meshfeed.errors import MeshfeedError, StoreError
from meshfeed.store import IndexedStore, OpenedStore, open_store
from meshfeed.store.checksums import checksums_of, is_of, write_checksums

I64 = npt.NDArray[np.int64]

_LOOKED_AT_WHOLE = 1 << 20
_NUM_BLOCKS = 64
_BLOCK_DOCUMENTS = 1 << 12
_BAR_WIDTH = 40


def add_parser(subparsers: Any) -> None:
    """Add `inspect` to argparse's subparsers."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "inspect",
        help="what a token store holds, and whether it is whole",
        description="Show format, counts, fingerprint and document lengths of a token store.",
    )
    parser.add_argument(
        "path", help="path or URL: .bin/.idx, JSONL, Parquet, or a folder with dataset.json, MDS or litdata"
    )
    parser.add_argument("--column", help="of the tokens or the text, in MDS, JSONL and Parquet")
    parser.add_argument("--tokenizer", help="for text: 'bytes', or the path of a tokenizers JSON file")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check every entry, checksum and hash, every token of JSONL; exit 1 and name what is broken",
    )
    parser.add_argument(
        "--write-checksums",
        action="store_true",
        help="write PATH.sums, by which the bytes of a .bin/.idx pair are checked when they come from afar",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; exit code 0, or 1 where the store cannot be opened or is broken."""
    broken: str | None = None
    facts: dict[str, Any] = {}
    try:
        store = open_store(args.path, column=args.column, tokenizer=args.tokenizer)
        if args.write_checksums:
            _show_progress("summing", _written_checksums(store), quiet=args.json)
        facts = facts_of(store)
        lengths = look_at_lengths(store)
        facts["document_lengths"] = lengths.facts()
        if not args.json:
            _print_tables(facts, lengths)
        if args.verify:
            _show_progress("checking", store.verify(), quiet=args.json)
            facts["verified"] = True
    except MeshfeedError as error:
        broken = str(error)
    if args.json:
        print(json.dumps(facts | ({"broken": broken} if broken else {}), indent=2))
    elif broken:
        print(f"broken: {broken}", file=sys.stderr)
    elif args.verify:
        print("verified: every entry is sound")
    return 1 if broken else 0


def facts_of(store: OpenedStore) -> dict[str, Any]:
    """What the store says of itself, as JSON-able values."""
    with store:
        counts = {
            "dtype": store.dtype.name,
            "num_tokens": store.num_tokens,
            "num_documents": store.num_documents,
        }
        facts: dict[str, Any] = {"path": store.path} | counts | store.facts()
        if isinstance(store, IndexedStore):
            facts["checksums"] = _checksums(store)
        return facts | {"fingerprint": store.fingerprint}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Document lengths: of all documents, or of blocks spread evenly over a huge store.

    Attributes:
        tokens: of each document looked at; int64 [n].
        num_documents: documents in the store.
    """

    tokens: I64
    num_documents: int

    @property
    def is_partial(self) -> bool:
        """Whether some documents were not looked at."""
        return self.tokens.size < self.num_documents

    def statistics(self) -> dict[str, int | float]:
        """Figures in tokens, and how many documents are empty; none where there is no document."""
        if not self.tokens.size:
            return {}
        low, median, high90, high99, high = np.percentile(self.tokens, (0, 50, 90, 99, 100)).tolist()
        return {
            "min": int(low),
            "median": median,
            "mean": float(self.tokens.mean()),
            "p90": high90,
            "p99": high99,
            "max": int(high),
            "empty": int((self.tokens == 0).sum()),
        }

    def facts(self) -> dict[str, Any]:
        """Statistics and histogram, as JSON-able values, and of how many documents they are."""
        bins = [{"first": first, "last": last, "documents": count} for first, last, count in self.bins()]
        counts = {"looked_at": self.tokens.size, "of": self.num_documents}
        return counts | self.statistics() | {"histogram": bins}

    def bins(self) -> list[tuple[int, int, int]]:
        """(first, last, documents): how many are first..last tokens long, a bin per power of two."""
        if not self.tokens.size:
            return []
        # 0 -> bin 0, 1 -> 1, 2..3 -> 2, 4..7 -> 3; frexp's exponent is the number of bits
        counts = np.bincount(np.frexp(self.tokens.astype(np.float64))[1])
        bits = range(int(np.flatnonzero(counts)[0]), counts.size)
        return [(1 << b >> 1, (1 << b) - 1, int(counts[b])) for b in bits]


def look_at_lengths(store: OpenedStore) -> Lengths:
    """The lengths of all documents up to 2**20, of 64 blocks of 4,096 in longer stores."""
    size = store.num_documents
    documents = np.arange(min(size, _LOOKED_AT_WHOLE))
    if size > _LOOKED_AT_WHOLE:
        # Whole blocks: neighbours share pages of the index, lone documents would cost a read each.
        starts = [(size - _BLOCK_DOCUMENTS) * i // (_NUM_BLOCKS - 1) for i in range(_NUM_BLOCKS)]
        documents = (np.array(starts)[:, None] + np.arange(_BLOCK_DOCUMENTS)).ravel()
    with store:
        return Lengths(tokens=store.lengths(documents), num_documents=size)


def _written_checksums(store: OpenedStore) -> Iterator[float]:
    if not isinstance(store, IndexedStore):
        raise StoreError(
            f"{store.path}: only .bin/.idx pairs have such checksums; MDS has hashes, where its writer was "
            f"told to"
        )
    return write_checksums(store)


def _checksums(store: IndexedStore) -> str:
    if store.wants_ahead:
        return "none" if store.files[0].guarded_by is None else "yes"
    sums = checksums_of(store)
    if sums is None:
        return "none"
    return "yes" if is_of(sums, store) else "of another store"


def _show_progress(what: str, parts: Iterator[float], *, quiet: bool) -> None:
    with Progress(console=Console(stderr=True), disable=quiet, transient=True) as progress:
        task = progress.add_task(what, total=1.0)
        for done in parts:
            progress.update(task, completed=done)


def _print_tables(facts: dict[str, Any], lengths: Lengths) -> None:
    console = Console()
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        if name != "document_lengths":
            table.add_row(name.replace("_", " "), _text(value))
    console.print(table)
    title = f"tokens per document, {lengths.num_documents:,} documents"
    if lengths.is_partial:
        title = (
            f"tokens per document, from {lengths.tokens.size:,} of {lengths.num_documents:,} documents "
            f"({_NUM_BLOCKS} blocks spread evenly)"
        )
    console.print(f"\n{title}", highlight=False)
    statistics = Table(box=None)
    figures = lengths.statistics()
    for name in figures:
        statistics.add_column(name, justify="right")
    statistics.add_row(*map(_text, figures.values()))
    console.print(statistics)
    console.print(_histogram(lengths.bins()))


def _text(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.1f}"
        case _:
            return str(value)


def _histogram(bins: list[tuple[int, int, int]]) -> Table:
    table = Table(box=None, show_header=False)
    for justify in ("right", "right", "left"):
        table.add_column(justify=justify)
    most = max((count for _, _, count in bins), default=0)
    for first, last, count in bins:
        span = f"{first:,}" if first == last else f"{first:,}..{last:,}"
        # Rounded up: a bin with any document at all shows.
        table.add_row(span, f"{count:,}", "█" * -(-count * _BAR_WIDTH // most))
    return table
