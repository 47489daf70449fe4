"""The interface of a store to its bytes, on a local disk or in remote storage."""

from __future__ import annotations

import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from meshfeed.errors import StoreError
from meshfeed.forks import at_fork

I64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
_PAGE_BYTES = 1 << 12


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
    def content_id(self) -> str | None:
        """A hash of all its bytes, if storage keeps one that identifies them; else None."""
        return None

    @abstractmethod
    def peek(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """A few short ranges [begin, end), read at once and exactly; shorter at the end of the file."""

    @abstractmethod
    def look_up(self, out: Bytes, begins: I64, sizes: I64) -> None:
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

    def read_into(self, out: Bytes, begins: I64, sizes: I64, places: I64 | None = None) -> None:
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
    def will_need(self, begins: I64, ends: I64) -> None:
        """Announce byte ranges that will be read, each once; int64 [m] each. Returns at once."""

    def look_again(self) -> None:  # noqa: B027 - a local file has nothing to drop
        """Drop cached peeks and ask storage again; peeks before may have seen another version."""

    def forget_needs(self) -> None:  # noqa: B027 - as little can advice to the system be withdrawn
        """Cancel announced ranges that have not been read."""

    def arrays(self, *parts: tuple[str, int, int]) -> list[Vector]:
        """Arrays in the file, read as they are indexed. Each part: (NumPy dtype, first byte, count).

        They are read, not mapped: a map would kill the process if the file were truncated.
        """
        return [_Entries(self, np.dtype(dtype), begin, count) for dtype, begin, count in parts]

    @abstractmethod
    def _read(self, out: Bytes, begins: I64, sizes: I64, places: I64) -> None:
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

    def _between(self, start: int, stop: int) -> npt.NDArray[Any]:
        found = np.empty(max(stop - start, 0), self._dtype)
        begin = self._begin + start * self._dtype.itemsize
        self._file.look_up(found.view(np.uint8), np.array([begin]), np.array([found.nbytes]))
        return found

    def _gathered(self, places: I64) -> npt.NDArray[Any]:
        """Entries anywhere in the file. Each page that holds some of them is read once."""
        size = self._dtype.itemsize
        at = self._begin + places * size
        pages = np.unique(np.concatenate((at // _PAGE_BYTES, (at + size - 1) // _PAGE_BYTES)))
        begins = pages * _PAGE_BYTES
        sizes = np.minimum(begins + _PAGE_BYTES, self._file.size_bytes) - begins
        held = np.empty(sizes.sum(), np.uint8)
        self._file.look_up(held, begins, sizes)
        # offset of each entry in `held`: that of its page, plus the offset inside the page
        inside = pages.searchsorted(at // _PAGE_BYTES) * _PAGE_BYTES + at % _PAGE_BYTES
        return held[inside[:, None] + np.arange(size)].view(self._dtype)[:, 0]
