"""Spans of inputs -> records, one for each document that may be there, malformed ones too."""

from __future__ import annotations

import importlib
import io
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshfeed.errors import ChecksumError, StoreError
from meshfeed.files import ByteFile
from meshfeed.prepare.inputs import Input
from meshfeed.store.documents import Span, read_bytes
from meshfeed.store.jsonl import lines_of, record_of, value_in
from meshfeed.store.parquet import RawStream, name_in, parquet_of, typed_arrow

HERE = "here"
"""What errors call a record until it is known which line it is in."""

_STEP_BYTES = 1 << 16
_ROWS_TOGETHER = 256


@dataclass(frozen=True, slots=True)
class Record:
    """What may be a document.

    Attributes:
        number: of the line or row, from the first of its span on.
        byte: where the line begins, uncompressed; -1 of rows and whole files.
        value: of its column, as its file says it.
        num_bytes: that it took there.
        reason: why it is no document; None where it may be one.
    """

    number: int
    byte: int
    value: Any
    num_bytes: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of a record are its value.

    Attributes:
        names: to look for; the first that is there counts.
        beside: that go with it where a record has them: its value is then an object of all these.
        called: what the first is called there.
    """

    names: Sequence[str]
    beside: Sequence[str] = ()
    called: str = "value"

    def value(self, record: Mapping[str, Any]) -> Any:
        """Of a record. Raises StoreError."""
        value = value_in(record, self.names, lambda: HERE)
        more = {name: record[name] for name in self.beside if record.get(name) is not None}
        return {self.called: value} | more if more else value


def records(each: Input, begin: int, end: int, columns: Columns) -> Iterator[Record | None]:
    """The records of a span of an input, in order; None for what is none but counts, as an empty line.

    Raises StoreError where a file cannot be read or uncompressed.
    """
    with each.file() as file:
        if each.kind == "parquet":
            yield from _rows(file, begin, end, columns)
        elif each.kind == "jsonl":
            lines = _unpacked_lines(file, each.codec) if each.codec else lines_of(file, Span(0, begin, end))
            for number, (byte, line) in enumerate(lines):
                yield _of_line(number, byte, line, columns) if line.strip() else None
        else:
            yield _of_file(file, each.codec)


def reason_of(error: StoreError) -> str:
    """What an error says beside the place."""
    return str(error).removeprefix(f"{HERE}: ")


def _of_line(number: int, byte: int, line: bytes, columns: Columns) -> Record:
    try:
        return Record(number, byte, columns.value(record_of(line, lambda: HERE)), len(line) + 1)
    except StoreError as error:
        return Record(number, byte, None, len(line) + 1, reason_of(error))


def _of_file(file: ByteFile, codec: str | None) -> Record:
    raw = b"".join(_unpacked(file, codec)) if codec else read_bytes(file, 0, file.size_bytes)
    try:
        return Record(0, -1, raw.decode("utf-8-sig"), len(raw))
    except UnicodeDecodeError as error:
        return Record(0, -1, None, len(raw), f"no UTF-8: {error}; write it anew, or leave it out")


def _rows(file: ByteFile, begin: int, end: int, columns: Columns) -> Iterator[Record]:
    parquet, first, number = parquet_of(file), 0, 0
    name, there = name_in(parquet, columns.names, file.url), parquet.schema_arrow.names
    wanted = [name, *(other for other in columns.beside if other in there)]
    for group in range(parquet.num_row_groups):
        last = first + int(parquet.metadata.row_group(group).num_rows)
        if first < end and last > begin:
            for row, value, num_bytes in _of_group(parquet, group, wanted, columns, file.url):
                if begin <= first + row < end:
                    yield Record(number, -1, value, num_bytes)
                    number += 1
        first = last


def _of_group(
    parquet: Any, group: int, wanted: Sequence[str], columns: Columns, url: str
) -> Iterator[tuple[int, Any, int]]:
    """(row of the group, value, bytes) of each of its rows."""
    with typed_arrow(f"{url}: row group {group}"):
        row = 0
        for batch in parquet.iter_batches(
            _ROWS_TOGETHER, row_groups=[group], columns=list(wanted), use_threads=False
        ):
            share = batch.nbytes // max(batch.num_rows, 1)
            for record in batch.to_pylist():
                yield row, columns.value(record), share
                row += 1


# -- compressed files -------------------------------------------------------------------------------------


def _unpacked_lines(file: ByteFile, codec: str) -> Iterator[tuple[int, bytes]]:
    """(byte of its begin, line without its newline), both of what comes out."""
    at, rest = 0, b""
    for piece in _unpacked(file, codec):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield at, line
            at += len(line) + 1
    if rest:
        yield at, rest


def _unpacked(file: ByteFile, codec: str) -> Iterator[bytes]:
    """What comes out of a compressed file, member after member, in pieces."""
    made, stream, data = _DECOMPRESSORS[codec], io.BufferedReader(RawStream(file), 1 << 20), b""
    one: Any = None
    try:
        while data or (data := stream.read(_STEP_BYTES)):
            one = one or made()
            piece = one.decompress(data)
            data = one.unused_data if one.eof else b""
            one = None if one.eof else one
            if piece:
                yield piece
    except ImportError as missing:
        raise StoreError(
            f"{file.url}: {codec} needs {missing.name}: pip install 'meshfeed[prepare]'"
        ) from missing
    except StoreError:
        raise
    except Exception as error:  # each codec has its own
        raise ChecksumError(f"{file.url}: cannot be uncompressed: {error}; copy it again") from error
    if one is not None:
        raise ChecksumError(f"{file.url}: its compressed data ends too early; copy it again")


def _zstd() -> Any:
    return importlib.import_module("zstandard").ZstdDecompressor(max_window_size=1 << 31).decompressobj()


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {"gz": lambda: zlib.decompressobj(31), "zstd": _zstd}
