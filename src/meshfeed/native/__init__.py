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

from meshfeed.environment import switch

WHOLE = ctypes.c_int64
"""The type of an argument that is an int, or an address."""
ARRAY = ctypes.c_void_p
"""The type of an argument that is an array, of what type its loop says."""


class LONGS(ctypes.c_void_p):
    """The type of an argument that is an array of int64."""


_BYTE = ctypes.c_char
_INT64 = np.dtype(np.int64)

_SOURCE = Path(__file__).with_name("loops.c")


def compiled(name: str, *arguments: type[WHOLE | ARRAY]) -> Callable[..., int] | None:
    """A function of loops.c that returns int64; None if there is no library.

    It runs without the interpreter lock. arguments: WHOLE, ARRAY or LONGS for each; None is no array. The
    function raises ValueError for an array that is not contiguous, or not of int64 where it must be: none is
    converted.
    """
    if _LIBRARY is None:
        return None
    function = getattr(_LIBRARY, name)
    function.argtypes, function.restype = arguments, WHOLE

    def call(*given: Any) -> int:
        passed = list[Any]()
        for kind, each in zip(arguments, given, strict=True):
            if kind is WHOLE or each is None:
                passed.append(each)
                continue
            if kind is LONGS and each.dtype is not _INT64 and each.dtype != _INT64:
                raise ValueError(f"compiled loops take int64, not {each.dtype.name}")
            if not each.flags.c_contiguous:
                raise ValueError("compiled loops take contiguous arrays")
            try:
                passed.append(ctypes.addressof(_BYTE.from_buffer(each)))
            except (TypeError, ValueError):  # read-only, or empty; this way takes four times as long
                passed.append(each.ctypes.data)
        return function(*passed)

    return call


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
