"""One process of a node at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path, mode: int = 0o600) -> Generator[None, None, None]:
    """Hold the system's lock (flock) on a file, which is made if missing; waits for as long as it takes.

    mode: of the file. A signal such as Ctrl-C still comes through, and a holder that dies frees it. Raises
    OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):  # said aloud, for the sake of children forked meanwhile
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
