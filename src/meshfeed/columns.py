"""Types of data on the way from storage to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]

Columns = Mapping[str, Array | Sequence[Array] | Sequence[bytes]]
"""Stored data by name: an array, or one array (any shape) or byte string per sequence."""

Arrays = dict[str, Array | Sequence[Array] | Sequence[bytes]]
"""Fields of a microbatch by name, before they become tensors."""


Allocate = Callable[[tuple[int, ...], str], Array]
"""(shape, dtype name) -> an uninitialised array; page-locked if its data go to a GPU."""
