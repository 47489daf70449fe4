"""Bounded decompression, and the hashes that shard formats record."""

from __future__ import annotations

import hashlib
import importlib
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshfeed.arrays import Bytes
from meshfeed.errors import ChecksumError, StoreError
from meshfeed.extras import install

_CODECS = {
    "zstd": "zstd",
    "gz": "gzip",
    "bz2": "bzip2",
    "br": "brotli",
    "snappy": "snappy",
    "litdata": "zstd",
}
"""Codecs of `Content`, and cramjam's names for them."""
_TOO_SMALL = "write whole buffer", "output buffer"  # in cramjam's errors for a full output


def decompress(codec: str, data: memoryview | bytes, raw_bytes: int, url: str) -> memoryview:
    """Decompress `data` to exactly `raw_bytes`; it never takes more memory than that.

    codec: one of `Content`. Raises StoreError for another codec, a missing package, or data that exceed the
    declared size; ChecksumError for damaged data.
    """
    if codec not in _CODECS:
        raise StoreError(f"{url}: codec {codec!r} is unknown; known are {', '.join(_CODECS)}")
    try:
        one: Any = getattr(importlib.import_module("cramjam"), _CODECS[codec])
    except ImportError as missing:
        raise StoreError(f"{url}: {codec} needs {missing.name}: {install('mds')}") from missing
    exceeds = StoreError(
        f"{url}: exceeds the {raw_bytes} bytes that its index declares; one of the two is damaged or "
        f"malicious"
    )
    try:
        out = np.empty(raw_bytes + 1, np.uint8)  # one more byte reveals data that exceed it
        match codec:
            case "snappy":
                size = one.decompress_raw_into(data, out)
            case "litdata":
                size = _litdata(one, data, out)
            case _:
                size = one.decompress_into(data, out)
    except Exception as error:  # each codec raises its own
        if any(words in str(error) for words in _TOO_SMALL):
            raise exceeds from error
        raise ChecksumError(
            f"{url}: the {codec} data cannot be decompressed: {error}; copy it again"
        ) from error
    if size > raw_bytes:
        raise exceeds
    if size != raw_bytes:
        raise ChecksumError(f"{url}: {size} bytes uncompressed, {raw_bytes} declared; copy it again")
    return out.data[:raw_bytes]


def check_hashes(data: memoryview | bytes, hashes: Mapping[str, str], url: str) -> None:
    """Raises ChecksumError for bytes with a wrong digest, StoreError for an unknown algorithm."""
    for algorithm, expected in hashes.items():
        found = digest_of(algorithm, data, url)
        if found != expected.lower():
            raise ChecksumError(f"{url}: {algorithm} is {found}, its index says {expected}; copy it again")


def digest_of(algorithm: str, data: memoryview | bytes, url: str) -> str:
    """Hex digest, by hashlib or xxhash. url: for messages. Raises StoreError for an unknown algorithm."""
    if algorithm in hashlib.algorithms_available and not algorithm.startswith("shake"):
        return hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()
    if algorithm not in ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128"):
        raise StoreError(
            f"{url}: hash {algorithm!r} is unknown; create its index with one of hashlib or xxhash"
        )
    try:
        xxhash = importlib.import_module("xxhash")
    except ImportError as missing:
        raise StoreError(f"{url}: {algorithm} needs xxhash: {install('mds')}") from missing
    name = f"{algorithm}_hexdigest" if algorithm.startswith("xxh3") or algorithm == "xxh128" else None
    return getattr(xxhash, name)(data) if name else getattr(xxhash, algorithm)(data).hexdigest()


def _litdata(zstd: Any, data: memoryview | bytes, out: Bytes) -> int:
    """Expand a chunk of litdata whose frames of items are compressed; returns its uncompressed size.

    "LDFZ01" 0 0 | u16 version, flags | u32 items, items of a frame, frames |
    u32 offsets[items + 1] | table | frames
    in the table, for each frame: u32 first item, items | u64 byte | u32 bytes, bytes uncompressed
    """
    magic, version, _, num_items, _, num_frames = struct.unpack_from("<8sHHIII", data)
    if magic != b"LDFZ01\0\0" or version != 1:
        raise ValueError("no LDFZ01 of version 1")
    head = 8 + 4 * num_items
    offsets = np.frombuffer(data, "<u4", num_items + 1, 24) + np.uint64(head)
    out[:4] = np.frombuffer(struct.pack("<I", num_items), np.uint8)
    out[4:head] = offsets.astype("<u4").view(np.uint8)
    table = range(20 + head, 20 + head + 24 * num_frames, 24)
    size, end = head, table.stop
    for at in table:
        begin, num_bytes = struct.unpack_from("<QI", data, at + 8)
        if begin < end:
            raise ValueError("frames overlap")
        end = begin + num_bytes
        size += zstd.decompress_into(data[begin:end], out[size:])
    return size
