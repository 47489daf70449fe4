"""Finds the compiled loops of loops.c, which the package's build makes where there is a C compiler.

The name of the library carries a digest of its source, so that an old one is never taken for it. Without a
library, or with MESHFEED_NATIVE=0, `compiled` gives None, and the caller's NumPy version runs instead. Both
compute the same bits. Nothing is compiled when meshfeed is imported.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshfeed.environment import switch

WHOLE = ctypes.c_int64
POINTER = ctypes.c_void_p
_BYTE = ctypes.c_char
_INT64 = np.dtype(np.int64)

_SOURCE = Path(__file__).with_name("loops.c")


def compiled(name: str, *arguments: type[WHOLE] | type[POINTER]) -> Callable[..., int] | None:
    """A function of loops.c that returns int64; None if there is no library.

    It runs without the interpreter lock. arguments: WHOLE for an int, POINTER for what `address` gives.
    """
    if _LIBRARY is None:
        return None
    function = getattr(_LIBRARY, name)
    function.argtypes, function.restype = arguments, WHOLE
    return function


def address(array: Any) -> int:
    """Of an array's first element; valid while the array lives. Raises ValueError if it is not contiguous."""
    if not array.flags.c_contiguous:
        raise ValueError("compiled loops take contiguous arrays")
    try:
        return ctypes.addressof(_BYTE.from_buffer(array))
    except (TypeError, ValueError):  # read-only, or empty; this way takes four times as long
        return array.ctypes.data


def addresses(*arrays: npt.NDArray[np.int64]) -> list[int]:
    """Of contiguous int64 arrays, none of them converted: the caller's local variables keep them alive."""
    found: list[int] = []
    for array in arrays:
        if array.dtype != _INT64:
            raise ValueError(f"compiled loops take int64, not {array.dtype.name}")
        found.append(address(array))
    return found


def is_compiled() -> bool:
    """Whether this process runs the compiled loops."""
    return _LIBRARY is not None


def _loaded() -> ctypes.CDLL | None:
    if not switch("MESHFEED_NATIVE", unset=True):
        return None
    try:
        digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
        return ctypes.CDLL(str(_SOURCE.with_name(f"loops-{digest}-{platform.machine()}.so")))
    except OSError:  # not compiled, or for another system
        return None


_LIBRARY = _loaded()
