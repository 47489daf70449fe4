"""Parquet as a token store: a document per row, decoded a row group at a time."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from meshfeed.columns import Array
from meshfeed.errors import OptionError, StoreError
from meshfeed.extras import install
from meshfeed.files import ByteFile, Cache
from meshfeed.formats.documents import DocumentFiles, DocumentFilesFormat, FileSpan
from meshfeed.formats.tokens import (
    TokenColumn,
    Where,
    hint_for,
    refuse_null_row,
    refuse_null_token,
    refuse_unfit,
)
from meshfeed.store.base import I64, Pieces, grouped
from meshfeed.store.loss_columns import LOSS_COLUMNS
from meshfeed.store.node_arrays import joined

_SPAN_BYTES = 1 << 26
_ROWS_TOGETHER = 1024
MOST_HELD_BYTES = 1 << 30
"""The most bytes of decoded row groups that a store keeps, unless a single one is larger."""


class ParquetStore(DocumentFiles):
    """Parquet files; each row is a document, its tokens in one column of lists.

    A row group is a shard, and is decoded as a whole: up to 1 GiB of them stay in memory. Shuffle with
    `mf.Blocks()`, which goes through a bounded number of them at a time (`window` times `lanes`: choose few
    lanes); a global shuffle over large row groups decodes one for almost every document, which is slow. Needs
    pyarrow. See `DocumentFiles`.
    """

    format = "parquet"

    def __init__(self, path: str, files: Sequence[ByteFile], column: TokenColumn, cache: Cache) -> None:
        super().__init__(path, files, column, cache)
        self._open: dict[int, Any] = {}
        self._held: OrderedDict[int, _RowGroup] = OrderedDict()
        self._announced: set[int] = set()

    def check(self) -> Self:
        """Load pyarrow, and check that the files exist."""
        _ = arrow_for(self.path)
        return super().check()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        with self._lock:
            if not self._depth:
                self._held.clear()
                self._open.clear()

    @property
    def shard_ends(self) -> I64:
        """Where row groups end, in documents; int64 [row groups]."""
        return self._group_ends

    @cached_property
    def _group_ends(self) -> I64:
        return self._index["rows"].cumsum()

    # -- the index --------------------------------------------------------------------------------------

    def _spans(self) -> list[FileSpan]:
        """Row groups of files."""
        spans: list[FileSpan] = []
        for f, file in enumerate(self._files):
            with file, typed_arrow(file.url):
                parquet = self._parquet(f)
                extents = [extent_of(parquet, g, self._name(f)) for g in range(parquet.num_row_groups)]
            first = size = 0
            for group, (begin, end) in enumerate(extents):
                size += end - begin
                if size >= _SPAN_BYTES or group == len(extents) - 1:
                    spans.append(FileSpan(f, first, group + 1))
                    first, size = group + 1, 0
        return spans

    def _scan(self, span: FileSpan) -> Mapping[str, Array]:
        rows: list[int] = []
        lengths: list[I64] = []
        most = 0
        for group in range(span.begin, span.end):
            held = self._decoded(span.file, group)
            rows.append(held.count)
            for first in range(0, held.count, _ROWS_TOGETHER):
                some = held.tokens(range(first, min(first + _ROWS_TOGETHER, held.count)))
                lengths.append(np.array([found.size for found in some], np.int64))
                most = max(most, *(int(found.max(initial=0)) for found in some))
        return {
            "lengths": np.concatenate(lengths or [np.zeros(0, np.int64)]),
            "rows": np.array(rows, np.int64),
            "most": np.array([most]),
            "beside": np.isin(LOSS_COLUMNS, self._parquet(span.file).schema_arrow.names),
        }

    def _joined(
        self, spans: Sequence[FileSpan], arrays: Sequence[Mapping[str, Array]]
    ) -> Mapping[str, Array]:
        pairs = [(span.file, group) for span in spans for group in range(span.begin, span.end)]
        return {"rows": joined(arrays, "rows"), "groups": np.array(pairs, np.int64).reshape(-1, 2)}

    # -- reading ----------------------------------------------------------------------------------------

    def _tokens(self, documents: I64) -> list[Array]:
        found: list[Array] = [np.zeros(0, np.int64)] * documents.size
        group_of = self._group_ends.searchsorted(documents, side="right")
        for group, mine in grouped(group_of):
            rows, inverse = np.unique(documents[mine], return_inverse=True)
            held = self._group(group)
            tokens = held.tokens((rows - self._group_ends[group] + held.count).tolist())
            for i, place in zip(mine.tolist(), inverse.tolist()):
                found[i] = tokens[place]
        return found

    def _announce(self, pieces: Pieces) -> None:
        groups = np.unique(self._group_ends.searchsorted(pieces.documents, side="right")).tolist()
        with self._lock:
            for group in groups:
                # Announce a group once for all its documents.
                if group not in self._held and group not in self._announced:
                    self._announced.add(group)
                    f, g = self._index["groups"][group].tolist()
                    file = self._files[f]
                    with typed_arrow(file.url):
                        begin, end = extent_of(self._parquet(f), g, self._name(f))
                        file.will_need(np.array([begin]), np.array([end]))

    def forget_needs(self) -> None:
        super().forget_needs()
        with self._lock:
            self._announced.clear()

    def _group(self, group: int) -> _RowGroup:
        with self._lock:
            self._announced.discard(group)
            held = self._held.get(group)
            if held is None:
                f, g = self._index["groups"][group].tolist()
                held = self._held[group] = self._decoded(f, g)
                while (
                    len(self._held) > 1
                    and sum(rows.num_bytes for rows in self._held.values()) > MOST_HELD_BYTES
                ):
                    self._held.popitem(last=False)
            self._held.move_to_end(group)
            return held

    def _decoded(self, f: int, group: int) -> _RowGroup:
        file = self._files[f]
        with typed_arrow(f"{file.url}: row group {group}"):
            parquet, name = self._parquet(f), self._name(f)
            table = parquet.read_row_group(group, columns=[name], use_threads=False)
            first = sum(parquet.metadata.row_group(g).num_rows for g in range(group))

            def where(row: int) -> str:
                return f"{file.url}: row {first + row} (row group {group}, column {name!r})"

            return _rows_of(table.column(name), where, f"{file.url}: column {name!r}", self._column)

    def _parquet(self, f: int) -> Any:
        """The opened file, its footer read; the file must be entered."""
        if f not in self._open:
            self._open[f] = parquet_of(self._files[f])
        return self._open[f]

    def _name(self, f: int) -> str:
        return name_in(self._parquet(f).schema_arrow, self._column.names, self._files[f].url)


class ParquetFormat(DocumentFilesFormat):
    """Parquet."""

    name = "parquet"
    lies_at = "a .parquet file, or a folder of such"
    suffix, store = ".parquet", ParquetStore


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """One decoded row group: lists of tokens, flat.

    Attributes:
        count: rows.
        num_bytes: its size in memory.
        ends: where each row's tokens end; int64 [count].
        values: all tokens.
    """

    count: int
    num_bytes: int
    ends: I64
    values: Array

    def tokens(self, rows: Sequence[int]) -> list[Array]:
        """All tokens of some rows."""
        ends = self.ends
        return [self.values[int(ends[row - 1]) if row else 0 : int(ends[row])] for row in rows]


def _is_text(kind: Any) -> bool:
    plain = getattr(kind, "value_type", kind) if str(kind).startswith("dictionary<") else kind
    return str(plain) in ("string", "large_string", "string_view")


def _rows_of(column: Any, where: Where, name: str, how: TokenColumn) -> _RowGroup:
    arrow = arrow_for(name)
    element = getattr(column.type, "value_type", None)  # of any kind of list
    if arrow.types.is_dictionary(column.type) or element is None or not how.holds(arrow, element):
        raise OptionError(f"{name} is {column.type}, where {how.belongs}")
    wide = column.cast(arrow.large_list(element))
    array = arrow.concat_arrays(wide.chunks) if wide.num_chunks else arrow.array([], wide.type)
    refuse_null_row(array, where)
    offsets = array.offsets.to_numpy()
    ends, values = offsets[1:] - offsets[0], array.flatten()
    refuse_null_token(values, ends, where)
    numbers = values.to_numpy(zero_copy_only=False)
    if how.of_loss:
        numbers = how.of_dtype(numbers, lambda at: where(int(ends.searchsorted(at, side="right"))))
    else:
        refuse_unfit(numbers, ends, where)
    return _RowGroup(len(array), array.nbytes, ends, numbers)


def parquet_of(file: ByteFile) -> Any:
    """An entered file as pyarrow's ParquetFile, its footer read. Raises StoreError."""
    arrow = arrow_for(file.url)
    parquet = importlib.import_module("pyarrow.parquet")
    with typed_arrow(file.url):
        return parquet.ParquetFile(arrow.PythonFile(RawStream(file), mode="r"))


def name_in(schema: Any, names: Sequence[str], url: str) -> str:
    """The first of some columns that an Arrow schema has. Raises StoreError."""
    there = schema.names
    for name in names:
        if name in there:
            return name
    has_text = "text" in there and _is_text(schema.field("text").type)
    raise OptionError(
        f"{url}: no column {' or '.join(map(repr, names))}, found "
        f"{', '.join(map(repr, there[:8])) or 'nothing'}; {hint_for(names, there, has_text=has_text)}"
    )


class RawStream(io.RawIOBase):
    """An entered ByteFile as a Python file object."""

    def __init__(self, file: ByteFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Read from there next."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size_bytes}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer up to the end of the file."""
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
        (chunk.dictionary_page_offset or chunk.data_page_offset, chunk.total_compressed_size)
        for chunk in chunks
        if chunk.path_in_schema == name or chunk.path_in_schema.startswith(f"{name}.")
    ]
    return min(begin for begin, _ in spans), max(begin + size for begin, size in spans)


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
