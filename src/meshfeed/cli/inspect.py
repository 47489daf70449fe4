"""meshfeed inspect: what a token store holds, and whether it is whole."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.text import Text

from meshfeed.cli.command import (
    OK,
    WRONG,
    Console,
    Table,
    print_json,
    say,
    show_progress,
    shown,
)
from meshfeed.cli.options import Command, argument, option
from meshfeed.cli.recipes import StoreOptions
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
from meshfeed.formats.tokenizer import BYTES, tokenizer_file
from meshfeed.formats.tokens import TOKEN_COLUMNS
from meshfeed.parts import KINDS
from meshfeed.report.lengths import Lengths
from meshfeed.store import IndexedStore, MultimodalStore, StreamStore
from meshfeed.store.checksums import is_of, write_checksums
from meshfeed.store.node_index import checksums_beside

_LOOKED_AT_WHOLE = 1 << 20
_NUM_BLOCKS = 64
_BLOCK_DOCUMENTS = 1 << 12
_PARTS_OF = 1 << 16  # documents
_BAR_WIDTH = 40
_SHOWN_TOKENS = 256

_UNASKED = (
    OptionError,
    MissingError,
    AccessError,
    UnavailableError,
    CacheError,
)  # says nothing about the store


@dataclass(frozen=True, kw_only=True)
class Inspect(Command, StoreOptions):
    """what a token store holds, and whether it is whole

    Show format, counts, fingerprint, document lengths and texts of a token store: .bin/.idx, a folder
    with dataset.json, MDS, litdata, JSONL, Parquet or Arrow, local or remote.
    """

    examples = """
        meshfeed inspect corpus
        meshfeed inspect corpus --show 3 --tokenizer tokenizer.json
        meshfeed inspect s3://bucket/corpus --storage region=eu-west-1 --cache /local/cache --json
        meshfeed inspect corpus --verify && sbatch train.sh
    """
    wrong = "the store is broken; stderr, or the key 'broken', says where"
    keys = {
        "path, format, fingerprint": "where it is, what it is, digest of its content",
        "dtype, num_tokens, num_documents": "what the whole store holds",
        "num_shards, shard_documents": "where it has shards; documents per shard: min, median, max",
        "columns, ...": "what else its format says of it",
        "image, audio, video": "of a multimodal store: parts of its first 65,536 documents, and their sizes",
        "document_lengths": "looked_at, of, min, p1 ... max, mean, empty, histogram of first..last",
        "texts": "with --show: document and text, or tokens without --tokenizer",
        "verified, broken": "with --verify: true, or what is broken and where",
    }

    path: str = argument("PATH", "path or URL (s3://, gs://, az://, https://) of the store")
    show: int | None = option("show how N documents begin, decoded by --tokenizer")
    verify: bool = option(
        "check every entry, checksum, hash and length that the format has, and name what is broken",
        default=False,
    )
    write_checksums: bool = option(
        "write PATH.sums, checksums that remote reads of a .bin/.idx pair are compared with", default=False
    )

    def run(self) -> int:
        if not (self.verify and is_remote(self.path)):
            return self._run(self.cache)
        with Cache(self.cache).anew() as cache:  # what lies there now, whatever the node remembers
            return self._run(cache)

    def _run(self, cache: Cache | str | None) -> int:
        try:
            store = self._opened(cache)
        except _UNASKED:
            raise
        except StoreError as error:
            return self._ended({"path": without_secrets(self.path)}, str(error))
        if self.write_checksums:
            show_progress("summing", _written_checksums(store), quiet=self.json)
        decode = _decoder(self.tokenizer) if self.tokenizer and self.show else None
        facts: dict[str, Any] = {"path": without_secrets(self.path)}
        texts: list[tuple[int, str]] = []
        lengths, looked, broken = Lengths(tokens=np.zeros(0, np.int64), num_documents=0), False, None
        try:
            facts = facts_of(store)
            lengths = look_at_lengths(store)
            texts = _beginnings(store, self.show, decode) if self.show else []
            looked = True
            if self.verify:
                show_progress("checking", store.verify(), quiet=self.json)
        except (AccessError, UnavailableError, CacheError):
            raise
        except StoreError as error:
            broken = str(error)
        if looked and not self.json:
            _print(facts, lengths, texts)
        facts["document_lengths"] = lengths.facts()
        if self.show:
            facts["texts"] = [{"document": document, "text": text} for document, text in texts]
        return self._ended(facts, broken)

    def _ended(self, facts: dict[str, Any], broken: str | None) -> int:
        if self.verify and not broken:
            facts["verified"] = True
        if broken:
            facts["broken"] = broken
        if self.json:
            print_json(facts)
        elif broken:
            sys.stdout.flush()
            say(f"broken: {broken}", sys.stderr)
        elif self.verify:
            print("verified: every entry is sound")
        return WRONG if broken else OK

    def _opened(self, cache: Cache | str | None) -> StreamStore:
        """The store. Its text is read with --tokenizer; of tokens, that only decodes what is shown."""
        if self.tokenizer is None:
            return self.open(self.path, cache=cache)
        store = self.open(self.path, cache=cache, tokenizer=None)
        if isinstance(store, DocumentFiles) and self.column not in TOKEN_COLUMNS:
            return self.open(self.path, cache=cache)
        if not self.show:
            raise MeshfeedError(
                f"--tokenizer {self.tokenizer}: {store.path} holds tokens; add --show N to decode some"
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
        if isinstance(store, MultimodalStore):
            facts |= _parts_of(store)
        if isinstance(store, IndexedStore):
            facts["checksums"] = _checksums(store)
        return facts | {"fingerprint": store.fingerprint}


def _parts_of(store: MultimodalStore) -> dict[str, Any]:
    """Kind -> how many parts the first documents have, and how large they are."""
    parts, found = store.parts(np.arange(min(store.num_documents, _PARTS_OF))), dict[str, Any]()
    for kind in KINDS:
        mine = parts.take(parts.of_kind(kind))
        if not len(mine):
            continue
        sizes = {"pixels": mine.height * mine.width} if kind != "audio" else {}
        sizes |= {"seconds": mine.length / mine.rate} if kind != "image" else {}
        found[kind] = {"parts": len(mine), "bytes": int(mine.num_bytes.sum())} | {
            f"{which}_{name}": round(float(of(values)), 3)
            for name, values in sizes.items()
            for which, of in (("median", np.median), ("most", np.max))
        }
    return found


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


def _beginnings(
    store: StreamStore, count: int, decode: Callable[[Sequence[int]], str] | None
) -> list[tuple[int, str]]:
    """(document, how it begins) of documents spread evenly over a store; token ids without a decoder.

    Raises StoreError, or MeshfeedError for tokens that the tokenizer does not know.
    """
    found: list[tuple[int, str]] = []
    with store:
        num = store.num_documents
        for document in np.unique(np.linspace(0, num - 1, min(count, num)).astype(np.int64)).tolist():
            length = int(store.lengths(np.array([document]))[0])
            tokens = store.read(document, 0, min(length, _SHOWN_TOKENS)).tolist()
            text = " ".join(map(str, tokens)) if decode is None else decode(tokens)
            found.append((document, text + (" …" if length > _SHOWN_TOKENS else "")))
    return found


def _decoder(tokenizer: str) -> Callable[[Sequence[int]], str]:
    """How tokens are read as text. tokenizer: `formats.tokenizer.KNOWN`. Raises StoreError for another."""
    made = tokenizer_file(tokenizer).load()
    size = made.vocab_size + (tokenizer == BYTES)  # what ends a document there is no byte

    def decode(tokens: Sequence[int]) -> str:
        strange = next((token for token in tokens if not 0 <= token < size), None)
        if strange is not None:
            raise MeshfeedError(
                f"--tokenizer {tokenizer}: knows tokens below {size:,}, the store has {strange:,}; it is "
                f"another's"
            )
        return made.decode(tokens)

    return decode


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
    table = Table("", "", show_header=False)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), shown(value))
    console.print(table, markup=False)
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
