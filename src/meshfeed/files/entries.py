"""An index's entries in a file whose blocks may not be here yet."""

from __future__ import annotations

import operator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meshfeed.files.byte_file import I64


class Gathers(Protocol):
    """A file that finds entries by their places."""

    url: str

    def gathered(self, dtype: np.dtype[Any], begin: int, places: I64) -> npt.NDArray[Any]:
        """Entries of `dtype` that lie one after the other from byte `begin` on, at some places."""
        ...

    def between(self, dtype: np.dtype[Any], begin: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Those of them from place `start` to `stop`."""
        ...


class EntriesOf:
    """A Vector in such a file. Looking entries up brings their blocks here first, and copies them out."""

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
            raise IndexError(f"{self._file.url}: an entry of {self.size} that is not there")
        found = self._file.gathered(self._dtype, self._begin, wrapped.ravel()).reshape(wrapped.shape)
        return found[()] if array.ndim == 0 else found
