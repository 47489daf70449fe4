"""Finds the compiled loops of a loops.c, which the package's build makes where there is a C compiler.

The name of a library carries a digest of its source, so that an old one is never taken for it. Without a
library, or with MESHFEED_NATIVE=0, `compiled` gives None, and the caller's NumPy version runs instead. Both
compute the same bits. Nothing is compiled when meshfeed is imported.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
from collections.abc import Callable
from functools import cache
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

_HERE = Path(__file__).parent


def compiled(name: str, *arguments: type[WHOLE | ARRAY], folder: Path = _HERE) -> Callable[..., int] | None:
    """A function of a folder's loops.c that returns int64; None if there is no library.

    It runs without the interpreter lock. arguments: WHOLE, ARRAY or LONGS for each; None is no array. The
    function raises ValueError for an array that is not contiguous, or not of int64 where it must be: none is
    converted.
    """
    if (library := _loaded(folder)) is None:
        return None
    function = getattr(library, name)
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
    return _loaded(_HERE) is not None


@cache
def _loaded(folder: Path) -> ctypes.CDLL | None:
    if not switch("MESHFEED_NATIVE", unset=True):
        return None
    try:
        sources = (_HERE / "heap.h").read_bytes() + (folder / "loops.c").read_bytes()
        digest = hashlib.sha256(sources).hexdigest()[:16]
        return ctypes.CDLL(str(folder / f"loops-{digest}-{platform.machine()}.so"))
    except OSError:  # not compiled, or for another system
        return None


_loaded(_HERE)
