"""A remote object, read through the node's cache like a local file.

The process's fetcher fetches and checks blocks; this process opens their files. It requests a block again if
that was evicted in between.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from meshfeed.errors import ChangedError
from meshfeed.files.byte_file import I64, ByteFile, Bytes, Content
from meshfeed.files.cache.blocks import num_blocks_of
from meshfeed.files.cache.cache import Cache, cache_error
from meshfeed.files.fetcher.objects import Address, Opened
from meshfeed.files.fetcher.protocol import FetcherClient, LostError, fetcher, retried
from meshfeed.files.local.file import fill
from meshfeed.files.url import is_hub, without_secrets

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
        self._given, self._cache, self._options, self._content = url, cache, dict(options or {}), content
        self._sums = sums
        self._known: Opened | None = None

    def forget_parent(self) -> None:
        """In a forked child: the parent's fetcher and threads are not its own."""
        super().forget_parent()
        self._at: tuple[FetcherClient, int, Opened] | None = None
        self._wished: Counter[int] = Counter()

    @property
    def size_bytes(self) -> int:
        return self._opened.size_bytes

    @property
    def guarded_by(self) -> str | None:
        return self._opened.sums

    @property
    def content_id(self) -> str | None:
        return self._opened.tag if is_hub(self._given) else None

    def look_again(self) -> None:
        self._tell("look_again")

    def peek(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        if self._content is not None:
            return [self._whole(begin, max(min(end, self.size_bytes), begin)) for begin, end in ranges]
        return self._ask("peek", [*ranges])

    def within(self, cache: Cache) -> CachedFile:
        """The same object in its current version, read through another cache."""
        return CachedFile(self._given, cache, self._options, self._content, self._sums)

    @property
    def sums(self) -> CachedFile | None:
        """The file with the checksums of its blocks, if any."""
        return None if self._sums is None else CachedFile(self._sums[0], self._cache, self._options)

    @property
    def cache(self) -> Cache:
        """The cache of its blocks."""
        return self._cache

    def __getstate__(self) -> dict[str, Any]:
        return {
            "given": (self._given, self._cache, self._options, self._content, self._sums),
            "known": self._known,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["given"])
        self._known = state["known"]

    def __repr__(self) -> str:
        return f"CachedFile({self.url!r})"

    def will_need(self, begins: I64, ends: I64) -> None:
        """Ranges are fetched in the order of announcement."""
        some = ends > begins
        begins, ends = begins[some], ends[some]
        if not begins.size:
            return
        touched = self._pieces(begins, ends - begins, begins)[0]
        with self._lock:
            self._wished.update(touched.tolist())
        self._tell("wish", np.unique(touched).tolist())

    def forget_needs(self) -> None:
        with self._lock:
            has_needs = bool(self._wished)
            self._wished.clear()
        if has_needs:
            self._tell("release", None)

    def look_up(self, out: Bytes, begins: I64, sizes: I64) -> None:
        if out.size:
            self._fill(out, begins, sizes, sizes.cumsum() - sizes)

    # -- the blocks ---------------------------------------------------------------------------------------

    def _read(self, out: Bytes, begins: I64, sizes: I64, places: I64) -> None:
        self._fill(out, begins, sizes, places)
        self.stats.opens = 1
        self._note_read(begins, sizes)

    def _leave(self) -> None:
        self.forget_needs()

    def _fill(self, out: Bytes, begins: I64, sizes: I64, places: I64) -> None:
        """Read ranges block by block: from the blocks that have arrived, until all are read."""
        pieces = self._pieces(begins, sizes, places)
        while pieces[0].size:
            wanted = np.unique(pieces[0])
            there = self._need(wanted)
            is_left = np.zeros(pieces[0].size, np.bool_)
            if there.size < wanted.size:
                is_left = np.isin(pieces[0], there, invert=True)
            by_block = pieces[0].argsort(kind="stable")
            for of_one in np.split(by_block, np.flatnonzero(np.diff(pieces[0][by_block])) + 1):
                if not is_left[of_one[0]]:
                    block, *where = (each[of_one] for each in pieces)
                    is_left[of_one] = not self._read_block(int(block[0]), out, *where)
            pieces = tuple(each[is_left] for each in pieces)

    def _need(self, blocks: I64) -> I64:
        """Wait for blocks; returns those in the cache: all, or at least one if the cache is small."""
        used = self._used
        if used[blocks].all():
            return blocks
        there, fetched = self._ask("need", blocks.tolist())
        with self._lock:
            self.stats.bytes_fetched += fetched
        used[there] = time.monotonic()
        return np.array(there, np.int64)

    @cached_property
    def _used(self) -> npt.NDArray[np.float64]:
        """When each block was last marked as used; 0 until this process has verified it."""
        opened = self._opened
        return np.zeros(num_blocks_of(opened.size_bytes, opened.block_bytes))

    def _read_block(self, block: int, out: Bytes, begins: I64, sizes: I64, places: I64) -> bool:
        """Read ranges of one block; False if it has been evicted."""
        path = self._opened.folder / str(block)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._used[block] = 0
            return False
        except OSError as error:
            raise cache_error(path, error) from error
        try:
            fill(fd, out, begins, sizes, places, self.url)
            now = time.monotonic()
            if now - self._used[block] > _MARKED_S:  # else eviction would take it for unused
                self._used[block] = now
                with contextlib.suppress(OSError):
                    os.utime(fd)
        except ChangedError:  # evicted while it was read
            self._used[block] = 0
            return False
        finally:
            os.close(fd)
        return True

    def _pieces(self, begins: I64, sizes: I64, places: I64) -> tuple[I64, ...]:
        """Ranges cut at the ends of blocks: (block, byte in the block, bytes, place) of each piece."""
        unit = self._opened.block_bytes
        first = begins // unit
        counts = np.where(sizes > 0, (begins + sizes - 1) // unit - first + 1, 0)
        if (counts == 1).all():
            return first, begins - first * unit, sizes, places
        # ranges of 2 1 3 blocks -> 0 0 1 2 2 2, and 0 1 0 0 1 2
        source = np.arange(counts.size).repeat(counts)
        block = first[source] + np.arange(source.size) - (counts.cumsum() - counts)[source]
        low = np.maximum(begins[source], block * unit)
        high = np.minimum((begins + sizes)[source], (block + 1) * unit)
        return block, low - block * unit, high - low, places[source] + low - begins[source]

    def _note_read(self, begins: I64, sizes: I64) -> None:
        """Release announced blocks that have been read."""
        with self._lock:
            if not self._wished:
                return
            read: list[int] = []
            for block in self._pieces(begins, sizes, begins)[0].tolist():
                if block in self._wished:
                    self._wished[block] -= 1
                    if not self._wished[block]:
                        del self._wished[block]
                        read.append(block)
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
        cache = self._cache.make(), self._cache.limit_bytes, self._cache.block_bytes
        sums = None if self._sums is None else (Address.of(self._sums[0], self._options), self._sums[1])
        address = Address.of(self._given, self._options)
        number, opened = one.ask("open", address, cache, self._content, sums, what=self.url)
        with self._lock:  # not held during the request, since leaving the file takes it, too
            if self._at is not None and self._at[0] is one:
                return self._at
            if self._known not in (None, opened):
                raise ChangedError(
                    f"{self.url}: version {opened.tag}, {opened.size_bytes} bytes, was {self._known.tag} of "
                    f"{self._known.size_bytes} when this run opened it; restore the old one, or start a new "
                    f"run"
                )
            self._known = opened
            self._at = one, number, opened
            return self._at

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
