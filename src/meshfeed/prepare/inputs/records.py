"""Spans of inputs -> records: candidate documents, including malformed ones."""

from __future__ import annotations

import codecs
import gzip
import importlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, BinaryIO, cast

from meshfeed.errors import ChecksumError, MeshfeedError, PrepareError, StoreError
from meshfeed.extras import install
from meshfeed.files import ByteFile
from meshfeed.files.url import parent, without_secrets
from meshfeed.formats.arrow import batches_in
from meshfeed.formats.documents import FileSpan, read_bytes
from meshfeed.formats.jsonl import lines_of, place_of, record_of, split_lines, value_in
from meshfeed.formats.mds_sample import PICTURES
from meshfeed.formats.parquet import RawStream, name_in, parquet_of, typed_arrow
from meshfeed.formats.tokens import PAIRS
from meshfeed.prepare.inputs.arrow import kinds_in, may_hold_parts, plain_rows, rows_of
from meshfeed.prepare.inputs.chat_columns import ChatColumns
from meshfeed.prepare.inputs.files import Input, mds_of, pieces_of
from meshfeed.prepare.inputs.json_list import elements
from meshfeed.prepare.inputs.named import fetch_from, too_large
from meshfeed.prepare.inputs.samples import Sample, SampleColumns
from meshfeed.prepare.inputs.webdataset import grouped, sample_of
from meshfeed.store.loss_columns import OF_OTHERS

HERE = "here"
"""Stands for a record in errors until its line is known."""

UTF8 = "utf-8-sig"
"""With or without a byte order mark."""
RECORD_BYTES = 16 << 20
"""Largest record: decompressing, parsing and tokenizing it takes many times as much memory."""

_ZSTD_STEP_BYTES = 1 << 11  # 4 bytes may expand to 128 KiB, and a step returns all at once
_PIECE_BYTES = 1 << 20
_ROWS_TOGETHER = 256


@dataclass(frozen=True, slots=True)
class Record:
    """A candidate document.

    Attributes:
        number: of the line or row in its span, from 0.
        byte: at which the line begins, uncompressed; -1 for rows and whole files.
        value: of its column, as in its file.
        num_bytes: its size there.
        reason: why it is not a document; None if it may be one.
    """

    number: int
    byte: int
    value: Any
    num_bytes: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that make a record's value.

    Attributes:
        names: to look for; the first that exists counts.
        refused: further columns that say how to train, and would be lost.
        masks: further columns that would be lost, harmless if they are 1 everywhere.
    """

    names: Sequence[str]
    refused: Sequence[str] = ()
    masks: Sequence[str] = ()

    def value(self, record: Mapping[str, Any]) -> Any:
        """The value of a record. Raises StoreError."""
        self.refuse_lost([name for name, value in record.items() if value is not None])
        for name in self.masks:
            if record.get(name) is not None:
                _refuse_padding(name, record[name])
        return value_in(record, self.names, lambda: HERE)

    def wanted(self, there: Sequence[str]) -> list[str]:
        """Those of a table's columns that are read. Raises StoreError for columns that would be lost."""
        self.refuse_lost(there)
        first = next((name for name in self.names if name in there), None)
        return [name for name in there if name == first or name in self.masks]

    def refuse_lost(self, there: Sequence[str]) -> None:
        """Raises StoreError for columns that would be lost. there: the names of all columns."""
        if {"chosen", "rejected", "prompt"} <= {*there} and self.names[0] in ("chosen", "rejected"):
            raise StoreError(f"{HERE}: the prompt would be lost; {PAIRS}")
        lost = [name for name in self.refused if name in there]
        if unread := [name for name in lost if name in OF_OTHERS]:
            raise StoreError(
                f"{HERE}: {unread[0]!r} next to the tokens: {OF_OTHERS[unread[0]]}; or leave it out"
            )
        if lost:
            raise StoreError(
                f"{HERE}: {' and '.join(map(repr, lost))} next to the tokens: prepare does not keep such "
                f"columns, and what they say would be lost; open the files as they are, mf.open(PATH)"
            )


def _refuse_padding(name: str, mask: Any) -> None:
    """Raises StoreError unless a mask is a list of ones. name: of its column."""
    numbers: list[Any] = cast(list[Any], mask) if isinstance(mask, list) else [None]
    if not (set(map(type, numbers)) <= {int, float, bool} and set(numbers) <= {1}):
        raise StoreError(
            f"{HERE}: {name!r} is not 1 at every token; meshfeed trains on every token of a document and "
            f"packs by itself: tokenize without padding, write each sequence of a packed row as its own, or "
            f"leave the column out to train on them all"
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """How records are read.

    Attributes:
        columns: of the values; or how samples with parts are made.
        encodings: of text and JSON lines; the first that decodes a file, or a line of JSON, is used.
        most_bytes: of a record, uncompressed; of a sample, with its parts.
        named: gets the version of each file that is read beside the inputs; see `named.NAMED`.
    """

    columns: Columns | ChatColumns | SampleColumns
    encodings: Sequence[str]
    most_bytes: int
    named: dict[str, str] = field(default_factory=dict[str, str])

    def declared(self, kinds: Mapping[str, str]) -> Reading:
        """Itself for a file that declares which of its columns are parts: name -> kind."""
        if not isinstance(self.columns, SampleColumns):
            return self
        return replace(self, columns=self.columns.with_declared(kinds))

    def value(self, record: Mapping[str, Any], url: str) -> Any:
        """The value of a record of a file. Raises StoreError."""
        if not isinstance(self.columns, SampleColumns):
            return self.columns.value(record)
        own = parent(url)[0]
        folder = own if self.columns.folder is None else self.columns.folder
        return self.columns.sample(record, fetch_from(folder, self.most_bytes, own=own, named=self.named))


def records(each: Input, begin: int, end: int, how: Reading) -> Iterator[Record | None]:
    """The records of a span of an input, in order; None for an empty line, which counts but is not a record.

    Raises StoreError if a file cannot be read or decompressed, ChangedError if it is not as the job found it,
    and PrepareError for a record that is too long. At most `most_bytes` of such a record are kept in memory,
    even if it is compressed.
    """
    with each.file() as file:
        each.refuse_changed(file)
        yield from _records_in(file, each, begin, end, how)
        each.refuse_changed(file)


def _records_in(file: ByteFile, each: Input, begin: int, end: int, how: Reading) -> Iterator[Record | None]:
    if each.kind == "parquet":
        yield from _rows(file, begin, end, how)
    elif each.kind == "arrow":
        yield from _arrow_rows(file, begin, end, how)
    elif each.kind == "json":
        yield from _of_list(file, each, begin, end, how)
    elif each.kind == "jsonl":
        if each.codec is None:
            lines = lines_of(file, FileSpan(0, begin, end), how.most_bytes)
        else:
            lines = split_lines(_unpacked(file, each.codec), how.most_bytes)
        for number, (byte, line) in enumerate(lines):
            if line is None:
                where = place_of(file, byte) if each.codec is None else f"{file.url}: line {1 + number}"
                raise _too_long(where, how)
            is_empty = not line.removeprefix(codecs.BOM_UTF8).strip()
            yield None if is_empty else _of_line(number, byte, line, how, each.url)
    elif each.kind == "webdataset" and isinstance(how.columns, SampleColumns):
        yield from _of_tar(file, how, how.columns)
    elif each.kind == "mds" and isinstance(how.columns, SampleColumns):
        yield from _of_mds(each.url, range(begin, end), how, how.columns)
    else:
        yield _of_file(file, each.codec, how)


def reason_of(error: StoreError) -> str:
    """The text of an error, without the record."""
    return str(error).removeprefix(f"{HERE}: ")


def _too_long(where: str, how: Reading) -> PrepareError:
    return PrepareError(
        f"{where}: a record of more than {how.most_bytes:,} bytes; split it into several documents, or allow "
        f"it by --max-record-bytes (add --resume to keep what is done)"
    )


def _of_list(file: ByteFile, each: Input, begin: int, end: int, how: Reading) -> Iterator[Record]:
    shown = without_secrets(each.url)
    if each.codec is None:
        pieces = pieces_of(file, begin, end)
        found = elements(pieces, how.most_bytes, shown, at=begin, within=True)
    else:
        found = elements(_unpacked(file, each.codec), how.most_bytes, shown)
    for number, (first, _, text) in enumerate(found):
        if text is None:
            raise _too_long(f"{shown}: byte {first}", how)
        byte = first + len(text) - len(text.lstrip())
        yield _of_line(number, byte, text.strip(), how, each.url)


def _of_line(number: int, byte: int, line: bytes, how: Reading, url: str) -> Record:
    try:
        record = record_of(_decoded(line, how.encodings, " of the line"), lambda: HERE)
        value = how.value(record, url)
        num_bytes = len(line) + 1 + (value.size_bytes if isinstance(value, Sample) else 0)
        return Record(number, byte, value, num_bytes)
    except StoreError as error:
        hint = "; one list of records is read by --format json" if line.lstrip()[:1] == b"[" else ""
        return Record(number, byte, None, len(line) + 1, f"{reason_of(error)}{hint}")


def _of_tar(file: ByteFile, how: Reading, columns: SampleColumns) -> Iterator[Record]:
    for number, (key, files) in enumerate(grouped(file, how.most_bytes)):
        size = 0 if isinstance(files, str) else sum(map(len, files.values()))
        reason, value = None, None
        try:
            if isinstance(files, str):
                raise StoreError(files)
            value = sample_of(key, files, columns)
        except StoreError as error:
            reason = f"{key}: {error}"
        yield Record(number, -1, value, size, reason)


def _of_mds(url: str, samples: range, how: Reading, columns: SampleColumns) -> Iterator[Record]:
    with mds_of(url) as store:
        dataset, shown = store.dataset, without_secrets(url)
        fields = dataset.fields
        for shard, first in zip(dataset.shards, dataset.firsts.tolist()):
            if first < samples.stop and samples.start < first + shard.num_documents:
                file = dataset.folder.file(shard.name)
                how.named.setdefault(without_secrets(file.url), file.version)
        how = how.declared({each.name: "image" for each in fields if each.encoding in PICTURES})
        names = columns.wanted((there := [each.name for each in fields]), there)
        for number, i in enumerate(samples):
            record = store.sample(i, names, images=False)
            yield _of_row(number, record, 0, how, f"{shown}: sample {i}", url)


def _of_file(file: ByteFile, codec: str | None, how: Reading) -> Record:
    if codec is None:
        pieces = iter([read_bytes(file, 0, min(file.size_bytes, how.most_bytes + 1))])
    else:
        pieces = _unpacked(file, codec)
    raw = bytearray()
    for piece in pieces:
        raw += piece
        if len(raw) > how.most_bytes:
            raise _too_long(file.url, how)
    try:
        if raw.startswith(b"ustar", 257):
            raise StoreError(f"{HERE}: a tar, which would be one text with the names of its files; unpack it")
        return Record(0, -1, _decoded(raw, how.encodings), len(raw))
    except StoreError as error:
        return Record(0, -1, None, len(raw), reason_of(error))


def _decoded(raw: bytes | bytearray, encodings: Sequence[str], inside: str = "") -> str:
    """Bytes as text, without a byte order mark. inside: what the bytes are part of, for the message."""
    bad = list[str]()
    for encoding in encodings:
        try:
            return raw.decode(encoding).removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            name = "UTF-8" if encoding == UTF8 else encoding
            bad.append(f"not valid {name}: byte {error.start}{inside} is 0x{raw[error.start]:02x}")
    raise StoreError(
        f"{HERE}: {', '.join(bad)}; convert the file to UTF-8, exclude it, or name its encoding, such as "
        f"--encoding utf-8,latin-1"
    )


def refuse_column(encoding: object, inputs: Sequence[Input]) -> None:
    """Raises PrepareError for a column that an encoding names where no input has any."""
    column = getattr(encoding, "column", None)
    if column is not None and inputs and all(each.kind == "text" for each in inputs):
        raise PrepareError(f"--column {column}: has no effect on files of text; leave it out")


def encodings_of(given: str, inputs: Sequence[Input]) -> str:
    """Encodings joined by commas, checked, as `Reading` takes them. Raises PrepareError."""
    if given != "utf-8" and all(each.kind not in ("text", "jsonl", "json") for each in inputs):
        raise PrepareError(f"--encoding {given}: has no effect on tables, tars and MDS; leave it out")
    found = list[str]()
    for name in given.split(","):
        try:
            found.append(codecs.lookup(name).name)
            keeps_newlines = b"\n".decode(name) == "\n"
        except UnicodeDecodeError:  # two bytes or four
            keeps_newlines = False
        except LookupError as error:
            raise PrepareError(f"--encoding {given}: {error}; Python knows names such as latin-1") from error
        if not keeps_newlines and any(each.kind in ("jsonl", "json") for each in inputs):
            raise PrepareError(
                f"--encoding {given}: JSON cannot be split in {name}, where a newline is not one byte; "
                f"convert it to UTF-8"
            )
    return ",".join(UTF8 if name == "utf-8" else name for name in found)


def _rows(file: ByteFile, begin: int, end: int, how: Reading) -> Iterator[Record]:
    parquet, row = parquet_of(file), 0
    how = how.declared(kinds_in(parquet.schema_arrow))
    wanted = _wanted(parquet.schema_arrow, how, file.url)
    for group in range(parquet.num_row_groups):
        count = int(parquet.metadata.row_group(group).num_rows)
        if row + count <= begin or row >= end:
            row += count
            continue
        for record, num_bytes in _of_group(parquet, group, wanted, how, file.url):
            if begin <= row < end:
                yield _of_row(row - begin, record, num_bytes, how, f"{file.url}: row {row}", file.url)
            row += 1


def _arrow_rows(file: ByteFile, begin: int, end: int, how: Reading) -> Iterator[Record]:
    row, wanted = 0, None
    for batch in batches_in(file):
        if wanted is None:
            how = how.declared(kinds_in(batch.schema))
            wanted = _wanted(batch.schema, how, file.url)
        if begin < row + len(batch) and row < end:
            mean = batch.select(wanted).nbytes // max(len(batch), 1)
            for i, record in enumerate(rows_of(batch, wanted, how.most_bytes)):
                if begin <= row + i < end:
                    number, where = row + i - begin, f"{file.url}: row {row + i}"
                    yield _of_row(number, record, mean, how, where, file.url)
        row += len(batch)
        if row >= end:
            return


def _wanted(schema: Any, how: Reading, url: str) -> list[str]:
    """The columns of a table that are read. Raises StoreError if there are none."""
    try:
        if isinstance(how.columns, SampleColumns):
            suspected = [each.name for each in schema if may_hold_parts(each.type)]
            wanted = how.columns.wanted(schema.names, suspected)
        else:
            wanted = how.columns.wanted(schema.names)
    except StoreError as error:
        raise StoreError(f"{url}: {reason_of(error)}") from None
    for names in (how.columns.names, *([name] for name in wanted)):
        name_in(schema, names, url)
    return wanted


def _of_row(
    number: int, record: Mapping[str, Any], num_bytes: int, how: Reading, where: str, url: str
) -> Record:
    try:
        value = how.value(record, url)
        size = value.size_bytes if isinstance(value, Sample) else 0
        if size > how.most_bytes:
            raise StoreError(too_large(how.most_bytes))
    except StoreError as error:
        return Record(number, -1, None, num_bytes, reason_of(error))
    if isinstance(value, str | list) and len(cast(str, value)) > how.most_bytes:
        raise _too_long(where, how)
    return Record(number, -1, value, max(num_bytes, size))


def _of_group(
    parquet: Any, group: int, wanted: Sequence[str], how: Reading, url: str
) -> Iterator[tuple[dict[str, Any], int]]:
    """Its rows, each with its size in bytes."""
    facts = parquet.metadata.row_group(group)
    # Fewer at a time if rows are long, according to the footer.
    mean = facts.total_byte_size // max(facts.num_rows, 1)
    some = min(max(how.most_bytes // max(mean, 1), 1), _ROWS_TOGETHER)
    with typed_arrow(f"{url}: row group {group}"):
        for batch in parquet.iter_batches(some, row_groups=[group], columns=list(wanted), use_threads=False):
            for record in plain_rows(batch):
                yield record, batch.nbytes // batch.num_rows


# -- compressed files -------------------------------------------------------------------------------------


def _unpacked(file: ByteFile, codec: str) -> Iterator[bytes]:
    """The decompressed content of a file, member after member, in pieces of at most _PIECE_BYTES."""
    stream = io.BufferedReader(RawStream(file), 1 << 20)
    try:
        if not file.size_bytes:  # even of nothing, compressed data has some bytes
            raise EOFError
        if codec == "zstd":
            yield from _unzstd(stream)
        else:
            yield from iter(partial(gzip.GzipFile(fileobj=stream).read, _PIECE_BYTES), b"")
    except ImportError as missing:
        raise StoreError(f"{file.url}: {codec} needs {missing.name}: {install('prepare')}") from missing
    except EOFError as error:
        raise ChecksumError(f"{file.url}: its compressed data ends too early; copy it again") from error
    except MeshfeedError:
        raise
    except Exception as error:  # each codec has its own
        raise ChecksumError(f"{file.url}: cannot be decompressed: {error}; copy it again") from error


def _unzstd(stream: BinaryIO) -> Iterator[bytes]:
    made = importlib.import_module("zstandard").ZstdDecompressor(max_window_size=1 << 31)
    data = b""
    while data or (data := stream.read(_ZSTD_STEP_BYTES)):
        one = made.decompressobj()
        while not one.eof:
            if not (data or (data := stream.read(_ZSTD_STEP_BYTES))):
                raise EOFError
            whole, data = one.decompress(data), b""
            for at in range(0, len(whole), _PIECE_BYTES):
                yield whole[at : at + _PIECE_BYTES]
        data = one.unused_data
