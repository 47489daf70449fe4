"""The interface of a store to its bytes, on a local disk or in remote storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


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


class Vector(Protocol):
    """Entries of equal size in a file; a NumPy array is a Vector."""

    @property
    def size(self) -> int:
        """Number of entries."""
        ...

    def __getitem__(self, places: Any, /) -> Any:
        """Entries at an integer, a slice or an int64 array, as in NumPy; read-only."""
        ...


class ByteFile(Protocol):
    """Bytes that are read at random offsets. All calls may raise StoreError, naming the file and the bytes.

    The constructor only stores its arguments. `size_bytes` and `peek` work at once; the rest needs `with
    file:`. Threads may share one. A pickled copy arrives not entered.
    """

    @property
    def url(self) -> str:
        """Path or URL, for messages."""
        ...

    @property
    def size_bytes(self) -> int:
        """Its uncompressed size when it was first used; an object that changes later is refused."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether reads should be announced as early as possible instead of just before."""
        ...

    @property
    def stats(self) -> FileStats:
        """Costs of reading so far."""
        ...

    def peek(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """A few short ranges [begin, end), read at once and exactly; shorter at the end of the file."""
        ...

    @property
    def guarded_by(self) -> str | None:
        """Fingerprint of the store whose checksums verify its blocks as they arrive, if any.

        Peeked ranges are not verified.
        """
        ...

    def look_again(self) -> None:
        """Drop cached peeks and ask storage again; peeks before may have seen another version."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def read_into(self, out: Bytes, begins: I64, sizes: I64, places: I64 | None = None) -> None:
        """Read `sizes` bytes from each of `begins` to each of `places` in `out`; int64 [m] each, uint8.

        places: None writes the ranges back to back, filling `out`.
        """
        ...

    def will_need(self, begins: I64, ends: I64) -> None:
        """Announce byte ranges that will be read, each once; int64 [m] each. Returns at once."""
        ...

    def forget_needs(self) -> None:
        """Cancel announced ranges that have not been read."""
        ...

    def arrays(self, *parts: tuple[str, int, int]) -> list[Vector]:
        """Entries looked up in place: (NumPy dtype, byte of the first, count) each; works before entering."""
        ...
