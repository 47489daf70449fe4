"""Element types by name: NumPy's, and torch types that are sent as plain integers."""

from __future__ import annotations

import math

import numpy as np

CARRIED = {
    "bfloat16": "int16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
}
"""Types of torch that NumPy lacks -> integers of the same width."""

BYTES = "bytes"
NESTED = "nested"
"""A value that holds others, as one byte string; see `values`."""


def carrier(dtype: str) -> str:
    """The NumPy type that holds elements of a type."""
    return "uint8" if dtype in (BYTES, NESTED) else CARRIED.get(dtype, dtype)


def entry_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array of this type and shape."""
    return math.prod(shape) * np.dtype(carrier(dtype)).itemsize
