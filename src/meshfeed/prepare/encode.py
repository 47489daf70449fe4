"""One part, encoded: what every engine runs, on whatever machine.

`encode_part(folder, part)` wants nothing but the job's folder and the inputs. It may run more than once, and
twice at a time: what it writes is the same, and appears at one moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from meshfeed.columns import Array
from meshfeed.errors import PrepareError, StoreError
from meshfeed.files import typed_errors
from meshfeed.files.url import without_secrets
from meshfeed.prepare.encoders import Encoder, hash_of
from meshfeed.prepare.job import Job, job_in
from meshfeed.prepare.part_file import Block, Malformed, PartFacts, PartWriter, part_path
from meshfeed.prepare.records import HERE, Record, reason_of, records
from meshfeed.store.jsonl import place_of

_RECORDS_TOGETHER, _BYTES_TOGETHER = 512, 1 << 18
_SHOWN = 5


def encode_part(folder: Path, part: int) -> None:
    """Encode a part of the job in a folder, unless it lies there already.

    Raises PrepareError where more records are malformed than the job lets pass, or where its tokenizer is
    not what it was; StoreError where something cannot be read or written.
    """
    path = part_path(folder, part)
    if path.exists():
        return
    task = _Task(*_loaded(folder, _version(folder)), part)
    num_documents = num_tokens = num_blocks = 0
    with PartWriter(path) as writer:
        for block in task.blocks():
            writer.add(block)
            num_documents += block.lengths.size
            num_tokens += int(block.lengths.sum())
            num_blocks += 1
        malformed = sorted(task.malformed, key=lambda each: (each.span, each.number))
        writer.finish(
            PartFacts(num_documents, num_tokens, task.num_bytes, num_blocks, task.counts, malformed)
        )


def refuse_malformed(job: Job, malformed: Sequence[Malformed]) -> None:
    """Raises PrepareError, listing the first, where more records are malformed than the job lets pass."""
    if len(malformed) <= job.limits.max_malformed:
        return
    shown = [f"{_place(job, each)}: {each.reason}" for each in malformed[:_SHOWN]]
    more = f"\n  and {len(malformed) - _SHOWN} more" if len(malformed) > _SHOWN else ""
    documents = "document" if len(malformed) == 1 else "documents"
    raise PrepareError(
        f"{len(malformed)} malformed {documents} (limit: --max-errors {job.limits.max_malformed}); fix them, "
        f"or rerun with a higher --max-errors and --resume:\n  " + "\n  ".join(shown) + more
    )


class _Task:
    """One part being encoded, and what was found on the way.

    Attributes:
        counts: lines or rows of each span so far.
        malformed: records that are no documents.
        num_bytes: of records.
    """

    def __init__(self, job: Job, encoder: Encoder, part: int) -> None:
        self._job, self._encoder, self._part = job, encoder, part
        self.counts, self.malformed, self.num_bytes = list[int](), list[Malformed](), 0

    def blocks(self) -> Iterator[Block]:
        """The part's documents; some at a time, so that memory does not grow with the part."""
        some: list[tuple[int, Record]] = []
        size = 0
        for span, record in self._records():
            some.append((span, record))
            size += record.num_bytes
            if len(some) >= _RECORDS_TOGETHER or size >= _BYTES_TOGETHER:
                yield self._encoded(some)
                some, size = [], 0
        if some:
            yield self._encoded(some)

    def _records(self) -> Iterator[tuple[int, Record]]:
        """(span, record) of each that may be a document."""
        for span in self._job.spans_of(self._part):
            _, i, begin, end = self._job.spans[span].tolist()
            self.counts.append(0)
            for record in records(self._job.request.inputs[i], begin, end, self._job.reading):
                self.counts[-1] += 1
                if record is None:
                    continue
                self.num_bytes += record.num_bytes
                if record.reason is None:
                    yield span, record
                else:
                    self._refuse(span, record, record.reason)

    def _refuse(self, span: int, record: Record, reason: str) -> None:
        self.malformed.append(Malformed(span, record.number, record.byte, reason))
        refuse_malformed(self._job, self.malformed)

    def _encoded(self, some: Sequence[tuple[int, Record]]) -> Block:
        try:
            found = self._encoder.encode([record.value for _, record in some], lambda i: HERE)
        except StoreError:  # one of them; which, only trying tells
            some, found = self._one_by_one(some)
        hashed = [hash_of(record.value) for _, record in some] if self._job.request.wants_hashes else []
        columns = {
            name: np.concatenate([each[name] for each in found] or [np.zeros(0, dtype)])
            for name, dtype in self._encoder.columns.items()
        }
        return Block(
            lengths=np.array([each["tokens"].size for each in found], np.int64),
            spans=np.array([span for span, _ in some], np.int64),
            numbers=np.array([record.number for _, record in some], np.int64),
            hashes=np.frombuffer(b"".join(hashed), "<u8").reshape(-1, 2),
            columns=columns,
        )

    def _one_by_one(
        self, some: Sequence[tuple[int, Record]]
    ) -> tuple[list[tuple[int, Record]], list[Mapping[str, Array]]]:
        kept: list[tuple[int, Record]] = []
        found: list[Mapping[str, Array]] = []
        for span, record in some:
            try:
                found += self._encoder.encode([record.value], lambda i: HERE)
                kept.append((span, record))
            except StoreError as error:
                self._refuse(span, record, reason_of(error))
        return kept, found


def _version(folder: Path) -> tuple[int, int]:
    with typed_errors(folder):
        found = (folder / "job.json").stat()
    return found.st_ino, found.st_mtime_ns


@lru_cache(maxsize=1)
def _loaded(folder: Path, version: tuple[int, int]) -> tuple[Job, Encoder]:
    """The job of a folder and its encoder, once for all parts that this process encodes."""
    job = job_in(folder)
    if job is None:
        raise PrepareError(f"{folder}: no job there; was it finished, or started anew, meanwhile?")
    return job, job.encoder()


def _place(job: Job, each: Malformed) -> str:
    """File, and line or row, as a message names them."""
    _, i, begin, _ = job.spans[each.span].tolist()
    where = job.request.inputs[i]
    shown = without_secrets(where.url)
    if where.kind == "text":
        return shown
    if where.kind == "parquet":
        return f"{shown}: row {begin + each.number}"
    if where.codec is not None:
        return f"{shown}: line {1 + each.number}"
    with where.file() as file:
        return place_of(file, each.byte)
