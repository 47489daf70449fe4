"""What a store asks of the bytes that it lies in, on a disk of this machine or far away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True)
class FileStats:
    """What reading has cost so far; peeks are not counted.

    Attributes:
        opens: times a file was opened.
        reads: ranges read.
        bytes_read: bytes of those ranges.
        bytes_fetched: bytes brought from remote storage because this process was the first of its node to
            want them.
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
    """What must hold of an object's bytes before anybody sees them, where an index elsewhere tells.

    An object with any of these is fetched as a whole, checked, and only then served.

    Attributes:
        codec: how it is compressed: "zstd", "gz", "bz2", "br", "snappy", or "litdata" for a
            chunk of litdata with zstd inside; None where it is not.
        stored_bytes: its size as it lies in storage; None where nobody says.
        raw_bytes: its size uncompressed, which it must have exactly; needed with a codec.
        stored_hashes, raw_hashes: algorithm, of hashlib or xxhash -> hex digest of the bytes as they are
            stored, and of those uncompressed.
    """

    codec: str | None = None
    stored_bytes: int | None = None
    raw_bytes: int | None = None
    stored_hashes: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    raw_hashes: Mapping[str, str] = field(default_factory=lambda: _NOTHING)


class Vector(Protocol):
    """Equal-sized entries somewhere in a file; a NumPy array is one."""

    @property
    def size(self) -> int:
        """Entries."""
        ...

    def __getitem__(self, places: Any, /) -> Any:
        """Entries at a whole number, a slice or an int64 array, as NumPy gives them; not to be written."""
        ...


class ByteFile(Protocol):
    """Bytes that are read at random places. All may raise StoreError, naming the file and the bytes.

    Making one only remembers. `size_bytes` and `peek` work at once; the rest wants `with file:`. Threads may
    share one. Pickled, it arrives not entered.
    """

    @property
    def url(self) -> str:
        """Path or URL, as messages name it."""
        ...

    @property
    def size_bytes(self) -> int:
        """Its size, uncompressed, when it was first looked at; an object that changes later is refused."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether reads should be announced as early as possible, not just before."""
        ...

    @property
    def stats(self) -> FileStats:
        """What reading has cost so far."""
        ...

    def peek(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """A few short pieces [begin, end), at once and exactly; shorter where the file ends."""
        ...

    @property
    def guarded_by(self) -> str | None:
        """Fingerprint of the store with whose checksums its blocks are compared as they come, if any.

        What is peeked is not compared.
        """
        ...

    def look_again(self) -> None:
        """Ask storage anew for what was peeked; others that peeked may have been told something else."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def read_into(self, out: Bytes, begins: I64, sizes: I64, places: I64 | None = None) -> None:
        """Bring `sizes` bytes from each of `begins` to each of `places` of `out`; int64 [m] each, uint8.

        places: None lays the ranges back to back, and then they fill `out`.
        """
        ...

    def will_need(self, begins: I64, ends: I64) -> None:
        """Announce byte ranges that will be read, each once; int64 [m] twice. Returns at once."""
        ...

    def forget_needs(self) -> None:
        """What was announced and is not read yet will not be."""
        ...

    def arrays(self, *parts: tuple[str, int, int]) -> list[Vector]:
        """Entries looked up in place: (NumPy dtype, byte of the first, how many) each; needs no entering."""
        ...
