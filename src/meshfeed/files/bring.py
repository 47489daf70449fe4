"""An object as the leader knows it, and its bytes off the wire, checked before anybody sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshfeed.errors import ChecksumError, StoreError
from meshfeed.files.byte_file import Content
from meshfeed.files.client import Reader
from meshfeed.files.codec import check_hashes, decompress
from meshfeed.files.sums import FileSums, Sums, parse
from meshfeed.files.table import Blocks

RANGE_BYTES = 16 << 20
"""The most that one request asks for."""
_ATTEMPTS = 3


@dataclass(eq=False)
class CachedObject:
    """An object as the leader knows it.

    Attributes:
        key: of its folder.
        url: as messages name it.
        blocks: its data and table.
        reader, path, tag: where its bytes come from, and which version.
        stored_bytes: its size there.
        content: what must hold of it; None where nobody says. Then it is not fetched as a whole.
        sums: what must hold of each part of it; None where nobody says.
        doubted: blocks that an earlier leader left, to be verified first.
    """

    key: str
    url: str
    blocks: Blocks
    reader: Reader
    path: str
    tag: str
    stored_bytes: int
    content: Content | None = None
    sums: FileSums | None = None
    doubted: set[int] = field(default_factory=set)


def part_of(one: CachedObject, begin: int, end: int) -> tuple[memoryview, int]:
    """Bytes [begin, end), which are whole blocks of its checksums, and how many were fetched for them.

    Raises StoreError; ChecksumError where they are wrong again and again.
    """
    data, fetched = _read(one, begin, end), end - begin
    wrong = [] if one.sums is None else one.sums.wrong(data, begin)
    for _ in range(1, _ATTEMPTS):
        if one.sums is None or not wrong:
            break
        data = memoryview(bytearray(data))
        for low, high in wrong:
            data[low - begin : high - begin] = _read(one, low, high)
            fetched += high - low
        wrong = one.sums.wrong(data, begin)
    for low, high in wrong:
        raise ChecksumError(
            f"{one.url}: bytes {low}..{high} are not those that its .sums has a checksum of (fetched "
            f"{_ATTEMPTS} times); copy the file again, or, where it was written anew since, make the .sums "
            f"anew with `meshfeed inspect --write-checksums`"
        )
    return data, fetched


def whole_of(one: CachedObject, content: Content) -> tuple[memoryview, int]:
    """An object's bytes, checked and uncompressed, and how many were fetched for it.

    Raises StoreError; ChecksumError where they are wrong again and again.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            data = _pieces(one.reader, one.path, one.stored_bytes, one.tag)
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
    """The file of checksums at a path of storage. Raises StoreError where it stays damaged, or is another."""
    stat = reader.stat(path)
    for attempt in range(1, _ATTEMPTS + 1):
        told = _pieces(reader, path, stat.size_bytes, stat.tag)
        try:
            return parse(url, told)
        except StoreError as error:
            if attempt == _ATTEMPTS:
                raise type(error)(f"{error} (fetched {attempt} times)") from error
    raise ChecksumError(f"{url}: never fetched")


def _read(one: CachedObject, begin: int, end: int) -> memoryview:
    return memoryview(one.reader.read(one.path, begin, end, one.tag)).cast("B")


def _pieces(reader: Reader, path: str, size: int, tag: str) -> bytes:
    """All bytes of an object."""
    spans = ((begin, min(begin + RANGE_BYTES, size)) for begin in range(0, size, RANGE_BYTES))
    return b"".join(bytes(reader.read(path, begin, end, tag)) for begin, end in spans)
