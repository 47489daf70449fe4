"""Memory maps without a descriptor: `mmap.mmap` keeps one open for each map, and descriptors are scarce."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from ctypes import c_int, c_long, c_size_t, c_void_p
from typing import Any

import numpy as np

from meshfeed.arrays import Bytes


def mapped(fd: int, *, write: bool = False) -> Bytes:
    """Map all bytes of an open file, uint8; `fd` may be closed afterwards.

    Dropping the array and all its slices unmaps the file. Only for files that are never truncated: access to
    a missing page kills the process with SIGBUS. Raises OSError.
    """
    size = os.fstat(fd).st_size
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, fd, 0)
    if address in (None, _FAILED):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    pages: Any = (ctypes.c_uint8 * size).from_address(address)
    # Not at exit: threads may still read, and the system unmaps then.
    weakref.finalize(pages, _libc.munmap, address, size).atexit = False
    array = np.frombuffer(pages, np.uint8)
    array.flags.writeable = write
    return array


def _of_libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = c_void_p
    libc.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, c_long)
    libc.munmap.argtypes = (c_void_p, c_size_t)
    return libc


_libc = _of_libc()
_FAILED = c_void_p(-1).value
