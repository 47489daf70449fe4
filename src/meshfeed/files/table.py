"""The blocks of a cached object: a sparse data file, and a table of valid blocks.

    data     as long as the object; missing blocks are holes
    table    per block u32 generation, u32 crc32 of its bytes

A generation is even and above 0 while a block is valid, odd while it is written, dropped or doubted. A reader
compares the generation before and after reading: the same even number means that it read the block (a
sequence lock). So a reader never gets half a block, whichever process dies when. Pinning blocks saves work;
correctness does not depend on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshfeed.errors import CacheError
from meshfeed.files.mapping import mapped

I64 = npt.NDArray[np.int64]
Entries = npt.NDArray[Any]

ENTRY = np.dtype([("generation", "<u4"), ("sum", "<u4")])
DATA, TABLE = "data", "table"
_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_LAST = 0xFFFF_FFFE
_MOST_TABLES = 8192  # a process may have 65,530 maps in all


def num_blocks_of(size_bytes: int, block_bytes: int) -> int:
    """Number of blocks of an object."""
    return -(-size_bytes // block_bytes)


def is_valid(generation: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """Which generations belong to a valid block."""
    return (generation > 0) & (generation & 1 == 0)


def map_table(folder: Path, num_blocks: int, *, write: bool) -> Entries:
    """The table, mapped; dropping the array unmaps it. Raises OSError, ValueError."""
    size = num_blocks * ENTRY.itemsize
    with (folder / TABLE).open("r+b" if write else "rb") as stream:
        if os.fstat(stream.fileno()).st_size != max(size, 1):
            raise ValueError(f"{folder / TABLE}: not of {num_blocks} blocks")
        return np.frombuffer(mapped(stream.fileno(), write=write), ENTRY, num_blocks)


def make_files(folder: Path, size_bytes: int, num_blocks: int) -> None:
    """Create the empty data and table of an object. Raises OSError."""
    for name, size in ((DATA, size_bytes), (TABLE, max(num_blocks * ENTRY.itemsize, 1))):
        with (folder / name).open("wb") as stream:
            os.truncate(stream.fileno(), size)
            if name == TABLE:  # a full disk raises here, instead of a signal when the map is written
                os.posix_fallocate(stream.fileno(), 0, size)


class Blocks:
    """The writer's side: publish, doubt, verify and drop blocks. Only the leader has it.

    No file stays open; recently used tables stay mapped. The constructor raises OSError if data or table
    cannot be opened, ValueError if their size is wrong.
    """

    def __init__(self, folder: Path, size_bytes: int, block_bytes: int) -> None:
        self.folder, self.size_bytes, self.block_bytes = folder, size_bytes, block_bytes
        self.num_blocks = num_blocks_of(size_bytes, block_bytes)
        _ = self._entries
        if (folder / DATA).stat().st_size != size_bytes:
            raise ValueError(f"{folder / DATA}: not of {size_bytes} bytes")

    @property
    def _entries(self) -> Entries:
        with _mapping:
            entries = _tables.pop(self.folder, None)
            if entries is None:
                entries = map_table(self.folder, self.num_blocks, write=True)
                while len(_tables) >= _MOST_TABLES:
                    _tables.popitem(last=False)
            _tables[self.folder] = entries
            return entries

    def num_bytes(self, block: int) -> int:
        """Bytes of a block; the last one may be short."""
        return min(self.block_bytes, self.size_bytes - block * self.block_bytes)

    def valid(self, blocks: Sequence[int]) -> list[bool]:
        """Which of some blocks are valid."""
        return is_valid(self._entries["generation"][list(blocks)]).tolist()

    def doubt_all(self) -> list[int]:
        """Invalidate every block until it is verified; returns those that may be valid.

        Frees the disk space of blocks that a killed leader left unfinished.
        """
        entries = self._entries
        entries["generation"][is_valid(entries["generation"])] += 1
        doubted = np.flatnonzero((entries["generation"] > 0) & (entries["sum"] > 0)).tolist()
        if self._held_bytes() > sum(map(self.num_bytes, doubted)) + self.block_bytes // 2:
            for block in sorted(set(range(self.num_blocks)) - set(doubted)):
                self._punch(block)
        return doubted

    def publish(self, block: int, data: memoryview) -> None:
        """Write a block and mark it valid. If it raises OSError, the block stays invalid."""
        self._begin_change(block)
        with (self.folder / DATA).open("r+b", buffering=0) as stream:
            begin, at = block * self.block_bytes, 0
            while at < len(data):
                at += os.pwrite(stream.fileno(), data[at:], begin + at)
        self._entries["sum"][block] = zlib.crc32(data)
        self._end_change(block)

    def verify(self, block: int) -> bool:
        """Mark a doubted block valid if its checksum matches; else drop it."""
        with (self.folder / DATA).open("rb", buffering=0) as stream:
            stream.seek(block * self.block_bytes)
            data = bytearray(self.num_bytes(block))
            filled = io.BufferedReader(stream).readinto(data)
        if filled == len(data) and zlib.crc32(data) == int(self._entries["sum"][block]):
            self._end_change(block)
            return True
        self.drop(block)
        return False

    def drop(self, block: int) -> None:
        """Invalidate a block and free its disk space."""
        self._begin_change(block)
        self._entries["sum"][block] = 0
        with contextlib.suppress(CacheError, OSError):  # the disk supported it when the object was created
            self._punch(block)

    def check_holes(self) -> None:
        """Raises CacheError if the file system cannot punch holes."""
        if self.num_blocks:
            self._punch(0)

    def _held_bytes(self) -> int:
        return (self.folder / DATA).stat().st_blocks * 512

    def _punch(self, block: int) -> None:
        begin, size = block * self.block_bytes, self.num_bytes(block)
        with (self.folder / DATA).open("r+b", buffering=0) as stream:
            failed = _libc.fallocate(stream.fileno(), _PUNCH, ctypes.c_int64(begin), ctypes.c_int64(size))
        if failed:
            why = os.strerror(ctypes.get_errno())
            raise CacheError(
                f"{self.folder}: its file system cannot free single blocks ({why}); choose a cache folder on "
                f"ext4, xfs, btrfs or tmpfs"
            )

    # A block's generation is one aligned 4-byte word, written as a whole.

    def _begin_change(self, block: int) -> None:
        generation = int(self._entries["generation"][block])
        if generation % 2 == 0:
            self._entries["generation"][block] = generation % _LAST + 1

    def _end_change(self, block: int) -> None:
        self._entries["generation"][block] += 1


_tables: OrderedDict[Path, Entries] = OrderedDict()
_mapping = threading.Lock()

_libc: Any = ctypes.CDLL(None, use_errno=True)
