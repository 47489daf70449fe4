"""A file of items that begins with a table of their positions, as MDS and litdata write it.

Little-endian. An item gives the sizes of some of its values, then the values:

    u32 count | u32 offsets[count + 1] | anything else from the writer | items
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from meshfeed.arrays import Array, Bools, Longs
from meshfeed.errors import StoreError
from meshfeed.files import ByteFile, Vector

_SLICE_BYTES = 1 << 25
_GAP_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Column:
    """A column of all items.

    Attributes:
        name, encoding: from the index.
        size_bytes: of every value; None if values differ.
    """

    name: str
    encoding: str
    size_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A file of items, as the index describes it.

    Attributes:
        name: of the stored file, which is compressed if there is a codec.
        num_documents: items in it.
    """

    name: str
    num_documents: int


class Head(ABC):
    """The header of an array, before its elements."""

    @abstractmethod
    def sizes(self, file: ItemsFile, begins: Longs, sizes: Longs) -> Longs:
        """Bytes of the heads of values, from their first bytes and sizes; int64 [n]. Raises StoreError."""

    def sizes_of_rows(self, sizes: Longs, itemsize: int) -> Longs | None:
        """The same from their sizes alone, if all are arrays of one dimension; None if they cannot be."""
        return None

    def of_row(self, elements: int) -> bytes:
        """The head of an array of one dimension."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """The layout of items, the same in all shards.

    Attributes:
        noun: the word for an item in messages.
        sizes: bytes of each column's values; None if values differ.
        stored_sizes: the columns whose sizes an item stores, in words before its values. A value whose size
            varies and is not stored takes the bytes that the others leave.
        at: the column of the tokens.
        dtype: of the tokens, little-endian.
        head: header of an array of tokens; None if there is none.
        num_tokens: of every item; None if items differ.
        has_gap: whether there may be other bytes between the table and the first item.
    """

    noun: str
    sizes: tuple[int | None, ...]
    stored_sizes: tuple[int, ...]
    at: int
    dtype: np.dtype[Any]
    head: Head | None = None
    num_tokens: int | None = None
    has_gap: bool = False

    @property
    def least_bytes(self) -> int:
        return 4 * len(self.stored_sizes) + sum(size or 0 for size in self.sizes)


class ItemsFile:
    """The items of one file, readable while entered. All methods raise StoreError, naming file and byte.

    Args:
        file: of the items; its size matches the index.
        count: items in it, from the index.
    """

    def __init__(self, file: ByteFile, count: int, items: Items) -> None:
        self.file, self.items = file, items
        self._count = count
        self._mapped: Vector | None = None

    def __enter__(self) -> Self:
        self.file.__enter__()
        try:
            self._offsets = self._read_table()
        except BaseException:
            self.file.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.file.__exit__(*exc)

    @staticmethod
    def glanced_bytes(count: int) -> int:
        """How many bytes of a file to take at once: its table, most often with the first item's head."""
        return 4 * (count + 2) + _GAP_BYTES

    def places(self) -> tuple[Longs, Longs]:
        """(byte where its tokens begin, tokens) of every item; int64 [count] each.

        From the table alone if that is enough, else from the headers of all items, for which the whole file
        is announced. Arrays that store their shapes are assumed to have one dimension if their sizes allow it
        and the first and the last array of the file have one.
        """
        found = self._by_table()
        if found is not None:
            return found
        begins, counts = zip(*(self._tokens_of(some) for some in self._slices()))
        return np.concatenate(begins), np.concatenate(counts)

    def verify(self) -> None:
        """Check every item, and raise StoreError if an assumption of `places` is wrong."""
        guessed, found = self._by_table(), self._tokens_of(np.arange(self._count))
        wrong = np.zeros(0) if guessed is None else (guessed[0] != found[0]) | (guessed[1] != found[1])
        if wrong.any():
            i = int(wrong.argmax())
            raise StoreError(
                f"{self.file.url}: byte {found[0][i]}: {self.items.noun} {i} has an array of several "
                f"dimensions, others have one; write it again with one"
            )

    def spans(self, which: Longs, column: int) -> tuple[Longs, Longs]:
        """(first byte, bytes) of one column's value in some items; int64 [n] each."""
        items, begins, wholes = self.items, self._offsets[which], np.diff(self._offsets)[which]
        fixed = np.array([size or 0 for size in items.sizes], np.int64)
        sizes = np.tile(fixed, (which.size, 1))
        if items.stored_sizes:
            sizes[:, items.stored_sizes] = self.words(begins, len(items.stored_sizes))
        elif None in items.sizes:
            sizes[:, items.sizes.index(None)] = wholes - items.least_bytes
        known = [at for at, size in enumerate(items.sizes) if size is not None]
        lead = 4 * len(items.stored_sizes)
        wrong = (lead + sizes.sum(axis=1) != wholes) | (sizes[:, known] != fixed[known]).any(axis=1)
        if wrong.any():
            i = int(wrong.argmax())
            raise StoreError(
                f"{self.file.url}: byte {begins[i]}: {items.noun} {which[i]} has values of "
                f"{sizes[i].tolist()} bytes in {wholes[i]}; copy it again"
            )
        return begins + lead + sizes[:, :column].sum(axis=1), sizes[:, column]

    def first(self) -> bytes:
        """The first item's value that holds tokens."""
        begin, size = (int(each[0]) for each in self.spans(np.zeros(1, np.int64), self.items.at))
        return self.raw[begin : begin + size].tobytes()

    # -- for heads ----------------------------------------------------------------------------------------

    @property
    def raw(self) -> Vector:
        if self._mapped is None:
            (self._mapped,) = self.file.arrays(("u1", 0, self.file.size_bytes))
        return self._mapped

    def words(self, begins: Longs, count: int, order: str = "<") -> Longs:
        """u32 words from each place on; int64 [n, count]."""
        places = begins[:, None] + np.arange(4 * count)
        words: Array = np.ascontiguousarray(self.raw[places]).view(f"{order}u4")
        return words.reshape(begins.size, count).astype(np.int64)

    def refuse(self, begins: Longs, wrong: Bools, what: str) -> None:
        """Raise for the first value that is wrong, if any."""
        if wrong.any():
            raise StoreError(f"{self.file.url}: byte {begins[int(wrong.argmax())]}: {what}; copy it again")

    # -- below --------------------------------------------------------------------------------------------

    def _read_table(self) -> Longs:
        url, size, noun, least = self.file.url, self.file.size_bytes, self.items.noun, self.items.least_bytes
        head = 4 * (self._count + 2)
        (table,) = self.file.peek([(0, head)])
        if len(table) != head:
            raise StoreError(
                f"{url}: {len(table)} bytes, too few for the offsets of {self._count} {noun}s; copy it again"
            )
        words = np.frombuffer(table, "<u4").astype(np.int64)
        offsets, short = words[1:], np.diff(words[1:]) < least
        if words[0] != self._count:
            raise StoreError(f"{url}: byte 0: {words[0]} {noun}s, its index says {self._count}")
        begins = offsets[0] >= head if self.items.has_gap else offsets[0] == head
        if not begins or offsets[-1] != size or short.any():
            at = 4 * (2 + int(short.argmax())) if short.any() else 4
            raise StoreError(
                f"{url}: byte {at}: the {noun}s' offsets do not ascend by at least {least} from {head} to "
                f"{size}; copy it again"
            )
        return offsets

    def _by_table(self) -> tuple[Longs, Longs] | None:
        items = self.items
        size, before, after = items.sizes[items.at], items.sizes[: items.at], items.sizes[items.at + 1 :]
        begins = self._offsets[:-1] + 4 * len(items.stored_sizes) + sum(each or 0 for each in before)
        ends = self._offsets[1:] - sum(each or 0 for each in after)
        if size is not None and None not in before:
            ends = begins + size
        elif size is not None and None not in after:
            begins = ends - size
        elif None in before or None in after:
            return None
        if items.head is None:
            return self._counted(begins, ends - begins)
        heads = items.head.sizes_of_rows(ends - begins, items.dtype.itemsize)
        if heads is None:
            return None
        found = self._counted(begins + heads, ends - begins - heads)
        ends_of_all = [0, -1][: begins.size]
        first_and_last = list(zip(begins[ends_of_all].tolist(), found[0][ends_of_all].tolist()))
        rows = [items.head.of_row(count) for count in found[1][ends_of_all].tolist()]
        return found if not rows or self.file.peek(first_and_last) == rows else None

    def _slices(self) -> Iterator[Longs]:
        """All items, about 32 MiB at a time; the whole file is announced."""
        size = self.file.size_bytes
        self.file.will_need(np.zeros(1, np.int64), np.array([size]))
        cuts = self._offsets[:-1].searchsorted(np.arange(_SLICE_BYTES, size, _SLICE_BYTES))
        yield from np.split(np.arange(self._count), cuts)

    def _tokens_of(self, which: Longs) -> tuple[Longs, Longs]:
        """(first byte, number) of the tokens of some items, from their heads; int64 [n] each."""
        begins, sizes = self.spans(which, self.items.at)
        if self.items.head is None or not which.size:
            return self._counted(begins, sizes)
        heads = self.items.head.sizes(self, begins, sizes)
        return self._counted(begins + heads, sizes - heads)

    def _counted(self, begins: Longs, sizes: Longs) -> tuple[Longs, Longs]:
        """(first byte, number) of the tokens in some bytes."""
        dtype, expected = self.items.dtype, self.items.num_tokens
        counts, rest = np.divmod(sizes, dtype.itemsize)
        self.refuse(begins, (sizes < 0) | (rest != 0), f"no whole number of {dtype.name}")
        if expected is not None:
            self.refuse(begins, counts != expected, f"not the {expected} tokens that its encoding says")
        return begins, counts
