"""What passes from storage to the ranks, and what it becomes there: names for shapes of data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

Columns = Mapping[str, Array | Sequence[Array] | Sequence[bytes]]
"""Stored data by name: an array, or one array (any shape) or byte string per sequence."""

Arrays = dict[str, Array | Sequence[Array] | Sequence[bytes]]
"""Fields of a microbatch by name, before they become tensors."""


class Constant(np.ndarray[Any, np.dtype[Any]]):
    """A read-only array that is the same in every microbatch: it is built once, and tensors may share it."""

    @classmethod
    def of(cls, array: Array) -> "Constant":
        """An array that nobody writes any more."""
        made = array.view(cls)
        made.setflags(write=False)
        return made


Allocate = Callable[[tuple[int, ...], str], Array]
"""(shape, dtype name) -> an uninitialised array; page-locked when it is bound for a GPU."""
