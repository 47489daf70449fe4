"""A part's documents in a file of their own: there, whole and on the disk, or not there at all.

blocks    of documents: each some arrays as NumPy's .npy, one after the other (see Block)
facts     JSON (see PartFacts)
u64       bytes of the facts
"MFPART" 0 1
"""

from __future__ import annotations

import json
import os
import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Array
from meshfeed.errors import StoreError
from meshfeed.files import typed_errors
from meshfeed.store.indexed_writer import sync_directory

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_MAGIC = b"MFPART\0\1"
_TAIL = struct.Struct("<Q8s")


@dataclass(frozen=True, slots=True)
class Malformed:
    """A record that is no document.

    Attributes:
        span: that it is in; a row of the job's spans.
        number: of its line or row in the span, from 0.
        byte: where its line begins; -1 of rows and whole files.
        reason: what is wrong.
    """

    span: int
    number: int
    byte: int
    reason: str


@dataclass(frozen=True, slots=True)
class PartFacts:
    """What a part holds.

    Attributes:
        num_documents, num_tokens: in it.
        num_bytes: of records read for it.
        num_blocks: in its file.
        counts: lines or rows of each of its spans, documents or not.
        malformed: records that are none, in order.
    """

    num_documents: int
    num_tokens: int
    num_bytes: int
    num_blocks: int
    counts: list[int]
    malformed: list[Malformed]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Some documents of a part, in order.

    Attributes:
        lengths: tokens of each; int64 [n].
        spans, numbers: where each comes from: row of the job's spans, line or row in it; int64 [n].
        hashes: 128 bits of each; uint64 [n, 2], or [0, 2] where nobody wants them.
        columns: name -> the values of all documents, back to back.
    """

    lengths: I64
    spans: I64
    numbers: I64
    hashes: U64
    columns: Mapping[str, Array]


def part_path(folder: Path, part: int) -> Path:
    """Where a part lies in the folder of its job."""
    return folder / "parts" / f"{part:08}"


class PartWriter:
    """Writes a part; it appears at a clean end of `with`, and what came before it goes otherwise.

    Whoever else writes the same part at the same time writes the same bytes, so the last one may win. Raises
    StoreError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        self._stream: IO[bytes] | None = None

    def __enter__(self) -> Self:
        with typed_errors(self._path):
            self._stream = self._partial.open("xb", buffering=1 << 20)
        return self

    def add(self, block: Block) -> None:
        """The next documents."""
        with typed_errors(self._path):
            for array in (block.lengths, block.spans, block.numbers, block.hashes, *block.columns.values()):
                write_array(self._file, array)

    def finish(self, facts: PartFacts) -> None:
        """All blocks were added."""
        told = json.dumps(asdict(facts)).encode()
        with typed_errors(self._path):
            self._file.write(told + _TAIL.pack(len(told), _MAGIC))
            self._file.flush()
            os.fsync(self._file.fileno())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with typed_errors(self._path):
                self._file.close()
                if kind is None:
                    self._partial.replace(self._path)
                    sync_directory(self._path.parent)
        finally:
            self._partial.unlink(missing_ok=True)

    @property
    def _file(self) -> IO[bytes]:
        if self._stream is None:
            raise StoreError(f"{self._path}: not writing; use it inside `with`")
        return self._stream


def write_array(stream: IO[bytes], array: npt.NDArray[Any]) -> None:
    """Write an array as .npy. NumPy's own way with files does not say what the system says of a full disk."""
    array = np.ascontiguousarray(array)
    np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
    stream.write(array.view(np.uint8).data if array.size else b"")


def facts_of_part(path: Path) -> PartFacts | None:
    """What a part holds; None where it is not made yet. Raises StoreError for a damaged one."""
    try:
        with typed_errors(path), path.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END) - _TAIL.size
            stream.seek(max(end, 0))
            size, magic = _TAIL.unpack(stream.read(_TAIL.size).ljust(_TAIL.size, b"\0"))
            if magic != _MAGIC or size > end:
                raise StoreError(f"{path}: no whole part; remove it, and continue with --resume")
            stream.seek(end - size)
            told: dict[str, Any] = json.loads(stream.read(size))
    except StoreError:
        if not path.exists():
            return None
        raise
    malformed = [Malformed(**each) for each in told.pop("malformed")]
    return PartFacts(**told, malformed=malformed)


def hashes_of_part(path: Path, num_blocks: int, num_columns: int) -> U64:
    """The hashes of all documents of a part, uint64 [n, 2], without reading its tokens. Raises StoreError."""
    found = [np.zeros((0, 2), np.uint64)]
    with typed_errors(path), path.open("rb") as stream:
        for _ in range(num_blocks):
            for place in range(4 + num_columns):
                if place == 3:
                    found.append(np.lib.format.read_array(stream, allow_pickle=False))
                else:
                    _skip(stream)
    return np.concatenate(found)


def _skip(stream: IO[bytes]) -> None:
    np.lib.format.read_magic(stream)
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    stream.seek(shape[0] * dtype.itemsize, os.SEEK_CUR)


def blocks_of_part(path: Path, num_blocks: int, names: Sequence[str] = ()) -> Iterator[Block]:
    """The blocks of a part, with the columns that it was written with. Raises StoreError."""
    with typed_errors(path), path.open("rb") as stream:
        for _ in range(num_blocks):
            arrays = [np.lib.format.read_array(stream, allow_pickle=False) for _ in range(4 + len(names))]
            lengths, spans, numbers, hashes, *columns = arrays
            yield Block(lengths, spans, numbers, hashes, dict(zip(names, columns)))
