"""The files of a store's shards: many, some of them open at a time, and what was announced of each."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator
from queue import SimpleQueue

import numpy as np

from meshfeed.errors import MeshfeedError, StoreError
from meshfeed.files import ByteFile, FileStats
from meshfeed.files.byte_file import Bytes
from meshfeed.files.forks import at_fork
from meshfeed.store.stream import I64

_MOST_OPEN = 128
_ANNOUNCERS = 8


class _Shard:
    """A shard's file, made when it is first wanted.

    Attributes:
        lock: held while the file is made, entered, left or told something; never while others are served.
        is_met: the file was told something, so that telling it more asks storage nothing.
        owed: ranges that were announced and are not read yet, and how often.
        untold: ranges of those of which the file does not know yet.
        times_forgotten: how often all of these were dropped.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.file: ByteFile | None = None
        self.is_met = self.is_entered = False
        self.owed: Counter[tuple[int, int]] = Counter()
        self.forget_parent()

    def forget_parent(self) -> None:
        """In a forked child: no thread of the parent reads here, and what it announced was its own."""
        self.lock = threading.RLock()
        self.num_readers = 0
        self.times_forgotten = 0
        self.forget()

    def forget(self) -> None:
        """What was announced will not be read."""
        self.times_forgotten += 1
        self.owed.clear()
        self.untold: list[tuple[I64, I64]] = []


class ShardFiles:
    """Reads from and announces ranges of shards, from any thread; usable between `open` and `close`.

    At most 128 files are open at a time, but for those that are just being read. To leave a remote file takes
    back what was announced of it, so that is announced again. A remote file that nothing is known of yet is
    met on a thread of its own, because to meet it waits for storage.

    name: of the store, for messages.
    made: the file of a shard, not entered; may ask storage, and raise StoreError for what is no such shard.
    is_remote: all shards lie far away.
    """

    def __init__(self, name: str, made: Callable[[int], ByteFile], *, is_remote: bool) -> None:
        self._name, self._made, self._is_remote = name, made, is_remote
        self._depth = 0
        self._shards: dict[int, _Shard] = {}
        self._open: OrderedDict[int, _Shard] = OrderedDict()
        self.forget_parent()
        at_fork(self)

    def forget_parent(self) -> None:
        """In a forked child: the parent's threads are not here, and hold no lock."""
        self._lock = threading.RLock()
        self._to_meet: SimpleQueue[_Shard | None] = SimpleQueue()
        self._num_announcers = 0
        for shard in self._shards.values():
            shard.forget_parent()

    @property
    def stats(self) -> FileStats:
        """What reading has cost so far."""
        shards = list(self._shards.values())
        return sum((shard.file.stats for shard in shards if shard.file is not None), FileStats())

    def open(self) -> None:
        """Once more in use."""
        with self._lock:
            self._depth += 1

    def close(self) -> None:
        """Once less in use; the last time all files are left."""
        with self._lock:
            self._depth -= 1
            if self._depth:
                return
            self._open.clear()
            announcers, self._num_announcers = self._num_announcers, 0
            to_meet, self._to_meet = self._to_meet, SimpleQueue()
        self.forget_needs()
        for _ in range(announcers):
            to_meet.put(None)
        for shard in list(self._shards.values()):
            if shard.is_entered:
                self._leave(shard)

    @contextlib.contextmanager
    def reading(self, number: int) -> Generator[ByteFile, None, None]:
        """A shard's file, entered until the end of the block at least."""
        shard = self._shard(number)
        with shard.lock:
            file = self._file(shard)
            self._tell(shard, file)
            if not shard.is_entered:
                file.__enter__()
                shard.is_entered = True
            shard.num_readers += 1
        try:
            self._make_room(shard)
            yield file
        finally:
            with shard.lock:
                shard.num_readers -= 1

    def read_into(self, number: int, out: Bytes, begins: I64, sizes: I64, places: I64) -> None:
        """See ByteFile."""
        with self.reading(number) as file:
            if not file.is_remote:  # there, a range is announced and settled by itself
                begins, sizes, places = joined_reads(begins, sizes, places)
            file.read_into(out, begins, sizes, places)
            owed = self._shards[number].owed
            if owed:
                with self._lock:
                    for one in zip(begins.tolist(), (begins + sizes).tolist()):
                        owed[one] -= 1
                        if owed[one] <= 0:
                            del owed[one]

    def will_need(self, number: int, begins: I64, ends: I64) -> None:
        """See ByteFile; waits for nothing."""
        shard = self._shard(number)
        if not self._is_remote:
            with self.reading(number) as file:
                if not file.is_remote:
                    file.will_need(begins, ends)
                    return
        with self._lock:
            shard.owed.update(zip(begins.tolist(), ends.tolist()))
            shard.untold.append((begins, ends))
            if not shard.is_met:
                self._to_meet.put(shard)
                if self._num_announcers < _ANNOUNCERS:
                    self._num_announcers += 1
                    told = weakref.ref(self), self._to_meet
                    threading.Thread(target=_announce, args=told, daemon=True).start()
                return
        self.tell(shard)

    def forget_needs(self) -> None:
        """What was announced and is not read yet will not be."""
        with self._lock:
            shards = [shard for shard in self._shards.values() if shard.owed or shard.untold]
            for shard in shards:
                shard.forget()
        for shard in shards:
            if shard.file is not None:
                shard.file.forget_needs()

    def tell(self, shard: _Shard) -> None:
        """Have the file know all that was announced of it."""
        with shard.lock:
            if shard.untold:
                self._tell(shard, self._file(shard))

    # -- below; all but `_shard` and `_make_room` under the shard's lock ------------------------------------

    def _shard(self, number: int) -> _Shard:
        if not self._depth:
            raise StoreError(f"{self._name}: not entered; read from it inside `with store:`")
        shard = self._shards.get(number)
        return self._shards.setdefault(number, _Shard(number)) if shard is None else shard

    def _file(self, shard: _Shard) -> ByteFile:
        if shard.file is None:
            shard.file = self._made(shard.number)
        return shard.file

    def _tell(self, shard: _Shard, file: ByteFile) -> None:
        while shard.untold:
            with self._lock:
                times_forgotten, untold = shard.times_forgotten, shard.untold
                shard.untold = []
            for begins, ends in untold:
                file.will_need(begins, ends)
            shard.is_met = True
            if shard.times_forgotten != times_forgotten:  # before the file knew
                file.forget_needs()

    def _make_room(self, newest: _Shard) -> None:
        """Note that a shard is used, and leave those that were used longest ago where too many are open."""
        surplus: list[_Shard] = []
        with self._lock:
            self._open[newest.number] = newest
            self._open.move_to_end(newest.number)
            excess = len(self._open) - _MOST_OPEN
            if excess > 0:
                idle = (number for number, shard in self._open.items() if not shard.num_readers)
                surplus = [self._open.pop(number) for number in list(idle)[:excess]]
        for shard in surplus:
            self._leave(shard)

    def _leave(self, shard: _Shard) -> None:
        with shard.lock:
            if shard.num_readers or not shard.is_entered or shard.file is None:
                return
            shard.is_entered = False
            shard.file.__exit__(None, None, None)
            with self._lock:
                owed = np.array(sorted(shard.owed.elements()), np.int64).reshape(-1, 2)
                shard.untold = [(owed[:, 0], owed[:, 1])] if owed.size else []
            self._tell(shard, shard.file)


def joined_reads(begins: I64, sizes: I64, places: I64) -> tuple[I64, I64, I64]:
    """The same reads, where those that touch in the file and in the output are one; int64 [k] each."""
    apart = (begins[1:] != (begins + sizes)[:-1]) | (places[1:] != (places + sizes)[:-1])
    if apart.all():
        return begins, sizes, places
    first = np.flatnonzero(np.append(True, apart))
    return begins[first], np.add.reduceat(sizes, first), places[first]


def _announce(of: weakref.ref[ShardFiles], to_meet: SimpleQueue[_Shard | None]) -> None:
    """A thread that meets files, in the order in which they were announced, until a None comes."""
    while (shard := to_meet.get()) is not None:
        files = of()
        if files is None:
            return
        with contextlib.suppress(MeshfeedError):  # reading will meet it, too
            files.tell(shard)
        del files
