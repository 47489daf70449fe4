"""A remote object, read through the node's cache like a local file.

The process's fetcher fetches and checks blocks; this process opens their files, which stay open as those of
local files do. It requests a block again if that was evicted in between.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from meshfeed.arrays import Bytes, Floats, Longs
from meshfeed.errors import ChangedError
from meshfeed.files import ByteFile, Cache, Content, Fetching
from meshfeed.files.byte_file import Descriptor, acquire, fill, release
from meshfeed.files.cache.cache import cache_error
from meshfeed.files.url import is_hub, without_secrets
from meshfeed.intervals import numbered
from meshfeed.remote.blocks import CacheFolder
from meshfeed.remote.fetcher.objects import Address, Opened
from meshfeed.remote.fetcher.protocol import FetcherClient, LostError, fetcher, retried
from meshfeed.remote.retries import Stat

_MARKED_S = 10.0


class CachedFile(ByteFile):
    """A ByteFile over an object that a node fetches once.

    Args:
        url: of the object; or of a compressed local file, with `content`.
        cache: for its blocks.
        options: of the storage client, in addition to the environment's.
        content: its declared size and hashes; then it is fetched and checked as a whole.
        sums: URL of the checksums of its blocks, and the index of this file there; see `sums`.
    """

    is_remote = True

    def __init__(
        self,
        url: str,
        cache: Cache,
        options: Mapping[str, str] | None = None,
        content: Content | None = None,
        sums: tuple[str, int] | None = None,
    ) -> None:
        super().__init__(without_secrets(url))
        self._given, self.cache, self._options, self._content = url, cache, dict(options or {}), content
        self._sums = sums
        self._joints: tuple[Longs, Longs] | None = None
        self._known: Opened | None = None
        self._glanced: tuple[Stat, bytes] | None = None
        self._kept_open: set[int] = set()

    def forget_parent(self) -> None:
        """In a forked child: the parent's fetcher and threads are not its own."""
        super().forget_parent()
        self._at: tuple[FetcherClient, int, Opened] | None = None
        self._wished: Longs | None = None  # of each block, how many announced pieces are still to be read

    @property
    def size_bytes(self) -> int:
        return self._opened.cut.size_bytes if self._glanced is None else self._glanced[0].size_bytes

    @property
    def guarded_by(self) -> str | None:
        return self._opened.sums

    @property
    def version(self) -> str:
        return self._opened.tag if self._glanced is None else self._glanced[0].tag

    @property
    def content_id(self) -> str | None:
        return self._opened.tag if is_hub(self._given) else None

    @staticmethod
    def glance(files: Sequence[ByteFile], first_bytes: Sequence[int]) -> None:
        """Take size and first bytes of each file in one request, and then each peek beyond them in one.

        For files of one folder of which one process of a node needs little, once: the node keeps none of it.
        Does nothing for files on this machine, and for those that are fetched as a whole.

        first_bytes: of each file, at least 1. Raises StoreError.
        """
        far = [
            (file, count)
            for file, count in zip(files, first_bytes, strict=True)
            if isinstance(file, CachedFile) and file._content is None
        ]
        if not far:
            return
        cache, what = far[0][0].cache.make(), far[0][0].url
        wanted = [(file._address, count) for file, count in far]
        found = retried(lambda: fetcher().ask("glance", cache, wanted, what=what))
        for (file, _), seen in zip(far, found, strict=True):
            file._glanced = seen

    def look_again(self) -> None:
        self._glanced = None
        self._tell("look_again")

    def peek(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        if self._content is not None:
            return [self._whole(begin, max(min(end, self.size_bytes), begin)) for begin, end in ranges]
        if self._glanced is None:
            return self._ask("peek", [*ranges])
        stat, first = self._glanced
        spans = [(begin, min(end, stat.size_bytes)) for begin, end in ranges]
        beyond = [span for span in spans if span[0] < span[1] > len(first)]
        found: dict[tuple[int, int], bytes] = {}
        if beyond:
            address, cache = self._address, self.cache.make()
            read = retried(lambda: fetcher().ask("read", address, cache, beyond, stat.tag, what=self.url))
            found = dict(zip(beyond, read))
        return [found[span] if span in found else first[slice(*span)] for span in spans]

    def within(self, cache: Cache) -> CachedFile:
        return CachedFile(self._given, cache, self._options, self._content, self._sums)

    @property
    def sums(self) -> CachedFile | None:
        """The file with the checksums of its blocks, if any."""
        return None if self._sums is None else CachedFile(self._sums[0], self.cache, self._options)

    @property
    def fetching(self) -> Fetching:
        opened, folder = self._opened, CacheFolder(self.cache.make())
        try:
            cut, limit = opened.cut, folder.limit_bytes()
            return Fetching(cut.size_bytes, cut.block_bytes, limit, opened.check_bytes)
        except OSError as error:
            raise cache_error(folder.path, error) from error

    def __getstate__(self) -> dict[str, Any]:
        return {
            "given": (self._given, self.cache, self._options, self._content, self._sums),
            "joints": self._joints,
            "known": self._known,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["given"])
        self._joints, self._known = state["joints"], state["known"]

    def __repr__(self) -> str:
        return f"CachedFile({self.url!r})"

    def cut(self, begins: Longs, ends: Longs) -> None:
        """Let blocks end where the shards of a shuffle meet, see `cut_at`; not while the file is entered."""
        with self._lock:
            if self._depth:
                return
            known, self._known, self._at, self._joints = self._known, None, None, (begins, ends)
            for by_block in ("_edges", "_used"):
                vars(self).pop(by_block, None)
        if known is not None and known.tag != self._opened.tag:
            raise self._changed(known.tag, known.cut.size_bytes, self._opened)

    def will_need(self, begins: Longs, ends: Longs) -> None:
        """Ranges are fetched in the order of announcement."""
        blocks = self._pieces(begins, (ends - begins).clip(0), begins)[0]
        touched, counts = np.unique(blocks, return_counts=True)
        with self._lock:
            if self._wished is None:
                self._wished = np.zeros_like(self._used, np.int64)
            new = touched[self._wished[touched] == 0].tolist()
            self._wished[touched] += counts
        if new:
            self._tell("wish", new)

    def forget_needs(self) -> None:
        with self._lock:
            wished, self._wished = self._wished, None
        if wished is not None and wished.any():
            self._tell("release", None)

    def look_up(self, out: Bytes, begins: Longs, sizes: Longs) -> None:
        if out.size:
            self._fill(out, begins, sizes, sizes.cumsum() - sizes)

    # -- the blocks ---------------------------------------------------------------------------------------

    def _read(self, out: Bytes, begins: Longs, sizes: Longs, places: Longs) -> None:
        blocks = self._fill(out, begins, sizes, places)
        self.stats.opens = 1
        self._note_read(blocks)

    def _leave(self) -> None:
        self.forget_needs()
        self._close(*self._kept_open)

    def _fill(self, out: Bytes, begins: Longs, sizes: Longs, places: Longs) -> Longs:
        """Read ranges from the blocks that have arrived, until all are read; returns each piece's block."""
        blocks, begins, sizes, places = self._pieces(begins, sizes, places)
        left = np.arange(blocks.size)
        while left.size:
            wanted, of_piece = np.unique(blocks[left], return_inverse=True)
            files = self._arrived(wanted)
            fds = np.array([-1 if file is None else file.fd for file in files])[of_piece]
            here = left[fds >= 0]
            try:
                fill(fds[fds >= 0], out, begins[here], sizes[here], places[here], self.url)
                left = left[fds < 0]
            except ChangedError:  # one of them was evicted while it was read
                self._used[wanted] = 0
                self._close(*wanted.tolist())
            files.clear()  # else they would keep evicted blocks on the disk while others are asked for
        if not self._depth:
            self._close(*self._kept_open)
        return blocks

    def _arrived(self, blocks: Longs) -> list[Descriptor | None]:
        """The open files of blocks, once they are in the cache: of all, or of some if the cache is small."""
        if not self._used[blocks].all():
            self._close(*self._kept_open)  # the disk may have to make room, and an open file keeps its inode
            there, fetched = self._ask("need", blocks.tolist())
            with self._lock:
                self.stats.bytes_fetched += fetched
            self._used[there] = time.monotonic()
        files = [self._file(block) if self._used[block] else None for block in blocks.tolist()]
        for i in np.flatnonzero(time.monotonic() - self._used[blocks] > _MARKED_S).tolist():
            if (file := files[i]) is not None:  # else eviction would take it for unused
                self._used[blocks[i]] = time.monotonic()
                with contextlib.suppress(OSError):
                    os.utime(file.fd)
                self._close(int(blocks[i]))  # after this read, so that one that a user removed is let go
        return files

    @cached_property
    def _used(self) -> Floats:
        """When each block was last marked as used; 0 until this process has verified it."""
        return np.zeros(self._edges.size - 1)

    @cached_property
    def _edges(self) -> Longs:
        return self._opened.cut.edges

    def _file(self, block: int) -> Descriptor | None:
        """The open file of a block; None if it has been evicted."""

        def opens() -> Descriptor:
            path = self._opened.folder / self._opened.cut.name(block)
            try:
                return Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except FileNotFoundError:
                raise
            except OSError as error:
                raise cache_error(path, error) from error

        try:
            file = acquire((self, block), opens)
        except FileNotFoundError:
            self._used[block] = 0
            return None
        self._kept_open.add(block)
        return file

    def _close(self, *blocks: int) -> None:
        self._kept_open.difference_update(blocks)
        for block in blocks:
            release((self, block))

    def _pieces(self, begins: Longs, sizes: Longs, places: Longs) -> tuple[Longs, ...]:
        """Ranges cut at the ends of blocks: (block, byte in the block, bytes, place) of each piece."""
        edges = self._edges
        first = edges.searchsorted(begins, side="right") - 1
        counts = np.where(sizes > 0, edges.searchsorted(begins + sizes) - first, 0)
        if (counts == 1).all():
            return first, begins - edges[first], sizes, places
        source, number = numbered(counts)
        block = first[source] + number
        low = np.maximum(begins[source], edges[block])
        high = np.minimum((begins + sizes)[source], edges[block + 1])
        return block, low - edges[block], high - low, places[source] + low - begins[source]

    def _note_read(self, blocks: Longs) -> None:
        """Release announced blocks that have been read. blocks: of each range."""
        with self._lock:
            if self._wished is None:
                return
            touched, counts = np.unique(blocks, return_counts=True)
            before = self._wished[touched]
            self._wished[touched] = after = (before - counts).clip(0)
            read = touched[(before > 0) & (after == 0)].tolist()
        if read:
            self._tell("release", read)

    def _whole(self, begin: int, end: int) -> bytes:
        out = np.empty(end - begin, np.uint8)
        self.look_up(out, np.array([begin]), np.array([out.size]))
        return out.tobytes()

    # -- the fetcher ---------------------------------------------------------------------------------------

    @property
    def _opened(self) -> Opened:
        return self._known or retried(self._open)[2]

    def _open(self) -> tuple[FetcherClient, int, Opened]:
        """(fetcher, its number for this object, the object)."""
        one = fetcher()
        if (at := self._at) is not None and at[0] is one:
            return at
        cache = self.cache.make(), self.cache.limit_bytes, self.cache.block_bytes
        sums = None if self._sums is None else (Address.of(self._sums[0], self._options), self._sums[1])
        glanced = None if self._glanced is None else self._glanced[0].tag
        wanted = self._address, cache, self._content, sums, self._joints, glanced
        number, opened = one.ask("open", *wanted, what=self.url)
        if self._glanced is not None and self._glanced[0].tag != opened.tag:
            raise self._changed(self._glanced[0].tag, self._glanced[0].size_bytes, opened)
        with self._lock:  # not held during the request, since leaving the file takes it, too
            if self._at is not None and self._at[0] is one:
                return self._at
            if self._known is not None and self._known != opened:
                raise self._changed(self._known.tag, self._known.cut.size_bytes, opened)
            self._known = opened
            self._at = one, number, opened
            return self._at

    def _changed(self, was: str, was_bytes: int, now: Opened) -> ChangedError:
        return ChangedError(
            f"{self.url}: version {now.tag}, {now.cut.size_bytes} bytes, was {was} of {was_bytes} when this "
            f"run opened it; restore the old one, or start a new run"
        )

    @property
    def _address(self) -> Address:
        return Address.of(self._given, self._options)

    def _ask(self, request: str, *arguments: Any) -> Any:
        def ask() -> Any:
            one, number, _ = self._open()
            return one.ask(request, number, *arguments, what=self.url)

        return retried(ask)

    def _tell(self, request: str, *arguments: Any) -> None:
        """Send a request that needs no answer. If the fetcher has died, a new one has nothing to release."""
        with contextlib.suppress(LostError):
            at = self._open() if request == "wish" else self._at
            if at is not None:
                at[0].tell(request, at[1], *arguments)


def listed(url: str, cache: Cache, options: Mapping[str, str]) -> list[tuple[str, int]]:
    """(relative name, bytes) of all objects below a URL; see `Folder.names`."""
    address, folder = Address.of(url, options), cache.make()
    found = retried(lambda: fetcher().ask("list", address, folder, what=address.url))
    prefix = f"{address.path.rstrip('/')}/".lstrip("/")
    return [(name.removeprefix(prefix), size) for name, size in found]
