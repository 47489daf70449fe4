"""A part's documents in a file of their own.

blocks    of documents: each some arrays as NumPy's .npy, one after the other (see Block)
summary   JSON (see PartSummary)
u64       bytes of the summary
"MFPART" 0 4
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from meshfeed.arrays import Array, Bytes, Longs, Words
from meshfeed.files import typed_errors

VERSION = 4
"""Of part files; a job resumes only with its own version."""

_MAGIC = b"MFPART\0\4"
_TAIL = struct.Struct("<Q8s")


@dataclass(frozen=True, slots=True)
class Malformed:
    """A record that is not a document.

    Attributes:
        span: its row in the job's spans.
        number: of its line or row in the span, from 0.
        byte: at which its line begins; -1 for rows and whole files.
        reason: what is wrong.
    """

    span: int
    number: int
    byte: int
    reason: str


@dataclass(slots=True)
class PartSummary:
    """Totals of a part, or of what is encoded so far.

    Attributes:
        num_documents, num_tokens: in it.
        num_bytes: of the records read for it.
        num_blocks: in its file.
        counts: lines or rows of each of its spans, documents or not.
        malformed: records that are not documents, in order.
        named: files that were read beside the inputs; see `inputs.named.NAMED`.
    """

    num_documents: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_blocks: int = 0
    counts: list[int] = field(default_factory=list[int])
    malformed: list[Malformed] = field(default_factory=list[Malformed])
    named: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Some documents of a part, in order.

    Attributes:
        lengths: tokens of each; int64 [n].
        records: the span of each in the job's spans, and the number of its line or row there; int64 [n, 2].
        hashes: 128 bits of each; uint64 [n, 2], or [0, 2] if they are not needed.
        columns: name -> the values of all documents, back to back; of tokens, and of images,
            audio and video as `encoding.multimodal.PART_DTYPES`.
    """

    lengths: Longs
    records: Longs
    hashes: Words
    columns: Mapping[str, Array]


def part_path(folder: Path, part: int) -> Path:
    """The path of a part in the folder of its job."""
    return folder / "parts" / f"{part:08}"


def write_block(stream: IO[bytes], block: Block) -> None:
    """The next documents of a part."""
    for array in (block.lengths, block.records, block.hashes, *block.columns.values()):
        write_array(stream, array)


def write_summary(stream: IO[bytes], summary: PartSummary) -> None:
    """The end of a part."""
    text = json.dumps(asdict(summary)).encode()
    stream.write(text + _TAIL.pack(len(text), _MAGIC))


def write_array(stream: IO[bytes], array: Array) -> None:
    """Write an array as .npy. NumPy's own writer hides the system's error for a full disk."""
    array = np.ascontiguousarray(array)
    np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
    stream.write(array.view(np.uint8).data if array.size else b"")


def summary_of_part(path: Path) -> PartSummary:
    """The summary of a part. Raises StoreError."""
    with typed_errors(path), path.open("rb") as stream:
        end = stream.seek(-_TAIL.size, os.SEEK_END)
        size, _ = _TAIL.unpack(stream.read())
        stream.seek(end - size)
        values: dict[str, Any] = json.loads(stream.read(size))
    malformed = [Malformed(**each) for each in values.pop("malformed")]
    return PartSummary(**values, malformed=malformed)


def blocks_of_part(path: Path, num_blocks: int, names: Sequence[str]) -> Iterator[Block]:
    """The blocks of a part, with the columns that it was written with, memory-mapped. Raises StoreError."""
    with typed_errors(path), path.open("rb") as stream:
        mapped = np.asarray(np.memmap(path, np.uint8, "r"))
        for _ in range(num_blocks):
            lengths, records, hashes, *arrays = (_next(stream, mapped) for _ in range(3 + len(names)))
            yield Block(lengths, records, hashes, dict(zip(names, arrays)))


def _next(stream: IO[bytes], mapped: Bytes) -> Array:
    np.lib.format.read_magic(stream)
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    begin = stream.tell()
    end = stream.seek(math.prod(shape) * dtype.itemsize, os.SEEK_CUR)
    return mapped[begin:end].view(dtype).reshape(shape)
