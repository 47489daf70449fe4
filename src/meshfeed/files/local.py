"""A file on this machine, read by preadv or looked up in a map."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from meshfeed.errors import AccessError, ChangedError, MissingError, StoreError
from meshfeed.files.byte_file import I64, Bytes, FileStats, Vector

_NEIGHBOUR_BYTES = 1 << 12  # ranges that share a page or nearly so are announced as one


class LocalFile:
    """A ByteFile on a disk of this machine. path: absolute or relative, of a regular file."""

    is_remote = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.url = os.fspath(path)
        self.stats = FileStats()
        self._fd: int | None = None
        self._size_bytes: int | None = None
        self._depth = 0
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """See ByteFile."""
        if self._size_bytes is None:
            with typed_errors(self.url):
                path = Path(self.url)
                if path.is_dir():
                    raise StoreError(f"{self.url}: a directory, where a store has a file")
                self._size_bytes = path.stat().st_size
        return self._size_bytes

    def peek(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See ByteFile."""
        with typed_errors(self.url), Path(self.url).open("rb", buffering=0) as stream:
            return [os.pread(stream.fileno(), end - begin, begin) for begin, end in ranges]

    def __enter__(self) -> Self:
        with self._lock:
            self._depth += 1
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth:
                return
            fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "_size_bytes": self._size_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"])
        self.__dict__.update(state)

    def read_into(self, out: Bytes, begins: I64, sizes: I64, places: I64 | None = None) -> None:
        """See ByteFile."""
        if out.size == 0:
            return
        fill(self._opened(), out, begins, sizes, places, self.url)
        with self._lock:
            self.stats.reads += sizes.size
            self.stats.bytes_read += int(sizes.sum())

    def will_need(self, begins: I64, ends: I64) -> None:
        """Ask the system to fetch the ranges; does nothing on systems without such advice."""
        advise = getattr(os, "posix_fadvise", None)
        # To the system a length of 0 means all the rest of the file.
        begins, ends = begins[ends > begins], ends[ends > begins]
        if advise is None or not begins.size:
            return
        by_begin = begins.argsort()
        begins, ends = begins[by_begin], np.maximum.accumulate(ends[by_begin])
        apart = np.flatnonzero(begins[1:] > ends[:-1] + _NEIGHBOUR_BYTES)
        begins, ends = begins[np.append(0, apart + 1)], ends[np.append(apart, -1)]
        fd = self._opened()
        with typed_errors(self.url):
            for begin, end in zip(begins.tolist(), ends.tolist()):
                advise(fd, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def forget_needs(self) -> None:
        """Advice needs no taking back."""

    def arrays(self, *parts: tuple[str, int, int], in_order: bool = False) -> list[Vector]:
        """The entries, mapped into memory; dropping them all unmaps the file."""
        with typed_errors(self.url), Path(self.url).open("rb") as stream:
            self._refuse_resized(stream.fileno())
            pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            if not in_order and hasattr(mmap, "MADV_RANDOM"):
                # A cold look-up costs one page then, not a read-ahead of megabytes.
                pages.madvise(mmap.MADV_RANDOM)
            return [np.frombuffer(pages, dtype, count, begin) for dtype, begin, count in parts]

    # -- below --------------------------------------------------------------------------------------

    def _opened(self) -> int:
        """The file, opened by the first to ask."""
        fd = self._fd
        if fd is not None:
            return fd
        with self._lock:
            if not self._depth:
                raise StoreError(f"{self.url}: not entered; read from it inside `with`")
            if self._fd is None:
                with typed_errors(self.url):
                    fd = os.open(self.url, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    self._refuse_resized(fd)
                except StoreError:
                    os.close(fd)
                    raise
                self._fd = fd
                self.stats.opens += 1
            return self._fd

    def _refuse_resized(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        if size != self.size_bytes:
            raise ChangedError(
                f"{self.url}: {size} bytes, {self.size_bytes} when it was opened; open the store again"
            )


@contextlib.contextmanager
def typed_errors(path: str | os.PathLike[str]) -> Generator[None, None, None]:
    """Turn what the system says of a file into a StoreError that names it."""
    try:
        yield
    except StoreError:
        raise
    except FileNotFoundError as error:
        raise MissingError(f"{path}: missing; look at the path, and whether this node has it") from error
    except PermissionError as error:
        raise AccessError(f"{path}: {error.strerror}; this user may not do that here") from error
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def fill(fd: int, out: Bytes, begins: I64, sizes: I64, places: I64 | None, url: str) -> None:
    """What `ByteFile.read_into` does, from an open file. Raises StoreError naming `url`."""
    places = sizes.cumsum() - sizes if places is None else places
    preadv, buffer, begin = os.preadv, out.data, 0
    try:
        for begin, size, at in zip(begins.tolist(), sizes.tolist(), places.tolist()):
            end = at + size
            got = preadv(fd, (buffer[at:end],), begin)
            while got != size:  # cut short, past 2 GiB or at a signal
                more = preadv(fd, (buffer[at + got : end],), begin + got)
                if more == 0:
                    raise ChangedError(
                        f"{url}: byte {begin + got}: the file ends within a read of {size} bytes; it was cut "
                        f"after it was opened"
                    )
                got += more
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{url}: byte {begin}: {error.strerror or error}") from error
