"""What one process of a node makes and the others read.

The first to ask makes it under the system's lock (flock) on a file, and the others sleep until that is free:
nobody talks to anybody, nothing times out, and a killed process frees the lock by dying. An entry appears by
one rename, so a killed process leaves only a `.part`, which the next one throws away.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from meshfeed.files.local.durable import sync
from meshfeed.files.local.lock import locked

T = TypeVar("T")


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
    """What an entry holds; made by the first process to ask, or by the next one if that fails.

    Args:
        entry: a file or a folder in one that exists; its name is a digest of all that it depends on.
        read: what is at a path; None where nothing is, or something damaged.
        make: writes a file or a folder at the path that it is given. What it raises passes through.
        is_good: whether what was made earlier is still of use; what was made just now is.
        lock: the file to lock; None for one beside the entry. lock_mode: of that file, if it is made.
        is_durable: whether the entry is synced to the disk. An entry that is not needs a name that changes
            when the machine starts again.

    Raises OSError.
    """
    found = read(entry)
    if found is not None and is_good(found):
        return found
    part = entry.with_name(f"{entry.name}.part")
    with locked(lock or entry.with_name(f"{entry.name}.lock"), lock_mode):
        found = read(entry)  # made by who held the lock before
        if found is not None and is_good(found):
            return found
        _remove(part)
        try:
            make(part)
            if is_durable:
                for each in (*part.rglob("*"), part):
                    sync(each)
            if entry.is_dir():  # a damaged one; who has it mapped keeps it
                shutil.rmtree(entry)
            part.replace(entry)
            if is_durable:
                sync(entry.parent)
        finally:
            with contextlib.suppress(OSError):  # the next one removes it
                _remove(part)
        found = read(entry)
    if found is None:
        raise OSError(errno.EIO, "damaged as soon as it was written", str(entry))
    return found


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
