"""Files that appear complete and on the disk, or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from meshfeed.files.byte_file import typed_errors


@contextmanager
def durable_file(path: Path, mode: int = 0o666) -> Generator[IO[bytes], None, None]:
    """A stream to write, which becomes `path` at a clean end of `with` and is removed otherwise.

    mode: of the file, less the umask. Of several writers, the last to finish wins. Raises StoreError.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "wb", 1 << 20) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
        sync(path.parent)
    except OSError:
        with typed_errors(path):
            raise
    finally:
        with suppress(OSError):  # it would hide why the file cannot be written
            partial.unlink()


def sync(path: Path) -> None:
    """Write a file's bytes to the disk, or a folder's names, which an fsync of its files does not cover.

    Raises OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
