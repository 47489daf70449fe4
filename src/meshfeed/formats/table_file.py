"""A file that begins with a table of where its items lie; MDS and litdata have such.

u32 count | u32 offsets[count + 1] | items
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

import numpy as np

from meshfeed.errors import StoreError
from meshfeed.files import ByteFile, Vector
from meshfeed.store.stream import I64

_SLICE_BYTES = 1 << 25


class TableFile:
    """Readable while entered. All methods raise StoreError, naming file and byte.

    Args:
        file: of the items; its size is that of its index.
        count: items in it, as the index says.
        least_bytes: that an item has at least.
    """

    noun: ClassVar[str] = "items"
    has_gap: ClassVar[bool] = False
    """Whether something may lie between the table and the first item."""

    def __init__(self, file: ByteFile, count: int, least_bytes: int) -> None:
        self.file = file
        self._count, self._least = count, least_bytes
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

    def _read_table(self) -> I64:
        url, size, head = self.file.url, self.file.size_bytes, 4 * (self._count + 2)
        (table,) = self.file.peek([(0, head)])
        if len(table) != head:
            raise StoreError(
                f"{url}: {len(table)} bytes, too few for the offsets of {self._count} {self.noun}; copy it "
                f"again"
            )
        words = np.frombuffer(table, "<u4").astype(np.int64)
        count, offsets = int(words[0]), words[1:]
        if count != self._count:
            raise StoreError(f"{url}: byte 0: {count} {self.noun}, its index says {self._count}")
        short, first = np.diff(offsets) < self._least, int(offsets[0])
        if (first < head if self.has_gap else first != head) or offsets[-1] != size or short.any():
            at = 4 * (2 + int(short.argmax())) if short.any() else 4
            raise StoreError(
                f"{url}: byte {at}: the {self.noun}' offsets do not ascend by at least {self._least} "
                f"from {head} to {size}; copy it again"
            )
        return offsets

    @property
    def _bytes(self) -> Vector:
        if self._mapped is None:
            (self._mapped,) = self.file.arrays(("u1", 0, self.file.size_bytes))
        return self._mapped

    def _slices(self) -> Iterator[I64]:
        """All items, some 32 MiB at a time; the whole file is announced."""
        size = self.file.size_bytes
        self.file.will_need(np.zeros(1, np.int64), np.array([size]))
        cuts = self._offsets[:-1].searchsorted(np.arange(_SLICE_BYTES, size, _SLICE_BYTES))
        yield from np.split(np.arange(self._count), cuts)
