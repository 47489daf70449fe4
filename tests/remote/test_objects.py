"""An object in storage, fetched by blocks: each byte is summed once, for its .sums and for the cache."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

from meshfeed.errors import ChecksumError
from meshfeed.files.sums import Summer
from meshfeed.remote.blocks import SUM_BYTES, CacheFolder
from meshfeed.remote.client import LocalReader
from meshfeed.remote.fetcher.objects import Address, StoredObject
from meshfeed.remote.retries import Stat

BLOCK = 1 << 14
DATA = np.random.default_rng(0).integers(0, 256, 5 * BLOCK + 99).astype(np.uint8).tobytes()


def stored(folder: Path, check_bytes: int | None, data: bytes = DATA) -> StoredObject:
    """An object with these bytes; its .sums, of blocks of check_bytes, is that of DATA."""
    (folder / "object").write_bytes(data)
    sums = None
    if check_bytes is not None:
        summer = Summer(check_bytes)
        summer.update(DATA)
        sums = summer.sums()
    cache = CacheFolder(folder)
    cache.join(None)
    address, reader = Address.of(str(folder / "object"), {}), LocalReader()
    return StoredObject.of(address, reader, reader.stat(address.path), cache, BLOCK, None, sums, None)


@pytest.mark.parametrize("check_bytes", [None, 1 << 12, BLOCK])
def test_each_byte_is_summed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check_bytes: int | None
) -> None:
    one, summed, crc32 = stored(tmp_path, check_bytes), list[int](), zlib.crc32

    def counted(data: memoryview, start: int = 0) -> int:
        summed.append(len(data))
        return crc32(data, start)

    claims = [one.blocks.claim(block, wait=True) for block in (3, 4, 5)]
    one.part(0, 1)  # fills tables
    with monkeypatch.context() as patched:
        patched.setattr(zlib, "crc32", counted)
        found, fetched = one.part(3, 3)
        for claim, block in zip(claims, found, strict=True):
            assert claim is not None
            claim.publish(block)
    assert sum(summed) == fetched == 2 * BLOCK + 99
    for block in (3, 4, 5):
        assert one.blocks.claim(block, wait=True) is None  # there, and right
        assert one.blocks.path(block).read_bytes()[:-SUM_BYTES] == DATA[block * BLOCK : (block + 1) * BLOCK]


@pytest.mark.parametrize("at", [3 * BLOCK, 4 * BLOCK + 5000, len(DATA) - 1])
def test_a_wrong_byte_is_named_by_its_checksum(tmp_path: Path, at: int) -> None:
    damaged = bytearray(DATA)
    damaged[at] ^= 1
    one, low = stored(tmp_path, 1 << 12, bytes(damaged)), at // 4096 * 4096
    with pytest.raises(ChecksumError, match=rf"bytes {low}\.\.{min(low + 4096, len(DATA))} .*3 times"):
        one.part(3, 3)
    found, _ = one.part(0, 3)
    assert b"".join(bytes(each.data) for each in found) == DATA[: 3 * BLOCK]


def test_services_share_no_blocks_however_they_are_named(tmp_path: Path) -> None:
    """Buckets of one name, with objects of one size and version: some services have no better version."""

    def folder(name: str, value: str) -> Path:
        address = Address("s3://bucket", "object", {name: value, "access_key_id": f"of {name}"})
        found = Stat(len(DATA), "modified 2026")
        return StoredObject.of(
            address, LocalReader(), found, CacheFolder(tmp_path), BLOCK, None, None, None
        ).blocks.folder

    names = (
        "endpoint",
        "AWS_ENDPOINT",
        "aws_endpoint_url",
        "aws_endpoint_url_s3",
        "azure_storage_account_name",
    )
    for name in names:
        assert folder(name, "http://one") == folder("endpoint", "http://one") != folder(name, "http://other")
