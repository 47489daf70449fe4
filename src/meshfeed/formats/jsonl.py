"""JSON lines as a token store: a document per line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np

from meshfeed.arrays import Array, Bools, Longs
from meshfeed.errors import OptionError, StoreError
from meshfeed.files import ByteFile
from meshfeed.formats.documents import DocumentFiles, DocumentFilesFormat, FileSpan, read_bytes
from meshfeed.formats.tokens import hint_for
from meshfeed.store.loss_columns import LOSS_COLUMNS

_SPAN_BYTES = 1 << 26
_STEP_BYTES = 1 << 23
_BEYOND_BYTES = 1 << 16
_LINES_TOGETHER = 512
_MOST_LINE_BYTES = 1 << 28


class JsonlStore(DocumentFiles):
    """Files of JSON objects, one per line; each is a document, its tokens in one column.

    Lines of white space are skipped. See `DocumentFiles`.
    """

    format = "jsonl"

    def _spans(self) -> list[FileSpan]:
        """Bytes of files; a line belongs to the span in which it begins."""
        return [
            FileSpan(i, begin, min(begin + _SPAN_BYTES, file.size_bytes))
            for i, file in enumerate(self._files)
            for begin in range(0, file.size_bytes, _SPAN_BYTES)
        ]

    def _scan(self, span: FileSpan, beside: Bools) -> Iterator[tuple[Longs, Array]]:
        file = self._files[span.file]
        lines = ((begin, line) for begin, line in _bounded_lines(file, span) if line.strip())
        while some := list(islice(lines, _LINES_TOGETHER)):

            def where(i: int, some: Sequence[tuple[int, bytes]] = some) -> str:
                return place_of(file, some[i][0])

            values: list[Any] = []
            for i, (begin, line) in enumerate(some):
                record = record_of(line, partial(where, i))
                beside[:] |= [name in record for name in LOSS_COLUMNS]
                wrong = StoreError if begin else OptionError  # the first line shows which columns exist
                values.append(value_in(record, self._column.names, partial(where, i), wrong))
            tokens = self._column.encoded(values, where)
            yield np.array([each.size for each in tokens], np.int64), np.concatenate(tokens)


class JsonlFormat(DocumentFilesFormat):
    """JSON lines."""

    name = "jsonl"
    lies_at = "a .jsonl file, or a folder of such"
    suffix, store = ".jsonl", JsonlStore


def value_in(
    record: Mapping[str, Any],
    names: Sequence[str],
    where: Callable[[], str],
    wrong: type[StoreError] = StoreError,
) -> Any:
    """The value of the first of `names` that a record has. Raises `wrong`, with the file and line."""
    for name in names:
        if name in record:
            return record[name]
    there = ", ".join(map(repr, list(record)[:8])) or "nothing"
    hint = hint_for(names, record, has_text=isinstance(record.get("text"), str))
    if any(name.partition(".")[0] in record for name in names):
        hint = f"nested keys are not searched: lift the key first, as jq -c '{{text: .{names[0]}}}' does"
    raise wrong(f"{where()}: no {' or '.join(map(repr, names))}, found {there}; {hint}")


def record_of(line: bytes | str, where: Callable[[], str]) -> dict[str, Any]:
    """The object in a line. Raises StoreError, with the file and line."""
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where()}: not valid JSON: {error}; fix the line or remove it") from error
    if not isinstance(record, dict):
        raise StoreError(f"{where()}: {type(record).__name__} where a JSON object belongs")
    return cast(dict[str, Any], record)


def lines_of(file: ByteFile, span: FileSpan, most_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Where each line that begins in the span begins, and the line without its newline.

    For a line longer than `most_bytes`, None is yielded, and the line is not kept in memory.
    """
    # The byte before the span belongs to a line of the previous span, even if it is that line's newline.
    first = max(span.begin - 1, 0)
    pieces = _pieces_from(file, first, span.end)
    return split_lines(pieces, most_bytes, at=first, stop=span.end, within=span.begin > 0)


def _bounded_lines(file: ByteFile, span: FileSpan) -> Iterator[tuple[int, bytes]]:
    for begin, line in lines_of(file, span, _MOST_LINE_BYTES):
        if line is None:
            raise StoreError(
                f"{place_of(file, begin)}: longer than {_MOST_LINE_BYTES:,} bytes; split it into several "
                f"documents"
            )
        yield begin, line


def split_lines(
    pieces: Iterable[bytes], most_bytes: int, *, at: int = 0, stop: int | None = None, within: bool = False
) -> Iterator[tuple[int, bytes | None]]:
    """The lines in a sequence of pieces, as `lines_of` yields them.

    at: byte at which the first piece begins. stop: lines from this byte on are skipped; None for no end.
    within: whether the first piece begins within a line, which is skipped.
    """
    here, rest, dropping = at, b"", within
    for piece in pieces:
        *ended, tail = piece.split(b"\n")
        for part in ended:
            line, rest = rest + part, b""
            if not dropping:
                yield at, line if len(line) <= most_bytes else None
            here += len(part) + 1
            at, dropping = here, False
            if stop is not None and at >= stop:
                return
        here += len(tail)
        if not dropping:
            rest += tail
            if len(rest) > most_bytes:
                yield at, None
                rest, dropping = b"", True
        if dropping and stop is not None and here >= stop:
            return  # the next line begins later
    if rest:
        yield at, rest


def _pieces_from(file: ByteFile, begin: int, stop: int) -> Iterator[bytes]:
    """The bytes of a file in pieces, large ones up to `stop`."""
    size, beyond = file.size_bytes, _BEYOND_BYTES
    while begin < size:
        if begin < stop:
            end = min(begin + _STEP_BYTES, stop)
        else:  # the rest of its last line
            end, beyond = min(begin + beyond, size), min(2 * beyond, _STEP_BYTES)
        if file.is_remote and end < size:
            file.will_need(np.array([end]), np.array([min(end + _STEP_BYTES, size)]))
        yield read_bytes(file, begin, end)
        begin = end


def place_of(file: ByteFile, byte: int) -> str:
    """File, line and byte, as a message names them; counts the lines before."""
    line = 1 + sum(
        read_bytes(file, begin, min(begin + _STEP_BYTES, byte)).count(b"\n")
        for begin in range(0, byte, _STEP_BYTES)
    )
    return f"{file.url}: line {line} (byte {byte})"
