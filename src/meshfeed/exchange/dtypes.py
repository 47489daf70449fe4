"""Element types by name: those that NumPy has, and those of torch that travel as plain integers."""

from __future__ import annotations

import numpy as np

CARRIED = {
    "bfloat16": "int16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
}
"""Types that torch has and NumPy has not -> the integers that hold their bits."""

BYTES = "bytes"


def carrier(dtype: str) -> str:
    """The NumPy name of what holds elements of a type."""
    return "uint8" if dtype == BYTES else CARRIED.get(dtype, dtype)


def item_bytes(dtype: str) -> int:
    """Bytes of one element."""
    return np.dtype(carrier(dtype)).itemsize
