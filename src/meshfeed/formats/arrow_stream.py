"""Byte positions of the rows of one column in an Arrow stream, or in an Arrow file, which has a footer.

pyarrow reads record batches without copying, so the address of a buffer gives its position in the file. A
local file is mapped, so little more than the offsets of the column is read; a remote stream is read through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from meshfeed.errors import OptionError, StoreError
from meshfeed.files import ByteFile
from meshfeed.formats.documents import read_bytes
from meshfeed.formats.parquet import RawStream
from meshfeed.formats.tokens import TokenColumn, refuse_null_row, refuse_null_token
from meshfeed.store.base import I64

_FILE_MAGIC = b"ARROW1"
_END = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """The rows of one record batch.

    Attributes:
        at: byte of the file where each row's values begin; int64 [rows].
        sizes: bytes of each row's values; int64 [rows].
    """

    at: I64
    sizes: I64


@dataclass(frozen=True, slots=True)
class ArrowColumn:
    """A column of lists of numbers.

    Attributes:
        name: its name.
        index: which column of the stream.
        dtype: of its values.
    """

    name: str
    index: int
    dtype: np.dtype[Any]


def column_of(arrow: Any, schema: Any, name: str, where: str, how: TokenColumn) -> ArrowColumn:
    """The column of a name. how: the column's use.

    Raises OptionError for any type but lists of fitting numbers.
    """
    types, index = arrow.types, schema.names.index(name)
    kind = declared = schema.field(index).type
    if isinstance(kind, arrow.BaseExtensionType):  # `datasets`, if it is imported, registers types of its own
        kind = kind.storage_type
    of_list: Any = getattr(kind, "value_type", None)  # of any kind of list
    if types.is_dictionary(kind) or of_list is None or not how.holds(arrow, of_list):
        raise OptionError(f"{where}: column {name!r} is {declared}, where {how.belongs}")
    if types.is_boolean(of_list):
        raise OptionError(
            f"{where}: column {name!r} is {declared}: bits cannot be read in place; cast it to int8, as "
            f"cast_column({name!r}, List(Value('int8'))) of datasets does, or save it as Parquet"
        )
    return ArrowColumn(name, index, np.dtype(of_list.to_pandas_dtype()))


def schema_of(arrow: Any, file: ByteFile) -> Any:
    """The schema of an entered file. Raises StoreError, or what pyarrow raises for a damaged one."""
    with _source(arrow, file) as source:
        return _opened(arrow, file, source.stream)[0].schema


def batches_of(arrow: Any, file: ByteFile, column: ArrowColumn) -> Iterator[RecordBatch]:
    """The record batches of an entered file.

    Raises StoreError for a null, naming its row, and for damage; or what pyarrow raises for that.
    """
    first = 0
    with _source(arrow, file) as source:
        reader, is_file = _opened(arrow, file, source.stream)
        for batch in _in_file(reader) if is_file else _in_stream(reader, file, source):
            values = batch.column(column.index)
            values.validate()  # checks that its buffers hold its length, which is trusted below
            values = getattr(values, "storage", values)
            found = _BatchRows(arrow, source, column, first, file.url).located(values)
            yield found
            first += found.at.size
            source.forget()


# -- below ------------------------------------------------------------------------------------------------


class _Source(Protocol):
    """A file as pyarrow reads it, and the positions of its buffers in the file."""

    stream: Any

    def place_of(self, buffer: Any) -> int | None:
        """The byte of the file at which a buffer begins; None if the buffer is a copy."""
        ...

    def forget(self) -> None:
        """Release what was kept for the values that have been located."""
        ...


class _MappedSource:
    """A file of this machine."""

    def __init__(self, arrow: Any, url: str) -> None:
        with arrow.memory_map(url) as mapped:
            self._whole = mapped.read_buffer()
        self.stream = arrow.BufferReader(self._whole)

    def place_of(self, buffer: Any) -> int | None:
        at = buffer.address - self._whole.address
        return at if at >= 0 and at + buffer.size <= self._whole.size else None

    def forget(self) -> None:
        return


class _RemoteSource(RawStream):
    """A remote file. What is read is kept until its values have been located."""

    def __init__(self, arrow: Any, file: ByteFile) -> None:
        super().__init__(file)
        self._read: list[tuple[int, int, bytes]] = []
        self.stream = arrow.PythonFile(self, mode="r")

    def read(self, size: int = -1) -> bytes:
        """As of files; remembers where it was."""
        at = self.tell()
        found = super().read(size) or b""
        if found:
            self._read.append((np.frombuffer(found, np.uint8).ctypes.data, at, found))
        return found

    def place_of(self, buffer: Any) -> int | None:
        for address, at, held in self._read:
            inside = buffer.address - address
            if inside >= 0 and inside + buffer.size <= len(held):
                return at + inside
        return None

    def forget(self) -> None:
        self._read.clear()


@contextlib.contextmanager
def _source(arrow: Any, file: ByteFile) -> Generator[_Source]:
    source = _RemoteSource(arrow, file) if file.is_remote else _MappedSource(arrow, file.url)
    with source.stream:
        yield source


def _opened(arrow: Any, file: ByteFile, stream: Any) -> tuple[Any, bool]:
    """A reader of the batches, and whether it is of a file with a footer, not of a stream."""
    is_file = read_bytes(file, 0, min(len(_FILE_MAGIC), file.size_bytes)) == _FILE_MAGIC
    return (arrow.ipc.open_file if is_file else arrow.ipc.open_stream)(stream), is_file


def _in_file(reader: Any) -> Iterator[Any]:
    return (reader.get_batch(i) for i in range(reader.num_record_batches))


def _in_stream(reader: Any, file: ByteFile, source: _Source) -> Iterator[Any]:
    with contextlib.suppress(StopIteration):
        while True:
            yield reader.read_next_batch()
    end = source.stream.tell()
    if end < len(_END) or read_bytes(file, end - len(_END), end) != _END:
        raise StoreError(f"{file.url}: byte {end}: no end mark; it was cut short: write it or copy it again")


@dataclass(frozen=True, slots=True)
class _BatchRows:
    """The rows of a record batch. first: the number of the first one."""

    arrow: Any
    source: _Source
    column: ArrowColumn
    first: int
    url: str

    def located(self, values: Any) -> RecordBatch:
        """Positions of the values.

        Raises StoreError for a null, and for values that are not stored as they are.
        """
        refuse_null_row(values, self._where)
        begins, sizes = self._lists(values, str(values.type))
        data = values.values.buffers()[1]
        width, available = self.column.dtype.itemsize, data.size if data is not None else 0
        if sizes.size and (min(begins.min(), sizes.min()) < 0 or (begins + sizes).max() * width > available):
            raise self._damaged()
        return RecordBatch(self._place(data) + begins * width, sizes * width)

    def _where(self, row: int) -> str:
        return f"{self.url}: row {self.first + row} (column {self.column.name!r})"

    def _damaged(self) -> StoreError:
        return StoreError(
            f"{self.url}: rows from {self.first} on: offsets outside the data; copy the file again"
        )

    def _place(self, buffer: Any) -> int:
        if buffer is None or not buffer.size:
            return 0
        at = self.source.place_of(buffer)
        if at is None:
            raise StoreError(
                f"{self.url}: rows from {self.first} on: compressed record batches; save them uncompressed"
            )
        return at

    def _lists(self, values: Any, kind: str) -> tuple[I64, I64]:
        if kind.startswith(("list_view", "large_list_view")):
            begins, sizes = (each.to_numpy().astype(np.int64) for each in (values.offsets, values.sizes))
        else:
            is_fixed = not hasattr(values, "offsets")
            ends = (
                np.arange(len(values) + 1) * values.type.list_size if is_fixed else values.offsets.to_numpy()
            ).astype(np.int64)
            begins, sizes = ends[:-1], np.diff(ends)
        if values.values.null_count:
            refuse_null_token(values.flatten(), sizes.cumsum(), self._where)
        return begins, sizes
