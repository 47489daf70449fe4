"""A remote object, read through the node's cache like a local file."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from meshfeed.errors import CacheError, ChangedError, StoreError
from meshfeed.files.byte_file import I64, Bytes, Content, FileStats, Vector
from meshfeed.files.cache import Cache
from meshfeed.files.descriptors import Descriptor
from meshfeed.files.entries import EntriesOf
from meshfeed.files.facts import open_request
from meshfeed.files.link import Link, LostError, Session, link_of, retried
from meshfeed.files.local import fill
from meshfeed.files.mapping import mapped
from meshfeed.files.table import DATA, Entries, is_valid, map_table, num_blocks_of
from meshfeed.files.url import without_secrets

_RELEASED_TOGETHER, _RELEASED_BYTES = 64, 16 << 20  # blocks released in one message


@dataclass(frozen=True, slots=True)
class _Opened:
    """The leader's answer about the object; the folder stays valid after that leader dies."""

    folder: Path
    size_bytes: int
    block_bytes: int
    tag: str
    sums: str | None
    birth: int

    def same_version(self, other: _Opened) -> bool:
        """Whether another leader has the same object, possibly in a recreated folder."""
        return replace(self, birth=0) == replace(other, birth=0)


class CachedFile:
    """A ByteFile over an object that a node fetches once.

    Args:
        url: of the object; or of a compressed local file, with `content`.
        cache: for its blocks.
        options: of the storage client, in addition to the environment's.
        content: its declared size and hashes; then it is fetched and checked as a whole.
        sums: URL of the checksums of its blocks, and the index of this file there; see `sums`.
    """

    def __init__(
        self,
        url: str,
        cache: Cache,
        options: Mapping[str, str] | None = None,
        content: Content | None = None,
        sums: tuple[str, int] | None = None,
    ) -> None:
        self._given, self._cache, self._options, self._content = url, cache, dict(options or {}), content
        self._sums = sums
        self.url = without_secrets(url)
        self.is_remote = True
        self.stats = FileStats()
        self._lock = threading.RLock()
        self._known: _Opened | None = None
        self._session: Session | None = None
        self._number = -1
        self._file = Descriptor(self._open_data)
        self._file_id: tuple[int, int] | None = None
        self._depth = 0
        self._wished: Counter[int] = Counter()
        self._read: list[int] = []
        _files.add(self)

    def forget_parent(self) -> None:
        """In a forked child: the child's leader connection does not know the parent's requests."""
        self._lock = threading.RLock()
        self._session = None
        self._wished, self._read = Counter(), []

    @property
    def size_bytes(self) -> int:
        """See ByteFile."""
        return self._opened.size_bytes

    @property
    def tag(self) -> str:
        """Identifies the version that was opened, such as its ETag."""
        return self._opened.tag

    @property
    def guarded_by(self) -> str | None:
        """See ByteFile."""
        return self._opened.sums

    def look_again(self) -> None:
        """See ByteFile."""
        self._notify("look again")

    def peek(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See ByteFile. Storage is asked once for all processes of the node."""
        if self._content is not None:
            return [self._whole(begin, min(end, self.size_bytes)) for begin, end in ranges]
        answer, payload = self._ask("peek", ranges=[list(span) for span in ranges])
        ends = np.cumsum(answer["sizes"]).tolist()
        return [payload[end - size : end] for end, size in zip(ends, answer["sizes"])]

    def within(self, cache: Cache) -> CachedFile:
        """The same object in its current version, read through another cache."""
        return CachedFile(self._given, cache, self._options, self._content, self._sums)

    @property
    def cache(self) -> Cache:
        """The cache of its blocks."""
        return self._cache

    def __enter__(self) -> Self:
        with self._lock:
            self._depth += 1
        return self

    def __exit__(self, *exc: object) -> None:
        if self._depth == 1:
            self.forget_needs()
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._drop_mappings()

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

    def read_into(self, out: Bytes, begins: I64, sizes: I64, places: I64 | None = None) -> None:
        """See ByteFile."""
        if out.size == 0:
            return
        if not self._depth:
            raise StoreError(f"{self.url}: not entered; read from it inside `with`")
        blocks = self._blocks_of(begins, begins + sizes)
        self._read_stable(blocks, lambda: self._fill(out, begins, sizes, places))
        with self._lock:
            self.stats.reads += sizes.size
            self.stats.bytes_read += int(sizes.sum())
        self._note_read(begins, sizes)

    def will_need(self, begins: I64, ends: I64) -> None:
        """See ByteFile. Ranges are fetched in the order of announcement."""
        some = ends > begins
        begins, ends = begins[some], ends[some]
        if not begins.size:
            return
        touched = self._each_block(begins, ends)
        with self._lock:
            self._wished.update(touched.tolist())
        self._notify("wish", blocks=np.unique(touched).tolist())

    def forget_needs(self) -> None:
        """See ByteFile."""
        with self._lock:
            has_needs = bool(self._wished or self._read)
            self._wished.clear()
            self._read.clear()
        if has_needs:
            self._notify("forget")

    def arrays(self, *parts: tuple[str, int, int]) -> list[Vector]:
        """See ByteFile. Looking up entries fetches their blocks first and copies them."""
        return [EntriesOf(self, np.dtype(dtype), begin, count) for dtype, begin, count in parts]

    def gathered(self, dtype: np.dtype[Any], begin: int, places: I64) -> npt.NDArray[Any]:
        """Entries at the indices `places` of an array of `dtype` that starts at byte `begin`."""
        if not places.size:
            return np.zeros(0, dtype)
        at = begin + places * dtype.itemsize
        blocks = self._blocks_of(at, at + dtype.itemsize)
        return self._read_stable(blocks, lambda: self._entries(dtype, begin)[places])

    def between(self, dtype: np.dtype[Any], begin: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Entries start..stop of an array of `dtype` that starts at byte `begin`."""
        if stop <= start:
            return np.zeros(0, dtype)
        ends = np.array([begin + start * dtype.itemsize]), np.array([begin + stop * dtype.itemsize])
        return self._read_stable(
            self._blocks_of(*ends), lambda: self._entries(dtype, begin)[start:stop].copy()
        )

    def _entries(self, dtype: np.dtype[Any], begin: int) -> npt.NDArray[Any]:
        return np.frombuffer(self._pages, dtype, (self.size_bytes - begin) // dtype.itemsize, begin)

    # -- the blocks ---------------------------------------------------------------------------------------

    def _read_stable(self, blocks: I64, read: Any) -> Any:
        """The result of `read()`, repeated until all blocks are valid and unchanged from before to after."""
        while True:
            generations = self._table["generation"]
            before = generations[blocks]
            # request all of them: valid ones must stay while the others are fetched
            needed: list[int] = [] if is_valid(before).all() else blocks.tolist()
            if needed:
                self._need(needed)
                generations = self._table["generation"]  # a new leader may have recreated the folder
                before = generations[blocks]
            try:
                if is_valid(before).all():
                    result = read()
                    if np.array_equal(generations[blocks], before):
                        return result
            finally:
                if needed:
                    self._notify("release", needs=needed, wishes=[])

    def _need(self, blocks: list[int]) -> None:
        """Wait until blocks are valid; they stay until released."""
        try:
            self._ask("need", blocks=blocks)
        except StoreError:
            raise
        except BaseException:  # interrupted: the blocks will not be read
            self._notify("abandon", blocks=blocks)
            raise

    def _blocks_of(self, begins: I64, ends: I64) -> I64:
        return np.unique(self._each_block(begins, ends))

    def _each_block(self, begins: I64, ends: I64) -> I64:
        """The blocks of every range, concatenated; blocks in several ranges are repeated."""
        first = begins // self._opened.block_bytes
        counts = (ends - 1) // self._opened.block_bytes - first + 1
        if (counts == 1).all():
            return first
        # ranges of 2 1 3 blocks -> 0 1 0 0 1 2
        inside = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        return first.repeat(counts) + inside

    def _note_read(self, begins: I64, sizes: I64) -> None:
        """Release announced blocks that have been read, several in one message."""
        some = sizes > 0
        with self._lock:
            if not self._wished:
                return
            for block in self._each_block(begins[some], (begins + sizes)[some]).tolist():
                if self._wished[block] > 0:
                    self._wished[block] -= 1
                if self._wished[block] == 0:
                    del self._wished[block]
                    self._read.append(block)
            few = min(_RELEASED_TOGETHER, _RELEASED_BYTES // self._opened.block_bytes)
            if len(self._read) < few and self._wished:
                return
            read, self._read = self._read, []
        self._notify("release", needs=[], wishes=read)

    def _whole(self, begin: int, end: int) -> bytes:
        out = np.empty(max(end - begin, 0), np.uint8)
        with self:
            self.read_into(out, np.array([begin]), np.array([out.size]))
        return out.tobytes()

    # -- the leader ---------------------------------------------------------------------------------------

    @cached_property
    def _link(self) -> Link:
        return link_of(self._cache)

    @property
    def _opened(self) -> _Opened:
        if self._known is None:
            retried(self._cache, self._open)
        known = self._known
        if known is None:
            raise StoreError(f"{self.url}: could not be opened")
        return known

    def _open(self) -> tuple[Session, int]:
        """(session, number) of this object with the current leader."""
        session = self._link.connected()
        with self._lock:
            if session == self._session:
                return session, self._number
        request = open_request(self._given, self._cache.block_bytes, self._options, self._content, self._sums)
        answer, _ = self._link.ask(session, do="open", **request)
        answer["folder"] = Path(answer["folder"])
        opened = _Opened(**{each.name: answer[each.name] for each in fields(_Opened)})
        with self._lock:
            if self._known is not None and not self._known.same_version(opened):
                raise ChangedError(
                    f"{self.url}: version {opened.tag}, {opened.size_bytes} bytes, was {self._known.tag} of "
                    f"{self._known.size_bytes} when this run opened it; restore the old one, or start a new "
                    "run"
                )
            if self._known is not None and self._known.birth != opened.birth:
                self._drop_mappings()
            self._known = opened
            if self._session != session:
                self._session, self._number = session, answer["object"]
                self._link.listen(session, self._number, self._count_fetched)
            return session, self._number

    def _drop_mappings(self) -> None:
        """Unmap the folder's files; they are opened again when needed."""
        for name in ("_table", "_pages"):
            self.__dict__.pop(name, None)
        self._file_id = None
        self._file.close()

    def _ask(self, do: str, **request: Any) -> tuple[dict[str, Any], bytes]:
        def ask() -> tuple[dict[str, Any], bytes]:
            session, number = self._open()
            return self._link.ask(session, do=do, object=number, **request)

        return retried(self._cache, ask)

    def _notify(self, do: str, **request: Any) -> None:
        """Send a message that needs no answer. If the leader has died, a new one has nothing to release."""
        try:
            if do == "wish":
                self._open()
            if self._session is not None:
                self._link.notify(self._session, do=do, object=self._number, **request)
        except LostError:
            pass

    def _count_fetched(self, num_bytes: int) -> None:
        self.stats.bytes_fetched += num_bytes

    # -- the folder ---------------------------------------------------------------------------------------

    @cached_property
    def _table(self) -> Entries:
        known = self._opened
        try:
            return map_table(known.folder, num_blocks_of(known.size_bytes, known.block_bytes), write=False)
        except (OSError, ValueError) as error:
            raise CacheError(
                f"{known.folder}: {error}; was the cache folder cleared during this run?"
            ) from error

    @cached_property
    def _pages(self) -> Bytes:
        known = self._opened
        try:
            with (known.folder / DATA).open("rb") as stream:
                return mapped(stream.fileno())
        except (OSError, ValueError) as error:
            raise CacheError(
                f"{known.folder}: {error}; was the cache folder cleared during this run?"
            ) from error

    def _fill(self, out: Bytes, begins: I64, sizes: I64, places: I64 | None) -> None:
        fd = self._file.acquire()
        try:
            fill(fd, out, begins, sizes, places, self.url)
        finally:
            with self._file.lock:
                self._file.release()

    def _open_data(self) -> int:
        """See Descriptor. The table stays mapped, so the data must stay the same file."""
        folder = self._opened.folder
        try:
            fd = os.open(folder / DATA, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CacheError(f"{folder}: {error}") from error
        found = os.fstat(fd)
        file_id = found.st_dev, found.st_ino
        if self._file_id not in (None, file_id):
            os.close(fd)
            raise CacheError(f"{folder}: was recreated; was the cache folder cleared during this run?")
        self._file_id = file_id
        self.stats.opens += 1
        return fd


_files: weakref.WeakSet[CachedFile] = weakref.WeakSet()


def _forget_parent() -> None:
    for file in list(_files):
        file.forget_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
