"""The .idx of a store on this machine, read once per node.

The first process of a node to ask copies it into the node's cache folder; all others, of this job or a later
one, map the copy, or read it if it fits into a page. So no process maps the file itself, and none dies by
SIGBUS if the file is truncated or its disk fails; memory does not grow with the ranks; a rank that needs no
tokens opens neither .idx nor .bin.

A copy belongs to one version of the files: its name is a digest of their inodes, sizes and times. Indexes of
more than 4 GiB, and all if the cache folder cannot be written, are read in place, page by page. A copy that
was not opened for a day is removed.

    <key>        the .idx | u32 crc32 of each block of the .bin, if there is a .sums | facts | u32 their size
                 facts: what its maker found, as JSON, so that the others need not parse and check it again
    <key>.seen   a byte per block of the .bin: whether a process of this node has compared it
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshfeed.arrays import Bytes, Longs
from meshfeed.errors import CacheError, ChangedError, StoreError
from meshfeed.files import ByteFile, Cache, LocalFile, Vector
from meshfeed.files.cache.once import DAY_S, mark, once_per_node, sweep
from meshfeed.files.local.mapping import mapped
from meshfeed.files.local.version import Version, version_if_there, version_of, wait_for_tick
from meshfeed.files.sums import BIN, IDX, SUFFIX, FileSums
from meshfeed.store.checksums import checksums_of
from meshfeed.store.index import Header, look_up
from meshfeed.store.pair import Pair

_FACTS = struct.Struct("<I")
_FOLDER = "index"  # of copies, in the cache
_FORMAT = 3  # of a copy; part of its name
_MOST_BYTES = 4 << 30
_PAGE_BYTES = 1 << 12  # a map takes as much, and longer
_PIECE_BYTES = 1 << 26  # whole blocks of checksums, whatever their size
_ENTRIES = "?" * 32 + "*"
_log = logging.getLogger("meshfeed")


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A copy, mapped unless it fits into a page.

    Attributes:
        pages: its bytes, the .idx first.
        facts: about the store. "header": the fields of a `Header`. "is_checked": `Index.check` found no fault
            in it. "crc": crc32 of the .idx. "guard": "good", "none", or "refused" for a .sums that is damaged
            or of other files.
        entry: its path.
    """

    pages: Bytes
    facts: Mapping[str, Any]
    entry: str | Path

    @property
    def sums(self) -> FileSums | None:
        """Checksums of the .bin."""
        if self.facts["guard"] != "good":
            return None
        block_bytes, header = self.facts["block_bytes"], self.facts["header"]
        size = header["bin_size_bytes"]
        sums = np.frombuffer(self.pages, "<u4", -(-size // block_bytes), header["idx_size_bytes"])
        return FileSums(block_bytes, size, sums)


class Versions(NamedTuple):
    """Versions of a store's .idx, .bin and .sums; None without a .sums."""

    idx: Version
    data: Version
    sums: Version | None


class NodeIndex(LocalFile):
    """The .idx of a store. Peeks and look-ups go to the node's copy; `read_into` reads the file itself.

    prefix: the store's path. cache: the one with the copy.
    """

    def __init__(self, prefix: str, cache: Cache | None = None) -> None:
        super().__init__(f"{prefix}.idx")
        self.prefix = prefix
        self.cache = cache or Cache()
        self._versions: Versions | None = None
        self._held: _Copy | None = None
        self._has_asked = False

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"prefix": self.prefix, "cache": self.cache}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["prefix"], state["cache"])
        self._size_bytes = state["_size_bytes"]

    @property
    def facts(self) -> Mapping[str, Any] | None:
        """See `_Copy`; None without a copy. "is_checked" holds only for a copy that is as it was made: one of
        more than a page is not summed. Raises StoreError."""
        copy = self._copy()
        if copy is None or copy.pages.size <= _PAGE_BYTES:
            return None if copy is None else copy.facts
        return {**copy.facts, "is_checked": False}

    @property
    def versions(self) -> Versions:
        """Versions of the files: one look at each. Raises StoreError."""
        if self._versions is None:
            self._versions = _versions_of(self.prefix)
        return self._versions

    def peek(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        copy, size = self._copy(), self.size_bytes
        if copy is None:
            return super().peek(ranges)
        return [copy.pages[begin : min(end, size)].tobytes() for begin, end in ranges]

    def arrays(self, *parts: tuple[str, int, int]) -> list[Vector]:
        """The entries, mapped in the copy. If entered, raises ChangedError if the file was written since."""
        copy = self._copy()
        if self._depth:
            self._refuse_other(version_of(self.url))
        if copy is None:
            return super().arrays(*parts)
        return [np.frombuffer(copy.pages, dtype, count, begin) for dtype, begin, count in parts]

    def look_up(self, out: Bytes, begins: Longs, sizes: Longs) -> None:
        """Of the file itself, without a copy. Raises ChangedError if it was written or replaced since."""
        super().look_up(out, begins, sizes)
        self._refuse_other(version_of(self.url))

    def guard(self) -> tuple[FileSums, Bytes] | None:
        """Checksums of the .bin, and a byte per block, 1 once it is compared; if it is shared, read-only.

        None without a .sums. Raises StoreError for a .sums that is damaged or belongs to other files.
        """
        copy = self._copy()
        if copy is not None and copy.facts["guard"] != "refused":
            sums = copy.sums
            return None if sums is None else (sums, _seen(copy.entry, sums.sums.size))
        fingerprint = _read_in_place(self.prefix).fingerprint if copy is None else copy.facts["fingerprint"]
        sums = checksums_of(self.prefix, fingerprint)
        return None if sums is None else (sums.files[BIN], np.zeros(sums.files[BIN].sums.size, np.uint8))

    def tell(self, blocks: Longs) -> None:
        """Tell all processes what was compared. On a full btrfs, writing to a map would kill this one."""
        if self._held is not None:
            with suppress(OSError), _seen_path(self._held.entry).open("r+b") as stream:
                for block in blocks.tolist():
                    os.pwrite(stream.fileno(), b"\1", block)

    def _look(self) -> int:
        return self.versions.idx[2]

    def _copy(self) -> _Copy | None:
        if not self._has_asked:
            self._refuse_other(self.versions.idx)
            if self.size_bytes <= _MOST_BYTES:
                self._held = _copy_of(self.prefix, self.versions, self.cache)
            self._has_asked = True
        return self._held

    def _refuse_other(self, found: Version) -> None:
        if found[:4] != self.versions.idx[:4] or found[2] != self.size_bytes:
            raise ChangedError(
                f"{self.url}: was written or replaced since it was opened ({found[2]} bytes now, "
                f"{self.size_bytes} when it was opened); open the store again",
                path=self.url,
            )


def _versions_of(prefix: str) -> Versions:
    idx, data = version_of(f"{prefix}.idx"), version_of(f"{prefix}.bin")
    return Versions(idx, data, version_if_there(f"{prefix}{SUFFIX}"))


# -- making a copy ------------------------------------------------------------------------------------------


def _read_in_place(prefix: str) -> Pair:
    return Pair(prefix, LocalFile(f"{prefix}.idx"), LocalFile(f"{prefix}.bin"))


def _copy_of(prefix: str, versions: Versions, cache: Cache) -> _Copy | None:
    """The node's copy, made by the first process to ask; None if it cannot be written."""
    key = hashlib.blake2b(f"{_FORMAT} {_boot()} {[*versions]}".encode(), digest_size=16).hexdigest()
    try:
        own = cache.make()
        with suppress(FileNotFoundError):  # most often it is there
            if (found := _opened(f"{own}/{_FOLDER}/{key}")) is not None:
                return found
        folder = own / _FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        entry = folder / key

        def make(part: Path) -> None:
            sweep(folder, _ENTRIES, DAY_S)
            _write(part, entry, prefix, versions)

        # a few locks for all copies, since lock files stay
        lock = folder / f"{key[0]}.lock"
        return once_per_node(entry, _opened, make, lock=lock, is_durable=False)
    except CacheError as error:
        reason = str(error)
    except StoreError:
        raise
    except OSError as error:
        reason = f"{cache.own_path}: {error.strerror or error}"
    _log.warning("%s.idx: read in place, since no copy can be kept for this node: %s", prefix, reason)
    return None


def _write(part: Path, entry: Path, prefix: str, versions: Versions) -> None:
    with open(part, "wb", opener=_private) as stream:
        for piece in _pieces(prefix, versions):
            stream.write(piece)
    sums = _read(part).sums
    if sums is not None:
        with open(_seen_path(entry), "ab", opener=_private) as stream:  # running jobs may have it mapped
            stream.truncate(sums.sums.size)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _pieces(prefix: str, versions: Versions) -> Iterator[bytes]:
    """The bytes of a copy, made from the files. Raises StoreError."""
    wait_for_tick(max(each[4] for each in versions if each is not None))
    pair = _read_in_place(prefix)
    header, fingerprint, idx = pair.header, pair.fingerprint, pair.idx
    try:
        sums = checksums_of(prefix, fingerprint)
        guard = "none" if sums is None else "good"
    except StoreError:
        sums, guard = None, "refused"
    is_small, crc = idx.size_bytes <= _PAGE_BYTES, 0  # of a larger one, nobody trusts the check
    for begin in range(0, idx.size_bytes, _PIECE_BYTES):
        (piece,) = idx.peek([(begin, min(begin + _PIECE_BYTES, idx.size_bytes))])
        if sums is not None:
            sums.files[IDX].check(memoryview(piece), begin, idx.url)
        crc = zlib.crc32(piece) if is_small else 0
        yield piece
    named = {each.name: getattr(header, each.name) for each in fields(header) if each.name != "prefix"}
    facts: dict[str, Any] = {
        "header": named | {"dtype": header.dtype.str},
        "is_checked": is_small and _is_valid(header, idx),
        "fingerprint": fingerprint,
        "guard": guard,
        "crc": crc,
    }
    if sums is not None:
        facts["block_bytes"] = sums.files[BIN].block_bytes
        yield sums.files[BIN].sums.astype("<u4").tobytes()
    text = json.dumps(facts).encode()
    yield text + _FACTS.pack(len(text))
    if _versions_of(prefix) != versions:
        raise ChangedError(
            f"{prefix}: .idx or .bin were written or replaced while they were opened; open the store again "
            f"once they are whole"
        )


def _is_valid(header: Header, idx: ByteFile) -> bool:
    with suppress(StoreError):
        for _ in look_up(header, idx).check(whole=False):
            pass
        return True
    return False


@functools.cache
def _boot() -> str:
    """The id of this boot: a copy is not synced to the disk, so a crash may leave it in any state."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


# -- reading one ------------------------------------------------------------------------------------------


def _opened(entry: str | Path) -> _Copy | None:
    """A copy; None if it is damaged and to be replaced. Raises OSError if it is missing."""
    try:
        return _read(entry)
    except (ValueError, struct.error):
        return None


def _read(entry: str | Path) -> _Copy:
    """A copy, marked as used. Raises OSError; ValueError or struct.error for a damaged one."""
    fd = os.open(entry, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        is_small = status.st_size <= _PAGE_BYTES
        pages = np.frombuffer(os.read(fd, _PAGE_BYTES), np.uint8) if is_small else mapped(fd)
        mark(fd, status.st_mtime)
    finally:
        os.close(fd)
    (size,) = _FACTS.unpack(pages[-_FACTS.size :].tobytes())
    facts = json.loads(pages[-_FACTS.size - size : -_FACTS.size].tobytes())
    if is_small and zlib.crc32(pages[: facts["header"]["idx_size_bytes"]].data) != facts["crc"]:
        raise ValueError("damaged")
    return _Copy(pages, facts, entry)


def _seen_path(entry: str | Path) -> Path:
    return Path(f"{entry}.seen")


def _seen(entry: str | Path, num_blocks: int) -> Bytes:
    """Which blocks were compared, uint8 [num_blocks]; by this process alone if it cannot be shared."""
    if num_blocks:
        with suppress(OSError), _seen_path(entry).open("rb") as stream:
            seen = mapped(stream.fileno())
            if seen.size == num_blocks:
                return seen
    return np.zeros(num_blocks, np.uint8)
