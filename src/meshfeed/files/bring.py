"""An object in the leader, and fetching its bytes, which are verified before they are served."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass, field
from typing import Any

from meshfeed.errors import AccessError, ChecksumError, StoreError
from meshfeed.files.byte_file import Content
from meshfeed.files.client import Reader
from meshfeed.files.codec import check_hashes, decompress
from meshfeed.files.sums import FileSums, Sums, parse
from meshfeed.files.table import Blocks

RANGE_BYTES = 16 << 20
"""The largest range of one request."""
_ATTEMPTS = 3


@dataclass(eq=False)
class CachedObject:
    """An object in the leader.

    Attributes:
        key: of its folder.
        url: for messages.
        blocks: its data and table.
        path, tag: its path in storage, and its version.
        readers: by holder and credentials.
        stored_bytes: its size in storage.
        content: its declared size and hashes, with which it is fetched as a whole; None if unknown.
        sums: checksums of its blocks; None if unknown.
        doubted: blocks of an earlier leader, to verify before use.
    """

    key: str
    url: str
    blocks: Blocks
    path: str
    tag: str
    stored_bytes: int
    content: Content | None = None
    sums: FileSums | None = None
    doubted: set[int] = field(default_factory=set)
    readers: dict[tuple[Hashable, str], Reader] = field(default_factory=dict)

    def forget(self, holder: Hashable) -> None:
        """Remove a holder and its credentials."""
        for key in [key for key in self.readers if key[0] is holder]:
            del self.readers[key]

    def read(self, begin: int, end: int, holder: Hashable) -> memoryview:
        """Stored bytes [begin, end), with a holder's own credentials if it has any here. Raises StoreError.

        If these are refused, it tries those of other holders, which belong to the same user.
        """
        by_holder = sorted(dict(self.readers).items(), key=lambda item: item[0][0] is not holder)
        readers = list(dict.fromkeys(reader for _, reader in by_holder))
        for reader in readers[:-1]:
            with contextlib.suppress(AccessError):
                return memoryview(reader.read(self.path, begin, end, self.tag)).cast("B")
        if not readers:
            raise StoreError(f"{self.url}: no client has it open any more")
        return memoryview(readers[-1].read(self.path, begin, end, self.tag)).cast("B")


class Budget:
    """A memory budget for objects fetched as a whole; a single larger object may exceed it."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._taken, self._changed = most_bytes, 0, threading.Condition()

    @contextlib.contextmanager
    def room_for(self, num_bytes: int) -> Generator[None, None, None]:
        """Wait until the bytes fit, and hold them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + num_bytes <= self._most)
            self._taken += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._taken -= num_bytes
                self._changed.notify_all()


def part_of(one: CachedObject, begin: int, end: int, holder: Hashable) -> tuple[memoryview, int]:
    """Bytes [begin, end), which are whole blocks of its checksums, and the number of bytes fetched.

    Raises StoreError; ChecksumError if they stay wrong after retries.
    """
    data, fetched = one.read(begin, end, holder), end - begin
    wrong = [] if one.sums is None else one.sums.wrong(data, begin)
    for _ in range(1, _ATTEMPTS):
        if one.sums is None or not wrong:
            break
        data = memoryview(bytearray(data))
        for low, high in wrong:
            data[low - begin : high - begin] = one.read(low, high, holder)
            fetched += high - low
        wrong = one.sums.wrong(data, begin)
    for low, high in wrong:
        raise ChecksumError(
            f"{one.url}: bytes {low}..{high} do not match the checksum in its .sums (fetched {_ATTEMPTS} "
            f"times); copy the file again, or, if it was rewritten since, recreate the .sums with "
            f"`meshfeed inspect --write-checksums`"
        )
    return data, fetched


def whole_of(one: CachedObject, content: Content, holder: Hashable) -> tuple[memoryview, int]:
    """An object's bytes, verified and uncompressed, and the number of bytes fetched.

    Raises StoreError; ChecksumError if they stay wrong after retries.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            data = _joined(one.stored_bytes, lambda begin, end: one.read(begin, end, holder))
            check_hashes(data, content.stored_hashes, one.url)
            if content.codec is not None:
                data = decompress(content.codec, data, one.blocks.size_bytes, one.url)
            check_hashes(data, content.raw_hashes, one.url)
            return memoryview(data), attempt * one.stored_bytes
        except ChecksumError as error:
            if attempt == _ATTEMPTS:
                raise ChecksumError(f"{error} (fetched {attempt} times)") from error
    raise ChecksumError(f"{one.url}: never fetched")


def sums_at(reader: Reader, path: str, url: str) -> Sums:
    """The file of checksums at a path in storage. Raises StoreError if it stays invalid after retries."""
    stat = reader.stat(path)
    for attempt in range(1, _ATTEMPTS + 1):
        text = _joined(stat.size_bytes, lambda begin, end: reader.read(path, begin, end, stat.tag))
        try:
            return parse(url, text)
        except StoreError as error:
            if attempt == _ATTEMPTS:
                raise type(error)(f"{error} (fetched {attempt} times)") from error
    raise ChecksumError(f"{url}: never fetched")


def _joined(size: int, read: Callable[[int, int], Any]) -> bytes:
    """All bytes of an object of `size` bytes."""
    spans = ((begin, min(begin + RANGE_BYTES, size)) for begin in range(0, size, RANGE_BYTES))
    return b"".join(bytes(read(begin, end)) for begin, end in spans)
