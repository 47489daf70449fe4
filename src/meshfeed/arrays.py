"""Types of arrays, and of the data on their way from storage to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Longs = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

Columns = Mapping[str, Array | Sequence[Array] | Sequence[bytes]]
"""Stored data by name: an array, or one array (any shape) or byte string per sequence."""

Arrays = dict[str, Array | Sequence[Array] | Sequence[bytes]]
"""Fields of a microbatch by name, before they become tensors."""

Allocate = Callable[[tuple[int, ...], str], Array]
"""(shape, dtype name) -> an uninitialised array; page-locked if its data go to a GPU."""
