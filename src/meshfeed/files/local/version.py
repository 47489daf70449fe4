"""Versions of files on this machine: writing to a file or replacing it changes its version."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from meshfeed.files.byte_file import status_of, typed

Version = tuple[int, int, int, int, int]
"""Device, inode, size, modification and change time in ns of a file."""

_CLOCK_REALTIME_COARSE = 5  # Linux's, which stamps files
_COARSE_TICK_NS = 2_000_000_000


def version_of(path: str) -> Version:
    """The version of a file. Raises StoreError; MissingError if the file is missing."""
    return _version(status_of(path))


def version_if_there(path: str) -> Version | None:
    """The version of a file; None if it is missing. Raises StoreError."""
    try:
        return _version(os.stat(path))  # noqa: PTH116 - a third of Path.stat's time
    except FileNotFoundError:
        return None
    except OSError as error:
        raise typed(path, error) from error


def _version(found: os.stat_result) -> Version:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def wait_for_tick(newest: int) -> None:
    """Wait until a further change of files would show in their times, which advance every few milliseconds.

    newest: the latest of their times, in ns. Waits for one tick at most: a file server's clock may be ahead.
    """
    tick = 20_000_000
    with suppress(OSError):
        tick = 2 * int(time.clock_getres(_CLOCK_REALTIME_COARSE) * 1e9)
    if newest % 1_000_000_000 == 0:  # some file systems count seconds
        tick = _COARSE_TICK_NS
    rest = newest + tick - time.time_ns()
    if 0 < rest <= tick:
        time.sleep(rest / 1e9)
