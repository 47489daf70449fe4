"""Megatron's .bin/.idx as a token store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Array, Longs
from meshfeed.errors import AccessError, MissingError, StoreError
from meshfeed.files import ByteFile, Fetching, FileStats, Folder
from meshfeed.files.sums import BIN, IDX, SUFFIX
from meshfeed.files.url import join
from meshfeed.intervals import numbers_in
from meshfeed.store.base import LengthsIndex, StreamStore, checked_places
from meshfeed.store.checksums import compare, refuse_others
from meshfeed.store.format import Place, StoreFormat
from meshfeed.store.index import Header, Index, look_up
from meshfeed.store.local_pair import LocalPair
from meshfeed.store.pair import Pair

_SUFFIXES = (".bin", ".idx")


class IndexedStore(StreamStore):
    """A Megatron token store: `path`.bin holds the tokens, `path`.idx the place of each sequence in it.

    The attributes read the header of the index once. Everything else needs `with store:`, which maps the
    index; the first read of tokens opens the .bin. Both are released when the last `with` ends.

    path: the files' common prefix. pair: the files; None for the local ones at the path. All methods raise
    StoreError, naming file and byte.
    """

    not_pickled = ("_index", "_documents")
    _index: Index | None = None
    _documents: LengthsIndex | None = None

    def __init__(self, path: str | os.PathLike[str], pair: Pair | None = None) -> None:
        super().__init__()
        self.path = os.fspath(path)
        self.pair = pair or LocalPair(self.path, self.path)
        self._idx, self._data, self.kept_in = self.pair.idx, self.pair.data, self.pair.cache
        self.wants_ahead = self._data.is_remote

    @cached_property
    def header(self) -> Header:
        return self.pair.header

    @property
    def stats(self) -> FileStats:
        """Cost of reading tokens so far; index look-ups and header checks are not counted."""
        return self._data.stats

    @property
    def files(self) -> tuple[ByteFile, ByteFile]:
        return self.pair.files

    @property
    def files_version(self) -> str:
        return " ".join(file.version for file in self.files)

    @property
    def fetching(self) -> Fetching | None:
        return self._data.fetching

    def cut(self, begins: Longs, ends: Longs) -> None:
        self._data.cut(begins * self.dtype.itemsize, ends * self.dtype.itemsize)

    @cached_property
    def dtype(self) -> np.dtype[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.header.dtype

    @cached_property
    def num_tokens(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.header.bin_size_bytes // self.header.dtype.itemsize

    @property
    def num_sequences(self) -> int:
        """Sequences in the store; a document has any number of them."""
        return self.header.num_sequences

    @property
    def num_documents(self) -> int:
        return self.header.num_documents

    @property
    def has_modes(self) -> bool:
        return self.header.has_modes

    @cached_property
    def is_stream(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.header.is_stream

    @property
    def fingerprint(self) -> str:
        """Hex digest of dtype, sizes, header, both ends of the index and some blocks of the .bin.

        O(1), and independent of the path. It distinguishes corpora, but may miss a single changed token.
        """
        return self.pair.fingerprint

    def check(self) -> Self:
        """Check header, sizes and entries: all of up to 2**20 entries, both ends of longer indices.

        Other entries are checked when they are read; `verify` checks all.
        """
        if not self.pair.is_checked:
            for _ in self.index().check(whole=False):
                pass
        return self

    def verify(self) -> Iterator[float]:
        """Check every entry of the index and, with checksums, every block, in bounded memory."""
        with self.pair.anew() as given:
            pair = refuse_others(given)
            share = 0.5 if pair.is_summed else 1.0
            for done in look_up(pair.header, pair.idx).check(whole=True):
                yield done * share
            for done in compare(pair):
                yield share + done * (1 - share)

    @property
    def is_summed(self) -> bool:
        return self.pair.is_summed

    def facts(self) -> dict[str, Any]:
        return {
            "format": "megatron .bin/.idx, version 1",
            "num_sequences": self.num_sequences,
            "has_modes": self.has_modes,
            "is_stream": self.is_stream,
            "bin_size_bytes": self.header.bin_size_bytes,
            "idx_size_bytes": self.header.idx_size_bytes,
        }

    def acquire(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(self._idx)
        stack.enter_context(self._data)
        self._index = look_up(self.header, self._idx)
        stack.callback(vars(self).update, _index=None, _documents=None)

    @property
    def documents(self) -> LengthsIndex:
        if self._documents is None:
            self._refuse_no_stream()
            self._documents = LengthsIndex(self._entered())
        return self._documents

    def lengths(self, documents: Longs) -> Longs:
        if self.is_stream:
            return self.extents(documents)[1]
        documents, index = self._existing(documents), self._entered()
        firsts, ends = (index.first_sequences_of(each) for each in (documents, documents + 1))
        return self._ascending(documents, _sums_between(index, firsts, ends))

    def extents(self, documents: Longs) -> tuple[Longs, Longs]:
        return super().extents(documents)  # beside `lengths`, so that `extents_of` takes it: one look-up

    def read(self, document: int, start: int, stop: int) -> Array:
        """Tokens start..stop of one document, its sequences back to back; [stop - start] of `dtype`."""
        self._existing(np.array([document]))
        index = self._entered()
        both_ends = np.array([document, document + 1])
        if self.is_stream:
            offsets = index[both_ends]
            begins, lengths = offsets[:1], np.diff(offsets)
        else:
            first, end = index.first_sequences_of(both_ends).tolist()
            sequences = np.arange(first, end)
            lengths = index.lengths_of(sequences)
            begins = index.pointers_of(sequences, lengths) // self.dtype.itemsize
        length = int(lengths.sum())
        self._refuse_outside(document, start, stop, length)
        pieces = LengthsIndex(np.append(0, lengths.cumsum())).pieces(np.array([start]), np.array([stop]))
        begins, out = begins[pieces.documents], np.empty(stop - start, self.dtype)
        self.read_into(out, begins + pieces.begin, begins + pieces.end)
        return out

    def modes(self, sequences: Longs) -> npt.NDArray[np.int8]:
        """Mode of each sequence; int64 [n] -> int8 [n]. Raises StoreError if the store has none."""
        if not self.has_modes:
            raise StoreError(f"{self.path}.idx: has no modes; it was not written as multimodal")
        sequences = checked_places(self.path, sequences, self.num_sequences, "sequence")
        return self._entered().modes[sequences]

    def read_into(self, out: Array, starts: Longs, stops: Longs) -> None:
        self._data.read_into(out.view(np.uint8), starts * out.itemsize, (stops - starts) * out.itemsize)

    def will_need(self, starts: Longs, stops: Longs) -> None:
        starts, stops = self._ranges(starts, stops)
        self._refuse_not_entered()
        itemsize = self.dtype.itemsize
        self._data.will_need(starts * itemsize, stops * itemsize)

    def forget_needs(self) -> None:
        self._data.forget_needs()

    def index(self) -> Index:
        """The entries, usable without entering."""
        return look_up(self.header, self._idx)

    def _entered(self) -> Index:
        self._refuse_not_entered()
        return cast(Index, self._index)


def indexed_in(folder: Folder, stem: str, path: str) -> IndexedStore:
    """The store stem.bin, stem.idx of a folder; a remote one is guarded by its stem.sums, if any.

    path: its name in messages. Raises StoreError for a .sums of other files.
    """
    idx, data = f"{stem}.idx", f"{stem}.bin"
    sums = stem + SUFFIX
    if not folder.is_remote:
        prefix = join(folder.url, idx).removesuffix(".idx")  # a stem may be "."
        return IndexedStore(path, LocalPair(path, prefix, folder.cache))
    if not _holds(folder, sums):
        return IndexedStore(path, Pair(path, folder.file(idx), folder.file(data), folder.cache))
    guarded = folder.file(idx, sums=(sums, IDX)), folder.file(data, sums=(sums, BIN))
    return IndexedStore(path, refuse_others(Pair(path, *guarded, folder.cache)))


def _holds(folder: Folder, sums: str) -> bool:
    try:
        return folder.holds(sums)
    except AccessError:  # S3's answer for a missing object, if the user may not list the bucket
        return False


def _sums_between(index: Index, firsts: Longs, ends: Longs) -> Longs:
    """Tokens of the sequences firsts..ends of each document, int64 [n]; -1 if they descend."""
    counts = (ends - firsts).clip(0)
    stops = counts.cumsum()
    running = np.append(0, index.lengths_of(numbers_in(firsts, counts)).cumsum())
    return np.where(ends < firsts, -1, running[stops] - running[stops - counts])


class IndexedFormat(StoreFormat):
    """A Megatron .bin/.idx pair."""

    name = "a Megatron store"
    lies_at = "a Megatron .bin/.idx pair, with or without the suffix"

    def open(self, place: Place) -> IndexedStore | None:
        # a store may itself be named corpus.bin, so what exists decides
        for stem in _stems_of(place.name):
            index, data = f"{stem}.idx", f"{stem}.bin"
            if place.beside.is_remote and not any(place.holds(place.beside, name) for name in (data, index)):
                continue  # local files are looked at once, by the store
            if place.dtype is not None and not place.holds(place.beside, index):
                continue  # a .bin alone, with a dtype, is a file of raw tokens
            prefix = f"{place.shown[: len(place.shown) - len(place.name)]}{stem}"
            try:
                return indexed_in(place.beside, stem, prefix).check()
            except MissingError as missing:
                if place.holds(place.beside, index):
                    raise
                if place.holds(place.beside, data):
                    raise MissingError(
                        f"{missing}; if {prefix}.bin holds raw tokens that never had an index, as nanoGPT's "
                        f"train.bin does, give their dtype: mf.open({f'{prefix}.bin'!r}, dtype='uint16')"
                    ) from missing
        return None


def _stems_of(name: str) -> list[str]:
    """What may be the common name of the two files."""
    shorter = [name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)]
    return [name, *shorter] if name else []
