"""Columns as one buffer: a fixed header, a JSON table of contents, the data. No pickle.

    0   magic u32 | kind u32 | total bytes u64 | bytes of table u64
    24  table: [[name, dtype, shape or list of shapes, form], ...]
        data, each column aligned to 64 bytes

The arrays (of one dtype) or byte strings of a column are stored back to back.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from meshfeed.arrays import Array, Bytes, Columns
from meshfeed.deliver.error_codec import ErrorRecord
from meshfeed.errors import DeliveryError, MeshfeedError

DATA, ERROR, END = 0, 1, 2
TABLE_ROOM = 4096
"""Add this to the bytes of the columns: header, table and alignment usually fit in it."""

_MAGIC = 0x4446534D
_HEADER = struct.Struct("<IIQQ")
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Message:
    """A message to send: its head, and (offset, data) of what follows.

    Attributes:
        num_bytes: size on the wire.
    """

    num_bytes: int
    head: bytes
    parts: Sequence[tuple[int, Array]]

    def write(self, buffer: Bytes) -> None:
        """Write the message to the start of a uint8 buffer of at least `num_bytes`."""
        buffer[: len(self.head)] = np.frombuffer(self.head, np.uint8)
        for offset, part in self.parts:
            flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            buffer[offset : offset + flat.size] = flat

    def to_bytes(self) -> Bytes:
        """The message in new memory."""
        buffer = np.zeros(self.num_bytes, np.uint8)
        self.write(buffer)
        return buffer


def encode(columns: Columns) -> Message:
    """A message of columns. Raises DeliveryError for object arrays."""
    table: list[list[Any]] = []
    pieces: list[list[Array]] = []
    for name, column in columns.items():
        if isinstance(column, np.ndarray):
            table.append([name, _dtype_name(name, column), list(column.shape), "array"])
            pieces.append([column])
        elif column and isinstance(column[0], bytes):
            table.append([name, "|u1", [[len(piece)] for piece in column], "bytes"])
            pieces.append([np.frombuffer(piece, np.uint8) for piece in column])
        else:
            arrays = cast(Sequence[Array], column)
            dtypes = {_dtype_name(name, array) for array in arrays} or {"|u1"}
            if len(dtypes) > 1:
                raise DeliveryError(f"column {name!r} mixes dtypes {sorted(dtypes)}; use one")
            table.append([name, dtypes.pop(), [list(array.shape) for array in arrays], "ragged"])
            pieces.append(list(arrays))
    return _message(DATA, json.dumps(table, separators=(",", ":")).encode(), pieces)


def error_message(error: BaseException) -> Message:
    """A message with the error that ends the data."""
    return _message(ERROR, ErrorRecord.of(error).encode(TABLE_ROOM - _HEADER.size), [])


def end_message() -> Message:
    """A message that marks the end."""
    return _message(END, b"", [])


def peek(buffer: Bytes) -> tuple[int, int]:
    """(kind, total bytes) of the message at the start of a buffer. Raises DeliveryError."""
    magic, kind, num_bytes, _ = _HEADER.unpack_from(buffer.data)
    if magic != _MAGIC or kind not in (DATA, ERROR, END):
        raise DeliveryError(
            f"not a meshfeed message: it starts with {magic:#x}, kind {kind}; do all ranks run one version?"
        )
    return kind, num_bytes


def decode(buffer: Bytes) -> Columns:
    """The columns of a data message, as read-only views of the buffer."""
    table, offset = _table(buffer)
    columns: dict[str, Any] = {}
    for name, dtype, shape, form in json.loads(table):
        pieces: list[Array] = []
        offset = _aligned(offset)
        for one in [shape] if form == "array" else shape:
            view: Array = np.ndarray(one, dtype, buffer, offset)
            view.flags.writeable = False
            pieces.append(view)
            offset += view.nbytes
        columns[name] = pieces[0] if form == "array" else pieces
        if form == "bytes":
            columns[name] = [piece.tobytes() for piece in pieces]
    return columns


def decode_error(buffer: Bytes) -> MeshfeedError:
    """The error in an error message."""
    return ErrorRecord.decode(_table(buffer)[0]).exception()


def _table(buffer: Bytes) -> tuple[bytes, int]:
    """The table of contents, and where it ends."""
    end = _HEADER.size + _HEADER.unpack_from(buffer.data)[3]
    return buffer[_HEADER.size : end].tobytes(), end


def _message(kind: int, table: bytes, pieces: list[list[Array]]) -> Message:
    offset = _HEADER.size + len(table)
    parts: list[tuple[int, Array]] = []
    for column in pieces:
        offset = _aligned(offset)
        for piece in column:
            parts.append((offset, piece))
            offset += piece.nbytes
    return Message(offset, _HEADER.pack(_MAGIC, kind, offset, len(table)) + table, parts)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _dtype_name(name: str, array: Array) -> str:
    if array.dtype.hasobject:
        raise DeliveryError(f"column {name!r} holds Python objects; give arrays of numbers, or bytes")
    if array.dtype.kind == "V":  # records, bfloat16: their name does not identify them
        raise DeliveryError(f"column {name!r} is {array.dtype}; give plain numbers, or one column per part")
    return array.dtype.str
