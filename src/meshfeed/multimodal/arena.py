"""Memory that a process shares with its workers, and uses again.

New shared memory costs a page fault per 4 KiB, many times the cost of filling it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import defaultdict
from multiprocessing import reduction
from typing import Any

import numpy as np

from meshfeed.arrays import Array
from meshfeed.files.local.mapping import mapped

_LEAST = 4096


class ArenaRange:
    """A range of an arena, taken for as long as anything refers to its memory.

    Attributes:
        offset: in the arena; all that a worker gets of it.
        memory: uint8, at least as much as was asked for; None in a worker.
    """

    __slots__ = ("memory", "offset")

    def __init__(self, offset: int, memory: Array | None = None) -> None:
        self.offset, self.memory = offset, memory

    def __reduce__(self) -> Any:
        return ArenaRange, (self.offset,)


class Arena:
    """A sparse file in memory, mapped by this process and by the workers that get the arena as an argument.

    Rooms have sizes of powers of two, so that those given back fit again; what of them is never written takes
    no memory. All is freed when the last process that maps it ends.

    Args:
        num_bytes: most that can be taken.
        fd: of an arena that another process made.

    Raises OSError where the process may not map so much.
    """

    def __init__(self, num_bytes: int, fd: int | None = None) -> None:
        self._fd = os.memfd_create("meshfeed-parts") if fd is None else fd
        try:
            if fd is None:
                os.ftruncate(self._fd, num_bytes)
            # a view, so that arrays of a room refer to the room's and not, past it, to the whole
            self._memory = mapped(self._fd, write=True).data
        except OSError:
            os.close(self._fd)
            raise
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # size -> offsets
        self._end, self._lock = 0, threading.Lock()

    def __reduce__(self) -> Any:
        return _attached, (self._memory.nbytes, reduction.DupFd(self._fd))

    def take(self, num_bytes: int) -> ArenaRange | None:
        """A room of that many bytes or more; None where the arena is full."""
        size = 1 << (max(num_bytes, _LEAST) - 1).bit_length()
        with self._lock:
            free = self._free[size]
            if not free:
                if self._end + size > self._memory.nbytes:
                    return None
                free.append(self._end)
                self._end += size
            room = ArenaRange(offset := free.pop(), self.written(offset, size))
        # arrays cut from the room's memory refer to it, and keep the room taken
        weakref.finalize(room.memory, free.append, offset).atexit = False
        return room

    def written(self, offset: int, num_bytes: int) -> Array:
        """The bytes of a range, by reference; uint8 [num_bytes]."""
        return np.frombuffer(self._memory, np.uint8, num_bytes, offset)

    def close(self) -> None:
        """No room can be taken any more. The memory of those that are taken lives as long as they are."""
        with self._lock:
            self._memory = memoryview(b"")
            self._free.clear()
        os.close(self._fd)


def _attached(num_bytes: int, fd: Any) -> Arena:
    return Arena(num_bytes, fd.detach())
