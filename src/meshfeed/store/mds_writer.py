"""Write an MDS dataset, byte for byte as MosaicML Streaming's own writer does, of tokens and plain values."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from meshfeed.errors import StoreError
from meshfeed.files import typed_errors
from meshfeed.files.codec import digest_of
from meshfeed.store.indexed_writer import sync_directory
from meshfeed.store.mds_index import INDEX, parse_index
from meshfeed.store.mds_sample import DTYPE_CODES, ndarray_of

SHARD_BYTES = 1 << 26
_MOST_BYTES = (1 << 32) - 1  # offsets in a shard are u32
_SHAPES = ("<u1", "<u2", "<u4")  # a shape's own type, by the code that tells it


class MDSWriter:
    """Writes a folder of shards and index.json, uncompressed.

        with MDSWriter("corpus", {"tokens": "ndarray:uint16", "url": "str"}) as writer:
            writer.add_sample({"tokens": np.array([5, 7], np.uint16), "url": "..."})

    The folder appears, whole, at a clean end of `with`. Until then it has another name beside it, and an
    exception removes it. Memory holds one shard.

    Args:
        folder: its parent must exist.
        columns: name -> encoding: `ndarray:DTYPE` for arrays [n], n >= 0; a DTYPE alone for one number;
            `int`, `str` or `bytes`. DTYPE is (u)int8 to 64 or float16 to 64.
        shard_bytes: of a shard at most, unless one sample is larger; below 2**32.
        hashes: recorded of each shard, such as ("xxh64",) (needs xxhash) or ("sha1",).
        overwrite: whether an existing MDS dataset may be replaced. Nothing else ever is.

    Attributes:
        num_samples: added so far.

    All methods raise StoreError.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        columns: Mapping[str, str],
        *,
        shard_bytes: int = SHARD_BYTES,
        hashes: Sequence[str] = (),
        overwrite: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self._columns = {
            name: _encoder(encoding, f"{folder}: column {name!r}")
            for name, encoding in sorted(columns.items())
        }
        if not columns or not 0 < shard_bytes <= _MOST_BYTES:
            raise StoreError(
                f"{folder}: {len(columns)} columns, shard_bytes={shard_bytes}; one, and 1 to {_MOST_BYTES}"
            )
        self._overwrite, self._shard_bytes, self._hashes = overwrite, shard_bytes, sorted(hashes)
        self._config = {
            "version": 2,
            "format": "mds",
            "compression": None,
            "hashes": self._hashes,
            "size_limit": shard_bytes,
            "column_names": list(self._columns),
            "column_encodings": [columns[name] for name in self._columns],
            "column_sizes": [size for _, size in self._columns.values()],
        }
        self._head = json.dumps(self._config, sort_keys=True).encode()
        self._part: Path | None = None

    def __enter__(self) -> Self:
        if self._part is not None:
            raise StoreError(f"{self.folder}: this writer is already writing; make one for each dataset")
        self._refuse_existing()
        part = self.folder.with_name(f"{self.folder.name}.{secrets.token_hex(4)}.tmp")
        with typed_errors(part):
            part.mkdir()
        self._part, self.num_samples = part, 0
        self._shards: list[dict[str, Any]] = []
        self._samples: list[bytes] = []
        self._size = self._empty_bytes
        return self

    def add_sample(self, sample: Mapping[str, Any]) -> None:
        """Add a sample: a value for each column."""
        where = f"{self.folder}: sample {self.num_samples}"
        if sample.keys() != self._columns.keys():
            raise StoreError(f"{where} has columns {sorted(sample)}, where {list(self._columns)} belong")
        values: list[bytes] = []
        sizes: list[int] = []
        for name, (encode, size) in self._columns.items():
            try:
                values.append(encode(sample[name]))
            except (TypeError, ValueError, OverflowError, UnicodeError) as error:
                raise StoreError(f"{where}, column {name!r}: {error}") from error
            if size is None:
                sizes.append(len(values[-1]))
        encoded = b"".join((np.array(sizes, np.int64).astype("<u4").tobytes(), *values))
        # 4 more for its offset.
        if self._samples and self._size + len(encoded) + 4 > self._shard_bytes:
            self._write_shard(self._writing())
        if self._size + len(encoded) + 4 > _MOST_BYTES:
            raise StoreError(f"{where}: {len(encoded)} bytes, a shard has less than 2**32; split it")
        self._samples.append(encoded)
        self._size += len(encoded) + 4
        self.num_samples += 1

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        part = self._writing()
        self._part = None
        try:
            if kind is None:
                self._publish(part)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    # -- below --------------------------------------------------------------------------------------

    @property
    def _empty_bytes(self) -> int:
        """Of a shard without samples."""
        return 8 + len(self._head)

    def _writing(self) -> Path:
        if self._part is None:
            raise StoreError(f"{self.folder}: not writing; add to it inside `with`")
        return self._part

    def _write_shard(self, part: Path) -> None:
        sizes = [0, *map(len, self._samples)]
        offsets = np.cumsum(sizes, dtype=np.int64) + 4 * (len(sizes) + 1) + len(self._head)
        words = np.concatenate(([len(self._samples)], offsets)).astype("<u4")
        data = b"".join((words.tobytes(), self._head, *self._samples))
        name = f"shard.{len(self._shards):05}.mds"
        with typed_errors(part / name):
            _write_durably(part / name, data)
        hashes = {each: digest_of(each, data, str(self.folder)) for each in self._hashes}
        raw = {"basename": name, "bytes": len(data), "hashes": hashes}
        told = {"samples": len(self._samples), "raw_data": raw, "zip_data": None}
        self._shards.append(told | self._config)
        self._samples, self._size = [], self._empty_bytes

    def _publish(self, part: Path) -> None:
        if self._samples:
            self._write_shard(part)
        index = json.dumps({"version": 2, "shards": self._shards}, sort_keys=True)
        with typed_errors(part):
            _write_durably(part / INDEX, index.encode())
            sync_directory(part)
        self._refuse_existing()
        old = part.with_suffix(".old")
        with typed_errors(self.folder):
            if self.folder.exists():
                self.folder.replace(old)
            try:
                part.replace(self.folder)
            except OSError:
                if old.exists():
                    old.replace(self.folder)
                raise
            sync_directory(self.folder.parent)
            if old.exists():
                shutil.rmtree(old)

    def _refuse_existing(self) -> None:
        """Refuse what is there, unless it is an MDS dataset and nothing but, and may be replaced."""
        with typed_errors(self.folder):
            if not self.folder.exists() or (self.folder.is_dir() and not any(self.folder.iterdir())):
                return
            if not self._overwrite:
                raise StoreError(
                    f"{self.folder}: exists already; take another path or pass overwrite=True (--overwrite)"
                )
            index, mine = self.folder / INDEX, {INDEX}
            if index.is_file():
                for shard in parse_index(str(index), index.read_bytes())[1]:
                    mine |= {shard.name, shard.raw_name}
            for path in sorted(self.folder.iterdir()) if self.folder.is_dir() else [self.folder]:
                if not index.is_file() or path.name not in mine:
                    raise StoreError(
                        f"{path}: belongs to no MDS dataset, and is not removed; take another path"
                    )


def _encoder(encoding: str, where: str) -> tuple[Callable[[Any], bytes], int | None]:
    """What encodes a value, and how many bytes each takes; None where they differ."""
    if encoding in DTYPE_CODES.values():
        dtype = np.dtype(encoding)
        return lambda value: _exact(value, dtype, 0).tobytes(), dtype.itemsize
    try:
        kind = ndarray_of(encoding)
    except ValueError as error:
        raise StoreError(f"{where}: {error}") from error
    if kind is not None and kind.dtype is not None and kind.shape is None:
        dtype = kind.dtype
        return lambda value: _array(_exact(value, dtype, 1)), None
    if encoding not in _PLAIN:
        raise StoreError(
            f"{where}: encoding {encoding!r}; ndarray:DTYPE, DTYPE, int, str and bytes are written"
        )
    return _PLAIN[encoding]


def _array(value: np.ndarray[Any, Any]) -> bytes:
    code = next(code for code, dtype in enumerate(_SHAPES) if value.size <= np.iinfo(dtype).max)
    return bytes([1 << 2 | code]) + value.size.to_bytes(1 << code, "little") + value.tobytes()


def _exact(value: Any, dtype: np.dtype[Any], ndim: int) -> np.ndarray[Any, Any]:
    """The value in a dtype that holds it exactly. Raises ValueError."""
    given = np.asarray(value)
    if given.ndim != ndim:
        raise ValueError(f"shape {given.shape} where {'one dimension' if ndim else 'one number'} belongs")
    if given.dtype.kind not in "biuf":
        raise ValueError(f"{given.dtype} where numbers belong")
    made = given.astype(dtype.newbyteorder("<"), copy=False)
    if not np.can_cast(given.dtype, dtype, "safe") and not _is_same(given, made):
        raise ValueError(f"{given.dtype.name} values that {dtype.name} cannot hold")
    return made


def _is_same(given: np.ndarray[Any, Any], made: np.ndarray[Any, Any]) -> bool:
    return np.array_equal(made, given, equal_nan=given.dtype.kind == "f")


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} where bytes belong")
    return value


def _utf8(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where text belongs")
    return value.encode()


_PLAIN: Mapping[str, tuple[Callable[[Any], bytes], int | None]] = {
    "bytes": (_bytes, None),
    "str": (_utf8, None),
    "int": (lambda value: _exact(value, np.dtype(np.int64), 0).tobytes(), 8),
}


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
