"""The .idx file of a Megatron token store: its header, its entries, and their checks.

Little-endian, without padding, so the arrays are unaligned. They are never copied as a whole:

    byte 0        "MMIDIDX" 0 0 | u64 version | u8 dtype code | u64 S | u64 D
    byte 34       i32 lengths[S]      tokens of each sequence
    34 + 4S       i64 pointers[S]     byte of the .bin where it starts
    34 + 12S      i64 documents[D]    first sequence of each document, then S; D - 1 documents
    34 + 12S + 8D i8 modes[S]         multimodal stores only
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from meshfeed.arrays import Bools, Longs
from meshfeed.errors import StoreError
from meshfeed.files import ByteFile, Vector

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in enumerate(("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1)
}
"""Dtype code -> NumPy dtype of the tokens."""

CHECKED_WHOLE = 1 << 20
"""Arrays of up to this many entries are checked in full when a store is opened."""
CHECKED_ENDS = 1 << 16
"""Of longer arrays, this many entries at either end are checked."""
_CHUNK = 1 << 18
_GUIDE_SIZE = 1 << 8
_IDX_BLOCK_BYTES = 1 << 12
_BIN_BLOCK_BYTES = 1 << 9
_NUM_BIN_BLOCKS = 8

_REBUILD = "the index is damaged; copy it again or rebuild it"
_RECOPY = "one of the two files is truncated or belongs to another store; copy both again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of an .idx, and the sizes of both files.

    Attributes:
        prefix: the path without .bin or .idx.
        dtype: of the tokens, little-endian.
        num_sequences, num_documents: S and D - 1.
        has_modes: whether every sequence has a mode.
        is_stream: whether the sequences fill the .bin from its first byte to its last, in order.
        idx_size_bytes, bin_size_bytes: sizes of the files.
    """

    prefix: str
    dtype: np.dtype[Any]
    num_sequences: int
    num_documents: int
    has_modes: bool
    is_stream: bool
    idx_size_bytes: int
    bin_size_bytes: int

    @property
    def lengths_at(self) -> int:
        """Byte of lengths[0]."""
        return HEADER.size

    @property
    def pointers_at(self) -> int:
        """Byte of pointers[0]."""
        return HEADER.size + 4 * self.num_sequences

    @property
    def documents_at(self) -> int:
        """Byte of documents[0]."""
        return HEADER.size + 12 * self.num_sequences

    @property
    def modes_at(self) -> int:
        """Byte of modes[0]."""
        return self.documents_at + 8 * (self.num_documents + 1)


def read_header(prefix: str, idx: ByteFile, data: ByteFile) -> Header:
    """Read the header of `prefix`.idx and the sizes of both files: O(1); no file stays open.

    Raises StoreError for a missing, truncated or foreign file.
    """
    idx_size_bytes, bin_size_bytes = idx.size_bytes, data.size_bytes
    dtype, num_sequences, num_entries = _parse(idx.url, idx.peek([(0, HEADER.size)])[0])
    entries_size = HEADER.size + 12 * num_sequences + 8 * num_entries
    if idx_size_bytes not in (entries_size, entries_size + num_sequences):
        raise StoreError(_wrong_size(idx.url, idx_size_bytes, entries_size, num_sequences, num_entries))
    if bin_size_bytes % dtype.itemsize:
        raise StoreError(
            f"{data.url}: {bin_size_bytes} bytes are not a whole number of {dtype.name} tokens; {_RECOPY}"
        )
    return Header(
        prefix=prefix,
        dtype=dtype,
        num_sequences=num_sequences,
        num_documents=num_entries - 1,
        has_modes=idx_size_bytes > entries_size,
        is_stream=_fills(idx, num_sequences, dtype.itemsize, bin_size_bytes),
        idx_size_bytes=idx_size_bytes,
        bin_size_bytes=bin_size_bytes,
    )


def _parse(idx: str, head: bytes) -> tuple[np.dtype[Any], int, int]:
    if len(head) < HEADER.size:
        raise StoreError(f"{idx}: byte {len(head)}: ends within the {HEADER.size}-byte header; copy it again")
    magic, version, code, num_sequences, num_entries = HEADER.unpack(head)
    if magic != MAGIC:
        raise StoreError(f"{idx}: byte 0: found {magic!r} where {MAGIC!r} belongs; not a Megatron index")
    if version != VERSION:
        raise StoreError(f"{idx}: byte 9: version {version}; only version {VERSION} is known")
    if code not in DTYPES:
        raise StoreError(f"{idx}: byte 17: dtype code {code}; known are 1 to {max(DTYPES)}; {_REBUILD}")
    if num_entries < 1:
        raise StoreError(f"{idx}: byte 26: no document entries, not even the first; {_REBUILD}")
    return DTYPES[code], num_sequences, num_entries


def _wrong_size(idx: str, size: int, entries_size: int, num_sequences: int, num_entries: int) -> str:
    counts = f"{num_sequences} sequences and {num_entries} document entries (bytes 18 to 34)"
    if size < entries_size:
        return f"{idx}: byte {size}: truncated; {counts} take {entries_size} bytes; copy it again"
    return (
        f"{idx}: byte {entries_size}: {size - entries_size} bytes left over after {counts}; only "
        f"{num_sequences} modes may follow; {_REBUILD}"
    )


def _fills(idx: ByteFile, num_sequences: int, itemsize: int, bin_size_bytes: int) -> bool:
    if num_sequences == 0:
        return bin_size_bytes == 0
    pointers_at, pointers_end = HEADER.size + 4 * num_sequences, HEADER.size + 12 * num_sequences
    # the first pointer, the last one, the last length
    ends = (pointers_at, pointers_at + 8), (pointers_end - 8, pointers_end), (pointers_at - 4, pointers_at)
    first, last, length = (int.from_bytes(piece, "little", signed=True) for piece in idx.peek(ends))
    return first == 0 and last + length * itemsize == bin_size_bytes


def fingerprint_of(header: Header, idx: ByteFile, data: ByteFile) -> str:
    """Hex digest of dtype, sizes, header, both ends of the index and some blocks of the .bin."""
    sizes = f"{header.dtype.str} {header.idx_size_bytes} {header.bin_size_bytes}"
    digest = hashlib.blake2b(sizes.encode(), digest_size=16)
    digest.update(b"".join(idx.peek(ends_of_idx(header.idx_size_bytes))))
    digest.update(b"".join(data.peek(sampled_of_bin(header.bin_size_bytes))))
    return digest.hexdigest()


def ends_of_idx(size_bytes: int) -> list[tuple[int, int]]:
    """The ranges of an .idx that the fingerprint covers; they may reach beyond its end."""
    last = max(size_bytes - _IDX_BLOCK_BYTES, 0)
    return [(at, at + _IDX_BLOCK_BYTES) for at in (0, last)]


def sampled_of_bin(size_bytes: int) -> list[tuple[int, int]]:
    """The ranges of a .bin that the fingerprint covers."""
    last = max(size_bytes - _BIN_BLOCK_BYTES, 0)
    places = (last * i // (_NUM_BIN_BLOCKS - 1) for i in range(_NUM_BIN_BLOCKS))
    return [(at, at + _BIN_BLOCK_BYTES) for at in places]


def look_up(header: Header, idx: ByteFile) -> Index:
    """The entries of an index, read in place; dropping the result releases them.

    Raises StoreError if the file is gone, or its size is not the one that the header saw.
    """
    num_sequences = header.num_sequences
    lengths, pointers, documents, modes = idx.arrays(
        ("<i4", header.lengths_at, num_sequences),
        ("<i8", header.pointers_at, num_sequences),
        ("<i8", header.documents_at, header.num_documents + 1),
        ("i1", header.modes_at, num_sequences if header.has_modes else 0),
    )
    return Index(header=header, lengths=lengths, pointers=pointers, documents=documents, modes=modes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Index:
    """The unaligned arrays of an .idx, read in place; see the module's docstring.

    Read them through the methods, which check what they read and raise StoreError naming the byte.
    """

    header: Header
    lengths: Vector
    pointers: Vector
    documents: Vector
    modes: Vector

    def lengths_of(self, sequences: Longs) -> Longs:
        """Tokens of each sequence; int64 [n]."""
        lengths = self.lengths[sequences].astype(np.int64)
        self._refuse_lengths(lengths, sequences)
        return lengths

    def pointers_of(self, sequences: Longs, lengths: Longs) -> Longs:
        """Byte of the .bin where each sequence starts, checked to hold `lengths` tokens; int64 [n]."""
        pointers = self.pointers[sequences]
        self._refuse_pointers(pointers, lengths, sequences)
        return pointers

    def first_sequences_of(self, documents: Longs) -> Longs:
        """First sequence of each document, S for document D - 1; int64 [n]."""
        sequences = self.documents[documents]
        self._refuse_documents(sequences, documents)
        return sequences

    @property
    def size(self) -> int:
        """Number of stream offsets; see `LengthsIndex`."""
        return self.header.num_documents + 1

    def __getitem__(self, documents: Longs) -> Longs:
        """Stream offset in tokens of each document, the stream's end for document D - 1; int64 [n]."""
        header = self.header
        sequences = self.first_sequences_of(documents)
        offsets = np.full(sequences.shape, header.bin_size_bytes, np.int64)
        inside = np.flatnonzero(sequences < header.num_sequences)
        sequences = sequences[inside]
        offsets[inside] = self.pointers_of(sequences, np.zeros_like(sequences))
        return offsets // header.dtype.itemsize

    def searchsorted(self, offsets: Longs, side: Literal["left", "right"] = "left") -> Longs:
        """First document that starts at or after each stream offset, or after it; int64 [n], at most D - 1.

        All binary searches advance together: O(log D) gathers, memory for n.
        """
        if side == "right":
            offsets = offsets + 1
        places, guide = self._guide
        last = self.header.num_documents
        at = guide.searchsorted(offsets)
        low = np.append(-1, places)[at] + 1
        high = np.append(places, last)[at]
        bounds = offsets * self.header.dtype.itemsize
        while (apart := low < high).any():
            middle = (low + high) >> 1
            before = self._bytes_of(middle) < bounds
            low = np.where(apart & before, middle + 1, low)
            high = np.where(apart & ~before, middle, high)
        return np.minimum(low, last)

    @cached_property
    def _guide(self) -> tuple[Longs, Longs]:
        """Evenly spaced documents and their stream offsets, which replace the first rounds of a search."""
        step = -(-(self.header.num_documents + 1) // _GUIDE_SIZE)
        places = np.arange(0, self.header.num_documents + 1, step)
        offsets = self[places]
        for i in _first(offsets[1:] < offsets[:-1]):
            raise self._broken(
                self.header.documents_at + 8 * int(places[i + 1]),
                f"document {places[i + 1]} starts at token {offsets[i + 1]}, document {places[i]} at token "
                f"{offsets[i]}; {_REBUILD}",
            )
        return places, offsets

    def _bytes_of(self, documents: Longs) -> Longs:
        """Byte where each document starts, unchecked: wrong entries can only mislead a search."""
        header = self.header
        if not header.num_sequences:
            return np.zeros_like(documents)
        sequences = self.documents[documents]
        pointers = self.pointers[sequences.clip(0, header.num_sequences - 1)]
        return np.where(sequences < header.num_sequences, pointers, header.bin_size_bytes)

    def check(self, *, whole: bool) -> Iterator[float]:
        """Check the entries in bounded memory, yielding the fraction done, in (0, 1].

        whole: every entry; else every entry of short arrays and both ends of long ones.
        Raises StoreError at the first invalid entry.
        """
        sequences = _blocks(self.header.num_sequences, whole)
        documents = _blocks(self.header.num_documents + 1, whole)
        total = len(sequences) + len(documents)
        for done, (start, stop) in enumerate(sequences, start=1):
            self._check_sequences(start, stop)
            yield done / total
        for done, (start, stop) in enumerate(documents, start=1 + len(sequences)):
            self._check_documents(start, stop)
            yield done / total

    def _check_sequences(self, start: int, stop: int) -> None:
        header = self.header
        sequences = np.arange(start, stop)
        lengths = self.lengths[start:stop].astype(np.int64)
        pointers = self.pointers[start:stop].astype(np.int64)
        self._refuse_lengths(lengths, sequences)
        self._refuse_pointers(pointers, lengths, sequences)
        if not header.is_stream:
            return
        ends = pointers + lengths * header.dtype.itemsize
        after = header.bin_size_bytes if stop == header.num_sequences else int(self.pointers[stop])
        starts = np.append(pointers[1:], after)
        for i in _first(starts != ends):
            raise self._broken(
                header.pointers_at + 8 * (start + i + 1),
                f"sequence {start + i + 1} starts at byte {starts[i]} of the .bin, sequence {start + i} "
                f"ends at byte {ends[i]}; {_REBUILD}",
            )

    def _check_documents(self, start: int, stop: int) -> None:
        header = self.header
        entries = self.documents[max(start - 1, 0) : stop].astype(np.int64)
        places = np.arange(max(start - 1, 0), stop)
        self._refuse_documents(entries, places)
        for i in _first(entries[1:] < entries[:-1]):
            raise self._broken(
                header.documents_at + 8 * int(places[i + 1]),
                f"document {places[i + 1]} starts at sequence {entries[i + 1]}, before its predecessor "
                f"at {entries[i]}; {_REBUILD}",
            )
        if start == 0 and entries[0] != 0:
            raise self._broken(header.documents_at, f"document 0 starts at sequence {entries[0]}; {_REBUILD}")
        if stop == header.num_documents + 1 and entries[-1] != header.num_sequences:
            raise self._broken(
                header.modes_at - 8,
                f"the last document ends before sequence {entries[-1]} of {header.num_sequences}: the rest "
                f"belongs to no document; write the store again, ending its last document",
            )

    def _refuse_lengths(self, lengths: Longs, sequences: Longs) -> None:
        for i in _first(lengths < 0):
            raise self._broken(
                self.header.lengths_at + 4 * int(sequences[i]),
                f"sequence {sequences[i]} has {lengths[i]} tokens; {_REBUILD}",
            )

    def _refuse_pointers(self, pointers: Longs, lengths: Longs, sequences: Longs) -> None:
        header = self.header
        itemsize = header.dtype.itemsize
        # Subtract on the right: a damaged pointer plus a length could overflow.
        outside = (pointers < 0) | (pointers > header.bin_size_bytes - lengths * itemsize)
        for i in _first(outside | (pointers % itemsize != 0)):
            what = (
                "is not a whole token" if not outside[i] else f"is outside its {header.bin_size_bytes} bytes"
            )
            raise self._broken(
                header.pointers_at + 8 * int(sequences[i]),
                f"sequence {sequences[i]} of {lengths[i]} tokens at byte {pointers[i]} of the .bin {what}; "
                f"{_RECOPY}",
            )

    def _refuse_documents(self, sequences: Longs, documents: Longs) -> None:
        for i in _first((sequences < 0) | (sequences > self.header.num_sequences)):
            raise self._broken(
                self.header.documents_at + 8 * int(documents[i]),
                f"document {documents[i]} starts at sequence {sequences[i]} of "
                f"{self.header.num_sequences}; {_REBUILD}",
            )

    def _broken(self, at: int, message: str) -> StoreError:
        return StoreError(f"{self.header.prefix}.idx: byte {at}: {message}")


def _blocks(size: int, whole: bool) -> list[tuple[int, int]]:
    if not whole and size > CHECKED_WHOLE:
        return [(0, CHECKED_ENDS), (size - CHECKED_ENDS, size)]
    return [(start, min(start + _CHUNK, size)) for start in range(0, size, _CHUNK)]


def _first(bad: Bools) -> list[int]:
    """The first true index, if any: for i in _first(bad): raise ..."""
    return [int(bad.argmax())] if bad.any() else []
