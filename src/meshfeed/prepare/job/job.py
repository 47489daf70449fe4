"""A job: inputs, their parts, and how to encode them, in a folder that every worker reads.

job.json    written last: the `Request`, and the limits
spans.npy   the spans of inputs in each part; see `inputs.files.cut`
parts/      the parts that are encoded; see `part_file`
tasks/      which task encodes which part; see `engines.tasks`
out/        the output, while it is merged and until it is published
meshfeed-prepare.lock   held by the process that runs the job; marks the folder as this tool's own
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.errors import PrepareError
from meshfeed.files import typed_errors
from meshfeed.files.local.durable import durable_file
from meshfeed.files.url import without_secrets
from meshfeed.prepare.encoding.encodings import Encoder, encoder_of, encoding_of
from meshfeed.prepare.inputs.files import Input
from meshfeed.prepare.inputs.records import UTF8, Reading
from meshfeed.prepare.job.part_file import VERSION as PART_VERSION
from meshfeed.prepare.job.part_file import write_array

JOB = "job.json"
"""Describes the job; a folder without it has none."""
VERSION = 2
"""Version of the job's content, and so of its output."""
LIMITS = ("max_malformed", "max_record_bytes")
"""Attributes of a job that may change on resume."""


@dataclass(frozen=True, slots=True)
class Request:
    """Everything that decides the bytes of the output.

    Attributes:
        inputs: in order.
        encoder: how values become tokens, as JSON-able values; see `Text.request`.
        dedup: whether only the first of equal documents stays.
        validation: share of the documents that is for validation, in [0, 1).
        encodings: of text and JSON lines, joined by commas; see `Reading`.
    """

    inputs: tuple[Input, ...]
    encoder: Mapping[str, Any]
    dedup: bool
    validation: float
    encodings: str = UTF8

    @property
    def wants_hashes(self) -> bool:
        return self.dedup or self.validation > 0

    def record(self) -> dict[str, Any]:
        """As JSON values, without passwords, for a manifest."""
        record = {"version": VERSION} | json.loads(json.dumps(asdict(self)))
        for each in record["inputs"]:
            each["url"] = without_secrets(each["url"])
        return record


@dataclass(frozen=True)
class Job:
    """A request, cut into parts, in its folder.

    Attributes:
        folder: of the job.
        request: what to make.
        spans: part, input, begin, end; int64 [num_spans, 4].
        max_malformed: records that may be left out.
        max_record_bytes: of a record. Both may change on resume: they decide only what is skipped, and
            whether the run finishes.
    """

    folder: Path
    request: Request
    spans: Longs
    max_malformed: int
    max_record_bytes: int

    @property
    def num_parts(self) -> int:
        return int(self.spans[-1, 0]) + 1 if len(self.spans) else 0

    def spans_of(self, part: int) -> range:
        return range(*self.spans[:, 0].searchsorted([part, part + 1]).tolist())

    @property
    def reading(self) -> Reading:
        columns = encoding_of(self.request.encoder).columns
        encodings = self.request.encodings.split(",")
        return Reading(columns, encodings, self.max_record_bytes)

    @property
    def limits(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in LIMITS}

    def encoder(self) -> Encoder:
        """The encoder of its records, newly loaded. Raises StoreError, PrepareError."""
        return encoder_of(self.request.encoder, self.folder)

    def save(self) -> None:
        """Write it to its folder, job.json last. Raises StoreError."""
        with typed_errors(self.folder):
            (self.folder / "parts").mkdir(parents=True, exist_ok=True)
        with durable_file(self.folder / "spans.npy") as stream:
            write_array(stream, self.spans)
        inputs = [asdict(each) for each in self.request.inputs]  # workers need the passwords
        record = self.request.record() | {"inputs": inputs, "part_version": PART_VERSION} | self.limits
        write_json(self.folder / JOB, record, mode=0o600)

    def refuse_changed(self) -> None:
        """Raises ChangedError if an input has changed."""
        for each in self.request.inputs:
            each.refuse_changed(each.file())


def load_job(folder: Path) -> Job:
    """The job of a folder. Raises StoreError, and PrepareError for one of another version of meshfeed."""
    path = folder / JOB
    record = read_json(path)
    if (record.get("version"), record.get("part_version")) != (VERSION, PART_VERSION):
        raise PrepareError(f"{path}: written by another version of meshfeed; start over with --overwrite")
    with typed_errors(folder):
        spans = np.load(folder / "spans.npy", mmap_mode="r", allow_pickle=False)
    inputs = tuple(Input(**each) for each in record["inputs"])
    settled = (record[name] for name in ("encoder", "dedup", "validation", "encodings"))
    request = Request(inputs, *settled)
    return Job(folder, request, spans, **{name: record[name] for name in LIMITS})


def write_json(path: Path, value: Any, mode: int = 0o666) -> None:
    """Write a durable file. mode: less the umask. Raises StoreError."""
    with durable_file(path, mode) as stream:
        stream.write(json.dumps(value, indent=1, sort_keys=True).encode() + b"\n")


def read_json(path: Path) -> Any:
    """The content of such a file. Raises StoreError."""
    with typed_errors(path):
        return json.loads(path.read_bytes())
