"""Checksums: of bytes in any pieces, kept and read again; whatever else lies there is a StoreError."""

from __future__ import annotations

import itertools
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed.errors import ChecksumError, StoreError
from meshfeed.files import sums
from meshfeed.files.sums import FileSums, Summer, Sums, parse
from soak import cases

BLOCK = 4096
LAWS = settings(max_examples=cases(150), deadline=None)
sizes = st.integers(0, 5 * BLOCK) | st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])


def bytes_of(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8).tobytes()


def summed(data: bytes, block_bytes: int = BLOCK) -> FileSums:
    summer = Summer(block_bytes)
    summer.update(data)
    return summer.sums()


def made(data: int = 3 * BLOCK + 5, idx: int = 100) -> Sums:
    return Sums("0123456789abcdef" * 2, (summed(bytes_of(data)), summed(bytes_of(idx, 1))))


@LAWS
@given(size=sizes, cuts=st.lists(st.integers(0, 5 * BLOCK), max_size=8))
def test_pieces_do_not_matter(size: int, cuts: list[int]) -> None:
    data = bytes_of(size)
    summer = Summer(BLOCK)
    places = [0, *sorted(min(cut, size) for cut in cuts), size]
    for begin, end in itertools.pairwise(places):
        summer.update(data[begin:end])
    right = [zlib.crc32(data[at : at + BLOCK]) for at in range(0, size, BLOCK)]
    assert (summer.sums().size_bytes, summer.sums().sums.tolist()) == (size, right)


@LAWS
@given(size=st.integers(1, 5 * BLOCK), data=st.data())
def test_just_the_blocks_that_changed_are_wrong(size: int, data: st.DataObject) -> None:
    right = bytes_of(size)
    guard = summed(right)
    flipped = sorted(data.draw(st.sets(st.integers(0, size * 8 - 1), max_size=4)))
    found = bytearray(right)
    for bit in flipped:
        found[bit // 8] ^= 1 << bit % 8
    first = data.draw(st.integers(0, (size - 1) // BLOCK)) * BLOCK
    wrong = sorted({bit // 8 // BLOCK * BLOCK for bit in flipped if bit // 8 >= first})
    assert guard.wrong(memoryview(found)[first:], first) == [(at, min(at + BLOCK, size)) for at in wrong]


@LAWS
@given(size=sizes, data=st.data())
def test_checksums_of_larger_pieces_follow(size: int, data: st.DataObject) -> None:
    found = bytes_of(size)
    inner = data.draw(st.sets(st.sampled_from(range(0, size or 1, BLOCK))))
    edges = sorted(inner | {size})
    right = [zlib.crc32(found[begin:end]) for begin, end in itertools.pairwise(edges)]
    assert summed(found).between(np.array(edges)).tolist() == right


@LAWS
@given(data=sizes, idx=sizes)
def test_what_is_kept_is_read_again(data: int, idx: int) -> None:
    before = made(data, idx)
    after = parse("c.sums", before.encode())
    assert after.fingerprint == before.fingerprint
    for one, other in zip(before.files, after.files):
        assert (one.block_bytes, one.size_bytes) == (other.block_bytes, other.size_bytes)
        assert np.array_equal(one.sums, other.sums)
    assert after.encode() == before.encode()


@LAWS
@given(data=st.data())
def test_damage_is_noticed(data: st.DataObject) -> None:
    right = made().encode()
    found = bytearray(right)
    match data.draw(st.sampled_from(["flip", "cut", "more", "any"])):
        case "flip":
            bit = data.draw(st.integers(0, len(right) * 8 - 1))
            found[bit // 8] ^= 1 << bit % 8
        case "cut":
            del found[data.draw(st.integers(0, len(right) - 1)) :]
        case "more":
            found += data.draw(st.binary(min_size=1, max_size=50))
        case _:
            found = bytearray(data.draw(st.binary(max_size=100)))
    with pytest.raises(StoreError, match=r"^c\.sums: "):
        parse("c.sums", bytes(found))


numbers = st.sampled_from([0, 1, 2**12, 2**12 + 1, 2**26, 2**27, 2**31, 2**32 - 1])
long_numbers = numbers | st.sampled_from([2**53, 2**63 - 1, 2**63, 2**64 - 1])


@LAWS
@given(version=numbers, block=numbers, size=long_numbers, idx=long_numbers, entries=st.binary(max_size=40))
def test_a_made_up_file_is_refused_or_fits(
    version: int, block: int, size: int, idx: int, entries: bytes
) -> None:
    """With the right checksum of its own: nobody looks for room that the file does not have itself."""
    head = struct.pack("<8sIIQQ16s", b"MFSUMS\0\0", version, block, size, idx, bytes(16))
    told = head + struct.pack("<I", zlib.crc32(entries, zlib.crc32(head))) + entries
    try:
        found = parse("c.sums", told)
    except StoreError as error:
        assert str(error).startswith("c.sums: ")
        assert not isinstance(error, ChecksumError)
        return
    assert [each.size_bytes for each in found.files] == [size, idx]
    assert 4 * sum(-(-each // block) for each in (size, idx)) == len(entries)


def test_the_terabyte_in_the_docs() -> None:
    assert 4 * (1 << 40) // sums.BLOCK_BYTES == 64 << 20
