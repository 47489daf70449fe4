"""One chunk of a litdata dataset: where its items lie, and their tokens.

Little-endian, but for the header of a "tensor":

    u32 num_items | u32 offsets[num_items + 1] | items
    item            u32 sizes[num_columns] | values
    bare item       value
    "numpy"         u32 dtype | u32 ndim | u32 shape[ndim] | elements
    "tensor"        the same, with a big-endian header
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from meshfeed.errors import StoreError
from meshfeed.files import ByteFile
from meshfeed.formats.litdata_column import Family
from meshfeed.formats.litdata_index import Chunk
from meshfeed.formats.table_file import TableFile
from meshfeed.store.stream import I64

_MOST_DIMS = 16


@dataclass(frozen=True, slots=True)
class Items:
    """What the items of all chunks are made of.

    Attributes:
        sizes: bytes of each column's values, None where they differ; () for bare items.
        at: the column of the tokens.
        family: how they are written.
    """

    sizes: tuple[int | None, ...]
    at: int
    family: Family

    @property
    def least_bytes(self) -> int:
        """That an item has at least; where `is_plain`, all that are not its tokens."""
        return 4 * len(self.sizes) + sum(size or 0 for size in self.sizes)

    @property
    def is_plain(self) -> bool:
        """Only tokens differ in length and have no header, so that offsets alone say where they lie."""
        return self.family.byte_order is None and self.sizes.count(None) <= 1


class ChunkFile(TableFile):
    """A chunk, readable while entered. All methods raise StoreError, naming file and byte."""

    def __init__(self, chunk: Chunk, items: Items, file: ByteFile) -> None:
        super().__init__(file, chunk.num_documents, items.least_bytes)
        self.chunk, self.items = chunk, items

    def places(self, dtype: np.dtype[Any]) -> tuple[I64, I64]:
        """(byte where its tokens begin, tokens) of every item; int64 [num_documents] each.

        By the chunk's head alone where that tells, else by the heads of all items, for which the whole chunk
        is announced.
        """
        if self.items.is_plain:
            begins, ends = self._plain_spans()
            counts = self._counts(begins, ends, dtype)
        else:
            found = [self.token_spans(some, dtype) for some in self._slices()]
            begins, counts = (np.concatenate(each) for each in zip(*found))
        total = self.chunk.num_tokens
        if total is not None and int(counts.sum()) != total:
            raise StoreError(f"{self.file.url}: {counts.sum()} tokens, its index says {total}; copy it again")
        return begins, counts

    def token_spans(self, items: I64, dtype: np.dtype[Any]) -> tuple[I64, I64]:
        """(first byte, number) of the tokens of each item; int64 [n] each."""
        begins, ends = self._values(items)
        begins = begins + self._lead(begins, ends - begins, dtype)
        return begins, self._counts(begins, ends, dtype)

    def first_dtype(self) -> np.dtype[Any]:
        """Of the first item's tokens, as its header says. Raises ValueError for what are no integers."""
        begins, ends = self._values(np.zeros(1, np.int64))
        self._refuse_short(begins, ends - begins, 8)
        family = self.items.family
        return family.dtype(int(self._words(begins, 1, family.byte_order or "<")[0, 0]))

    # -- below --------------------------------------------------------------------------------------------

    def _plain_spans(self) -> tuple[I64, I64]:
        """Bytes [begin, end) of the tokens of plain items, by their offsets alone; int64 [n] each."""
        sizes = self.items.sizes
        before = 4 * len(sizes) + sum(size or 0 for size in sizes[: self.items.at])
        return self._offsets[:-1] + before, self._offsets[1:] + before - self.items.least_bytes

    def _counts(self, begins: I64, ends: I64, dtype: np.dtype[Any]) -> I64:
        sizes = ends - begins
        counts, rest = np.divmod(sizes, dtype.itemsize)
        if rest.any():
            self._refuse(begins, rest != 0, f"no whole number of {dtype.name}")
        return counts

    def _values(self, items: I64) -> tuple[I64, I64]:
        """Bytes [begin, end) of the value that holds tokens, as the items' own sizes say; int64 [n] each."""
        at, fixed = self.items.at, self.items.sizes
        first = self._offsets[items]
        if not fixed:
            return first, self._offsets[items + 1]
        sizes = self._words(first, len(fixed), "<")
        ends = first + 4 * len(fixed) + sizes.cumsum(axis=1).T
        wrong = ends[-1] != self._offsets[items + 1]
        for column, size in enumerate(fixed):
            if size is not None:
                wrong |= sizes[:, column] != size
        if wrong.any():
            i = int(wrong.argmax())
            raise StoreError(
                f"{self.file.url}: byte {first[i]}: item {items[i]} has values of {sizes[i].tolist()} bytes "
                f"in {self._offsets[items[i] + 1] - first[i]}; copy it again"
            )
        return ends[at] - sizes[:, at], ends[at]

    def _lead(self, begins: I64, sizes: I64, dtype: np.dtype[Any]) -> I64:
        """Bytes before the elements of each value: int64 [n]."""
        order = self.items.family.byte_order
        if order is None or not begins.size:
            return np.zeros(begins.size, np.int64)
        self._refuse_short(begins, sizes, 8)
        codes, ndims = self._words(begins, 2, order).T
        same = [code for code, name in self.items.family.dtypes.items() if dtype == np.dtype(name)]
        self._refuse(begins, ~np.isin(codes, same), f"an array of another dtype than {dtype.name}")
        self._refuse(begins, ndims > _MOST_DIMS, f"an array of more than {_MOST_DIMS} dimensions")
        lead = 8 + 4 * ndims
        self._refuse_short(begins, sizes, lead)
        elements = np.ones(begins.size, np.float64)  # exact where it matters, and beyond 2**53 wrong anyway
        for dim in range(int(ndims.max())):
            deep = np.flatnonzero(ndims > dim)
            elements[deep] *= self._words(begins[deep] + 8 + 4 * dim, 1, order)[:, 0]
        self._refuse(
            begins, elements * dtype.itemsize != sizes - lead, "an array whose shape is not its size"
        )
        return lead

    def _words(self, begins: I64, count: int, order: str) -> I64:
        """u32 words from each place on; int64 [n, count]."""
        places = begins[:, None] + np.arange(4 * count)
        words: npt.NDArray[Any] = np.ascontiguousarray(self._bytes[places]).view(f"{order}u4")
        return words.reshape(begins.size, count).astype(np.int64)

    def _refuse_short(self, begins: I64, sizes: I64, least: I64 | int) -> None:
        self._refuse(begins, sizes < least, "an array without a whole header")

    def _refuse(self, begins: I64, wrong: npt.NDArray[np.bool_], what: str) -> None:
        if wrong.any():
            raise StoreError(f"{self.file.url}: byte {begins[int(wrong.argmax())]}: {what}; copy it again")
