"""The parts of a dataset's documents: images, audio and video, as stored bytes.

Two .bin/.idx pairs next to the tokens, with the same documents:

    parts.bin .idx .sums        uint8: the parts' bytes, unchanged; a part is a sequence
    part_sizes.bin .idx .sums   float64 [parts, 6]: the SIZES of each part; all but the rate are whole

So a plan reads 48 bytes per part, and only the index of `parts`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import cast

import numpy as np
import numpy.typing as npt

from meshfeed.errors import StoreError
from meshfeed.files import FileStats
from meshfeed.intervals import numbers_in
from meshfeed.parts import KINDS, Parts
from meshfeed.store.base import I64
from meshfeed.store.content import digest_of_texts
from meshfeed.store.index import Index
from meshfeed.store.indexed import IndexedStore

SIZES = ("kind", "height", "width", "length", "rate", "at")
"""Columns of a part's sizes; see `Parts`."""
FILES = {"bytes": "parts", "sizes": "part_sizes"}
"""The entry "parts" of dataset.json: the prefixes of both pairs."""

_BLOCK = 1 << 16


class PartFiles:
    """The two pairs. All but the constructor and `fingerprint` needs `acquire`, and may raise StoreError.

    path: of the dataset, as messages name it. data: the bytes, a sequence per part. sizes: of the parts.
    """

    def __init__(self, path: str, data: IndexedStore, sizes: IndexedStore) -> None:
        self.path, self.data, self.sizes = path, data, sizes

    def acquire(self, stack: contextlib.ExitStack) -> None:
        """Open the files."""
        for store in (self.data, self.sizes):
            stack.enter_context(store)

    @property
    def fingerprint(self) -> str:
        """Hex digest of both fingerprints."""
        text = f"{self.data.fingerprint} {self.sizes.fingerprint}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def content_digest(self) -> str:
        """Hex digest of every byte of both pairs."""
        return digest_of_texts(store.content_digest() for store in (self.data, self.sizes))

    @property
    def stats(self) -> FileStats:
        """The cost of reading bytes and sizes so far."""
        return self.data.stats + self.sizes.stats

    @property
    def num_parts(self) -> int:
        """Parts of all documents."""
        return self.data.num_sequences

    @property
    def size_bytes(self) -> int:
        """Of all parts."""
        return self.data.num_tokens

    def of(self, documents: I64) -> Parts:
        """The parts of some documents, without their bytes; int64 [n]."""
        index = self._index
        first, counts = _sequences_of(index, documents)
        lengths = self.sizes.lengths(documents)
        wrong = lengths != counts * len(SIZES)
        if wrong.any():
            i = int(wrong.argmax())
            raise StoreError(
                f"{self.path}: document {documents[i]} has {counts[i]} parts and the sizes of "
                f"{lengths[i] / len(SIZES):g}; {_AGAIN}"
            )
        begins = self.sizes.offsets(documents)
        rows = self.sizes.read_stream(begins, begins + lengths).reshape(-1, len(SIZES))
        whole = np.delete(rows, SIZES.index("rate"), axis=1)
        damaged = ~((whole >= 0) & (whole == np.floor(whole)) & (whole < 2.0**53)).all(axis=1)
        damaged |= ~(rows[:, 0] < len(KINDS)) | ~(rows[:, SIZES.index("rate")] >= 0)
        starts = np.append(0, counts.cumsum())
        if damaged.any():
            i = int(damaged.argmax())
            sample = int(starts.searchsorted(i, side="right")) - 1
            raise StoreError(
                f"{self.path}: document {documents[sample]}, part {i - starts[sample]}: sizes "
                f"{dict(zip(SIZES, rows[i].tolist()))} cannot be; {_AGAIN}"
            )
        return parts_of(rows, index.lengths_of(numbers_in(first, counts)), counts)

    def ranges(self, documents: I64, places: I64) -> tuple[I64, I64]:
        """Bytes begin..end, in parts.bin, of one part of each document; int64 [k] twice.

        places: which part of its document, from 0; int64 [k].
        """
        index = self._index
        first, counts = _sequences_of(index, documents)
        for i in np.flatnonzero((places < 0) | (places >= counts))[:1]:
            raise StoreError(
                f"{self.path}: part {places[i]} of document {documents[i]} asked for, it has {counts[i]}"
            )
        sequences = first + places
        lengths = index.lengths_of(sequences)
        begins = index.pointers_of(sequences, lengths)
        return begins, begins + lengths

    def read(self, documents: I64, places: I64) -> list[bytes]:
        """The bytes of one part of each document; see `ranges`."""
        begins, ends = self.ranges(documents, places)
        out = self.data.read_stream(begins, ends).tobytes()
        stops = (ends - begins).cumsum()
        return [out[stop - size : stop] for stop, size in zip(stops.tolist(), (ends - begins).tolist())]

    def will_need(self, documents: I64, places: I64) -> None:
        """Announce parts that will be read, each once; see `ranges`."""
        self.data.will_need(*self.ranges(documents, places))

    def forget_needs(self) -> None:
        """Cancel announced parts that have not been read."""
        for store in (self.data, self.sizes):
            store.forget_needs()

    def check(self, num_documents: int) -> None:
        """Check both indices as `IndexedStore.check` does, and that they have that many documents."""
        for name, store, dtype in (
            ("parts", self.data, np.dtype(np.uint8)),
            ("sizes of parts", self.sizes, np.dtype("<f8")),
        ):
            store.check()
            if store.dtype != dtype or not store.is_stream:
                raise StoreError(f"{store.path}: {store.dtype.name}, where {dtype.name} belongs; {_AGAIN}")
            if store.num_documents != num_documents:
                raise StoreError(
                    f"{self.path}: {store.num_documents} documents with {name}, {num_documents} with tokens; "
                    f"{_AGAIN}"
                )
        if self.sizes.num_tokens != self.num_parts * len(SIZES):
            raise StoreError(
                f"{self.path}: {self.num_parts} parts, {self.sizes.num_tokens / len(SIZES):g} sizes; {_AGAIN}"
            )

    def verify(self, tokens: IndexedStore) -> Iterator[float]:
        """Check every entry, and each placeholder's place in its document, yielding the fraction done."""
        for done, store in enumerate((self.data, self.sizes)):
            yield from ((done + part) / 3 for part in store.verify())
        with contextlib.ExitStack() as stack:
            self.acquire(stack)
            stack.enter_context(tokens)
            for begin in range(0, tokens.num_documents, _BLOCK):
                documents = np.arange(begin, min(begin + _BLOCK, tokens.num_documents))
                self._check_places(documents, tokens.lengths(documents))
                yield (2 + documents[-1] / tokens.num_documents) / 3
        yield 1.0

    @property
    def is_summed(self) -> bool:
        """See `StreamStore`."""
        return self.data.is_summed and self.sizes.is_summed

    def _check_places(self, documents: I64, lengths: I64) -> None:
        parts = self.of(documents)
        descends = np.zeros(len(parts), np.bool_)
        same = parts.sample[1:] == parts.sample[:-1]
        descends[1:] = same & (parts.at[1:] <= parts.at[:-1])
        for i in np.flatnonzero((parts.at >= lengths[parts.sample]) | descends)[:1]:
            sample = parts.sample[i]
            raise StoreError(
                f"{self.path}: document {documents[sample]}, part {i - parts.starts[sample]}: its "
                f"placeholder is token {parts.at[i]} of {lengths[sample]}, out of order or range; {_AGAIN}"
            )

    @property
    def _index(self) -> Index:
        """The entries of the parts, once entered."""
        return cast(Index, self.data.documents.starts)


_AGAIN = "copy the dataset again, or prepare it again"


def _sequences_of(index: Index, documents: I64) -> tuple[I64, I64]:
    """First sequence of each document and how many it has; int64 [n] twice."""
    first = index.first_sequences_of(documents)
    return first, index.first_sequences_of(documents + 1) - first


def rows_of(parts: Parts) -> npt.NDArray[np.float64]:
    """The stored sizes of parts; float64 [p, 6]."""
    return np.stack([np.asarray(getattr(parts, name), np.float64) for name in SIZES], axis=1)


def parts_of(rows: npt.NDArray[np.float64], num_bytes: I64, counts: I64) -> Parts:
    """Parts of stored sizes, float64 [p, 6]; the reverse of `rows_of`.

    num_bytes: of each part; int64 [p]. counts: parts of each sample; int64 [samples].
    """
    whole = np.delete(rows, SIZES.index("rate"), axis=1).astype(np.int64)
    kind, height, width, length, at = whole.T
    rate = rows[:, SIZES.index("rate")]
    return Parts(kind, height, width, length, rate, num_bytes, at, np.append(0, counts.cumsum()))
