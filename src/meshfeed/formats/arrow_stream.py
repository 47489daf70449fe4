"""Where the values of one column lie in an Arrow stream, by its metadata alone; no value is read.

A stream is a schema and then record batches. Each is a message (see Apache Arrow's "Columnar Format"):

    u32 0xFFFFFFFF | i32 bytes of metadata | metadata, a flatbuffer | body

A record batch's metadata has a node for each array (i64 rows, i64 nulls) and a place in the body for each of
its buffers (i64 offset, i64 bytes), children after their parent. Metadata of 0 bytes ends the stream. An
Arrow file is such a stream between "ARROW1" and a footer. `datasets` writes streams.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshfeed.columns import Array
from meshfeed.errors import StoreError
from meshfeed.files import ByteFile
from meshfeed.formats.documents import read_bytes
from meshfeed.store.base import I64

_FILE_MAGIC = b"ARROW1\0\0"
_CONTINUATION = 0xFFFFFFFF
_MOST_METADATA_BYTES = 64 << 20
_DICTIONARY, _BATCH = 2, 3  # types of messages
_COMPRESSION = 3  # a field of a record batch
_UNCOUNTED = ("union", "view", "run_end_encoded")
"""Types whose number of buffers differs between Arrow's versions, or between batches."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one record batch.

    Attributes:
        at: byte of the file where the column's values begin.
        ends: where each row ends, after where the first begins, in values; int64 [rows + 1].
    """

    at: int
    ends: I64


@dataclass(frozen=True, slots=True)
class ArrowColumn:
    """A column that is looked up in a stream's record batches.

    Attributes:
        kind: its Arrow type.
        node, buffer: how many nodes and buffers of a batch come before its own.
        fixed: values of each row of a fixed-size list, else 0.
        wide: whether its offsets are int64.
        dtype: of its values: integers, or uint8 for the bytes of text.
        is_text: whether it is text.
    """

    kind: str
    node: int
    buffer: int
    fixed: int
    wide: bool
    dtype: np.dtype[Any]
    is_text: bool


def column_of(arrow: Any, schema: Any, name: str, where: str) -> ArrowColumn:
    """How to find a column of text, or of lists of integers. Raises StoreError for any other."""
    types, nodes, buffers, at = arrow.types, 0, 0, schema.names.index(name)
    for field in list(schema)[:at]:
        if any(each in str(field.type) for each in _UNCOUNTED):
            raise StoreError(
                f"{where}: column {field.name!r} is {field.type}, and what lies behind it cannot be found; "
                f"save the dataset again without it"
            )
        more = _counts(arrow, field.type)
        nodes, buffers = nodes + more[0], buffers + more[1]
    kind = _storage(arrow, schema.field(at).type)
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_fixed = types.is_fixed_size_list(kind)
    if not (is_text or is_fixed or types.is_list(kind) or types.is_large_list(kind)) or (
        not is_text and not types.is_integer(kind.value_type)
    ):
        raise StoreError(
            f"{where}: column {name!r} is {kind}, where text or lists of whole numbers belong; name the "
            f"right column= and, for text, a tokenizer="
        )
    return ArrowColumn(
        kind=str(kind),
        node=nodes,
        buffer=buffers,
        fixed=int(kind.list_size) if is_fixed else 0,
        wide=types.is_large_string(kind) or types.is_large_list(kind),
        dtype=np.dtype(np.uint8 if is_text else kind.value_type.to_pandas_dtype()).newbyteorder("<"),
        is_text=is_text,
    )


def schema_of(arrow: Any, file: ByteFile) -> Any:
    """The schema of an entered file. Raises StoreError, or what pyarrow raises for a damaged one."""
    at = _first(file)
    body, _ = _metadata(file, at)
    return arrow.ipc.read_schema(arrow.py_buffer(read_bytes(file, at, body)))


def batches_of(file: ByteFile, column: ArrowColumn, name: str) -> Iterator[Batch]:
    """The record batches of an entered file. Raises StoreError for nulls, naming the row, and for damage."""
    at, first = _next(file, _first(file)), 0
    while (message := _message(file, at)) is not None:
        batch, body = message
        kind = batch.byte(1)
        if kind == _DICTIONARY:
            raise StoreError(f"{file.url}: byte {at}: a dictionary-encoded column; save it as plain text")
        if kind == _BATCH:
            found = _located(file, batch.table(2), body, column, name, first)
            yield found
            first += found.ends.size - 1
        at = body + batch.i64(3)


# -- below ------------------------------------------------------------------------------------------------


class _Table:
    """A table of a flatbuffer: its fields by number. Reading past the end raises struct.error."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._fields = at - self._number("<i", at)

    @classmethod
    def root(cls, data: bytes) -> _Table:
        """The outermost table."""
        return cls(data, int(struct.unpack_from("<I", data, 0)[0]))

    def byte(self, field: int) -> int:
        """A u8; 0 if it is left out."""
        at = self._place(field)
        return self._number("<B", at) if at else 0

    def i64(self, field: int) -> int:
        """An i64; 0 if it is left out."""
        at = self._place(field)
        return self._number("<q", at) if at else 0

    def has(self, field: int) -> bool:
        """Whether a field is there."""
        return self._place(field) > 0

    def table(self, field: int) -> _Table:
        """A table in it."""
        at = self._place(field)
        return _Table(self._data, at + self._number("<I", at))

    def pairs(self, field: int) -> list[tuple[int, int]]:
        """A vector of structs of two i64."""
        at = self._place(field)
        if not at:
            return []
        at += self._number("<I", at)
        count = self._number("<I", at)
        values = struct.unpack_from(f"<{2 * count}q", self._data, at + 4)
        return list(zip(values[::2], values[1::2]))

    def _place(self, field: int) -> int:
        """Of a field's value; 0 if it is left out."""
        slot = 4 + 2 * field
        offset = self._number("<H", self._fields + slot) if slot < self._number("<H", self._fields) else 0
        return self._at + offset if offset else 0

    def _number(self, how: str, at: int) -> int:
        if at < 0:
            raise struct.error("a place before the metadata")
        return int(struct.unpack_from(how, self._data, at)[0])


def _located(file: ByteFile, batch: _Table, body: int, column: ArrowColumn, name: str, first: int) -> Batch:
    """The rows of a record batch, which begin at row `first` of the file."""
    if batch.has(_COMPRESSION):
        raise StoreError(f"{file.url}: byte {body}: compressed record batches; save them uncompressed")
    nodes, places = batch.pairs(1), batch.pairs(2)
    rows, nulls = nodes[column.node]
    buffers = [(body + offset, size) for offset, size in places[column.buffer :]]
    if nulls:
        row = first + _first_null(file, *buffers[0])
        belongs = "text" if column.is_text else "a list of tokens"
        raise StoreError(f"{file.url}: row {row} (column {name!r}): null where {belongs} belongs")
    if column.fixed:
        ends, values = np.arange(rows + 1) * column.fixed, buffers[1:]
    else:
        ends, values = _offsets(file, buffers[1], rows, column), buffers[2:]
    if not column.is_text:
        nulls = nodes[column.node + 1][1]
        if nulls:
            at = _first_null(file, *values[0])
            row = first + int(ends.searchsorted(at, side="right")) - 1
            raise StoreError(
                f"{file.url}: row {row} (column {name!r}): a null among its tokens; leave it out"
            )
        values = values[1:]
    begin, size = values[0]
    if ends[0] < 0 or (np.diff(ends) < 0).any() or ends[-1] * column.dtype.itemsize > size:
        raise StoreError(f"{file.url}: byte {body}: lists that end before they begin; copy the file again")
    return Batch(begin, ends)


def _offsets(file: ByteFile, place: tuple[int, int], rows: int, column: ArrowColumn) -> I64:
    if not rows:  # then the buffer may be empty
        return np.zeros(1, np.int64)
    dtype = np.dtype("<i8" if column.wide else "<i4")
    return _array(file, place[0], rows + 1, dtype).astype(np.int64)


def _array(file: ByteFile, at: int, count: int, dtype: np.dtype[Any]) -> Array:
    if at + count * dtype.itemsize > file.size_bytes:
        raise StoreError(f"{file.url}: byte {at}: its data lie behind the file's end; copy it again")
    return np.frombuffer(read_bytes(file, at, at + count * dtype.itemsize), dtype)


def _first_null(file: ByteFile, at: int, size: int) -> int:
    """The first zero of a bitmap."""
    bits = np.unpackbits(_array(file, at, size, np.dtype(np.uint8)), bitorder="little")
    return int((bits == 0).argmax())


def _first(file: ByteFile) -> int:
    """Where the schema begins."""
    head = read_bytes(file, 0, min(len(_FILE_MAGIC), file.size_bytes))
    return len(_FILE_MAGIC) if head == _FILE_MAGIC else 0


def _next(file: ByteFile, at: int) -> int:
    """Where the message after the schema begins; a schema has no body."""
    return _metadata(file, at)[0]


def _message(file: ByteFile, at: int) -> tuple[_Table, int] | None:
    """A message's metadata, and where its body begins; None at the end of the stream."""
    body, size = _metadata(file, at)
    if not size:
        return None
    try:
        message = _Table.root(read_bytes(file, at + 8, body))
        num_bytes = message.i64(3)
    except struct.error as error:
        raise StoreError(f"{file.url}: byte {at}: no Arrow metadata: {error}; copy it again") from error
    if not 0 <= num_bytes <= file.size_bytes - body:
        raise StoreError(
            f"{file.url}: byte {body}: {num_bytes} bytes of data expected, {file.size_bytes - body} are "
            f"left; it was cut short: write it or copy it again"
        )
    return message, body


def _metadata(file: ByteFile, at: int) -> tuple[int, int]:
    """Where the metadata of a message end, and how many bytes they have."""
    head = read_bytes(file, at, min(at + 8, file.size_bytes)) if at < file.size_bytes else b""
    if len(head) < 8:
        raise StoreError(f"{file.url}: byte {at}: no end mark; it was cut short: write it or copy it again")
    continuation, size = struct.unpack("<Ii", head)
    if continuation != _CONTINUATION or not 0 <= size <= min(_MOST_METADATA_BYTES, file.size_bytes - at - 8):
        raise StoreError(f"{file.url}: byte {at}: not an Arrow message; copy the file again")
    return at + 8 + size, size


def _storage(arrow: Any, kind: Any) -> Any:
    """The type as it is stored: `datasets`, if it is imported, registers types of its own."""
    while isinstance(kind, arrow.BaseExtensionType):
        kind = kind.storage_type
    return kind


def _counts(arrow: Any, kind: Any) -> tuple[int, int]:
    """Nodes and buffers of a column of such a type in a record batch."""
    kind = _storage(arrow, kind)
    children = [] if arrow.types.is_dictionary(kind) else [kind.field(i).type for i in range(kind.num_fields)]
    inner = [_counts(arrow, child) for child in children]
    own = 2
    if arrow.types.is_null(kind):
        own = 0
    elif arrow.types.is_struct(kind) or arrow.types.is_fixed_size_list(kind):
        own = 1
    elif str(kind) in ("string", "large_string", "binary", "large_binary"):
        own = 3
    return 1 + sum(nodes for nodes, _ in inner), own + sum(buffers for _, buffers in inner)
