"""Entries that one process of a node makes and the others read.

The first process to ask makes the entry while it holds a lock (flock) on a file; the others wait until the
lock is free, for as long as the first one runs. No messages are sent, and the kernel frees the lock of a
killed process. An entry appears by one rename, so a killed process leaves only a `.part`, which the next one
removes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from meshfeed.files.local.durable import sync
from meshfeed.files.local.lock import locked

T = TypeVar("T")

DAY_S = 86_400.0
_SWEEP_EVERY_S, _MARKED_S = 600.0, 3_600.0


def once_per_node(
    entry: Path,
    read: Callable[[Path], T | None],
    make: Callable[[Path], None],
    *,
    is_good: Callable[[T], bool] = lambda _: True,
    lock: Path | None = None,
    lock_mode: int = 0o600,
    is_durable: bool = True,
) -> T:
    """The content of an entry; made by the first process to ask, or by the next one if that fails.

    Args:
        entry: a file or folder, in a folder that exists. Its name is a digest of all that it depends on.
        read: the content at a path; None if it is missing or damaged. An OSError counts as None, except for
            what was just made.
        make: writes a file or a folder at the path that it is given. Its errors pass through.
        is_good: whether content made earlier can still be used. Not called for what was just made.
        lock: the file to lock; None for one beside the entry. lock_mode: of that file, if it is made.
        is_durable: whether the entry is synced to the disk. If not, its name must change when the machine
            restarts.

    Raises CacheError if the process that makes it is stopped for a minute; OSError.
    """

    def there() -> T | None:
        with contextlib.suppress(OSError):
            if (found := read(entry)) is not None and is_good(found):
                return found
        return None

    if (found := there()) is not None:
        return found
    part = entry.with_name(f"{entry.name}.part")
    with locked(lock or entry.with_name(f"{entry.name}.lock"), lock_mode, works=True):
        if (found := there()) is not None:  # another process may have made it meanwhile
            return found
        _remove(part)
        try:
            make(part)
            if is_durable:
                for each in (*part.rglob("*"), part):
                    sync(each)
            if entry.is_dir():  # damaged; processes that have it mapped keep it
                shutil.rmtree(entry, ignore_errors=True)  # another process may sweep it away just now
            part.replace(entry)
            if is_durable:
                sync(entry.parent)
        finally:
            with contextlib.suppress(OSError):  # the next process removes it
                _remove(part)
        found = read(entry)
    if found is None:
        raise OSError(errno.EIO, "damaged as soon as it was written", str(entry))
    return found


def sweep(folder: Path, pattern: str, unused_s: float) -> None:
    """Remove, from time to time, entries that were not used for so long, and leftovers of killed processes.

    pattern: of entries, and of what is named after one, as NAME.part is; locks stay. An entry was used at its
    modification time. Who has it open or mapped keeps it.
    """
    with contextlib.suppress(OSError):
        marker, now = folder / "swept", time.time()
        if marker.exists() and now - marker.stat().st_mtime < _SWEEP_EVERY_S:
            return
        marker.touch(mode=0o600)
        for path in folder.glob(pattern):
            used = [each.stat().st_mtime for each in {path, path.with_suffix("")} if each.exists()]
            if path.suffix != ".lock" and now - max(used, default=now) > unused_s:
                _remove(path)


def mark(entry: Path | int, used_s: float) -> None:
    """Mark an entry, or its open file, as used, unless it was lately. used_s: its modification time."""
    if time.time() - used_s > _MARKED_S:
        with contextlib.suppress(OSError):  # a folder that can only be read
            os.utime(entry)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
