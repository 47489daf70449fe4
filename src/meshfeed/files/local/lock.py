"""A lock between the processes of a node."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path


@contextlib.contextmanager
def locked(
    path: Path, mode: int = 0o600, *, wait: bool = True, create: bool = True
) -> Generator[None, None, None]:
    """Hold the system's lock (flock) on a folder, or on a file, which is created if missing.

    mode: of the file. create: if False, a missing file raises FileNotFoundError. wait: without limit;
    otherwise a held lock raises BlockingIOError. A signal such as Ctrl-C interrupts the wait, and a dead
    holder releases the lock. Raises OSError.
    """
    # NFS locks only what is open for writing
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | (os.O_CREAT if create else 0)
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        with contextlib.suppress(OSError):  # explicit, since children forked meanwhile share the descriptor
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
