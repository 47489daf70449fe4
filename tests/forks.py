"""Cheap forks: of the servers that start commands and ranks, and of the processes that run tests."""

import contextlib
import ctypes
import gc
import re
from pathlib import Path

_HUGE_BYTES = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_WRITTEN = re.compile(r"^(\w+)-(\w+) rw-p \S+ \S+ 0 *(?:\[heap\])?$", re.M)
"""An anonymous mapping, in /proc/self/maps."""


def settle() -> None:
    """What was imported stays: no fork looks at it in search of garbage, and each page table of it is small.

    A page table of small pages takes longer to copy and to drop than most forks run.
    """
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):  # on Linux alone
        madvise = ctypes.CDLL(None).madvise
        for found in _WRITTEN.finditer(Path("/proc/self/maps").read_text()):
            start, stop = (int(number, 16) // _HUGE_BYTES * _HUGE_BYTES for number in found.groups())
            start += _HUGE_BYTES
            for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
                if start < stop:  # a kernel that does not know the advice leaves it
                    madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)
