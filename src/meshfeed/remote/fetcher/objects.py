"""An object in storage, as a fetcher knows it: its identity, and its bytes, verified as they arrive."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from meshfeed.arrays import Longs
from meshfeed.errors import ChecksumError, StoreError
from meshfeed.files.byte_file import Content
from meshfeed.files.sums import ANEW, FileSums, parse
from meshfeed.files.url import credentials_of, is_hub, is_remote, local_path, split, without_secrets
from meshfeed.remote.blocks import CachedBlocks, CacheFolder, Summed
from meshfeed.remote.client import Reader
from meshfeed.remote.codec import check_hashes, decompress
from meshfeed.remote.cut import Cut, cut_at
from meshfeed.remote.errors import options_of_environment
from meshfeed.remote.hub_url import hub_path
from meshfeed.remote.retries import Stat

T = TypeVar("T")

RANGE_BYTES = 16 << 20
"""The largest range of one request."""
_ATTEMPTS = 3
_SERVICE = re.compile("endpoint|account_name|base_url", re.IGNORECASE)  # in names of options


@dataclass(frozen=True, slots=True)
class Address:
    """Where an object or folder is in storage, and how to access it.

    Attributes:
        root: such as s3://bucket; empty for a file of this machine.
        path: below the root; absolute for a file of this machine.
        options: of the storage client, credentials among them.
    """

    root: str
    path: str
    options: Mapping[str, str]

    @classmethod
    def of(cls, url: str, options: Mapping[str, str]) -> Address:
        """That of a URL, with the credentials of this process's environment. Raises StoreError."""
        if not is_remote(url):
            return cls("", str(Path(local_path(url)).absolute()), {})
        if is_hub(url):
            hub = hub_path(url)
            return cls(hub.root, hub.path, options_of_environment(hub.root, os.environ) | dict(options))
        root, path = split(url)
        given = options_of_environment(root, os.environ) | credentials_of(url) | dict(options)
        return cls(root, path, given)

    @property
    def url(self) -> str:
        return without_secrets(f"{self.root}/{self.path}") if self.root else self.path

    @property
    def service(self) -> list[str]:
        """Whose bucket it is, however options and environment call that."""
        return sorted({value for name, value in self.options.items() if _SERVICE.search(name)})


@dataclass(frozen=True, slots=True)
class Opened:
    """What a reading process knows of an object. It stays the same whichever fetcher serves it.

    Attributes:
        folder: of its blocks. Each version, and each way to cut and check it, has a folder of its own.
        cut: its blocks, once it is uncompressed.
        tag: its version.
        sums: fingerprint of its checksums; None without.
        check_bytes: of which each has a checksum; 1 without.
    """

    folder: Path
    cut: Cut
    tag: str
    sums: str | None
    check_bytes: int


@dataclass(eq=False, slots=True)
class StoredObject:
    """One version of an object.

    Attributes:
        address, stat: where it is, its stored size and version.
        reader: of its storage.
        blocks: in the cache.
        content: its declared size and hashes, with which it is fetched as a whole; None if unknown.
        sums: checksums of its blocks; None if unknown.
        bytes_fetched: since the reader last asked for them.
    """

    address: Address
    stat: Stat
    reader: Reader
    blocks: CachedBlocks
    content: Content | None
    sums: FileSums | None
    bytes_fetched: int = 0

    @classmethod
    def of(
        cls,
        address: Address,
        reader: Reader,
        stat: Stat,
        cache: CacheFolder,
        block_bytes: int,
        content: Content | None,
        sums: FileSums | None,
        joints: tuple[Longs, Longs] | None,
    ) -> StoredObject:
        """joints: where blocks begin and end; see `cut_at`.

        Raises StoreError if the object's size differs from the declared one.
        """
        size, plain = stat.size_bytes, None
        if content is not None:
            if content.stored_bytes not in (None, size):
                raise StoreError(
                    f"{address.url}: {size} bytes, its index says {content.stored_bytes}; copy it again"
                )
            size = size if content.raw_bytes is None else content.raw_bytes
            block_bytes = max(size, 1)
            hashes = {name: dict(getattr(content, name)) for name in ("stored_hashes", "raw_hashes")}
            plain = [content.codec, content.stored_bytes, content.raw_bytes, hashes]
        digest, check_bytes = None, 1
        if sums is not None:
            if sums.size_bytes != size:
                raise StoreError(
                    f"{address.url}: {size} bytes, its .sums was made for {sums.size_bytes}; copy the file "
                    f"again; as for the .sums, {ANEW}"
                )
            check_bytes = sums.block_bytes
            block_bytes = -(-block_bytes // check_bytes) * check_bytes  # whole checksums
            digest = hashlib.blake2b(sums.sums.tobytes(), digest_size=16).hexdigest()
        cut = Cut(size, block_bytes)
        if joints is not None and content is None:
            cut = cut_at(joints, size, block_bytes, check_bytes)
        identity = [address.url, address.path, address.service, stat.tag, size, block_bytes, plain, digest]
        identity += cut.ends
        key = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()
        return cls(address, stat, reader, cache.object(key, cut), content, sums)

    def read(self, begin: int, end: int) -> memoryview:
        """Stored bytes [begin, end). Raises StoreError."""
        stat = self.stat
        data = self.reader.read(self.address.path, begin, end, stat.tag, stat.size_bytes)
        return memoryview(data).cast("B")

    def part(self, first: int, count: int) -> tuple[list[Summed], int]:
        """`count` blocks from block `first` on, verified, and the number of bytes fetched.

        Raises StoreError; ChecksumError if they stay wrong after retries.
        """
        edges = self.blocks.edges[first : first + count + 1]
        begin, *_, end = places = edges.tolist()
        expected = None if self.sums is None else self.sums.between(edges).tolist()

        def read() -> list[Summed]:
            data = self.read(begin, end)
            found = [Summed.of(data[low - begin : high - begin]) for low, high in itertools.pairwise(places)]
            if self.sums is not None and [each.crc for each in found] != expected:
                self.sums.check(data, begin, self.address.url)  # names the wrong bytes
            return found

        found, attempts = _retried(read)
        return found, attempts * (end - begin)

    def whole(self, content: Content) -> tuple[Summed, int]:
        """All its bytes, verified and uncompressed, and the number of bytes fetched.

        Raises StoreError; ChecksumError if they stay wrong after retries.
        """
        url = self.address.url

        def read() -> memoryview:
            data = _joined(self.stat.size_bytes, self.read)
            check_hashes(data, content.stored_hashes, url)
            if content.codec is not None:
                data = decompress(content.codec, data, self.blocks.cut.size_bytes, url)
            check_hashes(data, content.raw_hashes, url)
            return memoryview(data)

        data, attempts = _retried(read)
        return Summed.of(data), attempts * self.stat.size_bytes


def sums_at(reader: Reader, address: Address, stat: Stat) -> bytes:
    """The content of a file of checksums. Raises StoreError if it stays invalid after retries."""

    def read() -> bytes:
        path, tag, size = address.path, stat.tag, stat.size_bytes
        text = _joined(size, lambda begin, end: reader.read(path, begin, end, tag, size))
        parse(address.url, text)
        return text

    return _retried(read, StoreError)[0]


def _retried(read: Callable[[], T], wrong: type[StoreError] = ChecksumError) -> tuple[T, int]:
    """The result of `read`, which is called again while bytes are wrong, and the number of calls."""
    for attempt in range(1, _ATTEMPTS):
        with contextlib.suppress(wrong):
            return read(), attempt
    try:
        return read(), _ATTEMPTS
    except wrong as error:
        raise type(error)(f"{error} (fetched {_ATTEMPTS} times)") from error


def _joined(size: int, read: Callable[[int, int], Any]) -> bytes:
    """All bytes of an object of `size` bytes."""
    spans = ((begin, min(begin + RANGE_BYTES, size)) for begin in range(0, size, RANGE_BYTES))
    return b"".join(bytes(read(begin, end)) for begin, end in spans)
