"""Bounded decompression, and the hashes that shard formats record."""

from __future__ import annotations

import bz2
import hashlib
import importlib
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from meshfeed.errors import ChecksumError, StoreError
from meshfeed.extras import install

_STEP_BYTES = 1 << 20
_SLICE_BYTES = 1 << 16


def decompress(codec: str, data: memoryview | bytes, raw_bytes: int, url: str) -> bytes:
    """Decompress `data` to exactly `raw_bytes`; it never produces more than some MiB beyond that.

    codec: one of `Content`. Raises StoreError for another codec, a missing package, or data that exceed the
    declared size; ChecksumError for damaged data.
    """
    if codec not in _STREAMS:
        raise StoreError(f"{url}: codec {codec!r} is unknown; known are {', '.join(_STREAMS)}")
    pieces: list[bytes] = []
    size = 0
    try:
        for piece in _STREAMS[codec](bytes(data), raw_bytes):
            size += len(piece)
            if size > raw_bytes:
                raise StoreError(
                    f"{url}: exceeds the {raw_bytes} bytes that its index declares; one of the two is "
                    f"damaged or malicious"
                )
            pieces.append(piece)
    except ImportError as missing:
        raise StoreError(f"{url}: {codec} needs {missing.name}: {install('mds')}") from missing
    except StoreError:
        raise
    except Exception as error:  # each codec raises its own
        raise ChecksumError(
            f"{url}: the {codec} data cannot be decompressed: {error}; copy it again"
        ) from error
    if size != raw_bytes:
        raise ChecksumError(f"{url}: {size} bytes uncompressed, {raw_bytes} declared; copy it again")
    return b"".join(pieces)


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


def _zstd(data: bytes, raw_bytes: int) -> Iterator[bytes]:
    zstandard = importlib.import_module("zstandard")
    with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
        data, read_across_frames=True
    ) as stream:
        while piece := stream.read(_STEP_BYTES):
            yield piece


def _stream(made: Callable[[], Any], data: bytes) -> Iterator[bytes]:
    """Decompress with a class of the standard library, member by member, in small slices.

    A decompressor copies its unused input; slices keep that copy small.
    """
    view, at = memoryview(data), 0
    while at < len(view):
        one = made()
        while not one.eof:
            piece, used = _fed(one, view[at : at + _SLICE_BYTES])
            at += used
            if not piece and not used and not one.eof and at == len(view):
                raise EOFError("it ends too early")
            yield piece


def _fed(one: Any, data: memoryview) -> tuple[bytes, int]:
    """(output, bytes of input used); the output is at most one step."""
    if isinstance(one, bz2.BZ2Decompressor):  # it keeps its unused input
        if not one.needs_input:
            data = data[:0]
        piece = one.decompress(data, _STEP_BYTES)
        return piece, len(data) - len(one.unused_data)
    piece = one.decompress(data, _STEP_BYTES)
    return piece, len(data) - len(one.unconsumed_tail) - len(one.unused_data)


def _brotli(data: bytes, raw_bytes: int) -> Iterator[bytes]:
    one: Any = importlib.import_module("brotli").Decompressor()
    view, at = memoryview(data), 0
    while not one.is_finished():
        more = view[at : at + _SLICE_BYTES] if one.can_accept_more_data() else view[:0]
        at += len(more)
        piece = one.process(more, output_buffer_limit=_STEP_BYTES)
        if not piece and at == len(view) and one.can_accept_more_data():
            raise EOFError("it ends too early")
        yield piece


def _snappy(data: bytes, raw_bytes: int) -> Iterator[bytes]:
    raw: Any = importlib.import_module("cramjam").snappy
    if raw.decompress_raw_len(data) > raw_bytes:
        yield b"\0" * (raw_bytes + 1)  # its own header declares too many
        return
    yield bytes(raw.decompress_raw(data))


def _litdata(data: bytes, raw_bytes: int) -> Iterator[bytes]:
    """A chunk of litdata with compressed frames of items, as if it were uncompressed.

    "LDFZ01" 0 0 | u16 version, flags | u32 items, items of a frame, frames |
    u32 offsets[items + 1] | table | frames
    in the table, for each frame: u32 first item, items | u64 byte | u32 bytes, bytes uncompressed
    """
    magic, version, _, num_items, _, num_frames = struct.unpack_from("<8sHHIII", data)
    if magic != b"LDFZ01\0\0" or version != 1:
        raise ValueError("no LDFZ01 of version 1")
    head = 8 + 4 * num_items
    offsets = np.frombuffer(data, "<u4", num_items + 1, 24) + np.uint64(head)
    yield struct.pack("<I", num_items) + offsets.astype("<u4").tobytes()
    table = range(20 + head, 20 + head + 24 * num_frames, 24)
    end = table.stop
    for at in table:
        begin, size = struct.unpack_from("<QI", data, at + 8)
        if begin < end:
            raise ValueError("frames overlap")
        end = begin + size
        yield from _zstd(data[begin:end], raw_bytes)


_STREAMS: Mapping[str, Callable[[bytes, int], Iterator[bytes]]] = {
    "zstd": _zstd,
    "gz": lambda data, _: _stream(lambda: zlib.decompressobj(31), data),
    "bz2": lambda data, _: _stream(bz2.BZ2Decompressor, data),
    "br": _brotli,
    "snappy": _snappy,
    "litdata": _litdata,
}
