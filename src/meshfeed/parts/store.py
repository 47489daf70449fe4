"""The parts of a dataset's documents, images, audio and video, as stored bytes: files, store and writer.

A dataset.json of version 2 names two .bin/.idx pairs next to the tokens, with the same documents:

    "parts": {"bytes": "parts", "sizes": "part_sizes"}

    parts.bin .idx .sums        uint8: the parts' bytes, unchanged; a part is a sequence, an empty one if it
                                is the sound track of the video before it
    part_sizes.bin .idx .sums   float64 [parts, 6]: the SIZES of each part; all but the rate are whole

So a plan reads 48 bytes per part, and only the index of `parts`. "fingerprints", if it is there, has those
of both pairs and of the tokens, so that they are of one dataset.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn, Self, cast

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Bools, Bytes, Floats, Longs
from meshfeed.errors import StoreError
from meshfeed.files import Cache, Folder
from meshfeed.intervals import numbers_in
from meshfeed.parts.types import KINDS, Parts
from meshfeed.store.base import StreamStore
from meshfeed.store.dataset import NAME, DatasetFormat, DatasetStore, digest_of, pairs_in
from meshfeed.store.dataset_writer import DatasetWriter
from meshfeed.store.index import Index
from meshfeed.store.indexed import IndexedStore

WITH_PARTS = 2
"""The version of a dataset.json."""
_PLACED = 1 << 16  # documents whose parts are checked together
_AGAIN = "copy the dataset again, or prepare it again"

SIZES = ("kind", "height", "width", "length", "rate", "at")
"""Columns of a part's sizes; see `Parts`."""
FILES = {"bytes": "parts", "sizes": "part_sizes"}
"""The entry "parts" of dataset.json: the prefixes of both pairs."""

_BOUND = ("tokens", *FILES)


def are_sizes(rows: Floats) -> Bools:
    """Which rows of stored sizes, float64 [p, 6], can be those of a part; bool [p]."""
    whole = np.delete(rows, SIZES.index("rate"), axis=1)
    right = ((whole >= 0) & (whole == np.floor(whole)) & (whole < 2.0**53)).all(axis=1)
    return right & (rows[:, 0] < len(KINDS)) & (rows[:, SIZES.index("rate")] >= 0)


def rows_of(parts: Parts) -> Floats:
    """The stored sizes of parts; float64 [p, 6]."""
    return np.stack([np.asarray(getattr(parts, name), np.float64) for name in SIZES], axis=1)


def parts_of(rows: Floats, num_bytes: Longs, counts: Longs) -> Parts:
    """Parts of stored sizes, float64 [p, 6]; the reverse of `rows_of`.

    num_bytes: of each part; int64 [p]. counts: parts of each sample; int64 [samples].
    """
    whole = np.delete(rows, SIZES.index("rate"), axis=1).astype(np.int64)
    kind, height, width, length, at = whole.T
    rate = rows[:, SIZES.index("rate")]
    return Parts(kind, height, width, length, rate, num_bytes, at, np.append(0, counts.cumsum()))


class MultimodalStore(DatasetStore):
    """A DatasetStore whose documents have parts: images, audio and video.

    In the text, each part is one token, its placeholder. The inherited members describe that text. Its
    constructor takes the two pairs of `part_files`, too: bytes and sizes of the parts.

    Attributes:
        written: "tokens", "bytes" and "sizes" -> fingerprint of the pair, as dataset.json has them.
    """

    written: Mapping[str, Any] = {}

    def __getitem__(self, documents: slice) -> NoReturn:
        raise StoreError(f"{self.path}: documents with parts are not cut into ranges; prepare them apart")

    @property
    def _bytes(self) -> IndexedStore:
        """The bytes of all parts, a sequence for each."""
        return self._further[0]

    @property
    def _sizes(self) -> IndexedStore:
        return self._further[1]

    @property
    def num_parts(self) -> int:
        """Parts of all documents."""
        return self._bytes.num_sequences

    @property
    def parts_path(self) -> str:
        """The file with the bytes of all parts, as messages name it."""
        return f"{self._bytes.path}.bin"

    def parts(self, documents: Longs) -> Parts:
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
        parts = parts_of(rows, self._index.lengths_of(numbers_in(first, counts)), counts)
        self._refuse_places(documents, parts, parts.at >= self.lengths(documents)[parts.sample])
        return parts

    def part_ranges(self, documents: Longs, places: Longs) -> tuple[Longs, Longs]:
        """Positions of those parts: bytes begin..end of `parts_path`; int64 [k] twice. See `read_parts`."""
        documents, places = self._existing(documents), np.asarray(places, np.int64)
        first, counts = self._sequences_of(documents)
        for i in np.flatnonzero((places < 0) | (places >= counts))[:1]:
            raise StoreError(
                f"{self.path}: part {places[i]} of document {documents[i]} asked for, it has {counts[i]}"
            )
        sequences = first + places
        lengths = self._index.lengths_of(sequences)
        if (empty := np.flatnonzero(lengths == 0)).size:
            parts = self.parts(documents[empty])
            empty = empty[parts.is_track[parts.starts[:-1] + places[empty]]]
            sequences[empty] -= 1
            lengths = self._index.lengths_of(sequences)
        begins = self._index.pointers_of(sequences, lengths)
        return begins, begins + lengths

    def read_parts(self, documents: Longs, places: Longs) -> list[bytes]:
        """The stored bytes of one part of each document.

        documents: may repeat; int64 [k]. places: which part of its document, from 0; int64 [k]. Raises
        StoreError.
        """
        begins, ends = self.part_ranges(documents, places)
        out = self.read_part_ranges(begins, ends).tobytes()
        stops = (ends - begins).cumsum()
        return [out[stop - size : stop] for stop, size in zip(stops.tolist(), (ends - begins).tolist())]

    def read_part_ranges(self, begins: Longs, ends: Longs, out: Bytes | None = None) -> Bytes:
        """The bytes of such ranges, one after the other. out: of exactly their size, contiguous."""
        return self._bytes.read_stream(begins, ends, out=out)

    def will_need_part_ranges(self, begins: Longs, ends: Longs) -> None:
        """Announce such ranges, which will be read; returns at once. One that two parts share, once."""
        begins, first = np.unique(begins, return_index=True)
        self._bytes.will_need(begins, ends[first])

    @property
    def _index(self) -> Index:
        """The entries of the parts, once entered."""
        return cast(Index, self._bytes.documents.starts)

    def _sequences_of(self, documents: Longs) -> tuple[Longs, Longs]:
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
        for done, store in enumerate(self._further, start=3):
            yield from ((done + part) / 6 for part in store.verify())
        with self:
            for begin in range(0, self.num_documents, _PLACED):
                documents = np.arange(begin, min(begin + _PLACED, self.num_documents))
                self._check_places(documents)
                yield (5 + documents[-1] / self.num_documents) / 6
        yield 1.0

    def _check_places(self, documents: Longs) -> None:
        parts = self.parts(documents)
        descends = np.zeros(len(parts), np.bool_)
        same = parts.sample[1:] == parts.sample[:-1]
        descends[1:] = same & (parts.at[1:] <= parts.at[:-1]) & ~parts.is_within[1:]
        self._refuse_places(documents, parts, descends)

    def _refuse_places(self, documents: Longs, parts: Parts, wrong: Bools) -> None:
        for i in np.flatnonzero(wrong)[:1]:
            sample = parts.sample[i]
            length = self.lengths(documents)[sample]
            raise StoreError(
                f"{self.path}: document {documents[sample]}, part {i - parts.starts[sample]}: its "
                f"placeholder is token {parts.at[i]} of {length}, out of order or range; {_AGAIN}"
            )

    def refuse_apart(self) -> None:
        super().refuse_apart()
        for name, store in zip(_BOUND, (self.tokens, *self._further)):
            if self.written.get(name, store.fingerprint) != store.fingerprint:
                raise StoreError(
                    f"{store.path}.bin and .idx: not those that were written with {NAME}, which has another "
                    f"fingerprint of them; {_AGAIN}"
                )

    def facts(self) -> dict[str, Any]:
        facts = super().facts() | {"format": f"meshfeed {NAME}, version {WITH_PARTS}"}
        return facts | {"num_parts": self.num_parts, "parts_size_bytes": self._bytes.num_tokens}

    @cached_property
    def fingerprint(self) -> str:
        of_parts = digest_of(" ".join(store.fingerprint for store in self._further))
        return digest_of(f"{self._fingerprint_of_columns()} {of_parts}")


def parts_in(store: StreamStore, documents: Longs) -> Parts:
    """The parts of some documents, from the index alone; none of a store of text. int64 [n]."""
    if isinstance(store, MultimodalStore):
        return store.parts(documents)
    return Parts.none(len(documents))


class MultimodalFormat(DatasetFormat):
    """A folder with dataset.json, of documents with parts."""

    def _store(
        self, content: Mapping[str, Any], folder: Folder, shown: str, cache: Cache
    ) -> MultimodalStore | None:
        if content.get("version") != WITH_PARTS:
            return None
        stores = pairs_in(content, folder, shown, "columns", ("tokens",))
        parts = pairs_in(content, folder, shown, "parts", tuple(FILES))
        tokens, further = stores.pop("tokens"), [parts[name] for name in FILES]
        store = MultimodalStore(folder, shown, tokens, stores, cache, further)
        store.written = content.get("fingerprints", {})
        if not isinstance(store.written, dict):
            raise StoreError(f'{shown}/{NAME}: "fingerprints" is not an object; write it again')
        return store.check()


class MultimodalWriter(DatasetWriter):
    """A DatasetWriter of documents with parts; no column is "parts" or "part_sizes". See `add_parts`."""

    version = WITH_PARTS

    def __init__(
        self, folder: str | os.PathLike[str], columns: Mapping[str, npt.DTypeLike], *, overwrite: bool = False
    ) -> None:
        super().__init__(folder, columns, overwrite=overwrite)
        if taken := sorted(columns.keys() & set(FILES.values())):
            raise StoreError(
                f"{self.folder}: columns {taken} would be in the files of the parts; rename them"
            )
        self._further = {
            FILES["bytes"]: self._writer(FILES["bytes"], np.uint8),
            FILES["sizes"]: self._writer(FILES["sizes"], np.float64),
        }

    def add_parts(self, parts: Parts, data: Sequence[bytes]) -> None:
        """Add the parts of the next documents, also of those without any; before or after their tokens.

        data: the bytes of each part; [p], as long as `parts.num_bytes` says, none for the sound track of the
        video before it. Raises StoreError.
        """
        data_writer, sizes_writer = self._further.values()
        if [len(each) for each in data] != parts.num_bytes.tolist():
            raise StoreError(
                f"{self.folder}: document {data_writer.num_documents} and those after it: {len(data)} parts "
                f"of other lengths than their sizes say; write the dataset again"
            )
        for begin, end in zip(parts.starts.tolist(), parts.starts[1:].tolist()):
            for each in data[begin:end]:
                data_writer.add_sequence(np.frombuffer(each, np.uint8))
            data_writer.end_document()
        sizes_writer.add_documents(rows_of(parts).ravel(), np.diff(parts.starts) * len(SIZES))

    def _content(self) -> dict[str, Any]:
        stores = (IndexedStore(self.folder / name) for name in ("tokens", *FILES.values()))
        fingerprints = {name: store.fingerprint for name, store in zip(_BOUND, stores)}
        return super()._content() | {"parts": FILES, "fingerprints": fingerprints}
