"""The node's cache on disk: a folder for each object, a file for each block.

    blocks/<object>/<k>        block k: its bytes, then u32 crc32 of them; <k>+ if two shards read it
    blocks/<object>/<k>.part   a block while a process fetches it, locked by that process
    jobs/<name>                a process's limit, locked while the process lives
    room                       bytes of all blocks and parts without sums, in decimal; locked on change
    limit                      the last limit

Any number of processes of one user share a folder, without messages between them. What always holds:

- A block is fetched once: the process that holds the lock on its part fetches it; others wait for the lock.
- A reader never gets half a block: a rename publishes it, and each process checks its sum before first use.
- A process may be killed at any point. The kernel releases its locks, and the next process takes over its
  parts or removes them.
- A shared lock on a block pins it, because some process will read it. Eviction takes unpinned blocks first,
  the least recently used first. Pins only save work: a reader that misses a block requests it again.
- A block that two shards read, see `cut`, stays for the second one, up to a third of the limit.
- Blocks and parts together take at most the limit, except where all of them are needed right now.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import random
import secrets
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from meshfeed.files.local.lock import locked, take
from meshfeed.remote.cut import SHARED, Cut

SUM_BYTES = 4
"""Of the checksum behind each block."""
_PART = ".part"
_DEFAULT_LIMIT_BYTES = 64 << 30
_SPARE = 32  # an eviction frees 1/32 of the limit more than it must, so that the next ones need no scan
_SHARED = 3  # a third of the limit is for blocks that another shard will need
_PAUSE_S = 0.001
_SEEN_S = 1.0  # how long a limit that is not reached need not be read again


class CacheFolder:
    """One user's part of a cache folder, as one process sees it. All methods may raise OSError.

    Only `join` creates files other than blocks: a user may remove a temporary folder under a running fetcher.

    Attributes:
        path: of that part.
        seen_limit_bytes: the limit as it was read last, at most a second before the last reservation.
        most_pinned_bytes: this process's share of a quarter of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._blocks, self._jobs, self._room = path / "blocks", path / "jobs", path / "room"
        self._job: int | None = None
        self._limit_bytes: int | None = None
        self.seen_limit_bytes = self.most_pinned_bytes = _DEFAULT_LIMIT_BYTES
        self._seen_at = -math.inf
        self._is_over = False

    def join(self, limit_bytes: int | None) -> None:
        """Count this process's limit from now on: the largest that it was given."""
        is_new = self._job is None
        if not is_new and (limit_bytes or 0) <= (self._limit_bytes or 0):
            return
        with locked(self._room):
            if self._job is None:
                self._blocks.mkdir(mode=0o700, exist_ok=True)
                self._jobs.mkdir(mode=0o700, exist_ok=True)
                name = self._jobs / f"{os.getpid()}-{secrets.token_hex(4)}"
                self._job = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._job, fcntl.LOCK_EX)
            (self.path / "limit").touch(mode=0o600)
            if limit_bytes is not None:
                self._limit_bytes = limit_bytes
                os.pwrite(self._job, b"%d" % limit_bytes, 0)
            if is_new:
                self._evict(self._limit(), (), over_pins=False)  # and remove what killed processes left

    def limit_bytes(self) -> int:
        """The largest limit of the processes that use the folder, or else its last one."""
        with locked(self._room, create=False):
            return self._limit()

    def held_bytes(self) -> int:
        """Bytes of all blocks and parts."""
        with locked(self._room, create=False):
            return self._held()

    def object(self, key: str, cut: Cut) -> CachedBlocks:
        return CachedBlocks(self, self._blocks / key, cut)

    def reserve(self, claims: Sequence[Claim], keep: Collection[Path], *, over_pins: bool) -> bool:
        """Make room for claimed blocks. keep: blocks that stay.

        over_pins: evict pinned blocks, too, and exceed the limit if that does not suffice. Otherwise the
        result is False if there is no room.
        """
        num_bytes = sum(claim.num_bytes for claim in claims)
        with locked(self._room, create=False):
            held, limit = self._held(), self.seen_limit_bytes
            if held + num_bytes > limit or time.monotonic() - self._seen_at > _SEEN_S:
                limit = self._limit()  # a look at every job
            if held + num_bytes > limit:
                target = limit - num_bytes - limit // _SPARE
                held = self._evict(target, keep, over_pins=False)
                if held + num_bytes > limit and over_pins:
                    held = self._evict(limit - num_bytes, keep, over_pins=True)
                if held + num_bytes > limit and not over_pins:
                    return False
            for claim in claims:
                os.ftruncate(claim.fd, claim.num_bytes + SUM_BYTES)  # takes no disk space, but is counted
            self._count(held + num_bytes)
            self._is_over = held + num_bytes > limit
        return True

    def trim(self, keep: Collection[Path] = ()) -> None:
        """Evict unpinned blocks if this process has exceeded the limit. keep: blocks that stay."""
        if self._is_over:
            with locked(self._room, create=False):
                limit = self._limit()
                self._is_over = self._evict(limit, keep, over_pins=False) > limit

    def free(self, num_bytes: int, keep: Collection[Path], *, over_pins: bool) -> bool:
        """Evict at least that many bytes, since the disk is full; False if nothing can be evicted.

        over_pins: pinned blocks, too, if the others do not suffice.
        """
        with locked(self._room, create=False):
            held = self._evict(self._limit(), keep, over_pins=False)
            left = self._evict(held - num_bytes, keep, over_pins=False)
            if over_pins and left > held - num_bytes:
                left = self._evict(held - num_bytes, keep, over_pins=True)
            return left < held

    def give_up(self, claims: Sequence[Claim]) -> None:
        """Remove claimed parts. They are unlocked whatever goes wrong, since others wait for them."""
        try:
            with locked(self._room, create=False):
                num_bytes = sum(_counted(os.fstat(claim.fd)) for claim in claims)
                for claim in claims:
                    if _is_same(claim.fd, claim.part):
                        claim.part.unlink(missing_ok=True)
                self._count(self._held() - num_bytes)
        finally:
            for claim in claims:
                os.close(claim.fd)

    def remove(self, block: Path, fd: int) -> None:
        """Remove a block that is damaged, unless another has replaced it. fd: its open file."""
        with locked(self._room, create=False):
            if _is_same(fd, block):
                block.unlink(missing_ok=True)
                self._count(self._held() - _counted(os.fstat(fd)))

    # -- under the lock -----------------------------------------------------------------------------------

    def _count(self, num_bytes: int) -> None:
        """Record the bytes held, in place: a file truncated first would stay empty on a full disk."""
        with self._room.open("r+b", buffering=0) as file:
            file.write(b"%020d" % max(num_bytes, 0))

    def _held(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int(self._room.read_text())
        return self._evict(1 << 62, (), over_pins=False)

    def _limit(self) -> int:
        limits, num_jobs = list[int](), 0
        for file in self._jobs.iterdir():
            if _is_locked(file):
                num_jobs += 1
                with contextlib.suppress(OSError, ValueError):  # one without a limit
                    limits.append(int(file.read_text()))
            else:
                file.unlink(missing_ok=True)
        last = self.path / "limit"
        known = _DEFAULT_LIMIT_BYTES
        with contextlib.suppress(OSError, ValueError):
            known = int(last.read_text())
        if limits and max(limits) != known:
            with contextlib.suppress(FileNotFoundError), last.open("r+b", buffering=0) as file:
                file.write(b"%020d" % max(limits))  # of one length: a kill leaves the old one or this one
        limit = max(limits, default=known)
        self.seen_limit_bytes, self._seen_at = limit, time.monotonic()
        self.most_pinned_bytes = limit // (4 * max(num_jobs, 1))
        return limit

    def _evict(self, target_bytes: int, keep: Collection[Path], *, over_pins: bool) -> int:
        """Remove blocks until at most that many bytes are held; returns the bytes held then."""
        held, found = 0, dict[Path, os.stat_result]()
        for file in self._files():
            if file.suffix == _PART and not _removed_if_free(file):  # else its fetcher has died
                with contextlib.suppress(FileNotFoundError):
                    held += _counted(file.stat())
                    continue
            block = file.with_suffix("")  # a part may just have become this block
            with contextlib.suppress(FileNotFoundError):
                found[block] = block.stat()
        held += sum(map(_counted, found.values()))
        for block in _by_use(found, self.seen_limit_bytes // _SHARED):
            if held <= target_bytes:
                break
            if block not in keep and (over_pins or not _is_locked(block)):
                with contextlib.suppress(FileNotFoundError), block.open("r+b") as stream:
                    block.unlink()
                    stream.truncate(0)  # readers and pins have it open, which would keep the disk space
                held -= _counted(found[block])
        self._count(held)
        return held

    def _files(self) -> Iterator[Path]:
        with os.scandir(self._blocks) as objects:
            for each in objects:
                is_empty = True
                with contextlib.suppress(OSError), os.scandir(each.path) as files:
                    for file in files:
                        is_empty = False
                        yield Path(file.path)
                if is_empty:
                    with contextlib.suppress(OSError):  # a block was just added
                        Path(each.path).rmdir()


class Summed(NamedTuple):
    """Bytes and their crc32, which is computed once for all who need it."""

    data: memoryview
    crc: int

    @classmethod
    def of(cls, data: memoryview) -> Self:
        return cls(data, zlib.crc32(data))


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to fetch a block: its locked part.

    Attributes:
        part: the file.
        fd: the same file, open and locked.
        num_bytes: of the block.
    """

    part: Path
    fd: int
    num_bytes: int

    def publish(self, block: Summed) -> None:
        """Write the block and make it visible. Raises OSError; then the part is still claimed, and empty."""
        at, pieces = 0, [block.data, memoryview(block.crc.to_bytes(SUM_BYTES, "little"))]
        try:
            while pieces:
                at += (written := os.pwritev(self.fd, pieces, at))
                while pieces and written >= len(pieces[0]):
                    written -= len(pieces.pop(0))
                if pieces:
                    pieces[0] = pieces[0][written:]
        except OSError:  # on a full disk, others need the space that half a block takes
            os.ftruncate(self.fd, 0)
            os.ftruncate(self.fd, self.num_bytes + SUM_BYTES)
            raise
        if not _is_same(self.fd, self.part):  # the folder was cleared; the part may be another's
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.part))
        self.part.replace(self.part.with_suffix(""))
        os.close(self.fd)


class CachedBlocks:
    """The blocks of one object.

    Attributes:
        folder: their folder.
        cut: where each begins and ends.
        edges: of the cut.
    """

    def __init__(self, cache: CacheFolder, folder: Path, cut: Cut) -> None:
        self.cache, self.folder, self.cut = cache, folder, cut
        self.edges = cut.edges
        self._is_checked = bytearray(self.edges.size - 1)

    def num_bytes(self, block: int) -> int:
        return int(self.edges[block + 1] - self.edges[block])

    def path(self, block: int) -> Path:
        return self.folder / self.cut.name(block)

    def touch(self, block: int) -> bool:
        """Mark a block as used; True if it exists and this process has checked it."""
        if not self._is_checked[block]:
            return False
        path = self.path(block)
        with contextlib.suppress(OSError):  # the disk may have become read-only; its blocks can still be read
            os.utime(path)
        try:
            return path.stat().st_size == self.num_bytes(block) + SUM_BYTES
        except FileNotFoundError:
            return False

    def pin(self, block: int) -> int | None:
        """An open file that keeps the block from eviction until it is closed; None if it is gone."""
        path = self.path(block)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # also if there are too many open files
            return None
        with contextlib.suppress(OSError):
            take(fd, path, fcntl.LOCK_SH)
            if _is_same(fd, path):
                return fd
        os.close(fd)
        return None

    def claim(self, block: int, *, wait: bool) -> Claim | None:
        """The right to fetch a block; None if it exists.

        wait: for another process that is fetching it; if False, None may also mean that one is. Raises
        CacheError if that one is stopped for a minute.
        """
        path = self.path(block)
        part = path.with_suffix(_PART)
        while not self._is_there(block):
            fd = self._locked_part(part, wait=wait)
            if fd is None and not wait:
                return None
            if fd is None:
                continue
            if not path.exists():
                return Claim(part, fd, self.num_bytes(block))
            part.unlink(missing_ok=True)  # another process has just published it
            os.close(fd)
        return None

    def is_checked(self, block: int) -> bool:
        """Whether this process has checked the block, which therefore existed."""
        return bool(self._is_checked[block])

    def published(self, block: int) -> None:
        self._is_checked[block] = 1

    def _locked_part(self, part: Path, *, wait: bool) -> int | None:
        """The part, open and locked; None if another process has it. wait: until that process is done."""
        try:
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # this is the object's first block, or its last one was just evicted
            with contextlib.suppress(FileExistsError):  # another process makes it, or removes it again
                self.folder.mkdir(mode=0o700)
            return self._locked_part(part, wait=wait)
        is_held = False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_held := _is_same(fd, part):
                return fd
        except BlockingIOError:
            if wait:
                take(fd, part, fcntl.LOCK_SH, works=True)  # until the other process has published it or died
        finally:
            if not is_held:
                os.close(fd)
        if wait:
            time.sleep(random.uniform(0, _PAUSE_S))  # others waited too, and only one can hold it
        return None

    def _is_there(self, block: int) -> bool:
        """Whether a block exists and its checksum is right. A wrong one is removed."""
        if self.touch(block):
            return True
        path = self.path(block)
        try:
            file = path.open("rb", buffering=0)
        except FileNotFoundError:
            return False
        with file:
            data = memoryview(b"")
            with contextlib.suppress(OSError):  # a sector that the disk cannot read
                data = memoryview(file.readall())
            body = data[:-SUM_BYTES]
            right = zlib.crc32(body).to_bytes(SUM_BYTES, "little") == bytes(data[-SUM_BYTES:])
            if len(body) != self.num_bytes(block) or not right:
                self.cache.remove(path, file.fileno())
                return False
        self.published(block)
        return True


def _by_use(found: Mapping[Path, os.stat_result], most_shared_bytes: int) -> list[Path]:
    """Blocks in the order of eviction: the least recently used first.

    Shared ones count as used when any block of their object was: the newest, up to `most_shared_bytes`.
    """
    used, of_object = {block: status.st_mtime_ns for block, status in found.items()}, dict[Path, int]()
    for block, at in used.items():
        of_object[block.parent] = max(of_object.get(block.parent, at), at)
    for block in sorted((each for each in found if each.name.endswith(SHARED)), key=used.__getitem__)[::-1]:
        most_shared_bytes -= _counted(found[block])
        if most_shared_bytes < 0:
            break
        used[block] = of_object[block.parent]
    return sorted(found, key=lambda block: (used[block], block))


def _counted(status: os.stat_result) -> int:
    """Bytes of the block in a file."""
    return max(status.st_size - SUM_BYTES, 0)


def _is_locked(file: Path) -> bool:
    """Whether a process has a lock on a file; False if it is gone."""
    try:
        with locked(file, wait=False, create=False):
            return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False


def _removed_if_free(part: Path) -> bool:
    """Remove a part unless a process has claimed it; whether it is gone."""
    try:
        with part.open("r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_same(stream.fileno(), part):  # replaced in the meantime
                return False
            part.unlink()  # those who wait for the lock notice
    except BlockingIOError:
        return False
    except FileNotFoundError:
        pass
    return True


def _is_same(fd: int, path: Path) -> bool:
    """Whether an open file still has this path."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False
