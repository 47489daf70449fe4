"""A remote object, read through the node's cache as if it lay on a disk here."""

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
from meshfeed.files.facts import told_of
from meshfeed.files.link import Link, LostError, Session, link_of, retried
from meshfeed.files.local import fill
from meshfeed.files.mapping import mapped
from meshfeed.files.table import DATA, Entries, is_valid, map_table, num_blocks_of
from meshfeed.files.url import without_secrets

_RELEASED_TOGETHER, _RELEASED_BYTES = 64, 16 << 20  # of what was read, said to the leader at once


@dataclass(frozen=True, slots=True)
class _Opened:
    """What the leader said of the object; the folder stays good when that leader is gone."""

    folder: Path
    size_bytes: int
    block_bytes: int
    tag: str
    sums: str | None
    birth: int

    def same_version(self, other: _Opened) -> bool:
        """Whether another leader has the same object, though maybe in a folder that it had to make anew."""
        return replace(self, birth=0) == replace(other, birth=0)


class CachedFile:
    """A ByteFile over an object that a node fetches once.

    Args:
        url: of the object; of a local file, where `content` says that it is compressed.
        cache: where its blocks are kept.
        options: for the storage client, beside the environment's.
        content: what must hold of its bytes; then it is fetched and checked as a whole.
        sums: URL of the checksums of its blocks, beside it, and which of two files there it is; see `sums`.
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
        """In a forked child: what the parent told its leader, the child's does not know."""
        self._lock = threading.RLock()
        self._session = None
        self._wished, self._read = Counter(), []

    @property
    def size_bytes(self) -> int:
        """See ByteFile."""
        return self._opened.size_bytes

    @property
    def tag(self) -> str:
        """Of the version that was opened, such as its ETag."""
        return self._opened.tag

    @property
    def guarded_by(self) -> str | None:
        """See ByteFile."""
        return self._opened.sums

    def look_again(self) -> None:
        """See ByteFile."""
        self._tell("look again")

    def peek(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See ByteFile. Exact, and asked of storage once for all processes of the node."""
        if self._content is not None:
            return [self._whole(begin, min(end, self.size_bytes)) for begin, end in ranges]
        answer, payload = self._ask("peek", ranges=[list(span) for span in ranges])
        ends = np.cumsum(answer["sizes"]).tolist()
        return [payload[end - size : end] for end, size in zip(ends, answer["sizes"])]

    def within(self, cache: Cache) -> CachedFile:
        """The same object as storage has it now, read through another cache."""
        return CachedFile(self._given, cache, self._options, self._content, self._sums)

    @property
    def cache(self) -> Cache:
        """Where its blocks are kept."""
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
                self._let_go()

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
        self._steadily(blocks, lambda: self._fill(out, begins, sizes, places))
        with self._lock:
            self.stats.reads += sizes.size
            self.stats.bytes_read += int(sizes.sum())
        self._note_read(begins, sizes)

    def will_need(self, begins: I64, ends: I64) -> None:
        """See ByteFile. What is announced first is fetched first."""
        some = ends > begins
        begins, ends = begins[some], ends[some]
        if not begins.size:
            return
        touched = self._each_block(begins, ends)
        with self._lock:
            self._wished.update(touched.tolist())
        self._tell("wish", blocks=np.unique(touched).tolist())

    def forget_needs(self) -> None:
        """See ByteFile."""
        with self._lock:
            told = bool(self._wished or self._read)
            self._wished.clear()
            self._read.clear()
        if told:
            self._tell("forget")

    def arrays(self, *parts: tuple[str, int, int]) -> list[Vector]:
        """See ByteFile. Looking entries up brings their blocks here first, and copies them out."""
        return [EntriesOf(self, np.dtype(dtype), begin, count) for dtype, begin, count in parts]

    def gathered(self, dtype: np.dtype[Any], begin: int, places: I64) -> npt.NDArray[Any]:
        """Entries of `dtype` that lie one after the other from byte `begin` on, at some places."""
        if not places.size:
            return np.zeros(0, dtype)
        at = begin + places * dtype.itemsize
        blocks = self._blocks_of(at, at + dtype.itemsize)
        return self._steadily(blocks, lambda: self._entries(dtype, begin)[places])

    def between(self, dtype: np.dtype[Any], begin: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Entries start..stop of `dtype` that lie one after the other from byte `begin` on."""
        if stop <= start:
            return np.zeros(0, dtype)
        ends = np.array([begin + start * dtype.itemsize]), np.array([begin + stop * dtype.itemsize])
        return self._steadily(self._blocks_of(*ends), lambda: self._entries(dtype, begin)[start:stop].copy())

    def _entries(self, dtype: np.dtype[Any], begin: int) -> npt.NDArray[Any]:
        return np.frombuffer(self._pages, dtype, (self.size_bytes - begin) // dtype.itemsize, begin)

    # -- the blocks ---------------------------------------------------------------------------------------

    def _steadily(self, blocks: I64, read: Any) -> Any:
        """`read()` while all of the blocks are there, from before to after."""
        while True:
            generations = self._table["generation"]
            before = generations[blocks]
            # all of them: those that are there must stay while the others come
            needed: list[int] = [] if is_valid(before).all() else blocks.tolist()
            if needed:
                self._need(needed)
                generations = self._table["generation"]  # of a folder that a new leader may have made anew
                before = generations[blocks]
            try:
                if is_valid(before).all():
                    result = read()
                    if np.array_equal(generations[blocks], before):
                        return result
            finally:
                if needed:
                    self._tell("release", needs=needed, wishes=[])

    def _need(self, blocks: list[int]) -> None:
        """Wait until blocks are there; they stay until they are released."""
        try:
            self._ask("need", blocks=blocks)
        except StoreError:
            raise
        except BaseException:  # interrupted, and nobody will read what comes
            self._tell("abandon", blocks=blocks)
            raise

    def _blocks_of(self, begins: I64, ends: I64) -> I64:
        return np.unique(self._each_block(begins, ends))

    def _each_block(self, begins: I64, ends: I64) -> I64:
        """The blocks of every range, one after the other: those that several ranges share come again."""
        first = begins // self._opened.block_bytes
        counts = (ends - 1) // self._opened.block_bytes - first + 1
        if (counts == 1).all():
            return first
        # ranges of 2 1 3 blocks -> 0 1 0 0 1 2
        inside = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        return first.repeat(counts) + inside

    def _note_read(self, begins: I64, sizes: I64) -> None:
        """What was announced and is read now need not be kept; said of several blocks together."""
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
        self._tell("release", needs=[], wishes=read)

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
        """(session, number) of this object with today's leader."""
        session = self._link.connected()
        with self._lock:
            if session == self._session:
                return session, self._number
        told = told_of(self._given, self._cache.block_bytes, self._options, self._content, self._sums)
        answer, _ = self._link.ask(session, do="open", **told)
        answer["folder"] = Path(answer["folder"])
        told = _Opened(**{each.name: answer[each.name] for each in fields(_Opened)})
        with self._lock:
            if self._known is not None and not self._known.same_version(told):
                raise ChangedError(
                    f"{self.url}: version {told.tag}, {told.size_bytes} bytes, was {self._known.tag} of "
                    f"{self._known.size_bytes} when this run opened it; put the old one back, or start anew"
                )
            if self._known is not None and self._known.birth != told.birth:
                self._let_go()
            self._known = told
            if self._session != session:
                self._session, self._number = session, answer["object"]
                self._link.listen(session, self._number, self._count_fetched)
            return session, self._number

    def _let_go(self) -> None:
        """Look at the folder anew, when it is needed."""
        for name in ("_table", "_pages"):
            self.__dict__.pop(name, None)
        self._file_id = None
        self._file.close()

    def _ask(self, do: str, **said: Any) -> tuple[dict[str, Any], bytes]:
        def ask() -> tuple[dict[str, Any], bytes]:
            session, number = self._open()
            return self._link.ask(session, do=do, object=number, **said)

        return retried(self._cache, ask)

    def _tell(self, do: str, **said: Any) -> None:
        """What is good to know but not needed; a new leader has nothing to forget or release."""
        try:
            if do == "wish":
                self._open()
            if self._session is not None:
                self._link.say(self._session, do=do, object=self._number, **said)
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
                f"{known.folder}: {error}; was the cache folder cleared under this run?"
            ) from error

    @cached_property
    def _pages(self) -> Bytes:
        known = self._opened
        try:
            with (known.folder / DATA).open("rb") as stream:
                return mapped(stream.fileno())
        except (OSError, ValueError) as error:
            raise CacheError(
                f"{known.folder}: {error}; was the cache folder cleared under this run?"
            ) from error

    def _fill(self, out: Bytes, begins: I64, sizes: I64, places: I64 | None) -> None:
        fd = self._file.acquire()
        try:
            fill(fd, out, begins, sizes, places, self.url)
        finally:
            with self._file.lock:
                self._file.release()

    def _open_data(self) -> int:
        """See Descriptor. The table stays mapped all the time, so the data must stay the same file, too."""
        folder = self._opened.folder
        try:
            fd = os.open(folder / DATA, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CacheError(f"{folder}: {error}") from error
        found = os.fstat(fd)
        file_id = found.st_dev, found.st_ino
        if self._file_id not in (None, file_id):
            os.close(fd)
            raise CacheError(f"{folder}: made anew; was the cache folder cleared under this run?")
        self._file_id = file_id
        self.stats.opens += 1
        return fd


_files: weakref.WeakSet[CachedFile] = weakref.WeakSet()


def _forget_parent() -> None:
    for file in list(_files):
        file.forget_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
