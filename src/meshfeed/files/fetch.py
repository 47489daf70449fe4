"""Schedules and fetches blocks: each block once, urgent ones first.

A *need* is a reader that waits for blocks. It is admitted once the cache can hold all of its blocks together
with those of the other admitted needs; its blocks then stay until it is done. A *wish* is a block that will
be needed
later: it is fetched when nothing is urgent, and evicted when space is needed.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from meshfeed.errors import CacheError, MeshfeedError, StoreError
from meshfeed.files.bring import RANGE_BYTES, Budget, CachedObject, part_of, whole_of
from meshfeed.files.pace import Pace
from meshfeed.files.shelf import Block, Shelf

_THREADS = 24
_MOST_WHOLE_BYTES = 1 << 30
_DISK_PATIENCE_S, _DISK_PAUSE_S = 10.0, 0.2

Done = Callable[[MeshfeedError | None], None]


class _DiskFullError(CacheError):
    """The disk is full."""


@dataclass(eq=False)
class _Need:
    """A reader that waits for blocks."""

    holder: Hashable
    of: CachedObject
    sizes: dict[Block, int]
    done: Done
    missing: set[Block] = field(default_factory=set)


class Fetcher:
    """Fetches blocks into the cache with its own threads; `close` ends them.

    fetched: called with (holder, object, bytes) after each range, for the first holder that asked. Neither it
    nor a need's `done` may block: they may be called under the lock.
    """

    def __init__(self, shelf: Shelf, fetched: Callable[[Hashable, CachedObject, int], None]) -> None:
        self._shelf, self._fetched = shelf, fetched
        self._objects: dict[str, CachedObject] = {}
        self._changed = threading.Condition()
        self._waiting: deque[_Need] = deque()  # not admitted yet
        self._needs: dict[Block, list[_Need]] = {}
        self._urgent: deque[Block] = deque()
        self._wished: deque[Block] = deque()
        self._asked_by: dict[Block, Hashable] = {}  # every block that is queued or in flight
        self._flying = shelf.busy
        self._ahead = 0  # requests for wishes in flight
        self._pace = Pace(RANGE_BYTES)
        self._wholes = Budget(_MOST_WHOLE_BYTES)
        self._closed = False
        self._disk_error = ""  # why less than limit_bytes is held; empty if the disk has space
        self._threads = [
            threading.Thread(target=self._work, name=f"meshfeed-fetch-{i}", daemon=True)
            for i in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, one: CachedObject, doubted: Iterable[int]) -> None:
        """Add an object. doubted: its blocks from an earlier leader, which may be valid."""
        with self._changed:
            self._objects[one.key] = one
            one.doubted = set(doubted)
            for block in one.doubted:
                self._shelf.add((one.key, block), one.blocks.num_bytes(block))

    def need(self, holder: Hashable, one: CachedObject, blocks: Sequence[int], done: Done) -> None:
        """Call `done` once all blocks are valid, or with the error; they stay until `release`."""
        sizes = {(one.key, block): one.blocks.num_bytes(block) for block in blocks}
        with self._changed:
            self._waiting.append(_Need(holder, one, sizes, done))
            self._admit()

    def abandon(self, holder: Hashable, one: CachedObject, blocks: Sequence[int]) -> None:
        """The reader of a need was interrupted: release the need, admitted or not."""
        with self._changed:
            for need in self._waiting:
                if need.holder == holder and need.sizes.keys() == {(one.key, block) for block in blocks}:
                    self._waiting.remove(need)
                    return
        self.release(holder, one, blocks, firm=True)

    def limit(self, limit_bytes: int) -> None:
        """Change the limit."""
        with self._changed:
            self._shelf.limit_bytes, self._disk_error = limit_bytes, ""
            self._admit()
            self._changed.notify_all()

    def wish(self, holder: Hashable, one: CachedObject, blocks: Sequence[int]) -> None:
        """Announce blocks that will be needed, in this order."""
        with self._changed:
            sizes = {(one.key, block): one.blocks.num_bytes(block) for block in blocks}
            self._shelf.pin(holder, sizes, firm=False)
            self._shelf.touch(sizes)
            for block, there in self._valid(one, list(sizes)):
                if not there and block not in self._asked_by:
                    self._asked_by[block] = holder
                    self._wished.append(block)
            self._changed.notify_all()

    def release(self, holder: Hashable, one: CachedObject, blocks: Sequence[int], *, firm: bool) -> None:
        """Release needed or wished blocks, once for each time they were pinned."""
        with self._changed:
            self._shelf.release(holder, [(one.key, block) for block in blocks], firm=firm)
            self._admit()
            self._changed.notify_all()

    def forget(self, holder: Hashable, one: CachedObject | None = None) -> None:
        """Drop a holder's wishes for an object; without one, all its wishes and needs."""
        with self._changed:
            self._shelf.release_all(holder, firm=False, of=None if one is None else one.key)
            if one is None:
                self._shelf.release_all(holder, firm=True)
                self._waiting = deque(need for need in self._waiting if need.holder != holder)
            self._admit()
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads; blocks in flight are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- scheduling, under the lock -----------------------------------------------------------------------

    def _valid(self, one: CachedObject, blocks: Sequence[Block]) -> list[tuple[Block, bool]]:
        return list(zip(blocks, one.blocks.valid([number for _, number in blocks])))

    def _admit(self) -> None:
        """Admit waiting needs in order, while the cache can hold them all."""
        shelf = self._shelf
        while self._waiting:
            need = self._waiting[0]
            if sum(need.sizes.values()) > shelf.limit_bytes:
                self._waiting.popleft().done(self._too_large(need))
                continue
            if shelf.firm_bytes_with(need.sizes) > shelf.limit_bytes:
                return
            self._waiting.popleft()
            shelf.pin(need.holder, need.sizes, firm=True)
            shelf.touch(need.sizes)
            for block, there in self._valid(need.of, list(need.sizes)):
                if there:
                    continue
                need.missing.add(block)
                self._needs.setdefault(block, []).append(need)
                self._asked_by.setdefault(block, need.holder)
                if block not in self._flying:
                    self._urgent.append(block)
            if not need.missing:
                need.done(None)
            self._changed.notify_all()

    def _too_large(self, need: _Need) -> CacheError:
        if self._disk_error:
            return CacheError(
                f"{need.of.url}: {sum(need.sizes.values())} bytes are needed at one time; {self._disk_error}"
            )
        return CacheError(
            f"{need.of.url}: {sum(need.sizes.values())} bytes in {len(need.sizes)} blocks are needed at one "
            f"time, the cache {need.of.blocks.folder.parent} is limited to {self._shelf.limit_bytes}; raise "
            f"limit_bytes, or lower block_bytes or what is read at one time"
        )

    def _next_run(self) -> tuple[list[Block], bool] | None:
        """(adjacent blocks to fetch next, whether they are urgent), after evicting others for them.

        None if there is nothing to do.
        """
        for queue, urgent in ((self._urgent, True), (self._wished, False)):
            while queue and (urgent or self._ahead < self._pace.at_once):
                first = queue[0]
                if first in self._flying or first not in self._asked_by:
                    queue.popleft()  # already fetched, or in flight
                    continue
                if not self._shelf.is_wanted(first):
                    queue.popleft()
                    del self._asked_by[first]
                    continue
                run = self._run_from(first, urgent)
                if not self._make_room(run, urgent):
                    break  # wishes wait until something is released
                queue.popleft()
                self._flying.update(run)
                self._ahead += not urgent
                return run, urgent
        return None

    def _run_from(self, first: Block, urgent: bool) -> list[Block]:
        key, number = first
        one = self._objects[key]
        if number in one.doubted:
            return [first]
        run, size = [first], one.blocks.num_bytes(number)
        while True:
            after = (key, run[-1][1] + 1)
            wanted = after in self._needs if urgent else after in self._asked_by
            if not wanted or after in self._flying or after[1] in one.doubted:
                return run
            size += one.blocks.num_bytes(after[1])
            if size > self._pace.range_bytes:
                return run
            run.append(after)

    def _make_room(self, run: Sequence[Block], urgent: bool) -> bool:
        one = self._objects[run[0][0]]
        new = [block for block in run if block not in self._shelf]
        going = self._shelf.make_room(
            sum(one.blocks.num_bytes(number) for _, number in new), over_wishes=urgent
        )
        if going is None:
            return False
        self._drop(going)
        for block in new:
            self._shelf.add(block, one.blocks.num_bytes(block[1]))
        return True

    def _drop(self, going: Iterable[Block]) -> None:
        for block in going:
            key, number = block
            self._shelf.remove(block)
            self._objects[key].doubted.discard(number)
            self._objects[key].blocks.drop(number)

    # -- the threads --------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                found = self._next_run()
                while found is None:
                    if self._closed:
                        return
                    self._changed.wait()
                    found = self._next_run()
            run, urgent = found
            error: MeshfeedError | None = None
            try:
                self._bring(run)
            except MeshfeedError as known:
                error = known
            except BaseException as unknown:  # if the thread died, its readers would wait endlessly
                error = StoreError(f"{self._objects[run[0][0]].url}: {type(unknown).__name__}: {unknown}")
            self._finish(run, urgent, error)

    def _finish(self, run: Sequence[Block], urgent: bool, error: MeshfeedError | None) -> None:
        ended: list[_Need] = []
        with self._changed:
            self._ahead -= not urgent
            again = isinstance(error, _DiskFullError) and len(run) > 1
            for block in run:
                self._flying.discard(block)
                if error is not None:
                    self._drop_failed(block)
                if again and block in self._needs and not self._is_there(block):
                    self._urgent.append(block)  # alone it may fit
                    continue
                self._asked_by.pop(block, None)
                for need in self._needs.pop(block, []):
                    need.missing.discard(block)
                    if (error is not None and not again) or not need.missing:
                        ended.append(need)
            if again:
                self._pace = Pace(RANGE_BYTES)  # starts again with single blocks
                error = None
            if error is not None:
                for need in ended:
                    self._fail_need(need)
            self._admit()
            self._changed.notify_all()
        for need in dict.fromkeys(ended):
            need.done(error)

    def _drop_failed(self, block: Block) -> None:
        if not self._is_there(block):  # earlier blocks of its run may be valid
            self._shelf.remove(block)
            with contextlib.suppress(OSError):  # the first error is reported
                self._objects[block[0]].blocks.drop(block[1])

    def _is_there(self, block: Block) -> bool:
        return self._objects[block[0]].blocks.valid([block[1]])[0]

    def _fail_need(self, need: _Need) -> None:
        for block in need.missing:
            others = [other for other in self._needs.get(block, []) if other is not need]
            if others:
                self._needs[block] = others
            else:
                self._needs.pop(block, None)
        self._shelf.release(need.holder, need.sizes, firm=True)
        need.sizes = {}

    def _bring(self, run: Sequence[Block]) -> None:
        one = self._objects[run[0][0]]
        numbers = [number for _, number in run]
        if numbers[0] in one.doubted:
            one.doubted.discard(numbers[0])
            if one.blocks.verify(numbers[0]):
                return
        holder = self._asked_by.get(run[0])
        if one.content is not None:
            with self._wholes.room_for(one.stored_bytes + one.blocks.size_bytes):
                data, fetched = whole_of(one, one.content, holder)
                self._fetched(holder, one, fetched)
                self._publish(one, numbers[0], data)
            return
        begin = numbers[0] * one.blocks.block_bytes
        end = begin + sum(map(one.blocks.num_bytes, numbers))
        began = time.monotonic()
        data, fetched = part_of(one, begin, end, holder)
        with self._changed:
            self._pace.learn(fetched, time.monotonic() - began)
        self._fetched(holder, one, fetched)
        at = 0
        for number in numbers:
            size = one.blocks.num_bytes(number)
            self._publish(one, number, data[at : at + size])
            at += size

    def _publish(self, one: CachedObject, number: int, data: memoryview) -> None:
        began = time.monotonic()
        while True:
            try:
                one.blocks.publish(number, data)
                return
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
                if not full:
                    raise CacheError(
                        f"{one.blocks.folder}: {error.strerror or error}; was the cache folder cleared "
                        f"during this run, or is its disk faulty?"
                    ) from error
                late = time.monotonic() - began > _DISK_PATIENCE_S
                if late or not self._shelf.is_wanted((one.key, number)):
                    raise _DiskFullError(self._full_disk(one, error)) from error
                self._disk_error = self._full_disk(one, error)
                self._shrink(len(data))

    def _full_disk(self, one: CachedObject, error: OSError) -> str:
        return (
            f"{one.blocks.folder}: {error.strerror or error} with {self._shelf.held_bytes} bytes held, below "
            f"limit_bytes of the cache; free space on this disk, or give a cache folder on another"
        )

    def _shrink(self, num_bytes: int) -> None:
        """The disk is full below the limit: lower the limit and evict blocks."""
        with self._changed:
            shelf = self._shelf
            self._drop(shelf.to_free(num_bytes, over_wishes=True))
            shelf.limit_bytes = min(shelf.limit_bytes, max(shelf.held_bytes, num_bytes))
            self._admit()
            self._changed.wait(_DISK_PAUSE_S)  # other threads may use the freed space first
