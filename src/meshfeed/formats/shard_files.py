"""The files of a store's shards, and the reads that were announced before a shard is open."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from meshfeed.arrays import Bytes, Longs
from meshfeed.errors import MeshfeedError, StoreError
from meshfeed.files import ByteFile, FileStats
from meshfeed.forks import at_fork

_ANNOUNCERS = 8


class _Shard:
    """A shard's file, None until it is first used.

    Attributes:
        lock: held while the file is opened, closed or sent an announcement; never while it reads.
        pending: announced ranges that were not yet passed to the file.
        is_announced: whether the file has received an announcement, after which others make no request.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.file: ByteFile | None = None
        self.is_entered = False
        self.forget_parent()

    def forget_parent(self) -> None:
        """In a forked child: the parent's threads do not exist here, and its announcements were its own."""
        self.lock = threading.Lock()
        self.is_announced = False
        self.pending: deque[tuple[Longs, Longs]] = deque()


class ShardFiles:
    """Reads from and announces ranges of shards, from any thread; usable between `open` and `close`.

    A remote file is opened on a background thread, because opening waits for storage.

    name: of the store, for messages.
    made: returns the file of a shard, not entered; may ask storage, and raises StoreError for a wrong file.
    is_remote: all shards are remote.
    """

    def __init__(self, name: str, made: Callable[[int], ByteFile], *, is_remote: bool) -> None:
        self._name, self._made, self._is_remote = name, made, is_remote
        self._is_open = False
        self._shards: dict[int, _Shard] = {}
        self.forget_parent()
        at_fork(self)

    def forget_parent(self) -> None:
        """In a forked child: the parent's threads do not exist here, and hold no lock."""
        self._to_open: SimpleQueue[_Shard | None] = SimpleQueue()
        self._num_announcers = 0
        for shard in self._shards.values():
            shard.forget_parent()

    @property
    def stats(self) -> FileStats:
        files = [shard.file for shard in list(self._shards.values())]
        return sum((file.stats for file in files if file is not None), FileStats())

    def open(self) -> None:
        self._is_open = True

    def close(self) -> None:
        self._is_open = False
        for shard in list(self._shards.values()):
            shard.pending.clear()
            if shard.file is not None:
                with shard.lock:
                    if shard.is_entered:
                        shard.file.__exit__(None, None, None)
                    shard.is_entered = shard.is_announced = False
        for _ in range(self._num_announcers):
            self._to_open.put(None)
        self._to_open, self._num_announcers = SimpleQueue(), 0

    def file(self, number: int) -> ByteFile:
        """A shard's file, entered."""
        return self._opened(self._shard(number))

    def read_into(self, number: int, out: Bytes, begins: Longs, sizes: Longs, places: Longs) -> None:
        file = self.file(number)
        if not file.is_remote:  # each remote range is announced and read by itself
            begins, sizes, places = _joined(begins, sizes, places)
        file.read_into(out, begins, sizes, places)

    def will_need(self, number: int, begins: Longs, ends: Longs) -> None:
        shard = self._shard(number)
        shard.pending.append((begins, ends))
        if shard.is_announced or not self._is_remote:
            self._opened(shard)
            return
        self._to_open.put(shard)
        if self._num_announcers < _ANNOUNCERS:
            self._num_announcers += 1
            threading.Thread(target=self._open_in_background, args=(self._to_open,), daemon=True).start()

    def forget_needs(self) -> None:
        for shard in list(self._shards.values()):
            shard.pending.clear()  # first: a file that is being opened then finds nothing pending
            if shard.file is not None:
                with shard.lock:
                    shard.file.forget_needs()

    def _shard(self, number: int) -> _Shard:
        if not self._is_open:
            raise StoreError(f"{self._name}: not entered; read from it inside `with store:`")
        shard = self._shards.get(number)
        return self._shards.setdefault(number, _Shard(number)) if shard is None else shard

    def _opened(self, shard: _Shard) -> ByteFile:
        """The file, made on first use and entered; it gets the pending announcements."""
        with shard.lock:
            if shard.file is None:
                shard.file = self._made(shard.number)
            if not shard.is_entered and self._is_open:
                shard.file.__enter__()
                shard.is_entered = True
            while shard.pending:
                shard.file.will_need(*shard.pending.popleft())
                shard.is_announced = True
            return shard.file

    def _open_in_background(self, to_open: SimpleQueue[_Shard | None]) -> None:
        """A thread that opens files in the order of their announcements, until a None comes."""
        while (shard := to_open.get()) is not None:
            with contextlib.suppress(MeshfeedError):  # reading will raise it, too
                self._opened(shard)


def _joined(begins: Longs, sizes: Longs, places: Longs) -> tuple[Longs, Longs, Longs]:
    """The same reads, with adjacent ones (in the file and in the output) joined; int64 [k] each."""
    apart = (begins[1:] != (begins + sizes)[:-1]) | (places[1:] != (places + sizes)[:-1])
    first = np.flatnonzero(np.append(True, apart))
    return begins[first], np.add.reduceat(sizes, first), places[first]
