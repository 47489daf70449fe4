"""Arrays that one process of a node builds and all map into memory.

A folder has an entry per key, the digest of all that its arrays depend on; see `once_per_node`. Mapped pages
are shared, so memory does not grow with the number of processes.

    <key>.lock      empty; never removed
    <key>.part/     being written
    <key>.parts/    entries of parts, until the whole is made
    <key>/          name.npy for each array, and manifest.json: their sizes and digests
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from meshfeed.arrays import Array
from meshfeed.errors import CacheError, MeshfeedError
from meshfeed.files.cache.once import mark, once_per_node

Part = TypeVar("Part")
Arrays = Mapping[str, Array | list[Array]]
"""Arrays by name, to be kept; of a list, its one-dimensional arrays are written back to back, as one."""

_MANIFEST = "manifest.json"
_BLOCK_BYTES = 1 << 16
_NUM_BLOCKS = 64
_WRITTEN_TOGETHER = 1 << 22  # entries
_LOG_EVERY_S = 10.0
_log = logging.getLogger("meshfeed")


def key_of_parts(**parts: int | float | str | bool | None) -> str:
    """A file name: the digest of everything that some arrays depend on."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def cached_arrays(folder: str | os.PathLike[str], key: str, build: Callable[[], Arrays]) -> dict[str, Array]:
    """The arrays of `key`, mapped read-only; built by the first process to ask while the others wait.

    folder: on a disk of the node or a shared one, created if missing. key: letters and digits, as from
    `key_of_parts`. build: its names become file names. An entry is built again if its builder died or it is
    damaged: lacks a file, is truncated, or has other bytes at one of 64 places of a file. Errors of `build`
    pass through, and the next process tries again.

    Raises CacheError for a folder that cannot be written, is full, or has no locks.
    """
    entry, of_build = Path(folder) / key, list[OSError]()

    def make(part: Path) -> None:
        try:
            arrays = build()
        except OSError as error:
            of_build.append(error)
            raise
        _write(part, arrays)

    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        return once_per_node(entry, _opened, make, lock_mode=0o666)
    except MeshfeedError:
        raise
    except OSError as error:
        if error in of_build:
            raise
        raise CacheError(
            f"{entry}: {error.strerror or error}; give a folder that this process can write and lock, "
            f"for a store by mf.open(path, cache=...)"
        ) from error


def built_in_parts(
    folder: Path,
    key: str,
    parts: Callable[[], Sequence[Part]],
    build: Callable[[Part], Mapping[str, Array]],
    join: Callable[[Sequence[Part], Sequence[Mapping[str, Array]]], Arrays],
) -> dict[str, Array]:
    """`cached_arrays`, made part by part and joined: after a killed builder, the next one resumes.

    A part is an entry of its own, in <key>.parts, until the whole is made. The key covers everything that the
    arrays depend on, including how they are cut into parts.
    """
    of_parts = folder / f"{key}.parts"

    def whole() -> Arrays:
        cut, arrays, logged = parts(), list[Mapping[str, Array]](), time.monotonic()
        for i, part in enumerate(cut):
            arrays.append(cached_arrays(of_parts, str(i), lambda part=part: build(part)))
            if time.monotonic() - logged > _LOG_EVERY_S:
                logged = time.monotonic()
                _log.info("%s: made %d of %d parts", of_parts, i + 1, len(cut))
        return join(cut, arrays)

    arrays = cached_arrays(folder, key, whole)
    if of_parts.exists():
        shutil.rmtree(of_parts, ignore_errors=True)  # another process may remove it, too
    return arrays


def joined(arrays: Sequence[Mapping[str, Array]], name: str, dtype: Any = np.int64) -> Array:
    """One array of all parts, back to back; empty without parts."""
    return np.concatenate([part[name] for part in arrays] or [np.zeros(0, dtype)])


def _write(part: Path, arrays: Arrays) -> None:
    part.mkdir()
    manifest: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        path = part / f"{name}.npy"
        with path.open("wb") as stream:
            if isinstance(array, list):
                _write_joined(stream, array)
            else:
                np.save(stream, array, allow_pickle=False)
        manifest[name] = _signature(path)
    with (part / _MANIFEST).open("w") as stream:
        json.dump(manifest, stream)


def _write_joined(stream: BinaryIO, pieces: list[Array]) -> None:
    """Write arrays as one, which may be larger than memory."""
    dtype, size = np.result_type(*pieces), sum(piece.size for piece in pieces)
    header = {"descr": dtype.str, "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(stream, header)
    for piece in pieces:
        for first in range(0, piece.size, _WRITTEN_TOGETHER):
            stream.write(piece[first : first + _WRITTEN_TOGETHER].astype(dtype).data)


def _opened(entry: Path) -> dict[str, Array] | None:
    """The arrays of an entry; None if it is damaged. Raises OSError if it is missing."""
    try:
        manifest = json.loads((entry / _MANIFEST).read_text())
        arrays: dict[str, Array] = {}
        for name, signature in manifest.items():
            path = entry / f"{name}.npy"
            if _signature(path) != signature:
                return None
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
            arrays[name] = mapped.view(np.ndarray)  # a memmap's own __getitem__ costs a microsecond
        mark(entry, entry.stat().st_mtime)
        return arrays
    except (ValueError, TypeError, AttributeError):
        return None


def _signature(path: Path) -> dict[str, Any]:
    """What damage to a file changes: its size, and a digest of 64 blocks spread over it."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb", buffering=0) as stream:
        for place in _places(size):
            stream.seek(place)
            digest.update(stream.read(_BLOCK_BYTES))
    return {"bytes": size, "digest": digest.hexdigest()}


def _places(size: int) -> Iterator[int]:
    if size <= _BLOCK_BYTES * _NUM_BLOCKS:
        yield from range(0, size, _BLOCK_BYTES)
        return
    last = size - _BLOCK_BYTES
    yield from (last * i // (_NUM_BLOCKS - 1) for i in range(_NUM_BLOCKS))
