"""Bytes at random offsets: the interface of a store to its files, and a file on this machine, read by preadv.

A recipe may have more files than a process may have descriptors. So idle files use at
most a quarter of them; opening one more closes the least recently used. There is no lock: each step on the
table of open files is atomic, so threads, forks and garbage collection may come at any point.
"""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np

from meshfeed.arrays import Array, Bytes, Longs
from meshfeed.errors import AccessError, ChangedError, MissingError, StoreError
from meshfeed.forks import at_fork
from meshfeed.intervals import distinct
from meshfeed.native import ARRAY, LONGS, WHOLE, compiled

_PAGE_BYTES = 1 << 12
_NEIGHBOUR_BYTES = 1 << 12  # ranges that share a page or nearly so are announced as one


@dataclass(slots=True)
class FileStats:
    """Costs of reading so far; peeks are not counted.

    Attributes:
        opens: times a file was opened.
        reads: ranges read.
        bytes_read: bytes of those ranges.
        bytes_fetched: bytes fetched from remote storage because this process was the first of its node to
            request them.
    """

    opens: int = 0
    reads: int = 0
    bytes_read: int = 0
    bytes_fetched: int = 0

    def __add__(self, other: FileStats) -> FileStats:
        return FileStats(
            self.opens + other.opens,
            self.reads + other.reads,
            self.bytes_read + other.bytes_read,
            self.bytes_fetched + other.bytes_fetched,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Size, codec and hashes that an index declares for an object.

    Such an object is fetched as a whole and checked before any of it is served.

    Attributes:
        codec: how it is compressed: "zstd", "gz", "bz2", "br", "snappy", or "litdata" for a chunk of litdata
            with zstd inside; None if it is not.
        stored_bytes: its size in storage; None if unknown.
        raw_bytes: its exact uncompressed size; needed with a codec.
        stored_hashes, raw_hashes: algorithm, of hashlib or xxhash -> hex digest of the stored bytes, and of
            the uncompressed bytes.
    """

    codec: str | None = None
    stored_bytes: int | None = None
    raw_bytes: int | None = None
    stored_hashes: Mapping[str, str] = field(default_factory=dict[str, str])
    raw_hashes: Mapping[str, str] = field(default_factory=dict[str, str])


LEAST = 64
"""Shards of less than 1/64 of a block are not worth a file each."""


class Fetching(NamedTuple):
    """How a file is fetched.

    Attributes:
        num_bytes: of the file.
        block_bytes: fetched at a time, at most.
        limit_bytes: that the node's cache may hold.
        check_bytes: that are fetched together, since they have one checksum; 1 without.
    """

    num_bytes: int
    block_bytes: int
    limit_bytes: int
    check_bytes: int = 1


class Vector(Protocol):
    """Entries of equal size in a file; a NumPy array is a Vector."""

    @property
    def size(self) -> int:
        """Number of entries."""
        ...

    def __getitem__(self, places: Any, /) -> Any:
        """Entries at an integer, a slice or an int64 array, as in NumPy; read-only."""
        ...


class ByteFile(ABC):
    """Bytes that are read at random offsets. All calls may raise StoreError, naming the file and the bytes.

    The constructor only stores its arguments. `size_bytes`, `peek`, `look_up` and `arrays` work at once; the
    rest needs `with file:`. Threads may share one. A pickled copy arrives not entered.

    Attributes:
        url: path or URL, for messages.
        is_remote: whether reads should be announced as early as possible instead of just before.
        stats: costs of reading so far.
    """

    is_remote: ClassVar[bool]

    def __init__(self, url: str) -> None:
        self.url, self.stats, self._depth = url, FileStats(), 0
        self.forget_parent()
        at_fork(self)

    def forget_parent(self) -> None:
        """In a forked child: the parent's threads hold no lock here."""
        self._lock = threading.RLock()

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Its uncompressed size when it was first used; an object that changes later is refused."""

    @property
    def guarded_by(self) -> str | None:
        """Fingerprint of the store whose checksums verify its blocks as they arrive, if any.

        Peeked ranges are not verified.
        """
        return None

    @property
    @abstractmethod
    def version(self) -> str:
        """Changes when it is written or replaced, as far as storage tells: for what a node keeps of it."""

    @property
    def content_id(self) -> str | None:
        """A hash of all its bytes, if storage keeps one that identifies them; else None."""
        return None

    @abstractmethod
    def peek(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """A few short ranges [begin, end), read at once and exactly; shorter at the end of the file."""

    @abstractmethod
    def look_up(self, out: Bytes, begins: Longs, sizes: Longs) -> None:
        """Read ranges back to back, as `read_into` does, but before entering and without counting them."""

    def __enter__(self) -> Self:
        with self._lock:
            self._depth += 1
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._depth -= 1
        if not self._depth:
            self._leave()

    def read_into(self, out: Bytes, begins: Longs, sizes: Longs, places: Longs | None = None) -> None:
        """Read `sizes` bytes from each of `begins` to each of `places` in `out`; int64 [m] each, uint8.

        places: None writes the ranges back to back, filling `out`.
        """
        if out.size == 0:
            return
        self._refuse_not_entered()
        self._read(out, begins, sizes, sizes.cumsum() - sizes if places is None else places)
        with self._lock:
            self.stats.reads += sizes.size
            self.stats.bytes_read += int(sizes.sum())

    @abstractmethod
    def will_need(self, begins: Longs, ends: Longs) -> None:
        """Announce byte ranges that will be read, each once; int64 [m] each. Returns at once."""

    def look_again(self) -> None:  # noqa: B027 - a local file has nothing to drop
        """Drop cached peeks and ask storage again; peeks before may have seen another version."""

    def forget_needs(self) -> None:  # noqa: B027 - as little can advice to the system be withdrawn
        """Cancel announced ranges that have not been read."""

    @property
    def fetching(self) -> Fetching | None:
        """How it is fetched; None for a file on this machine. Raises StoreError."""
        return None

    def cut(self, begins: Longs, ends: Longs) -> None:  # noqa: B027 - a local file has no blocks
        """Let blocks that are fetched end where the shards of a shuffle meet; not while it is entered."""

    @abstractmethod
    def within(self, cache: Any) -> ByteFile:
        """The same file as it is now; one that is fetched, through another `Cache`."""

    def arrays(self, *parts: tuple[str, int, int]) -> list[Vector]:
        """Arrays in the file, read as they are indexed. Each part: (NumPy dtype, first byte, count).

        They are read, not mapped: a map would kill the process if the file were truncated.
        """
        return [_Entries(self, np.dtype(dtype), begin, count) for dtype, begin, count in parts]

    @abstractmethod
    def _read(self, out: Bytes, begins: Longs, sizes: Longs, places: Longs) -> None:
        """Read ranges that are not all empty, for `read_into`."""

    @abstractmethod
    def _leave(self) -> None:
        """The last `with` has ended."""

    def _refuse_not_entered(self) -> None:
        if not self._depth:
            raise StoreError(f"{self.url}: not entered; read from it inside `with`")


class _Entries:
    """A Vector in a file that is read and not mapped."""

    def __init__(self, file: ByteFile, dtype: np.dtype[Any], begin: int, count: int) -> None:
        self._file, self._dtype, self._begin, self.size = file, dtype, begin, count

    def __getitem__(self, places: Any, /) -> Any:
        if isinstance(places, slice):
            start, stop, step = places.indices(self.size)
            if step == 1:
                return self._between(start, stop)
            return self._gathered(np.arange(start, stop, step))
        array = np.asarray(places)
        if array.dtype.kind == "b" or array.ndim == 0:
            array = np.flatnonzero(array) if array.ndim else np.array(operator.index(places))
        wrapped = np.where(array < 0, array + self.size, array).astype(np.int64)
        if wrapped.size and not 0 <= wrapped.min() <= wrapped.max() < self.size:
            raise IndexError(f"{self._file.url}: an index out of range for {self.size} entries")
        found = self._gathered(wrapped.ravel()).reshape(wrapped.shape)
        return found[()] if array.ndim == 0 else found

    def _between(self, start: int, stop: int) -> Array:
        found = np.empty(max(stop - start, 0), self._dtype)
        begin = self._begin + start * self._dtype.itemsize
        self._file.look_up(found.view(np.uint8), np.array([begin]), np.array([found.nbytes]))
        return found

    def _gathered(self, places: Longs) -> Array:
        """Entries anywhere in the file. Each page that holds some of them is read once."""
        size = self._dtype.itemsize
        at = self._begin + places * size
        pages = distinct(np.concatenate((at // _PAGE_BYTES, (at + size - 1) // _PAGE_BYTES)))
        begins = pages * _PAGE_BYTES
        sizes = np.minimum(begins + _PAGE_BYTES, self._file.size_bytes) - begins
        held = np.empty(sizes.sum(), np.uint8)
        self._file.look_up(held, begins, sizes)
        # offset of each entry in `held`: that of its page, plus the offset inside the page
        inside = pages.searchsorted(at // _PAGE_BYTES) * _PAGE_BYTES + at % _PAGE_BYTES
        return held[inside[:, None] + np.arange(size)].view(self._dtype)[:, 0]


# -- files of this machine -------------------------------------------------------------------------------


class Descriptor:
    """An open file; closed once neither the table nor a reader refers to it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class LocalFile(ByteFile):
    """A ByteFile on a disk of this machine. path: absolute or relative, of a regular file."""

    is_remote = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(os.fspath(path))
        self._size_bytes: int | None = None
        self._version: tuple[int, ...] | None = None
        self._waits = True  # whether the last read waited for the disk

    @property
    def size_bytes(self) -> int:
        if self._size_bytes is None:
            self._size_bytes = self._look()
        return self._size_bytes

    @property
    def version(self) -> str:
        found = status_of(self.url)
        return f"{found.st_size}-{found.st_mtime_ns}"

    def _look(self) -> int:
        """Its size now. Raises StoreError."""
        return status_of(self.url).st_size

    def peek(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        with typed_errors(self.url), Path(self.url).open("rb", buffering=0) as stream:
            return [os.pread(stream.fileno(), end - begin, begin) for begin, end in ranges]

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "_size_bytes": self._size_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"])
        self._size_bytes = state["_size_bytes"]

    def will_need(self, begins: Longs, ends: Longs) -> None:
        """Ask the system to fetch the ranges, unless it had all of the last read in memory."""
        advise = getattr(os, "posix_fadvise", None) if self._waits else None
        # A length of 0 would mean the rest of the file.
        begins, ends = begins[ends > begins], ends[ends > begins]
        if advise is None or not begins.size:
            return
        by_begin = begins.argsort()
        begins, ends = begins[by_begin], np.maximum.accumulate(ends[by_begin])
        apart = np.flatnonzero(begins[1:] > ends[:-1] + _NEIGHBOUR_BYTES)
        begins, ends = begins[np.append(0, apart + 1)], ends[np.append(apart, -1)]
        file = self._opened()
        with typed_errors(self.url):
            for begin, end in zip(begins.tolist(), ends.tolist()):
                advise(file.fd, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def within(self, cache: Any) -> LocalFile:
        return LocalFile(self.url)

    def arrays(self, *parts: tuple[str, int, int]) -> list[Vector]:
        self._refuse_resized(status_of(self.url))
        return super().arrays(*parts)

    def _read(self, out: Bytes, begins: Longs, sizes: Longs, places: Longs) -> None:
        file = self._opened()
        self._waits = not fill(file.fd, out, begins, sizes, places, self.url)
        self._check_version(file)

    def _leave(self) -> None:
        release(self)

    def look_up(self, out: Bytes, begins: Longs, sizes: Longs) -> None:
        if out.size:
            with typed_errors(self.url), Path(self.url).open("rb", buffering=0) as stream:
                fill(stream.fileno(), out, begins, sizes, None, self.url)

    def _opened(self) -> Descriptor:
        """The open file, which stays open while the caller refers to it."""
        self._refuse_not_entered()
        file = acquire(self, self._open)
        if not self._depth:  # another thread has just left `with`, and nothing else would close the file
            self._leave()
        return file

    def _open(self) -> Descriptor:
        """Called for the first read inside `with`, and after the file was closed to make room for others."""
        with typed_errors(self.url):
            file = Descriptor(os.open(self.url, os.O_RDONLY | os.O_CLOEXEC))
        self._check_version(file)
        self.stats.opens += 1
        return file

    def _check_version(self, file: Descriptor) -> None:
        """Raise ChangedError if the file was replaced or written since it was opened."""
        try:
            found = os.fstat(file.fd)
        except OSError as error:
            raise typed(self.url, error) from error
        if found.st_size != self._size_bytes:
            self._refuse_resized(found)
        version = found.st_dev, found.st_ino, found.st_mtime_ns
        known = self._version or version
        if version[:2] != known[:2]:
            raise ChangedError(
                f"{self.url}: another file than when it was opened; open the store again", path=self.url
            )
        if version != known:
            self._allow_written(version[2])
        self._version = version

    def _allow_written(self, modified_ns: int) -> None:
        """Raise ChangedError for a changed modification time."""
        raise ChangedError(
            f"{self.url}: was written, or its modification time was set, after it was opened; if its bytes "
            f"are unchanged, open the store again and resume; else restore them, or start a new run",
            path=self.url,
        )

    def _refuse_resized(self, found: os.stat_result) -> None:
        size = found.st_size
        if size != self.size_bytes:
            raise ChangedError(
                f"{self.url}: {size} bytes, {self.size_bytes} when it was opened; open the store again",
                path=self.url,
            )


def status_of(path: str) -> os.stat_result:
    """What the system knows of a file. Raises StoreError; MissingError if the file is missing."""
    try:
        found = os.stat(path)  # noqa: PTH116 - a third of Path.stat's time
    except (OSError, ValueError) as error:
        raise typed(path, error) from error
    if stat.S_ISDIR(found.st_mode):
        raise StoreError(f"{path}: is a directory, not a file")
    return found


@contextlib.contextmanager
def typed_errors(path: str | os.PathLike[str]) -> Generator[None, None, None]:
    """Turn OSErrors into StoreErrors that name the file."""
    try:
        yield
    except StoreError:
        raise
    except (OSError, ValueError) as error:
        raise typed(path, error) from error


def typed(path: str | os.PathLike[str], error: OSError | ValueError) -> StoreError:
    """The StoreError that names the file."""
    match error:
        case FileNotFoundError() | NotADirectoryError():
            return MissingError(
                f"{path}: missing; check the path and that it exists on this node", path=str(path)
            )
        case PermissionError():
            cure = "check the permissions of this user"
            return AccessError(f"{path}: {error.strerror}; {cure}", path=str(path))
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            cure = "free some space there, or choose another disk"
            return StoreError(f"{path}: {error.strerror}; {cure}", path=str(path))
        case OSError(errno=errno.EROFS):
            cure = "choose a folder that can be written"
            return AccessError(f"{path}: {error.strerror}; {cure}", path=str(path))
        case _:
            return StoreError(f"{path}: {getattr(error, 'strerror', None) or error}", path=str(path))


def fill(fds: int | Longs, out: Bytes, begins: Longs, sizes: Longs, places: Longs | None, url: str) -> bool:
    """`ByteFile.read_into` from open files: one, or one for each range. Raises StoreError naming `url`.

    Returns whether the system had all of it in memory; False where it does not tell.
    """
    table = np.zeros((5, sizes.size), np.int64)  # see loops.c
    table[0], table[1], table[2] = fds, begins, sizes
    table[3] = sizes.cumsum() - sizes if places is None else places
    done = 0
    if _read_ranges is not None:
        done = _read_ranges(out, out.size, sizes.size, table)
        if done == sizes.size:
            return not table[4].any()
    preadv, buffer, begin = os.preadv, out.data, 0
    try:
        for fd, begin, size, at in table[:4, done:].T.tolist():
            end = at + size
            got = preadv(fd, (buffer[at:end],), begin)
            while got != size:  # a partial read, above 2 GiB or after a signal
                more = preadv(fd, (buffer[at + got : end],), begin + got)
                if more == 0:
                    raise ChangedError(
                        f"{url}: byte {begin + got}: the file ends within a read of {size} bytes; it was "
                        f"truncated after it was opened",
                        path=url,
                        range=(begin, begin + size),
                    )
                got += more
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{url}: byte {begin}: {error.strerror or error}", path=url) from error
    return False


_read_ranges = compiled("mf_read_ranges", ARRAY, WHOLE, WHOLE, LONGS)


_open: OrderedDict[Hashable, Descriptor] = OrderedDict()  # by owner, the least recently used first


def acquire(owner: Hashable, opens: Callable[[], Descriptor]) -> Descriptor:
    """The open file of an owner. opens: opens it, if it is not open. Raises the errors of `opens`."""
    found = _open.get(owner)
    if found is None:
        found = _open.setdefault(owner, _opened(opens))
        while len(_open) > most_open() and _closed_one():
            pass
    with contextlib.suppress(KeyError):  # another thread has just closed it
        _open.move_to_end(owner)
    return found


def release(owner: Hashable) -> None:
    """Close the open file of an owner, if it has one; a reader that still has it closes it."""
    _open.pop(owner, None)


def _opened(opens: Callable[[], Descriptor]) -> Descriptor:
    while True:
        try:
            return opens()
        except StoreError as error:  # other code may have used up the rest
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
    """A quarter of the descriptors that this process may have now: the trainer, its libraries and its
    connections need the rest."""
    try:
        import resource
    except ImportError:  # not on every system
        return 128
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 62 if soft == resource.RLIM_INFINITY else max(soft // 4, 1)
