"""JSON lines as a token store: a document per line, read from the byte at which its line begins."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Array
from meshfeed.errors import OptionError, StoreError
from meshfeed.files import ByteFile
from meshfeed.formats.documents import DocumentFiles, DocumentFilesFormat, FileSpan, read_bytes
from meshfeed.formats.tokens import hint_for
from meshfeed.store.base import I64, Pieces, grouped
from meshfeed.store.loss_columns import LOSS_COLUMNS
from meshfeed.store.node_arrays import joined

_SPAN_BYTES = 1 << 26
_STEP_BYTES = 1 << 23
_BEYOND_BYTES = 1 << 16
_LINES_TOGETHER = 512
_MOST_LINE_BYTES = 1 << 28


class JsonlStore(DocumentFiles):
    """Files of JSON objects, one per line; each is a document, its tokens in one column.

    Lines of white space are skipped. A shard is a file. See `DocumentFiles`.
    """

    format = "jsonl"

    @property
    def shard_ends(self) -> I64:
        """Where files end, in documents; int64 [num_files]."""
        return self._index["file_ends"]

    def _spans(self) -> list[FileSpan]:
        """Bytes of files; a line belongs to the span in which it begins."""
        return [
            FileSpan(i, begin, min(begin + _SPAN_BYTES, file.size_bytes))
            for i, file in enumerate(self._files)
            for begin in range(0, file.size_bytes, _SPAN_BYTES)
        ]

    def _scan(self, span: FileSpan) -> Mapping[str, Array]:
        file = self._files[span.file]
        at: list[int] = []
        sizes: list[int] = []
        lengths: list[int] = []
        most, beside = 0, np.zeros(len(LOSS_COLUMNS), np.bool_)
        lines = ((begin, line) for begin, line in _bounded_lines(file, span) if line.strip())
        while some := list(islice(lines, _LINES_TOGETHER)):
            begins = [begin for begin, _ in some]
            tokens = self._parsed(file, begins, [line for _, line in some], beside)
            at += begins
            sizes += [len(line) for _, line in some]
            lengths += [found.size for found in tokens]
            most = max(most, *(int(found.max(initial=0)) for found in tokens))
        whole = {"at": at, "sizes": sizes, "lengths": lengths, "most": [most]}
        return {name: np.array(values, np.int64) for name, values in whole.items()} | {"beside": beside}

    def _joined(
        self, spans: Sequence[FileSpan], arrays: Sequence[Mapping[str, Array]]
    ) -> Mapping[str, Array]:
        return {name: joined(arrays, name) for name in ("at", "sizes")}

    def _tokens(self, documents: I64) -> list[Array]:
        found: list[Array] = [np.zeros(0, np.int64)] * documents.size
        for f, mine in grouped(self._file_of(documents)):
            begins, sizes = self._lines(documents[mine])
            out, ends = np.empty(int(sizes.sum()), np.uint8), sizes.cumsum().tolist()
            file = self._files[f]
            file.read_into(out, begins, sizes)
            raw, places = out.tobytes(), zip(begins.tolist(), ends, sizes.tolist())
            # A line is read as often as it was announced, and parsed once.
            lines = {begin: raw[end - size : end] for begin, end, size in places}
            tokens = dict(zip(lines, self._parsed(file, list(lines), list(lines.values()))))
            for i, begin in zip(mine.tolist(), begins.tolist()):
                found[i] = tokens[begin]
        return found

    def _announce(self, pieces: Pieces) -> None:
        for f, mine in grouped(self._file_of(pieces.documents)):
            begins, sizes = self._lines(pieces.documents[mine])
            self._files[f].will_need(begins, begins + sizes)

    def _file_of(self, documents: I64) -> I64:
        return self._index["file_ends"].searchsorted(documents, side="right")

    def _lines(self, documents: I64) -> tuple[I64, I64]:
        return self._index["at"][documents], self._index["sizes"][documents]

    def _parsed(
        self,
        file: ByteFile,
        begins: Sequence[int],
        lines: Sequence[bytes],
        beside: npt.NDArray[np.bool_] | None = None,
    ) -> list[Array]:
        """The tokens of each line. beside: set where a line has a column of LOSS_COLUMNS."""

        def where(i: int) -> str:
            return place_of(file, begins[i])

        def value(i: int, line: bytes) -> Any:
            record = record_of(line, partial(where, i))
            if beside is not None:
                beside[:] |= [name in record for name in LOSS_COLUMNS]
            wrong = StoreError if begins[i] else OptionError  # the first line shows which columns exist
            return value_in(record, self._column.names, partial(where, i), wrong)

        return self._column.encoded([value(i, line) for i, line in enumerate(lines)], where)


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
