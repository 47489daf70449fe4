"""Limits the number of open files: a recipe may have more files than a process may have descriptors.

Files that nobody reads at the moment use at most half of the allowed descriptors; opening one more closes
the least recently used. There is no lock: each step on the table of open files is atomic, so threads, forks
and garbage collection may come at any point.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from meshfeed.errors import StoreError


class Descriptor:
    """An open file, which is closed once nothing refers to it: neither the table nor a reader."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


_open: OrderedDict[Any, Descriptor] = OrderedDict()  # by owner, the least recently used first


def acquire(owner: Any, opens: Callable[[], Descriptor]) -> Descriptor:
    """The open file of an owner. opens: opens it, if it is not open. Raises the errors of `opens`."""
    found = _open.get(owner)
    if found is None:
        found = _open.setdefault(owner, _opened(opens))
        while len(_open) > most_open() and _closed_one():
            pass
    with contextlib.suppress(KeyError):  # another thread has just closed it
        _open.move_to_end(owner)
    return found


def close(owner: Any) -> None:
    """Close the file of an owner, or let its last current reader close it."""
    _open.pop(owner, None)


def _opened(opens: Callable[[], Descriptor]) -> Descriptor:
    while True:
        try:
            return opens()
        except StoreError as error:  # other code has used up the other half
            reason = getattr(error.__cause__, "errno", None)
            if reason not in (errno.EMFILE, errno.ENFILE) or not _closed_one():
                raise


def _closed_one() -> bool:
    """Close the least recently used file; False if none is open."""
    with contextlib.suppress(KeyError):
        _open.popitem(last=False)
        return True
    return False


def most_open() -> int:
    """Half of the descriptors that this process may have now."""
    try:
        import resource
    except ImportError:  # not on every system
        return 128
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 62 if soft == resource.RLIM_INFINITY else max(soft // 2, 1)
