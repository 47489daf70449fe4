"""Encodes one part, on any machine that sees the job's folder and the inputs.

It may run several times, even at the same time: the part file is the same, and appears complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from meshfeed.errors import PrepareError, StoreError
from meshfeed.files.local.durable import durable_file
from meshfeed.files.url import without_secrets
from meshfeed.formats.jsonl import place_of as line_of
from meshfeed.formats.prepared import place_of
from meshfeed.prepare.encoding.encodings import Encoder, expanded, hash_of
from meshfeed.prepare.inputs.records import HERE, Record, reason_of, records
from meshfeed.prepare.job.job import Job, load_job
from meshfeed.prepare.job.part_file import (
    Block,
    Malformed,
    PartSummary,
    part_path,
    write_block,
    write_summary,
)

_RECORDS_TOGETHER, _BYTES_TOGETHER = 512, 1 << 18
_SHOWN = 5


def encode_part(folder: Path, part: int) -> None:
    """Encode a part of the job in a folder, unless that is done.

    Raises PrepareError if more records are malformed than the job allows, or its tokenizer has changed;
    StoreError if something cannot be read or written.
    """
    job = load_job(folder)
    encode(job, job.encoder(), part)


def encode(job: Job, encoder: Encoder, part: int) -> None:
    """Encode a part, unless that is done. encoder: of the job. Raises errors of `encode_part`."""
    path = part_path(job.folder, part)
    if path.exists():
        return
    summary = PartSummary()
    with durable_file(path) as stream:
        for some in _together(_records(job, part, summary)):
            write_block(stream, _encoded(job, encoder, some, summary))
        summary.malformed.sort(key=lambda each: (each.span, each.number))
        write_summary(stream, summary)


def refuse_malformed(job: Job, malformed: Sequence[Malformed]) -> None:
    """Raises PrepareError listing the first ones if more records are malformed than the job allows."""
    if len(malformed) <= job.max_malformed:
        return
    shown = [f"{_place(job, each)}: {each.reason}" for each in malformed[:_SHOWN]]
    more = f"\n  and {len(malformed) - _SHOWN} more" if len(malformed) > _SHOWN else ""
    documents = "document" if len(malformed) == 1 else "documents"
    raise PrepareError(
        f"{len(malformed)} malformed {documents} (limit: --max-errors {job.max_malformed}); fix them, "
        f"or rerun with a higher --max-errors and --resume:\n  " + "\n  ".join(shown) + more
    )


def _records(job: Job, part: int, summary: PartSummary) -> Iterator[tuple[int, Record]]:
    """(span, record) of each record of a part that may be a document; the others are noted."""
    reading = replace(job.reading, named=summary.named)
    for span in job.spans_of(part):
        _, i, begin, end = job.spans[span].tolist()
        summary.counts.append(0)
        for record in records(job.request.inputs[i], begin, end, reading):
            summary.counts[-1] += 1
            if record is None:
                continue
            summary.num_bytes += record.num_bytes
            if record.reason is None:
                yield span, record
            else:
                _refuse(job, summary, span, record, record.reason)


def _refuse(job: Job, summary: PartSummary, span: int, record: Record, reason: str) -> None:
    summary.malformed.append(Malformed(span, record.number, record.byte, reason))
    refuse_malformed(job, summary.malformed)


def _together(found: Iterator[tuple[int, Record]]) -> Iterator[list[tuple[int, Record]]]:
    """A few records at a time, so that memory does not grow with the part."""
    some: list[tuple[int, Record]] = []
    size = 0
    for span, record in found:
        some.append((span, record))
        size += record.num_bytes
        if len(some) >= _RECORDS_TOGETHER or size >= _BYTES_TOGETHER:
            yield some
            some, size = [], 0
    if some:
        yield some


def _encoded(job: Job, encoder: Encoder, some: list[tuple[int, Record]], summary: PartSummary) -> Block:
    values = [expanded(encoder, record.value) for _, record in some]
    try:
        found = encoder.encode([value for each in values for value in each], lambda i: HERE)
    except StoreError:  # one of them is at fault; encode each alone to find it
        given, some, found, values = zip(some, values), [], [], []
        for (span, record), each in given:
            try:
                found += encoder.encode(each, lambda i: HERE)
                some.append((span, record))
                values.append(each)
            except StoreError as error:
                _refuse(job, summary, span, record, reason_of(error))
    counts = np.array([len(each) for each in values], np.int64)
    hashed = [hash_of(record.value) for _, record in some] if job.request.wants_hashes else []
    hashes = np.frombuffer(b"".join(hashed), "<u8").reshape(-1, 2)
    if hashed:  # what is made of one record is of one side, by the first half, and no repetition
        hashes = hashes.repeat(counts, axis=0)
        hashes[:, 1] += np.concatenate([np.arange(count, dtype="<u8") for count in counts])
    columns = {
        name: np.concatenate([np.zeros(0, dtype), *(each[name] for each in found)], dtype=dtype)
        for name, dtype in {**encoder.columns, **encoder.beside}.items()
    }
    lengths = np.array([each["tokens"].size for each in found], np.int64)
    summary.num_documents += lengths.size
    summary.num_tokens += int(lengths.sum())
    summary.num_blocks += 1
    records = np.array([(span, record.number) for span, record in some], np.int64).reshape(-1, 2)
    return Block(lengths, records.repeat(counts, axis=0), hashes, columns)


def _place(job: Job, each: Malformed) -> str:
    """File, and line or row, as a message names them."""
    _, i, begin, _ = job.spans[each.span].tolist()
    where = job.request.inputs[i]
    if where.kind == "json":
        return f"{without_secrets(where.url)}: byte {each.byte}"
    if where.kind == "jsonl" and where.codec is None:
        with where.file() as file:
            return line_of(file, each.byte)
    first = begin if where.kind in ("parquet", "arrow", "mds") else 0
    file, *number = place_of(where.url, where.kind, first + each.number).items()
    return ": ".join((file[1], *(f"{what} {at}" for what, at in number)))
