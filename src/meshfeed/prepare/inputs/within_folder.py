"""Files that records name. None outside their base folder is read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from meshfeed.errors import StoreError
from meshfeed.files import typed_errors
from meshfeed.files.url import join, local_path


def read_beneath(folder: str, name: str, most_bytes: int) -> tuple[bytes, str]:
    """Bytes of a file below a local folder, at most `most_bytes`, and its version; see `ByteFile.version`.

    Links are followed as long as they stay below the folder. Raises StoreError for a path
    outside it, and unless it is a regular file.
    """
    path = join(folder, name)
    with typed_errors(path):
        base, real = os.path.realpath(local_path(folder)), os.path.realpath(path, strict=True)
        if not Path(real).is_relative_to(base):
            raise StoreError(
                f"{path}: a link that leads out of {folder}; put the file there itself, or copy the folder "
                f"with all that its links point to: cp -rL"
            )
        with os.fdopen(_opened(base, Path(real).relative_to(base).parts), "rb") as stream:
            found = os.fstat(stream.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise StoreError(f"{path}: not a file")
            return stream.read(most_bytes), f"{found.st_size}-{found.st_mtime_ns}"


def _opened(base: str, names: tuple[str, ...]) -> int:
    """A descriptor of a resolved path below `base`. A link that appeared since is refused."""
    how = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe must not block
    at = os.open(base, how)
    for name in names:
        try:
            below = os.open(name, how | os.O_NOFOLLOW, dir_fd=at)
        finally:
            os.close(at)
        at = below
    return at
