"""Types of data on the way from storage to the ranks."""

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
    """A read-only array that is the same in every microbatch: built once, and shared by tensors."""

    @classmethod
    def of(cls, array: Array) -> "Constant":
        """Make an array read-only."""
        made = array.view(cls)
        made.setflags(write=False)
        return made


Allocate = Callable[[tuple[int, ...], str], Array]
"""(shape, dtype name) -> an uninitialised array; page-locked if its data go to a GPU."""
