"""An index's entries, looked up in a file that is read and not mapped."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from meshfeed.files.byte_file import I64, Bytes, Vector

_PAGE_BYTES = 1 << 12


class EntriesOf:
    """A Vector in such a file. Looking up entries fetches their blocks first and copies them."""

    def __init__(self, file: Lookups, dtype: np.dtype[Any], begin: int, count: int) -> None:
        self._file, self._dtype, self._begin, self.size = file, dtype, begin, count

    def __getitem__(self, places: Any, /) -> Any:
        if isinstance(places, slice):
            start, stop, step = places.indices(self.size)
            if step == 1:
                return self._file.between(self._dtype, self._begin, start, stop)
            return self._file.gathered(self._dtype, self._begin, np.arange(start, stop, step))
        array = np.asarray(places)
        if array.dtype.kind == "b" or array.ndim == 0:
            array = np.flatnonzero(array) if array.ndim else np.array(operator.index(places))
        wrapped = np.where(array < 0, array + self.size, array).astype(np.int64)
        if wrapped.size and not 0 <= wrapped.min() <= wrapped.max() < self.size:
            raise IndexError(f"{self._file.url}: an index out of range for {self.size} entries")
        found = self._file.gathered(self._dtype, self._begin, wrapped.ravel()).reshape(wrapped.shape)
        return found[()] if array.ndim == 0 else found


class Lookups(ABC):
    """A file whose entries can be looked up, page by page."""

    url: str

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """See ByteFile."""

    @abstractmethod
    def look_up(self, out: Bytes, begins: I64, sizes: I64) -> None:
        """Read ranges back to back; works before entering."""

    def arrays(self, *parts: tuple[str, int, int]) -> list[Vector]:
        """See ByteFile. A lookup reads pages instead of a map, which would kill the process on truncation."""
        return [EntriesOf(self, np.dtype(dtype), begin, count) for dtype, begin, count in parts]

    def between(self, dtype: np.dtype[Any], begin: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Entries start..stop of an array of `dtype` that starts at byte `begin`."""
        found = np.empty(max(stop - start, 0), dtype)
        self.look_up(
            found.view(np.uint8), np.array([begin + start * dtype.itemsize]), np.array([found.nbytes])
        )
        return found

    def gathered(self, dtype: np.dtype[Any], begin: int, places: I64) -> npt.NDArray[Any]:
        """Entries at the indices `places` of an array of `dtype` that starts at byte `begin`."""
        size = dtype.itemsize
        at = begin + places * size
        pages = np.unique(np.concatenate((at // _PAGE_BYTES, (at + size - 1) // _PAGE_BYTES)))
        begins = pages * _PAGE_BYTES
        sizes = np.minimum(begins + _PAGE_BYTES, self.size_bytes) - begins
        held = np.empty(sizes.sum(), np.uint8)
        self.look_up(held, begins, sizes)
        # offset of each entry in `held`: that of its page, plus the offset inside the page
        inside = pages.searchsorted(at // _PAGE_BYTES) * _PAGE_BYTES + at % _PAGE_BYTES
        return held[inside[:, None] + np.arange(size)].view(dtype)[:, 0]
