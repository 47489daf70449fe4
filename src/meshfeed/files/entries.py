"""An index's entries in a file whose blocks may not have been fetched yet."""

from __future__ import annotations

import operator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meshfeed.files.byte_file import I64


class Gathers(Protocol):
    """A file that returns entries by index."""

    url: str

    def gathered(self, dtype: np.dtype[Any], begin: int, places: I64) -> npt.NDArray[Any]:
        """Entries at the indices `places` of an array of `dtype` that starts at byte `begin`."""
        ...

    def between(self, dtype: np.dtype[Any], begin: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Entries start..stop of that array."""
        ...


class EntriesOf:
    """A Vector in such a file. Looking up entries fetches their blocks first and copies them."""

    def __init__(self, file: Gathers, dtype: np.dtype[Any], begin: int, count: int) -> None:
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
