"""Checksums of the blocks of a token store's two files, in a small file next to them: PREFIX.sums.

Little-endian:

    byte 0    "MFSUMS" 0 0 | u32 version | u32 bytes of a block | u64 size of the .bin | u64 size of the .idx
    byte 32   fingerprint of the store, 16 bytes
    byte 48   u32 crc32 of the rest of this file
    byte 52   u32 crc32 of each block of the .bin, then of the .idx; the last block of each may be short
"""

from __future__ import annotations

import functools
import struct
import zlib
from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Longs
from meshfeed.errors import ChecksumError, StoreError
from meshfeed.whole import is_whole

U32 = npt.NDArray[np.uint32]

SUFFIX = ".sums"
BIN, IDX = 0, 1
"""Index of each of the two files."""
BLOCK_BYTES = 1 << 16
"""64 MB of checksums for a terabyte. Readers fetch and compare whole blocks, so small ones cost them less."""
ANEW = "recreate it with `meshfeed inspect --write-checksums`, or remove it"
"""What to do about an unusable file of checksums."""

_MAGIC, _VERSION = b"MFSUMS\0\0", 1
_HEAD, _SUM = struct.Struct("<8sIIQQ16s"), struct.Struct("<I")
_FIRST = _HEAD.size + _SUM.size
_LEAST_BLOCK_BYTES, _MOST_BLOCK_BYTES = 1 << 12, 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class FileSums:
    """Checksums of one file.

    Attributes:
        block_bytes: of each block except the last.
        size_bytes: of the file.
        sums: crc32 of each block; uint32 [num_blocks].
    """

    block_bytes: int
    size_bytes: int
    sums: U32

    def wrong(self, data: memoryview, begin: int) -> list[tuple[int, int]]:
        """Byte ranges of the blocks of `data` with a wrong checksum.

        data: bytes of the file from `begin`, the start of a block, to the end of a block or of the file.
        """
        size, first = self.block_bytes, begin // self.block_bytes
        starts = range(0, len(data), size)
        found = (zlib.crc32(data[at : at + size]) for at in starts)
        expected = self.sums[first : first + len(starts)].tolist()
        return [
            (begin + at, begin + min(at + size, len(data)))
            for at, sum_, right in zip(starts, found, expected, strict=True)
            if sum_ != right
        ]

    def between(self, edges: Longs) -> U32:
        """crc32 of the bytes from each edge to the next; uint32 [n].

        edges: where blocks begin, ascending, or the end of the file; int64 [n + 1].
        """
        firsts = -(-edges // self.block_bytes)
        ends = np.minimum(np.arange(firsts[0] + 1, firsts[-1] + 1) * self.block_bytes, self.size_bytes)
        behind = np.repeat(edges[1:], np.diff(firsts)) - ends  # bytes between a block and the next edge
        crcs, sizes = self.sums[firsts[0] : firsts[-1]].copy(), int(np.bitwise_or.reduce(behind))
        for bit in range(sizes.bit_length()):
            if sizes >> bit & 1:
                some = np.flatnonzero(behind >> bit & 1)
                crcs[some] = _followed(crcs[some], bit)
        return np.bitwise_xor.reduceat(crcs, firsts[:-1] - firsts[0])

    def check(self, data: memoryview, begin: int, url: str) -> None:
        """Raises ChecksumError for the first of the blocks that `wrong` names. url: of the file."""
        for low, high in self.wrong(data, begin):
            raise wrong_block(url, low, high)


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Checksums of a store's two files.

    Attributes:
        fingerprint: of the store that these checksums belong to.
        files: of the .bin and of the .idx.
    """

    fingerprint: str
    files: tuple[FileSums, FileSums]

    def encode(self) -> bytes:
        """The contents of the .sums file."""
        data, idx = self.files
        sizes = data.size_bytes, idx.size_bytes
        head = _HEAD.pack(_MAGIC, _VERSION, data.block_bytes, *sizes, bytes.fromhex(self.fingerprint))
        entries = b"".join(each.sums.astype("<u4").tobytes() for each in self.files)
        return head + _SUM.pack(zlib.crc32(entries, zlib.crc32(head))) + entries


def parse(url: str, encoded: bytes) -> Sums:
    """The checksums in a file. Raises StoreError; ChecksumError if the file itself is damaged."""
    if len(encoded) < _FIRST or not encoded.startswith(_MAGIC):
        raise StoreError(f"{url}: not a file of checksums of a store; {ANEW}")
    _, version, block_bytes, *sizes, fingerprint = _HEAD.unpack_from(encoded)
    if version != _VERSION:
        raise StoreError(f"{url}: byte 8: version {version}; only version {_VERSION} is known; {ANEW}")
    head, entries = memoryview(encoded)[: _HEAD.size], memoryview(encoded)[_FIRST:]
    if zlib.crc32(entries, zlib.crc32(head)) != _SUM.unpack_from(encoded, _HEAD.size)[0]:
        raise ChecksumError(
            f"{url}: its own checksum at byte {_HEAD.size} is wrong; copy it again, or {ANEW}"
        )
    if not is_block_size(block_bytes):
        raise StoreError(f"{url}: byte 12: blocks of {block_bytes} bytes; {ANEW}")
    counts = [-(-size // block_bytes) for size in sizes]
    if len(entries) != 4 * sum(counts):
        raise StoreError(
            f"{url}: {len(entries) // 4} checksums, for files of {sizes[0]} and {sizes[1]} bytes; {ANEW}"
        )
    sums = np.frombuffer(entries, "<u4").astype(np.uint32)
    data, idx = np.split(sums, [counts[0]])
    files = FileSums(block_bytes, sizes[0], data), FileSums(block_bytes, sizes[1], idx)
    return Sums(fingerprint.hex(), files)


def wrong_block(
    url: str, low: int, high: int, more: str = "", do: str = "the file is damaged: copy it again"
) -> ChecksumError:
    """The error for bytes of a file that differ from its .sums."""
    return ChecksumError(
        f"{url}: bytes {low}..{high} do not match its .sums{more}; {do}", path=url, range=(low, high)
    )


def is_block_size(block_bytes: int) -> bool:
    """Whether a block size is valid: a power of two from 4 KiB to 64 MiB."""
    in_range = is_whole(block_bytes, _LEAST_BLOCK_BYTES) and block_bytes <= _MOST_BLOCK_BYTES
    return in_range and block_bytes.bit_count() == 1


class Summer:
    """Computes checksums of bytes that arrive piece by piece."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes, self._room = block_bytes, block_bytes
        self._ended, self._sum = array("I"), 0

    def update(self, data: memoryview | bytes) -> None:
        if len(data) >= self._room:
            data = memoryview(data)  # slicing it does not copy
        while len(data) >= self._room:
            self._ended.append(zlib.crc32(data[: self._room], self._sum))
            data, self._room, self._sum = data[self._room :], self._block_bytes, 0
        self._sum = zlib.crc32(data, self._sum)
        self._room -= len(data)

    def sums(self) -> FileSums:
        rest = self._block_bytes - self._room
        size_bytes, sums = len(self._ended) * self._block_bytes + rest, self._ended[:]
        if rest:
            sums.append(self._sum)
        return FileSums(self._block_bytes, size_bytes, np.array(sums, np.uint32))


def _followed(crcs: U32, bit: int) -> U32:
    """crc32(a + b) ^ crc32(b) for any `b` of 2**bit bytes; crcs: of each `a`.

    It is linear in the bits of crc32(a), so that it is looked up byte by byte.
    """
    table = _of_bytes(bit)
    return (
        table[0][crcs & 255] ^ table[1][crcs >> 8 & 255] ^ table[2][crcs >> 16 & 255] ^ table[3][crcs >> 24]
    )


@functools.cache
def _of_bytes(bit: int) -> U32:
    """`_followed` for each value of each byte of a CRC-32; uint32 [4, 256]."""
    if bit:
        return _followed(_of_bytes(bit - 1), bit - 1)
    values = [[value << shift for value in range(256)] for shift in (0, 8, 16, 24)]
    zero = zlib.crc32(b"\0")
    return np.array([[zlib.crc32(b"\0", each) ^ zero for each in row] for row in values], np.uint32)
