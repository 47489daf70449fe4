"""Where the rows of one column lie in an Arrow stream, or in an Arrow file: a stream and a footer.

pyarrow reads the record batches. A file of this machine is mapped, so little more than the offsets of the
column is read; a remote one is read through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshfeed.errors import OptionError, StoreError
from meshfeed.files import ByteFile
from meshfeed.formats.parquet import RawStream
from meshfeed.formats.tokens import Column, refuse_null_row, refuse_null_token
from meshfeed.store.base import I64

_FILE_MAGIC = b"ARROW1\0\0"
_END = b"\xff\xff\xff\xff\0\0\0\0"


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
    """A column of text, or of lists of integers.

    Attributes:
        name: its name.
        index: which column of the stream.
        dtype: of its values: integers, or uint8 for the bytes of text.
        is_text: whether it is text.
    """

    name: str
    index: int
    dtype: np.dtype[Any]
    is_text: bool


def column_of(arrow: Any, schema: Any, name: str, where: str, how: Column) -> ArrowColumn:
    """The column of a name. how: it is used. Raises StoreError for any but text or lists of fit numbers."""
    types, index = arrow.types, schema.names.index(name)
    kind = schema.field(index).type
    if isinstance(kind, arrow.BaseExtensionType):  # `datasets`, if it is imported, registers types of its own
        kind = kind.storage_type
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_text and not (is_list and how.holds(arrow, kind.value_type)):
        raise OptionError(
            f"{where}: column {name!r} is {kind}, where {'text or ' * (not how.of_loss)}{how.belongs}"
        )
    if not is_text and types.is_boolean(kind.value_type):
        raise OptionError(
            f"{where}: column {name!r} is {kind}: bits are not read where they lie; cast it to int8, as "
            f"cast_column({name!r}, List(Value('int8'))) of datasets does, or save it as Parquet"
        )
    dtype = np.dtype(np.uint8 if is_text else kind.value_type.to_pandas_dtype())
    return ArrowColumn(name, index, dtype, is_text)


def schema_of(arrow: Any, file: ByteFile) -> Any:
    """The schema of an entered file. Raises StoreError, or what pyarrow raises for a damaged one."""
    with _stream(arrow, file) as stream:
        return arrow.ipc.read_schema(stream)


def batches_of(arrow: Any, file: ByteFile, column: ArrowColumn) -> Iterator[Batch]:
    """The record batches of an entered file.

    Raises StoreError for a null, naming its row, and for damage; or what pyarrow raises for that.
    """
    first = 0
    with _stream(arrow, file) as stream:
        schema = arrow.ipc.read_schema(stream)
        while (message := _next(arrow, file, stream)) is not None:
            body, end = message.body, stream.tell()
            if message.type != "record batch":
                kind = f"a {message.type}-encoded column" if body else "no record batch"
                raise StoreError(f"{file.url}: {kind} before byte {end}; save it as plain text")
            values = arrow.ipc.read_record_batch(message, schema).column(column.index)
            values.validate()  # that its buffers hold its length, which read_record_batch takes on trust
            values = getattr(values, "storage", values)
            found = _located(values, column, first, body, end - body.size, file.url)
            yield found
            first += found.ends.size - 1


# -- below ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stream(arrow: Any, file: ByteFile) -> Generator[Any, None, None]:
    """An entered file as pyarrow's, where its stream begins."""
    of_arrow = arrow.PythonFile(RawStream(file), mode="r") if file.is_remote else arrow.memory_map(file.url)
    with of_arrow as stream:
        if stream.read(len(_FILE_MAGIC)) != _FILE_MAGIC:
            stream.seek(0)
        yield stream


def _next(arrow: Any, file: ByteFile, stream: Any) -> Any:
    """The next message; None at the end mark."""
    at = stream.tell()
    with contextlib.suppress(EOFError):
        return arrow.ipc.read_message(stream)
    stream.seek(at)
    if stream.read(len(_END)) != _END:
        raise StoreError(f"{file.url}: byte {at}: no end mark; it was cut short: write it or copy it again")
    return None


def _located(values: Any, column: ArrowColumn, first: int, body: Any, at: int, url: str) -> Batch:
    """The rows of a record batch, from row `first` on. body: its bytes, from byte `at` of the file on."""

    def where(row: int) -> str:
        return f"{url}: row {first + row} (column {column.name!r})"

    refuse_null_row(values, where, is_text=column.is_text)
    if column.is_text:
        _, offsets, data = values.buffers()
        dtype = np.dtype("<i8" if "large" in str(values.type) else "<i4")
        ends = np.frombuffer(offsets, dtype, len(values) + 1) if len(values) else np.zeros(1, dtype)
    else:
        is_fixed = not hasattr(values, "offsets")
        ends = np.arange(len(values) + 1) * values.type.list_size if is_fixed else values.offsets.to_numpy()
        data = values.values.buffers()[1]
    ends = ends.astype(np.int64)
    if ends[0] < 0 or (np.diff(ends) < 0).any() or ends[-1] * column.dtype.itemsize > data.size:
        raise StoreError(f"{url}: byte {at}: lists that end before they begin; copy the file again")
    if not column.is_text:
        refuse_null_token(values.values, ends[1:], where)
    begin = data.address - body.address if data.size else 0
    if not 0 <= begin <= body.size:
        raise StoreError(f"{url}: byte {at}: compressed record batches; save them uncompressed")
    return Batch(at + begin, ends)
