"""A file on this machine, read by preadv."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from meshfeed.errors import AccessError, ChangedError, MissingError, StoreError
from meshfeed.files.byte_file import I64, Bytes, FileStats, Vector
from meshfeed.files.descriptors import Descriptor
from meshfeed.files.entries import EntriesOf

_PAGE_BYTES = 1 << 12
_NEIGHBOUR_BYTES = 1 << 12  # ranges that share a page or nearly so are announced as one


class LocalFile:
    """A ByteFile on a disk of this machine. path: absolute or relative, of a regular file."""

    is_remote = False
    guarded_by = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.url = os.fspath(path)
        self.stats = FileStats()
        self._file = Descriptor(self._open)
        self._size_bytes: int | None = None
        self._version: tuple[int, ...] | None = None
        self._depth = 0

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

    def look_again(self) -> None:
        """Peeks look each time."""

    def peek(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See ByteFile."""
        with typed_errors(self.url), Path(self.url).open("rb", buffering=0) as stream:
            return [os.pread(stream.fileno(), end - begin, begin) for begin, end in ranges]

    def __enter__(self) -> Self:
        with self._file.lock:
            self._depth += 1
        return self

    def __exit__(self, *exc: object) -> None:
        with self._file.lock:
            self._depth -= 1
            if self._depth:
                return
            self._version = None
        self._file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "_size_bytes": self._size_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"])
        self.__dict__.update(state)

    def read_into(self, out: Bytes, begins: I64, sizes: I64, places: I64 | None = None) -> None:
        """See ByteFile."""
        if out.size == 0:
            return
        fd = self._opened()
        try:
            fill(fd, out, begins, sizes, places, self.url)
            with typed_errors(self.url):
                self._check_version(os.fstat(fd))
        except BaseException:
            with self._file.lock:
                self._file.release()
            raise
        with self._file.lock:
            self._file.release()
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
        try:
            with typed_errors(self.url):
                for begin, end in zip(begins.tolist(), ends.tolist()):
                    advise(fd, begin, end - begin, os.POSIX_FADV_WILLNEED)
        finally:
            with self._file.lock:
                self._file.release()

    def forget_needs(self) -> None:
        """Advice needs no taking back."""

    def arrays(self, *parts: tuple[str, int, int]) -> list[Vector]:
        """The entries. Looking them up reads their pages: a map ends the process where the file is cut."""
        with typed_errors(self.url):
            self._refuse_resized(Path(self.url).stat())
        return [EntriesOf(self, np.dtype(dtype), begin, count) for dtype, begin, count in parts]

    def between(self, dtype: np.dtype[Any], begin: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Entries start..stop of `dtype` that lie one after the other from byte `begin` on."""
        found = np.empty(max(stop - start, 0), dtype)
        self._look_up(
            found.view(np.uint8), np.array([begin + start * dtype.itemsize]), np.array([found.nbytes])
        )
        return found

    def gathered(self, dtype: np.dtype[Any], begin: int, places: I64) -> npt.NDArray[Any]:
        """Entries of `dtype` that lie one after the other from byte `begin` on, at some places."""
        size = dtype.itemsize
        at = begin + places * size
        pages = np.unique(np.concatenate((at // _PAGE_BYTES, (at + size - 1) // _PAGE_BYTES)))
        begins = pages * _PAGE_BYTES
        sizes = np.minimum(begins + _PAGE_BYTES, self.size_bytes) - begins
        held = np.empty(sizes.sum(), np.uint8)
        self._look_up(held, begins, sizes)
        # where each entry's first byte lies in what is held: its page's place there, and its own in the page
        inside = pages.searchsorted(at // _PAGE_BYTES) * _PAGE_BYTES + at % _PAGE_BYTES
        return held[inside[:, None] + np.arange(size)].view(dtype)[:, 0]

    # -- below --------------------------------------------------------------------------------------

    def _look_up(self, out: Bytes, begins: I64, sizes: I64) -> None:
        if out.size:
            with typed_errors(self.url), Path(self.url).open("rb", buffering=0) as stream:
                fill(stream.fileno(), out, begins, sizes, None, self.url)

    def _opened(self) -> int:
        """The file, opened by the first to ask; to be released."""
        self._refuse_not_entered()
        return self._file.acquire()

    def _open(self) -> int:
        """See Descriptor: the first time within `with`, or again after it had to make room."""
        self._refuse_not_entered()  # or left just now: nobody would close it
        with typed_errors(self.url):
            fd = os.open(self.url, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._check_version(os.fstat(fd))
            except BaseException:
                os.close(fd)
                raise
        self.stats.opens += 1
        return fd

    def _refuse_not_entered(self) -> None:
        if not self._depth:
            raise StoreError(f"{self.url}: not entered; read from it inside `with`")

    def _check_version(self, found: os.stat_result) -> None:
        """Raise ChangedError for another file than was opened, or where anybody wrote to it since."""
        self._refuse_resized(found)
        version = found.st_dev, found.st_ino, found.st_mtime_ns
        known = self._version or version
        if version[:2] != known[:2]:
            raise ChangedError(f"{self.url}: another file than when it was opened; open the store again")
        if version != known:
            self._allow_written(version[2])
        self._version = version

    def _allow_written(self, modified_ns: int) -> None:
        """Raise ChangedError for a time of modification that is not the one when it was opened."""
        raise ChangedError(
            f"{self.url}: was written, or its time of modification was set, after this run had opened it; "
            f"where its bytes are the same, resume the run; else restore them, or start a new run"
        )

    def _refuse_resized(self, found: os.stat_result) -> None:
        size = found.st_size
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
