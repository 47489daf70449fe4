"""Parquet as a token store: a document per row."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from meshfeed.arrays import Array, Bools, Longs
from meshfeed.errors import OptionError, StoreError
from meshfeed.extras import install
from meshfeed.files import ByteFile
from meshfeed.formats.documents import DocumentFiles, DocumentFilesFormat, FileSpan, read_bytes
from meshfeed.formats.tokens import TokenColumn, hint_for, refuse_null_row, refuse_null_token, refuse_unfit
from meshfeed.store.loss_columns import LOSS_COLUMNS

_SPAN_BYTES = 1 << 26
_JOINT = re.compile(rb"(?s:(.{4}))PAR[1E](?=PAR1)")  # sizes of footers, magic numbers
_FOOTER = b"\x15"  # the first byte of any: Thrift's, of its version


class ParquetStore(DocumentFiles):
    """Parquet files; each row is a document, its tokens in one column of lists.

    Row groups are decoded as a whole. Needs pyarrow. See `DocumentFiles`.
    """

    format = "parquet"

    def check(self) -> Self:
        _ = arrow_for(self.path)
        return super().check()

    def _spans(self) -> list[FileSpan]:
        """Row groups of files."""
        spans: list[FileSpan] = []
        for f, file in enumerate(self._files):
            with file, typed_arrow(file.url):
                parquet = parquet_of(file)
                name = name_in(parquet.schema_arrow, self._column.names, file.url)
                extents = [extent_of(parquet, group, name) for group in range(parquet.num_row_groups)]
            spans += spans_of(f, [end - begin for begin, end in extents])
        return spans

    def _scan(self, span: FileSpan, beside: Bools) -> Iterator[tuple[Longs, Array]]:
        file = self._files[span.file]
        parquet = parquet_of(file)
        name = name_in(parquet.schema_arrow, self._column.names, file.url)
        beside[:] = np.isin(LOSS_COLUMNS, parquet.schema_arrow.names)
        for group in range(span.begin, span.end):
            first = sum(parquet.metadata.row_group(g).num_rows for g in range(group))
            with typed_arrow(f"{file.url}: row group {group}"):
                table = parquet.read_row_group(group, columns=[name], use_threads=False)
                for chunk in table.column(name).chunks:
                    yield lists_in(chunk, Rows(file.url, name, first, f"row group {group}, "), self._column)
                    first += len(chunk)


class ParquetFormat(DocumentFilesFormat):
    """Parquet."""

    name = "parquet"
    lies_at = "a .parquet file, or a folder of such"
    suffix, store = ".parquet", ParquetStore


def _is_text(kind: Any) -> bool:
    plain = getattr(kind, "value_type", kind) if str(kind).startswith("dictionary<") else kind
    return str(plain) in ("string", "large_string", "string_view")


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a column of a file, for messages.

    Attributes:
        url, column: the file, and the column.
        first: the number of the first row.
        within: what else says where they are; ends in a comma.
    """

    url: str
    column: str
    first: int
    within: str = ""

    def __call__(self, row: int) -> str:
        return f"{self.url}: row {self.first + row} ({self.within}column {self.column!r})"


def lists_in(array: Any, rows: Rows, how: TokenColumn) -> tuple[Longs, Array]:
    """Lengths of the lists of an Arrow array, and their numbers back to back; int64 [n], and [sum].

    Raises OptionError for any type but lists of fitting numbers; StoreError naming the row of a null, or of a
    number that does not fit.
    """
    arrow = arrow_for(rows.url)
    declared, array = array.type, getattr(array, "storage", array)  # `datasets` registers types of its own
    element = getattr(array.type, "value_type", None)  # of any kind of list
    if arrow.types.is_dictionary(array.type) or element is None or not how.holds(arrow, element):
        raise OptionError(f"{rows.url}: column {rows.column!r} is {declared}, where {how.belongs}")
    refuse_null_row(array, rows)
    lengths = importlib.import_module("pyarrow.compute").list_value_length(array).to_numpy().astype(np.int64)
    ends, values = lengths.cumsum(), array.flatten()

    def row_of(at: int) -> str:
        return rows(int(ends.searchsorted(at, side="right")))

    refuse_null_token(values, row_of)
    numbers = values.to_numpy(zero_copy_only=False)
    if how.of_loss:
        return lengths, how.of_dtype(numbers, row_of)
    refuse_unfit(numbers, row_of)
    return lengths, numbers


def spans_of(file: int, sizes: Sequence[int]) -> list[FileSpan]:
    """Spans of successive row groups or batches of a file, about _SPAN_BYTES each. sizes: their bytes."""
    spans, first, size = list[FileSpan](), 0, 0
    for at, more in enumerate(sizes):
        size += more
        if size >= _SPAN_BYTES or at == len(sizes) - 1:
            spans.append(FileSpan(file, first, at + 1))
            first, size = at + 1, 0
    return spans


def parquet_of(file: ByteFile) -> Any:
    """An entered file as pyarrow's ParquetFile, its footer read. Raises StoreError."""
    arrow = arrow_for(file.url)
    parquet = importlib.import_module("pyarrow.parquet")
    with typed_arrow(file.url):
        source = arrow.PythonFile(RawStream(file), mode="r")
        found = parquet.ParquetFile(source, page_checksum_verification=True)  # of pages that have one
        _refuse_joined(file, found.metadata)
        return found


def _refuse_joined(file: ByteFile, metadata: Any) -> None:
    """Raise StoreError for several files in one: the first would be read by the footer of the last.

    Offsets are those in the last file, so as many bytes as lie before it follow its columns, and its indexes.
    """
    footer, end = file.size_bytes - metadata.serialized_size - 8, 4
    if last := metadata.num_row_groups:
        group = metadata.row_group(last - 1)
        for chunk in map(group.column, range(group.num_columns)):
            end = max(end, _begin_of(chunk) + chunk.total_compressed_size)
            # of pyarrow 25 and later; an earlier one leaves the filter among what is searched
            bloom = (getattr(chunk, f"bloom_filter_{what}", None) or 0 for what in ("offset", "length"))
            end = max(end, sum(bloom))
    for at in range(0, footer - end, _SPAN_BYTES):
        for joint in _JOINT.finditer(read_bytes(file, at, min(at + _SPAN_BYTES + 12, footer))):
            second = at + joint.end()
            begin = second - 8 - int.from_bytes(joint[1], "little")
            if begin >= 4 and read_bytes(file, begin, begin + 1) == _FOOTER:
                raise StoreError(
                    f"{file.url}: byte {second}: another Parquet file begins within this one; write all rows "
                    f"as one file, or give each file as one of its own"
                )


def name_in(schema: Any, names: Sequence[str], url: str) -> str:
    """The first of some columns that an Arrow schema has. Raises StoreError, also for two of that name."""
    there = schema.names
    for name in names:
        if there.count(name) > 1:
            raise StoreError(f"{url}: {there.count(name)} columns {name!r}; rename or drop all but one")
        if name in there:
            return name
    has_text = "text" in there and _is_text(schema.field(there.index("text")).type)
    raise OptionError(
        f"{url}: no column {' or '.join(map(repr, names))}, found "
        f"{', '.join(map(repr, there[:8])) or 'nothing'}; {hint_for(names, there, has_text=has_text)}"
    )


class RawStream(io.RawIOBase):
    """An entered ByteFile as a Python file object."""

    def __init__(self, file: ByteFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size_bytes}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        out = np.frombuffer(buffer, np.uint8)
        size = max(min(out.size, self._file.size_bytes - self._at), 0)
        self._file.read_into(out[:size], np.array([self._at]), np.array([size]))
        self._at += size
        return size


def extent_of(parquet: Any, group: int, name: str) -> tuple[int, int]:
    """Bytes begin..end of a column in a row group; its leaves are adjacent."""
    facts = parquet.metadata.row_group(group)
    chunks = [facts.column(i) for i in range(facts.num_columns)]
    spans = [
        (_begin_of(chunk), chunk.total_compressed_size)
        for chunk in chunks
        if chunk.path_in_schema == name or chunk.path_in_schema.startswith(f"{name}.")
    ]
    return min(begin for begin, _ in spans), max(begin + size for begin, size in spans)


def _begin_of(chunk: Any) -> int:
    return chunk.dictionary_page_offset or chunk.data_page_offset


def arrow_for(path: str, kind: str = "Parquet") -> Any:
    """pyarrow, to read a file of some kind. Raises StoreError if it is not installed."""
    try:
        return importlib.import_module("pyarrow")
    except ImportError as missing:
        raise StoreError(f"{path}: {kind} needs pyarrow: {install('tables')}") from missing


@contextlib.contextmanager
def typed_arrow(where: str) -> Generator[None, None, None]:
    """Turn pyarrow's errors into StoreError."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:  # pyarrow raises ValueError, OSError and its own types
        raise StoreError(f"{where}: not readable: {error}; copy it again") from error
