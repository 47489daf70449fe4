"""meshfeed inspect: what a token store holds, and whether it is whole."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from meshfeed.cli import recipes
from meshfeed.cli.command import (
    OK,
    WRONG,
    Console,
    Table,
    add_command,
    print_facts,
    print_json,
    say,
    show_progress,
    shown,
    whole,
    write_text,
)
from meshfeed.cli.texts import beginnings, decoder
from meshfeed.errors import (
    AccessError,
    CacheError,
    MeshfeedError,
    MissingError,
    OptionError,
    StoreError,
    UnavailableError,
)
from meshfeed.files import Cache
from meshfeed.files.url import is_remote, without_secrets
from meshfeed.formats.documents import DocumentFiles
from meshfeed.formats.tokens import TOKEN_COLUMNS
from meshfeed.report.lengths import Lengths
from meshfeed.report.store import Picture, page
from meshfeed.store import IndexedStore, StreamStore
from meshfeed.store.checksums import is_of, write_checksums
from meshfeed.store.node_index import checksums_beside

_LOOKED_AT_WHOLE = 1 << 20
_NUM_BLOCKS = 64
_BLOCK_DOCUMENTS = 1 << 12
_BAR_WIDTH = 40

_UNASKED = (
    OptionError,
    MissingError,
    AccessError,
    UnavailableError,
    CacheError,
)  # says nothing about the store

_KEYS = {
    "path, format, fingerprint": "where it is, what it is, digest of its content",
    "dtype, num_tokens, num_documents": "what the whole store holds",
    "num_shards, shard_documents": "where it has shards; documents per shard: min, median, max",
    "columns, ...": "what else its format says of it",
    "document_lengths": "looked_at, of, min, p1 ... max, mean, empty, histogram of first..last",
    "texts": "with --show: document and text, or tokens without --tokenizer",
    "verified, broken": "with --verify: true, or what is broken and where",
}


def add_parser(subparsers: Any) -> None:
    """Add `inspect` to argparse's subparsers."""
    parser = add_command(
        subparsers,
        "inspect",
        run,
        help="what a token store holds, and whether it is whole",
        description="Show format, counts, fingerprint, document lengths and texts of a token store: "
        ".bin/.idx, a folder with dataset.json, MDS, litdata, JSONL or Parquet, local or remote.",
        examples="""
            meshfeed inspect corpus
            meshfeed inspect corpus --show 3 --tokenizer tokenizer.json --html corpus.html
            meshfeed inspect s3://bucket/corpus --storage region=eu-west-1 --cache /local/cache --json
            meshfeed inspect corpus --verify && sbatch train.sh
        """,
        wrong="the store is broken; stderr, or the key 'broken', says where",
        keys=_KEYS,
    )
    parser.add_argument(
        "path", metavar="PATH", help="path or URL (s3://, gs://, az://, https://) of the store"
    )
    recipes.add_store_options(parser)
    parser.add_argument(
        "--show", type=whole(1), metavar="N", help="show how N documents begin, decoded by --tokenizer"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the same as an HTML page")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check every entry, checksum, hash and length that the format has, and name what is broken",
    )
    parser.add_argument(
        "--write-checksums",
        action="store_true",
        help="write PATH.sums, checksums that remote reads of a .bin/.idx pair are compared with",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; 0, or 1 where the store is broken. Raises MeshfeedError where it cannot be asked."""
    if not (args.verify and is_remote(args.path)):
        return _run(args)
    with Cache(args.cache).anew() as cache:  # what lies there now, whatever the node remembers
        args.cache = cache
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    facts: dict[str, Any] = {"path": without_secrets(args.path)}
    try:
        store = _opened(args)
    except _UNASKED:
        raise
    except StoreError as error:
        return _ended(args, facts, str(error))
    if args.write_checksums:
        show_progress("summing", _written_checksums(store), quiet=args.json)
    decode = decoder(args.tokenizer) if args.tokenizer and args.show else None
    texts: list[tuple[int, str]] = []
    lengths, looked, broken = Lengths(tokens=np.zeros(0, np.int64), num_documents=0), False, None
    try:
        facts = facts_of(store)
        lengths = look_at_lengths(store)
        texts = beginnings(store, args.show, decode) if args.show else []
        looked = True
        if args.verify:
            show_progress("checking", store.verify(), quiet=args.json)
    except (AccessError, UnavailableError, CacheError):
        raise
    except StoreError as error:
        broken = str(error)
    if args.html and "dtype" in facts:
        verdict = f"broken: {broken}" if broken else "sound: every entry was checked" if args.verify else ""
        told = {name: shown(value) for name, value in facts.items()}
        picture = Picture(path=store.path, facts=told, lengths=lengths, texts=texts, verdict=verdict)
        write_text(args.html, page(picture))
    if looked and not args.json:
        _print(facts, lengths, texts)
    facts["document_lengths"] = lengths.facts()
    if args.show:
        facts["texts"] = [{"document": document, "text": text} for document, text in texts]
    return _ended(args, facts, broken)


def _ended(args: argparse.Namespace, facts: dict[str, Any], broken: str | None) -> int:
    if args.verify and not broken:
        facts["verified"] = True
    if broken:
        facts["broken"] = broken
    if args.json:
        print_json(facts)
    elif broken:
        sys.stdout.flush()
        say(f"broken: {broken}", sys.stderr)
    elif args.verify:
        print("verified: every entry is sound")
    return WRONG if broken else OK


def _opened(args: argparse.Namespace) -> StreamStore:
    """The store. Its text is read with --tokenizer; of tokens, that only decodes what is shown."""
    if args.tokenizer is None:
        return recipes.opened(args.path, args)
    store = recipes.opened(args.path, args, tokenizer=None)
    if isinstance(store, DocumentFiles) and args.column not in TOKEN_COLUMNS:
        return recipes.opened(args.path, args)
    if not args.show:
        raise MeshfeedError(
            f"--tokenizer {args.tokenizer}: {store.path} holds tokens; add --show N to decode some"
        )
    return store


def facts_of(store: StreamStore) -> dict[str, Any]:
    """Facts about the store, as JSON-able values."""
    with store:
        counts = {
            "dtype": store.dtype.name,
            "num_tokens": store.num_tokens,
            "num_documents": store.num_documents,
        }
        facts: dict[str, Any] = {"path": store.path} | counts | store.facts()
        ends = store.shard_ends
        if ends is not None and ends.size:
            sizes = np.diff(ends, prepend=0)
            low, median, high = int(sizes.min()), float(np.median(sizes)), int(sizes.max())
            facts["shard_documents"] = {"min": low, "median": median, "max": high}
        if isinstance(store, IndexedStore):
            facts["checksums"] = _checksums(store)
        return facts | {"fingerprint": store.fingerprint}


def look_at_lengths(store: StreamStore) -> Lengths:
    """The lengths of all documents up to 2**20, of 64 blocks of 4,096 in longer stores."""
    size = store.num_documents
    documents = np.arange(min(size, _LOOKED_AT_WHOLE))
    if size > _LOOKED_AT_WHOLE:
        # Whole blocks: neighbours share pages of the index, lone documents would cost a read each.
        starts = [(size - _BLOCK_DOCUMENTS) * i // (_NUM_BLOCKS - 1) for i in range(_NUM_BLOCKS)]
        documents = (np.array(starts)[:, None] + np.arange(_BLOCK_DOCUMENTS)).ravel()
    with store:
        return Lengths(tokens=store.lengths(documents), num_documents=size)


def _written_checksums(store: StreamStore) -> Iterator[float]:
    if not isinstance(store, IndexedStore):
        raise MeshfeedError(
            f"{store.path}: only .bin/.idx pairs have such checksums; MDS has hashes, where its writer was "
            f"told to"
        )
    return write_checksums(store)


def _checksums(store: IndexedStore) -> str:
    if store.wants_ahead:
        return "none" if store.files[0].guarded_by is None else "yes"
    sums = checksums_beside(store.path)
    if sums is None:
        return "none"
    return "yes" if is_of(sums, store) else "of another store"


def _print(facts: dict[str, Any], lengths: Lengths, texts: list[tuple[int, str]]) -> None:
    console = Console()
    print_facts(facts, console)
    console.print(f"\n{lengths.title}")
    statistics = Table()
    figures = lengths.statistics()
    for name in figures:
        statistics.add_column(name, justify="right")
    statistics.add_row(*map(shown, figures.values()))
    console.print(statistics)
    console.print()
    console.print(_histogram(lengths))
    for document, text in texts:
        console.print(f"\n[bold]document {document:,}[/bold]")
        console.print(Text(text), soft_wrap=True)


def _histogram(lengths: Lengths) -> Table:
    table = Table("tokens", "documents", "", "of all tokens")
    for column, justify in zip(table.columns, ("right", "right", "left", "right")):
        column.justify = justify
    bins = lengths.bins()
    most = max((each.documents for each in bins), default=0)
    tokens = max(sum(each.tokens for each in bins), 1)
    for each in bins:
        # Rounded up: a bin with any document at all shows.
        bar = "█" * -(-each.documents * _BAR_WIDTH // most)
        table.add_row(each.span, f"{each.documents:,}", f"{bar:{_BAR_WIDTH}}", f"{each.tokens / tokens:.1%}")
    return table
