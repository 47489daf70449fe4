"""Digests of every byte of a store's files, for `Recipe(verify_data="full")`.

A digest covers the sizes and the CRC-32 of each MiB, which follows from a .sums. So a pair with a .sums need
not be read, and has the same digest without it. A node keeps computed digests for the current version of the
files.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from meshfeed.columns import Array
from meshfeed.errors import ChangedError, OptionError
from meshfeed.files import ByteFile, Cache
from meshfeed.files.cache.cut import Cut
from meshfeed.files.local.version import Version, version_of, wait_for_tick
from meshfeed.files.sums import Sums
from meshfeed.store.node_arrays import built_in_parts, joined, key_of_parts

_VERSION = 1
_BLOCK_BYTES = 1 << 20
_PIECE_BYTES = 16 * _BLOCK_BYTES
_PART_PIECES = 64  # 1 GiB: what a killed process repeats at most
_THREADS = 8
_AT_ONCE = 1 << 12  # checksums of a MiB; those of a terabyte would take half a GB


class _Piece(NamedTuple):
    """Bytes begin..end of a file: whole blocks, except at the end of the file."""

    file: int
    begin: int
    end: int


def digest_of_files(path: str, files: Sequence[ByteFile], cache: Cache) -> str:
    """Hex digest of every byte of some files, in order; one process per node reads them.

    For files on the Hub, of the Hub's own hashes. path: of the store, for messages. Raises OptionError for
    other remote files, ChangedError for files that are written in the meantime.
    """
    ids = [file.content_id for file in files]
    if None not in ids:
        return digest_of_texts(f"{file.size_bytes} {file.content_id}" for file in files)
    if any(file.is_remote for file in files):
        raise remote_refused(path)
    versions = _versions(files)
    where = [os.path.abspath(file.url) for file in files]  # noqa: PTH100 - 100,000 Paths take longer
    of_versions = digest_of_texts(f"{each} {version}" for each, version in zip(where, versions))
    key = key_of_parts(kind="content", version=_VERSION, files=of_versions)
    pieces = [
        _Piece(i, begin, min(begin + _PIECE_BYTES, file.size_bytes))
        for i, file in enumerate(files)
        for begin in range(0, file.size_bytes, _PIECE_BYTES)
    ]

    def parts() -> list[list[_Piece]]:
        wait_for_tick(max((version[4] for version in versions), default=0))
        return [pieces[at : at + _PART_PIECES] for at in range(0, len(pieces), _PART_PIECES)]

    def sums_of(part: Sequence[_Piece]) -> Mapping[str, Array]:
        with ThreadPoolExecutor(_THREADS) as pool:
            found = list(pool.map(_sums, [files[piece.file] for piece in part], part))
        return {"sums": np.concatenate(found)}

    def whole(_: Sequence[list[_Piece]], arrays: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
        if _versions(files) != versions:
            raise ChangedError(f"{path}: was written while it was read for verify_data='full'; open it again")
        made = _digest(_BLOCK_BYTES, [file.size_bytes for file in files], joined(arrays, "sums", np.uint32))
        return {"digest": np.frombuffer(bytes.fromhex(made), np.uint8)}

    return built_in_parts(cache.kept(), key, parts, sums_of, whole)["digest"].tobytes().hex()


def digest_of_sums(sums: Sums) -> str:
    """The digest of a .bin and an .idx from their .sums; of blocks up to a MiB, that of `digest_of_files`."""
    block_bytes = max(sums.files[0].block_bytes, _BLOCK_BYTES)
    crcs = list[Array]()
    for file in sums.files:
        edges = Cut(file.size_bytes, block_bytes).edges
        crcs += [file.between(edges[at : at + _AT_ONCE + 1]) for at in range(0, edges.size - 1, _AT_ONCE)]
    return _digest(block_bytes, [file.size_bytes for file in sums.files], np.concatenate(crcs))


def digest_of_texts(texts: Iterator[str]) -> str:
    """Hex digest of several texts."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()


def remote_refused(path: str) -> OptionError:
    """The error for a store of which every byte would have to be fetched."""
    return OptionError(
        f"{path}: verify_data='full' would fetch all of it, since nothing there records a digest of its "
        f"bytes. For a .bin/.idx pair, write a .sums (`meshfeed inspect PATH --write-checksums`) and upload "
        f"it beside the pair; copy other formats to the nodes; or leave verify_data at 'sampled'",
        path=path,
    )


def _digest(block_bytes: int, sizes: Sequence[int], sums: Array) -> str:
    digest = hashlib.blake2b(f"{block_bytes} {[*sizes]}".encode(), digest_size=16)
    digest.update(sums.astype("<u4").tobytes())
    return digest.hexdigest()


def _sums(file: ByteFile, piece: _Piece) -> Array:
    """CRC-32 of each block of a piece; uint32 [num_blocks]."""
    out = np.empty(piece.end - piece.begin, np.uint8)
    file.look_up(out, np.array([piece.begin]), np.array([out.size]))
    blocks = (out[at : at + _BLOCK_BYTES].data for at in range(0, out.size, _BLOCK_BYTES))
    return np.array([zlib.crc32(block) for block in blocks], np.uint32)


def _versions(files: Sequence[ByteFile]) -> list[Version]:
    found: list[Version] = []
    for file in files:
        found.append(version_of(file.url))
        size = found[-1][2]
        if size != file.size_bytes:
            raise ChangedError(
                f"{file.url}: {size} bytes, {file.size_bytes} when it was opened; open the store again",
                path=file.url,
            )
    return found
