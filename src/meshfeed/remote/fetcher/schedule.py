"""Fetches blocks for one reading process: what it needs now first, then what it will need.

A *need* is a reader that waits for blocks. A *wish* is a block that will be needed later: it is fetched when
nothing is urgent, and pinned until it is released, so that no process evicts it before it is read.
"""

from __future__ import annotations

import logging
import os
import random
import resource
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from meshfeed.errors import CacheError, MeshfeedError, StoreError
from meshfeed.files.byte_file import Content
from meshfeed.files.cache.cache import FULL, cache_error
from meshfeed.remote.blocks import CacheFolder, Claim, Summed
from meshfeed.remote.fetcher.objects import RANGE_BYTES, StoredObject
from meshfeed.remote.fetcher.pace import Pace

T = TypeVar("T")

_THREADS = 24
_MOST_WHOLE_BYTES = 1 << 28
_DISK_PATIENCE_S, _PAUSE_S = 10.0, 0.2
_WASTE = 0.2  # share of the bytes fetched that were evicted before; above it, this is logged

Block = tuple[StoredObject, int]

_log = logging.getLogger("meshfeed")


class _NoRoomError(Exception):
    """The disk is full, and the block is not urgent."""


@dataclass(eq=False)
class _Need:
    """A reader that waits for blocks.

    Attributes:
        blocks: all that it needs.
        files: of these blocks.
        missing: those that have not arrived.
        error: why one of them cannot be fetched.
        is_short: the disk has no space for the missing ones until those that have arrived are read.
    """

    blocks: set[Block]
    files: set[Path]
    missing: set[Block]
    error: MeshfeedError | None = None
    is_short: bool = False


@dataclass(slots=True)
class _Traffic:
    """Bytes fetched into a cache, and how many of them it had held and evicted before."""

    num_bytes: int = 0
    again_bytes: int = 0
    has_warned: bool = False

    def add(self, cache: CacheFolder, num_bytes: int, *, is_again: bool) -> None:
        """Count a block; log once too many are fetched again."""
        limit = cache.seen_limit_bytes
        self.num_bytes += num_bytes
        self.again_bytes += num_bytes if is_again else 0
        if not self.has_warned and self.again_bytes > max(limit, _WASTE * self.num_bytes):
            self.has_warned = True
            _log.warning(
                "%s: of %d bytes fetched, %d had been fetched before and evicted; raise limit_bytes above %d",
                cache.path,
                self.num_bytes,
                self.again_bytes,
                limit,
            )


class Scheduler:
    """Fetches blocks into the cache with threads of its own, which end with the process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)  # readers wait, and fetches of whole objects
        self._idle = threading.Condition(self._lock)  # threads without work; who gets some wakes the next
        self._needs: list[_Need] = []
        self._urgent: deque[Block] = deque()
        self._wished: deque[Block] = deque()  # not fetched yet
        self._elsewhere = deque[tuple[float, Block]]()  # (when to look again, block)
        self._pins: dict[Block, int | None] = {}  # wishes; None before they are fetched
        self._flying: set[Block] = set()
        self._pinned_bytes = self._ahead = 0  # wishes fetched or in flight; requests in flight for wishes
        self._no_room_until = 0.0
        self._pace = Pace(RANGE_BYTES)
        self._whole_bytes = 0  # memory for objects that are fetched as a whole
        self._full_disks: set[CacheFolder] = set()  # whose disk was full at some time
        self._traffic: dict[CacheFolder, _Traffic] = {}
        self._most_pins = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2  # a pin is an open file
        self._num_pins = 0

    def start(self) -> None:
        for i in range(_THREADS):
            threading.Thread(target=self._run, name=f"meshfeed-fetch-{i}", daemon=True).start()

    def need(self, one: StoredObject, blocks: Sequence[int]) -> list[int]:
        """Wait for as many of the blocks as the cache may hold at a time, at least one, and return these.

        Raises a MeshfeedError if they cannot be fetched; OSError.
        """
        blocks = self._fitting(one, blocks)
        missing = [(one, block) for block in blocks if not one.blocks.touch(block)]
        if not missing:
            return [*blocks]
        files = {one.blocks.path(block) for block in blocks}
        need = _Need({(one, block) for block in blocks}, files, set(missing))
        with self._lock:
            self._needs.append(need)
            self._urgent.extend(missing)
            self._idle.notify()
            self._arrived.wait_for(lambda: need.error is not None or not need.missing or need.is_short)
            self._needs.remove(need)
        if need.error is not None:
            raise need.error
        return [block for block in blocks if (one, block) not in need.missing]

    def take_fetched_bytes(self, one: StoredObject) -> int:
        """Bytes of an object fetched since the last call."""
        with self._lock:
            num_bytes, one.bytes_fetched = one.bytes_fetched, 0
        return num_bytes

    def wish(self, one: StoredObject, blocks: Sequence[int]) -> None:
        """Announce blocks that will be needed, in this order."""
        with self._lock:
            for block in blocks:
                if (one, block) in self._pins:
                    continue
                self._pins[one, block] = None
                if self._room_for_pins(one) > 0 and one.blocks.touch(block):
                    self._pin((one, block))
                else:
                    self._wished.append((one, block))
            self._idle.notify()

    def release(self, one: StoredObject, blocks: Sequence[int] | None = None) -> None:
        """Drop wishes: of some blocks, or of the whole object."""
        with self._lock:
            if blocks is None:
                blocks = [block for of, block in self._pins if of is one]
            for block in blocks:
                self._unpin((one, block))
                self._pins.pop((one, block), None)
            self._no_room_until = 0.0
            self._idle.notify()

    def _fitting(self, one: StoredObject, blocks: Sequence[int]) -> Sequence[int]:
        """The first blocks that together fit into this process's part of the cache, at least one.

        Raises CacheError for a block that exceeds the cache.
        """
        cache, size = one.blocks.cache, one.blocks.num_bytes(blocks[0])
        if size > cache.seen_limit_bytes and size > (limit := cache.limit_bytes()):
            raise CacheError(
                f"{one.address.url}: {size} bytes are fetched at one time, the cache {cache.path} is limited "
                f"to {limit}; raise limit_bytes{'' if one.content else ', or lower block_bytes'}"
            )
        room = 2 * cache.most_pinned_bytes
        if cache in self._full_disks:
            room = min(room, (cache.held_bytes() + shutil.disk_usage(cache.path).free) // 2)
        for count, block in enumerate(blocks):
            room -= one.blocks.num_bytes(block)
            if room < 0 and count:
                return blocks[:count]
        return blocks

    # -- scheduling, under the lock -----------------------------------------------------------------------

    def _next_run(self) -> tuple[list[Block], bool] | None:
        """(adjacent blocks to fetch next, whether they are urgent); None if there is nothing to do."""
        while self._urgent:
            first = self._urgent.popleft()
            if self._is_needed(first) and first not in self._flying:
                return self._run_from(first, self._is_needed, self._pace.range_bytes), True
        if self._ahead >= self._pace.at_once or time.monotonic() < self._no_room_until:
            return None
        while self._elsewhere and self._elsewhere[0][0] < time.monotonic():
            self._wished.append(self._elsewhere.popleft()[1])
        while self._wished:
            first = self._wished[0]
            if self._is_wished(first):
                room = self._room_for_pins(first[0])
                if room <= 0:
                    return None
                return self._run_from(first, self._is_wished, min(room, self._pace.range_bytes)), False
            self._wished.popleft()
        return None

    def _room_for_pins(self, one: StoredObject) -> int:
        """Bytes that may be pinned, or fetched to be pinned."""
        if self._num_pins >= self._most_pins:
            return 0
        return one.blocks.cache.most_pinned_bytes - self._pinned_bytes

    def _is_needed(self, block: Block) -> bool:
        return any(block in need.missing and need.error is None for need in self._needs)

    def _is_wished(self, block: Block) -> bool:
        """Whether a block is wished for, but neither fetched nor in flight."""
        return block not in self._flying and self._pins.get(block, -1) is None

    def _run_from(self, first: Block, wanted: Callable[[Block], bool], most_bytes: int) -> list[Block]:
        one, number = first
        run, size = [first], one.blocks.num_bytes(number)
        while wanted(after := (one, number + 1)) and after not in self._flying:
            number += 1
            size += one.blocks.num_bytes(number)
            if size > most_bytes:
                break
            run.append(after)
        return run

    # -- the threads --------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                while (found := self._next_run()) is None:
                    self._idle.wait(_PAUSE_S if self._no_room_until or self._elsewhere else None)
                self._idle.notify()  # there may be more, which also waits for its time
                run, urgent = found
                self._flying.update(run)
                in_flight = 0 if urgent else sum(one.blocks.num_bytes(block) for one, block in run)
                self._pinned_bytes += in_flight
                self._ahead += not urgent
            present: set[Block] = set()
            error: MeshfeedError | None = None
            has_room = True
            try:
                has_room = self._fetch_run(run, urgent, present)
            except MeshfeedError as known:
                error = known
            except OSError as of_disk:  # also of giving claims up
                error = cache_error(run[0][0].blocks.folder, of_disk)
            except BaseException as unknown:  # if the thread died, its readers would wait endlessly
                error = StoreError(f"{run[0][0].address.url}: {type(unknown).__name__}: {unknown}")
            with self._lock:
                self._pinned_bytes -= in_flight
                self._ahead -= not urgent
                self._no_room_until = 0.0 if has_room else time.monotonic() + _PAUSE_S
                self._flying.difference_update(run)
                self._note(run, present, error, has_room=has_room)
                self._arrived.notify_all()

    def _fetch_run(self, run: Sequence[Block], urgent: bool, present: set[Block]) -> bool:
        """Fetch the first blocks of a run, or wait for another process that does; False if there is no room.

        Adds the blocks that are then in the cache to `present`.
        """
        one, first = run[0]
        claims: list[Claim] = []
        try:
            for block in run:
                claim = self._claimed(block, urgent=urgent, is_first=not claims)
                if claim is None:
                    break
                claims.append(claim)
            if not claims:
                if urgent or one.blocks.touch(first):
                    present.add(run[0])
                return True
            if not one.blocks.cache.reserve(claims, self._kept(), over_pins=urgent):
                return False
            for block, summed in zip(run, self._fetch(one, first, len(claims))):
                self._publish(block, claims[0], summed, urgent)
                present.add(block)
                claims.pop(0)
            one.blocks.cache.trim(self._kept())
            return True
        except _NoRoomError:
            return False
        finally:
            if claims:
                one.blocks.cache.give_up(claims)

    def _fetch(self, one: StoredObject, first: int, count: int) -> list[Summed]:
        began = time.monotonic()
        if one.content is not None:
            whole, fetched = self._fetch_whole(one, one.content)
            found = [whole]
        else:
            found, fetched = one.part(first, count)
        with self._lock:
            one.bytes_fetched += fetched
            if one.content is None:
                self._pace.learn(fetched, time.monotonic() - began)
        return found

    def _fetch_whole(self, one: StoredObject, content: Content) -> tuple[Summed, int]:
        """As `StoredObject.whole`, once the limit of memory allows it; a single object may exceed that."""
        size = one.stat.size_bytes + one.blocks.cut.size_bytes
        with self._lock:
            self._arrived.wait_for(
                lambda: not self._whole_bytes or self._whole_bytes + size <= _MOST_WHOLE_BYTES
            )
            self._whole_bytes += size
        try:
            return one.whole(content)
        finally:
            with self._lock:
                self._whole_bytes -= size
                self._arrived.notify_all()

    def _claimed(self, block: Block, *, urgent: bool, is_first: bool) -> Claim | None:
        """The right to fetch a block; None if it exists or, unless urgent, another process fetches it."""
        one, number = block
        if is_first:
            return self._with_room(block, urgent, lambda: one.blocks.claim(number, wait=urgent))
        try:
            return one.blocks.claim(number, wait=False)
        except OSError as error:
            if error.errno in FULL:
                return None
            raise

    def _publish(self, block: Block, claim: Claim, data: Summed, urgent: bool) -> None:
        one, number = block
        self._with_room(block, urgent, lambda: claim.publish(data))
        is_again = one.blocks.is_checked(number)
        one.blocks.published(number)
        with self._lock:
            for need in self._needs:
                need.missing.discard(block)
            self._arrived.notify_all()
            traffic = self._traffic.setdefault(one.blocks.cache, _Traffic())
            traffic.add(one.blocks.cache, claim.num_bytes, is_again=is_again)

    def _with_room(self, block: Block, urgent: bool, act: Callable[[], T]) -> T:
        """Do what needs space on the disk, evicting other blocks while the disk is full.

        Raises _NoRoomError if that does not suffice for a block that is not urgent; CacheError; OSError.
        """
        one, number = block
        began, cache, size = time.monotonic(), one.blocks.cache, one.blocks.num_bytes(number)
        while True:
            try:
                return act()
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._full_disks.add(cache)
                if not cache.free(size, self._kept(), over_pins=urgent):
                    if not urgent:
                        raise _NoRoomError from error
                    if time.monotonic() - began > _DISK_PATIENCE_S:
                        raise cache_error(one.blocks.folder, error) from error
                    self._cut_short(block)
                    time.sleep(random.uniform(0, _PAUSE_S))  # other readers may soon release theirs

    def _cut_short(self, block: Block) -> None:
        """Return to the readers of a block what has arrived; that can then be evicted, and so can wishes."""
        with self._lock:
            cache = block[0].blocks.cache  # a pin is an open file, which would keep an inode
            self._wished.extendleft(
                [each for each in reversed(self._pins) if each[0].blocks.cache is cache and self._unpin(each)]
            )
            for need in self._needs:
                need.is_short |= block in need.missing and need.missing < need.blocks
            self._arrived.notify_all()

    def _kept(self) -> set[Path]:
        """The files of all blocks of needs: their readers wait for the missing ones among them."""
        with self._lock:
            return set[Path]().union(*(need.files for need in self._needs))

    def _note(
        self, run: Sequence[Block], present: set[Block], error: MeshfeedError | None, *, has_room: bool
    ) -> None:
        """Update needs and wishes after a run. Blocks that did not arrive are fetched later, or failed."""
        for need in self._needs:
            need.missing -= present
            if not need.missing.isdisjoint(run):
                need.error = need.error or error
        for block in reversed(run):
            if self._is_needed(block):
                self._urgent.appendleft(block)
            if self._pins.get(block, -1) is not None:
                continue  # not wished for
            if block in present:
                self._pin(block)
            elif error is not None:
                del self._pins[block]  # its reader will need it, and get the error
            elif has_room and block == run[0]:
                self._elsewhere.append((time.monotonic() + _PAUSE_S, block))
            else:
                self._wished.appendleft(block)

    def _unpin(self, block: Block) -> bool:
        """Let a block be evicted, although its wish stays; True if it was pinned."""
        fd = self._pins.get(block)
        if fd is None:
            return False
        os.close(fd)
        self._pins[block] = None
        self._num_pins -= 1
        self._pinned_bytes -= block[0].blocks.num_bytes(block[1])
        return True

    def _pin(self, block: Block) -> None:
        """Keep a block until its wish is released."""
        one, number = block
        fd = one.blocks.pin(number)
        if fd is None:  # just evicted
            del self._pins[block]
        else:
            self._pins[block] = fd
            self._num_pins += 1
            self._pinned_bytes += one.blocks.num_bytes(number)
