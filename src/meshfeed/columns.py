"""Types of data on the way from storage to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

Columns = Mapping[str, Array | Sequence[Array] | Sequence[bytes]]
"""Stored data by name: an array, or one array (any shape) or byte string per sequence."""

Arrays = dict[str, Array | Sequence[Array] | Sequence[bytes]]
"""Fields of a microbatch by name, before they become tensors."""


@dataclass(slots=True)
class Stacked(Sequence[Arrays]):
    """The fields of some microbatches of one shape, in few arrays, until somebody looks at a microbatch.

    Then each microbatch has a dictionary of its own, as in a list, which may be changed.

    Attributes:
        rows: name -> the rows of all microbatches, one microbatch after the other; a Constant has those of
            each.
        others: the further fields of each microbatch.
    """

    rows: Mapping[str, Array]
    others: Sequence[Arrays]
    _each: list[Arrays] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nobody has looked at a single microbatch yet."""
        return self._each is None

    def __len__(self) -> int:
        return len(self.others)

    @overload
    def __getitem__(self, at: int) -> Arrays: ...
    @overload
    def __getitem__(self, at: slice) -> list[Arrays]: ...
    def __getitem__(self, at: int | slice) -> Arrays | list[Arrays]:
        if self._each is None:
            count = len(self)
            parts = [
                [array] * count if isinstance(array, Constant) else np.split(array, count)
                for array in self.rows.values()
            ]
            self._each = [dict(zip(self.rows, part)) | more for *part, more in zip(*parts, self.others)]
        return self._each[at]


class Constant(np.ndarray[Any, np.dtype[Any]]):
    """A read-only array that is the same in every microbatch: built once, and shared by tensors."""

    @classmethod
    def of(cls, array: Array) -> Constant:
        """Make an array read-only."""
        made = array.view(cls)
        made.setflags(write=False)
        return made


Allocate = Callable[[tuple[int, ...], str], Array]
"""(shape, dtype name) -> an uninitialised array; page-locked if its data go to a GPU."""
