"""Fetches blocks for one reading process: what it needs now first, then what it will need.

A *need* is a reader that waits for blocks. A *wish* is a block that will be needed later: it is fetched when
nothing is urgent, and pinned until it is released, so that others do not evict it before.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshfeed.errors import CacheError, MeshfeedError, StoreError
from meshfeed.files.blocks import CacheFolder, Claim, Piece
from meshfeed.files.byte_file import Content
from meshfeed.files.objects import RANGE_BYTES, StoredObject
from meshfeed.files.pace import Pace

_THREADS = 24
_MOST_WHOLE_BYTES = 1 << 28
_DISK_PATIENCE_S, _PAUSE_S = 10.0, 0.2
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Block = tuple[StoredObject, Piece]


@dataclass(eq=False)
class _Need:
    """A reader that waits for blocks.

    Attributes:
        files: of all its blocks.
        missing: blocks that are not there yet.
        error: why one of them cannot be fetched.
    """

    files: set[Path]
    missing: set[Block]
    error: MeshfeedError | None = None


class Fetcher:
    """Fetches blocks into the cache with threads of its own, which end with the process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._needs: list[_Need] = []
        self._urgent: deque[Block] = deque()
        self._wished: deque[Block] = deque()  # not fetched yet
        self._elsewhere = deque[tuple[float, Block]]()  # another process fetches it; when to look again
        self._pins: dict[Block, int | None] = {}  # wishes; None before they are fetched
        self._flying: set[Block] = set()
        self._pinned_bytes = self._ahead = 0  # wishes fetched or in flight; requests in flight for wishes
        self._no_room_until = 0.0
        self._pace = Pace(RANGE_BYTES)
        self._whole_bytes = 0  # memory for objects that are fetched as a whole
        self._full_disks: dict[CacheFolder, str] = {}  # that have been full; the error
        self._most_pins = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2  # a pin is an open file
        self._num_pins = 0

    def start(self) -> None:
        """Start the threads."""
        for i in range(_THREADS):
            threading.Thread(target=self._work, name=f"meshfeed-fetch-{i}", daemon=True).start()

    def need(self, one: StoredObject, blocks: Sequence[Piece]) -> None:
        """Wait until all blocks are there. Raises a MeshfeedError if they cannot be; OSError."""
        missing = [(one, block) for block in blocks if not one.blocks.touch(block)]
        if not missing:
            return
        self._refuse_too_large(one, blocks)
        need = _Need(set(map(one.blocks.path, blocks)), set(missing))
        with self._changed:
            self._needs.append(need)
            self._urgent.extend(missing)
            self._changed.notify_all()
            self._changed.wait_for(lambda: need.error is not None or not need.missing)
            self._needs.remove(need)
        if need.error is not None:
            raise need.error

    def told_bytes(self, one: StoredObject) -> int:
        """The bytes of an object fetched since the last call."""
        with self._changed:
            num_bytes, one.bytes_fetched = one.bytes_fetched, 0
        return num_bytes

    def wish(self, one: StoredObject, blocks: Sequence[Piece]) -> None:
        """Announce blocks that will be needed, in this order."""
        with self._changed:
            for block in blocks:
                if (one, block) in self._pins:
                    continue
                self._pins[one, block] = None
                if self._room_for_pins(one) > 0 and one.blocks.touch(block):
                    self._pin((one, block))
                else:
                    self._wished.append((one, block))
            self._changed.notify_all()

    def release(self, one: StoredObject, blocks: Sequence[Piece] | None = None) -> None:
        """Drop wishes: of some blocks, or of the whole object."""
        with self._changed:
            if blocks is None:
                blocks = [block for of, block in self._pins if of is one]
            for block in blocks:
                fd = self._pins.pop((one, block), None)
                if fd is not None:
                    os.close(fd)
                    self._num_pins -= 1
                    self._pinned_bytes -= one.blocks.num_bytes(block)
            self._no_room_until = 0.0
            self._changed.notify_all()

    def _refuse_too_large(self, one: StoredObject, blocks: Sequence[Piece]) -> None:
        cache = one.blocks.cache
        size = sum(one.blocks.num_bytes(block) for block in blocks if isinstance(block, int))
        full = self._full_disks.get(cache)
        if full and size > cache.held_bytes() + shutil.disk_usage(cache.path).free:
            raise CacheError(f"{one.address.url}: {size} bytes are needed at one time; {full}")
        if size > cache.seen_limit_bytes and size > (limit := cache.limit_bytes()):
            raise CacheError(
                f"{one.address.url}: {size} bytes in {len(blocks)} blocks are needed at one time, the cache "
                f"{cache.path} is limited to {limit}; raise limit_bytes, or lower block_bytes or "
                f"what is read at one time"
            )

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
        """Whether a block is wished for, and neither fetched nor in flight."""
        return block not in self._flying and self._pins.get(block, -1) is None

    def _run_from(self, first: Block, wanted: Callable[[Block], bool], most_bytes: int) -> list[Block]:
        one, number = first
        run, size = [first], one.blocks.num_bytes(number)
        while isinstance(number, int) and wanted(after := (one, number + 1)) and after not in self._flying:
            number += 1
            size += one.blocks.num_bytes(number)
            if size > most_bytes:
                break
            run.append(after)
        return run

    # -- the threads --------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                while (found := self._next_run()) is None:
                    self._changed.wait(_PAUSE_S if self._no_room_until or self._elsewhere else None)
                run, urgent = found
                self._flying.update(run)
                in_flight = 0 if urgent else sum(one.blocks.num_bytes(block) for one, block in run)
                self._pinned_bytes += in_flight
                self._ahead += not urgent
            there: set[Block] = set()
            error: MeshfeedError | None = None
            has_room = True
            try:
                has_room = self._bring(run, urgent, there)
            except MeshfeedError as known:
                error = known
            except BaseException as unknown:  # if the thread died, its readers would wait endlessly
                error = StoreError(f"{run[0][0].address.url}: {type(unknown).__name__}: {unknown}")
            with self._changed:
                self._pinned_bytes -= in_flight
                self._ahead -= not urgent
                self._no_room_until = 0.0 if has_room else time.monotonic() + _PAUSE_S
                self._flying.difference_update(run)
                self._note(run, there, error, has_room=has_room)
                self._changed.notify_all()

    def _bring(self, run: Sequence[Block], urgent: bool, there: set[Block]) -> bool:
        """Fetch the first blocks of a run, or wait for another process that does; False if there is no room.

        Adds to `there` those that are there.
        """
        one, first = run[0]
        claims: list[Claim] = []
        try:
            for _, number in run:
                claim = one.blocks.claim(number, wait=urgent and not claims)
                if claim is None:
                    break
                claims.append(claim)
            if not claims:
                if urgent or one.blocks.touch(first):
                    there.add(run[0])
                return True
            if not one.blocks.cache.reserve(claims, self._kept(), over_pins=urgent):
                return False
            data, at = self._fetch(one, first, len(claims)), 0
            for block in run[: len(claims)]:
                size = claims[0].num_bytes
                if not self._published(block, claims[0], data[at : at + size], urgent):
                    return False
                one.blocks.published(block[1])
                there.add(block)
                claims.pop(0)
                at += size
            one.blocks.cache.trim(self._kept())
            return True
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise CacheError(
                f"{one.blocks.folder}: {error.strerror or error}; was the cache folder cleared during this "
                f"run, or is its disk faulty?"
            ) from error
        finally:
            if claims:
                one.blocks.cache.give_up(claims)

    def _fetch(self, one: StoredObject, first: Piece, count: int) -> memoryview:
        """The bytes of `count` adjacent blocks, or of a peek, which is neither checked nor counted."""
        if isinstance(first, tuple):
            return one.read(*first)
        began = time.monotonic()
        if one.content is not None:
            data, fetched = self._fetch_whole(one, one.content)
        else:
            begin = first * one.blocks.block_bytes
            end = min(begin + count * one.blocks.block_bytes, one.blocks.size_bytes)
            data, fetched = one.part(begin, end)
        with self._changed:
            one.bytes_fetched += fetched
            if one.content is None:
                self._pace.learn(fetched, time.monotonic() - began)
        return data

    def _fetch_whole(self, one: StoredObject, content: Content) -> tuple[memoryview, int]:
        """As `StoredObject.whole`, once there is memory for it; a single object may exceed that."""
        size = one.stat.size_bytes + one.blocks.size_bytes
        with self._changed:
            self._changed.wait_for(
                lambda: not self._whole_bytes or self._whole_bytes + size <= _MOST_WHOLE_BYTES
            )
            self._whole_bytes += size
        try:
            return one.whole(content)
        finally:
            with self._changed:
                self._whole_bytes -= size
                self._changed.notify_all()

    def _published(self, block: Block, claim: Claim, data: memoryview, urgent: bool) -> bool:
        """Publish a block; False if the disk is full and the block is not urgent."""
        one, number = block
        # a peek is served without the cache, too, and waits for no room
        patience_s = 0.0 if isinstance(number, tuple) else _DISK_PATIENCE_S
        began, cache = time.monotonic(), one.blocks.cache
        while True:
            try:
                claim.publish(data)
                return True
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                if not cache.free(claim.num_bytes, self._kept(), over_pins=urgent):
                    if not urgent:
                        return False
                    if time.monotonic() - began > patience_s:
                        raise self._full_disk(one, cache, claim, error) from error
                    time.sleep(_PAUSE_S)  # others may be done with theirs soon

    def _full_disk(self, one: StoredObject, cache: CacheFolder, claim: Claim, error: OSError) -> CacheError:
        held = cache.held_bytes() - claim.num_bytes
        self._full_disks[cache] = (
            f"{one.blocks.folder}: {error.strerror or error} with {held} bytes held, below limit_bytes of "
            f"the cache; free space on this disk, or give a cache folder on another"
        )
        return CacheError(self._full_disks[cache])

    def _kept(self) -> set[Path]:
        """The files of blocks that readers of this process wait for, with others."""
        with self._changed:
            return set[Path]().union(*(need.files for need in self._needs))

    def _note(
        self, run: Sequence[Block], there: set[Block], error: MeshfeedError | None, *, has_room: bool
    ) -> None:
        """Note for needs and wishes which blocks of a run came. The others follow later, or have an error."""
        for need in self._needs:
            need.missing -= there
            if not need.missing.isdisjoint(run):
                need.error = need.error or error
        for block in reversed(run):
            if self._is_needed(block):
                self._urgent.appendleft(block)
            if self._pins.get(block, -1) is not None:
                continue  # not wished for
            if block in there:
                self._pin(block)
            elif error is not None:
                del self._pins[block]  # its reader will need it, and be told
            elif has_room and block == run[0]:
                self._elsewhere.append((time.monotonic() + _PAUSE_S, block))
            else:
                self._wished.appendleft(block)

    def _pin(self, block: Block) -> None:
        """Keep a block until its wish is released."""
        one, number = block
        fd = one.blocks.pin(number)
        if fd is None:  # evicted just now
            del self._pins[block]
        else:
            self._pins[block] = fd
            self._num_pins += 1
            self._pinned_bytes += one.blocks.num_bytes(number)
