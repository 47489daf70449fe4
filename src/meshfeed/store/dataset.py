"""A folder with dataset.json: several .bin/.idx pairs of the same documents: tokens and further columns.

    {"format": "meshfeed", "version": 1, "columns": {"tokens": "tokens", "loss_mask": "mask"}}

A column's value is the relative prefix of its pair. All have the same documents with the same lengths, so
a token's values are at its position in the stream of each column.

Version 2 has parts, too: images, audio and video of the documents; see `part_files`.

    "parts": {"bytes": "parts", "sizes": "part_sizes"}
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn, Self, cast

import numpy as np
import numpy.typing as npt

from meshfeed.errors import OptionError, StoreError
from meshfeed.files import Cache, Fetching, FileStats, Folder
from meshfeed.intervals import numbers_in
from meshfeed.parts import Parts
from meshfeed.store.base import LabelsAre, LengthsIndex
from meshfeed.store.format import Place, StoreFormat
from meshfeed.store.index import Index
from meshfeed.store.indexed import IndexedStore, indexed_in
from meshfeed.store.loss_columns import HasColumns
from meshfeed.store.part_files import FILES, SIZES, are_sizes, parts_of

I64 = npt.NDArray[np.int64]

NAME = "dataset.json"
FORMAT, VERSION, WITH_PARTS = "meshfeed", 1, 2
_MOST_BYTES = 1 << 20
_BLOCK, _PLACED = 1 << 18, 1 << 16  # documents whose lengths, and whose parts, are checked together
_AGAIN = "copy the dataset again, or prepare it again"


class DatasetStore(HasColumns):
    """A folder with dataset.json: its tokens as a token store, and its other columns.

    The constructor only stores its arguments. It is read like its tokens (see `IndexedStore`); entering it
    also enters its columns. A pickled or copied store is not entered.

    Attributes:
        folder: the folder, as it was opened.
        path: of the folder, for messages.
        tokens: the store of the column "tokens".
        columns: name -> store of each other column.
    """

    def __init__(
        self,
        folder: Folder,
        path: str,
        tokens: IndexedStore,
        columns: Mapping[str, IndexedStore],
        cache: Cache,
        parts: Sequence[IndexedStore] = (),
    ) -> None:
        super().__init__()
        self.folder, self.path, self.tokens, self._cache = folder, path, tokens, cache
        self._columns, self._parts = dict(columns), tuple(parts)

    @property
    def _stores(self) -> tuple[IndexedStore, ...]:
        return (self.tokens, *self._columns.values(), *self._parts)

    @property
    def columns(self) -> Mapping[str, IndexedStore]:
        """Name -> store of each column but the tokens."""
        return self._columns

    def check(self) -> Self:
        """Check each index as `IndexedStore.check` does, and that numbers of documents and tokens agree."""
        expected = self.tokens.check()
        for name, store in self._columns.items():
            found = store.check()
            for what in ("num_documents", "num_tokens"):
                if getattr(found, what) != getattr(expected, what):
                    raise StoreError(
                        f"{self.path}/{NAME}: column {name!r} has {what}={getattr(found, what)}, tokens have "
                        f"{getattr(expected, what)}; write both from the same documents"
                    )
        for name, store in {"tokens": self.tokens, **self._columns}.items():
            if not store.is_stream:
                raise StoreError(
                    f"{self.path}/{NAME}: column {name!r} does not fill its .bin in order; write it again"
                )
        return self

    def verify(self) -> Iterator[float]:
        """Check all entries of each index, and lengths against the tokens', yielding the fraction done."""
        stores = [self.tokens, *self._columns.values()]
        total = len(stores) + len(self._columns)
        for done, store in enumerate(stores):
            yield from ((done + part) / total for part in store.verify())
        for done, (name, store) in enumerate(self._columns.items(), start=len(stores) + 1):
            self._compare(name, store)
            yield done / total

    @property
    def is_summed(self) -> bool:
        return all(store.is_summed for store in self._stores)

    def _compare(self, name: str, store: IndexedStore) -> None:
        with self.tokens, store:
            for first in range(0, self.num_documents, _BLOCK):
                documents = np.arange(first, min(first + _BLOCK, self.num_documents))
                lengths, expected = store.lengths(documents), self.tokens.lengths(documents)
                for i in np.flatnonzero(lengths != expected)[:1]:
                    raise StoreError(
                        f"{self.path}/{NAME}: document {documents[i]} has {lengths[i]} values in column "
                        f"{name!r}, {expected[i]} tokens; write both from the same documents"
                    )

    def facts(self) -> dict[str, Any]:
        columns = {name: store.dtype.name for name, store in self._columns.items()}
        return {
            "format": f"meshfeed {NAME}, version {VERSION}",
            "columns": ", ".join(f"{name} ({dtype})" for name, dtype in columns.items()) or "none but tokens",
            "size_bytes": sum(s.header.bin_size_bytes for s in (self.tokens, *self._columns.values())),
        }

    @property
    def fingerprint(self) -> str:
        """Hex digest of all names and fingerprints; it does not depend on the path."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return self._fingerprint_of_columns()

    def _fingerprint_of_columns(self) -> str:
        columns = {name: store.fingerprint for name, store in sorted(self._columns.items())}
        text = json.dumps({"tokens": self.tokens.fingerprint, "columns": columns})
        return self._as_used(_digest(text))

    @property
    def stats(self) -> FileStats:
        """The cost of reading all files so far."""
        return sum((store.stats for store in self._stores), FileStats())

    @property
    def kept_in(self) -> Cache:
        """See `HasColumns`."""
        return self._cache

    def used_as(self, labels: LabelsAre | None, ignore: frozenset[str]) -> Self:
        """See `HasColumns`."""
        for name in sorted(ignore - self._columns.keys()):
            raise OptionError(
                f"{self.path}: ignore={name!r}: it has {', '.join(self._columns) or 'no columns but tokens'}"
            )
        self._columns = {name: store for name, store in self._columns.items() if name not in ignore}
        return super().used_as(labels, ignore)

    # -- as its tokens ----------------------------------------------------------------------------------

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.tokens.dtype

    @property
    def documents(self) -> LengthsIndex:
        """Where documents begin, as in its tokens."""
        return self.tokens.documents

    @property
    def num_documents(self) -> int:
        return self.tokens.num_documents

    @property
    def num_tokens(self) -> int:
        return self.tokens.num_tokens

    def lengths(self, documents: I64) -> I64:
        return self.tokens.lengths(documents)

    def extents(self, documents: I64) -> tuple[I64, I64]:
        return self.tokens.extents(documents)

    def document_starts(self, starts: I64, stops: I64) -> tuple[I64, I64]:
        return self.tokens.document_starts(starts, stops)

    @property
    def wants_ahead(self) -> bool:
        return self.tokens.wants_ahead

    @property
    def fetching(self) -> Fetching | None:
        return self.tokens.fetching

    def cut(self, begins: I64, ends: I64) -> None:
        for store in (self.tokens, *self._columns.values()):
            store.cut(begins, ends)

    def read_into(self, out: npt.NDArray[Any], starts: I64, stops: I64) -> None:
        """Tokens of stream ranges. For a column, use `columns[name].read_stream`."""
        self.tokens.read_into(out, starts, stops)

    def will_need(self, starts: I64, stops: I64) -> None:
        """Announce ranges of the tokens. For a column, use `columns[name].will_need`."""
        self.tokens.will_need(starts, stops)

    def forget_needs(self) -> None:
        for store in self._stores:
            store.forget_needs()

    def acquire(self, stack: contextlib.ExitStack) -> None:
        """Enter the tokens, every column, and the parts."""
        for store in self._stores:
            stack.enter_context(store)

    def __repr__(self) -> str:
        return f"DatasetStore({self.path!r}, columns {', '.join(self._columns) or 'none'})"


class MultimodalStore(DatasetStore):
    """A DatasetStore whose documents have parts: images, audio and video.

    In the text, each part is one token, its placeholder. The inherited members describe that text. Its
    constructor takes the two pairs of `part_files`, too: bytes and sizes of the parts.
    """

    def __getitem__(self, documents: slice) -> NoReturn:
        raise StoreError(f"{self.path}: documents with parts are not cut into ranges; prepare them apart")

    @property
    def _bytes(self) -> IndexedStore:
        """The bytes of all parts, a sequence for each."""
        return self._parts[0]

    @property
    def _sizes(self) -> IndexedStore:
        return self._parts[1]

    @property
    def num_parts(self) -> int:
        """Parts of all documents."""
        return self._bytes.num_sequences

    @property
    def parts_path(self) -> str:
        """The file with the bytes of all parts, as messages name it."""
        return f"{self._bytes.path}.bin"

    def parts(self, documents: I64) -> Parts:
        """Kind, sizes, bytes and placeholder of each part of some documents, from the index alone; int64 [n].

        In the order of `documents`, and within a document in the order of its text. Raises StoreError.
        """
        documents = self._existing(documents)
        first, counts = self._sequences_of(documents)
        begins, lengths = self._sizes.extents(documents)
        for i in np.flatnonzero(lengths != counts * len(SIZES))[:1]:
            raise StoreError(
                f"{self.path}: document {documents[i]} has {counts[i]} parts and the sizes of "
                f"{lengths[i] / len(SIZES):g}; {_AGAIN}"
            )
        rows = self._sizes.read_stream(begins, begins + lengths).reshape(-1, len(SIZES))
        starts = np.append(0, counts.cumsum())
        for i in np.flatnonzero(~are_sizes(rows))[:1]:
            sample = int(starts.searchsorted(i, side="right")) - 1
            raise StoreError(
                f"{self.path}: document {documents[sample]}, part {i - starts[sample]}: sizes "
                f"{dict(zip(SIZES, rows[i].tolist()))} cannot be; {_AGAIN}"
            )
        return parts_of(rows, self._index.lengths_of(numbers_in(first, counts)), counts)

    def part_ranges(self, documents: I64, places: I64) -> tuple[I64, I64]:
        """Positions of those parts: bytes begin..end of `parts_path`; int64 [k] twice. See `read_parts`."""
        documents, places = self._existing(documents), np.asarray(places, np.int64)
        first, counts = self._sequences_of(documents)
        for i in np.flatnonzero((places < 0) | (places >= counts))[:1]:
            raise StoreError(
                f"{self.path}: part {places[i]} of document {documents[i]} asked for, it has {counts[i]}"
            )
        sequences = first + places
        lengths = self._index.lengths_of(sequences)
        begins = self._index.pointers_of(sequences, lengths)
        return begins, begins + lengths

    def read_parts(self, documents: I64, places: I64) -> list[bytes]:
        """The stored bytes of one part of each document.

        documents: may repeat; int64 [k]. places: which part of its document, from 0; int64 [k]. Raises
        StoreError.
        """
        begins, ends = self.part_ranges(documents, places)
        out = self._bytes.read_stream(begins, ends).tobytes()
        stops = (ends - begins).cumsum()
        return [out[stop - size : stop] for stop, size in zip(stops.tolist(), (ends - begins).tolist())]

    def read_part_ranges(self, begins: I64, ends: I64, out: npt.NDArray[np.uint8]) -> None:
        """The bytes of such ranges, one after the other. out: of exactly their size, contiguous."""
        self._bytes.read_stream(begins, ends, out=out)

    def will_need_parts(self, documents: I64, places: I64) -> None:
        """Announce parts that will be read, each once; returns at once. See `read_parts`."""
        self._bytes.will_need(*self.part_ranges(documents, places))

    @property
    def _index(self) -> Index:
        """The entries of the parts, once entered."""
        return cast(Index, self._bytes.documents.starts)

    def _sequences_of(self, documents: I64) -> tuple[I64, I64]:
        """The first part of each document and how many it has; int64 [n] twice."""
        first = self._index.first_sequences_of(documents)
        return first, self._index.first_sequences_of(documents + 1) - first

    def check(self) -> Self:
        """Check as DatasetStore does, and that all files have the same numbers of documents and parts."""
        super().check()
        for name, store, dtype in (("parts", self._bytes, "<u1"), ("sizes of parts", self._sizes, "<f8")):
            store.check()
            if store.dtype != np.dtype(dtype) or not store.is_stream:
                raise StoreError(
                    f"{store.path}: {store.dtype.name}, where {np.dtype(dtype).name} belongs; {_AGAIN}"
                )
            if store.num_documents != self.num_documents:
                raise StoreError(
                    f"{self.path}: {store.num_documents} documents with {name}, {self.num_documents} with "
                    f"tokens; {_AGAIN}"
                )
        if (num_sizes := self._sizes.num_tokens / len(SIZES)) != self.num_parts:
            raise StoreError(f"{self.path}: {self.num_parts} parts, {num_sizes:g} sizes; {_AGAIN}")
        return self

    def verify(self) -> Iterator[float]:
        """Check as DatasetStore does, and all sizes and placeholders, yielding the fraction done."""
        yield from (done / 2 for done in super().verify())
        for done, store in enumerate(self._parts, start=3):
            yield from ((done + part) / 6 for part in store.verify())
        with self:
            for begin in range(0, self.num_documents, _PLACED):
                documents = np.arange(begin, min(begin + _PLACED, self.num_documents))
                self._check_places(documents, self.lengths(documents))
                yield (5 + documents[-1] / self.num_documents) / 6
        yield 1.0

    def _check_places(self, documents: I64, lengths: I64) -> None:
        parts = self.parts(documents)
        descends = np.zeros(len(parts), np.bool_)
        same = parts.sample[1:] == parts.sample[:-1]
        descends[1:] = same & (parts.at[1:] <= parts.at[:-1])
        for i in np.flatnonzero((parts.at >= lengths[parts.sample]) | descends)[:1]:
            sample = parts.sample[i]
            raise StoreError(
                f"{self.path}: document {documents[sample]}, part {i - parts.starts[sample]}: its "
                f"placeholder is token {parts.at[i]} of {lengths[sample]}, out of order or range; {_AGAIN}"
            )

    def facts(self) -> dict[str, Any]:
        facts = super().facts() | {"format": f"meshfeed {NAME}, version {WITH_PARTS}"}
        return facts | {"num_parts": self.num_parts, "parts_size_bytes": self._bytes.num_tokens}

    @cached_property
    def _fingerprint(self) -> str:
        of_parts = _digest(" ".join(store.fingerprint for store in self._parts))
        return _digest(f"{self._fingerprint_of_columns()} {of_parts}")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def open_dataset(folder: Folder, shown: str, cache: Cache) -> DatasetStore:
    """The store of a folder that has a dataset.json, checked. Raises StoreError."""
    where = f"{shown}/{NAME}"
    file = folder.file(NAME)
    if file.size_bytes > _MOST_BYTES:
        raise StoreError(f"{where}: {file.size_bytes} bytes, at most {_MOST_BYTES}; it is not a dataset.json")
    try:
        given: Any = json.loads(file.peek([(0, file.size_bytes)])[0])
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where}: not valid JSON: {error}; write it again") from error

    def pairs(prefixes: Mapping[str, str]) -> dict[str, IndexedStore]:
        return {name: indexed_in(folder, prefix, f"{shown}/{prefix}") for name, prefix in prefixes.items()}

    content = _parsed(given, where)
    stores = pairs(_prefixes(content, where, "columns", ("tokens",)))
    tokens = stores.pop("tokens")
    if content["version"] == VERSION:
        return DatasetStore(folder, shown, tokens, stores, cache).check()
    of_parts = pairs(_prefixes(content, where, "parts", tuple(FILES)))
    parts = [of_parts[name] for name in FILES]
    return MultimodalStore(folder, shown, tokens, stores, cache, parts).check()


def _parsed(given: Any, where: str) -> dict[str, Any]:
    """The checked content of a dataset.json. Raises StoreError unless its version is known."""
    if not isinstance(given, dict):
        raise StoreError(f"{where}: not a JSON object; write it again")
    content = cast(dict[str, Any], given)
    if content.get("format") != FORMAT:
        raise StoreError(f'{where}: "format" is {content.get("format")!r}, where {FORMAT!r} belongs')
    if content.get("version") not in (VERSION, WITH_PARTS) or type(content["version"]) is not int:
        raise StoreError(
            f'{where}: "version" is {content.get("version")!r}; only {VERSION} and {WITH_PARTS} are known; '
            f"update meshfeed, or write it again"
        )
    return content


def _prefixes(content: Mapping[str, Any], where: str, key: str, wanted: tuple[str, ...]) -> dict[str, str]:
    """Name -> prefix of each pair under a key of dataset.json. Raises StoreError if one is missing."""
    found = content.get(key)
    if not isinstance(found, dict) or not all(name in found for name in wanted):
        names = " and ".join(f'"{name}"' for name in wanted)
        raise StoreError(f'{where}: "{key}" is not an object with {names} in it; write it again')
    for name, prefix in cast(dict[str, Any], found).items():
        if not name or not isinstance(prefix, str):
            raise StoreError(
                f"{where}: {key.removesuffix('s')} {name!r} is {prefix!r}; give the relative prefix of a "
                f".bin/.idx pair"
            )
    return cast(dict[str, str], found)


class DatasetFormat(StoreFormat):
    """A folder with dataset.json."""

    name = "a dataset.json"
    lies_at = f"a folder with {NAME}"

    def open(self, place: Place) -> DatasetStore | None:
        """The store, if it is such a folder or its dataset.json."""
        inside = place.name == NAME
        folder = place.beside if inside else place.within
        if (place.is_file and not inside) or not place.holds(folder, NAME):
            return None
        shown = place.shown.removesuffix(NAME) if inside else place.shown
        return open_dataset(folder, shown.rstrip("/") or shown or ".", place.cache)
