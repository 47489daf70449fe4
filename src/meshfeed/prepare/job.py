"""What is to be prepared, in a folder that every worker reads: inputs, their parts, and how to encode them.

    job.json    written last: what was asked (`Request`), and how far malformed lines are let pass
    spans.npy   which spans of which inputs make up which part; see `inputs.cut`
    parts/      what is done; see `part`
    meshfeed-prepare.lock   held by the process that runs the job; marks the folder as this tool's own

It is no machine's own: an engine may run the parts wherever the folder and the inputs can be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from meshfeed.errors import ChangedError, PrepareError
from meshfeed.files import typed_errors
from meshfeed.files.durable import durable_file
from meshfeed.files.url import without_secrets
from meshfeed.prepare.encoders import Encoder, encoder_of, encoding_of
from meshfeed.prepare.inputs import Input, facts_of
from meshfeed.prepare.part_file import write_array
from meshfeed.prepare.records import RECORD_BYTES, UTF8, Reading

I64 = npt.NDArray[np.int64]

VERSION = 1
"""Of what a job says, and so of what it makes."""


@dataclass(frozen=True, slots=True)
class Request:
    """All that decides the bytes that come out.

    Attributes:
        inputs: in order.
        encoder: how values become tokens, as JSON-able values; see `Text.request`.
        dedup: whether only the first of equal documents stays.
        validation: share of the documents that is set apart, in [0, 1).
        encodings: of text and JSON lines, joined by commas; see `Reading`.
    """

    inputs: tuple[Input, ...]
    encoder: Mapping[str, Any]
    dedup: bool
    validation: float
    encodings: str = UTF8

    @property
    def wants_hashes(self) -> bool:
        """Whether documents are told apart."""
        return self.dedup or self.validation > 0

    def told(self) -> dict[str, Any]:
        """As JSON-able values, without passwords: a manifest tells of it."""
        told = {"version": VERSION} | json.loads(json.dumps(asdict(self)))
        for each in told["inputs"]:
            each["url"] = without_secrets(each["url"])
        if self.encodings == UTF8:  # as jobs and outputs say that are older than the choice
            del told["encodings"]
        return told


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run lets pass. What comes out does not depend on it, only whether the run finishes.

    Attributes:
        max_malformed: records that are left out.
        max_record_bytes: of a record.
    """

    max_malformed: int
    max_record_bytes: int


@dataclass(frozen=True)
class Job:
    """A request, cut into parts, in its folder.

    Attributes:
        folder: of the job.
        request: what was asked.
        limits: that a run may change when it resumes.
        spans: part, input, begin, end; int64 [num_spans, 4].
    """

    folder: Path
    request: Request
    limits: Limits
    spans: I64

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return int(self.spans[-1, 0]) + 1 if len(self.spans) else 0

    @cached_property
    def first_spans(self) -> I64:
        """The first span of each part, and their number; int64 [num_parts + 1]."""
        return np.append(self.spans[:, 0].searchsorted(np.arange(self.num_parts)), len(self.spans))

    def spans_of(self, part: int) -> range:
        """The spans of a part."""
        first, last = self.first_spans[part : part + 2].tolist()
        return range(first, last)

    @property
    def reading(self) -> Reading:
        """How its records are read."""
        columns = encoding_of(self.request.encoder).columns
        return Reading(columns, self.request.encodings.split(","), self.limits.max_record_bytes)

    def encoder(self) -> Encoder:
        """What encodes its records, loaded anew. Raises StoreError, PrepareError."""
        return encoder_of(self.request.encoder, self.folder)

    def save(self) -> None:
        """Write it to its folder, job.json last. Raises StoreError."""
        with typed_errors(self.folder):
            (self.folder / "parts").mkdir(parents=True, exist_ok=True)
        with durable_file(self.folder / "spans.npy") as stream:
            write_array(stream, self.spans)
        inputs = {"inputs": [asdict(each) for each in self.request.inputs]}  # workers need the passwords
        told = self.request.told() | inputs | asdict(self.limits)
        write_json(self.folder / "job.json", told, mode=0o600)

    def refuse_changed(self) -> None:
        """Raises ChangedError where an input has changed."""
        for each in self.request.inputs:
            if facts_of(each.url) != (each.size_bytes, each.modified_ns):
                raise ChangedError(
                    f"{without_secrets(each.url)}: was changed while it was prepared; restore the old one "
                    f"and rerun with --resume, or start over with --overwrite"
                )


def job_in(folder: Path) -> Job | None:
    """The job of a folder; None where none was saved. Raises StoreError, PrepareError for another version."""
    path = folder / "job.json"
    if not path.exists():
        return None
    with typed_errors(path):
        told = cast(dict[str, Any], json.loads(path.read_bytes()))
        if told.get("version") != VERSION:
            raise PrepareError(
                f"{path}: written by another version of meshfeed ({told.get('version')}, not {VERSION}); "
                f"start over with --overwrite"
            )
        spans = np.load(folder / "spans.npy", mmap_mode="r", allow_pickle=False)
        inputs = tuple(Input(**each) for each in told["inputs"])
    encodings = told.get("encodings", UTF8)
    request = Request(inputs, told["encoder"], told["dedup"], told["validation"], encodings)
    limits = Limits(told["max_malformed"], told.get("max_record_bytes", RECORD_BYTES))
    return Job(folder, request, limits, spans)


def load_job(folder: Path) -> Job:
    """The job of a folder. Raises StoreError, and PrepareError where there is none."""
    job = job_in(folder)
    if job is None:
        raise PrepareError(f"{folder}: no job there; did it finish or start over in the meantime?")
    return job


def write_json(path: Path, value: Any, mode: int = 0o666) -> None:
    """Write a durable file. mode: less the umask. Raises StoreError."""
    with durable_file(path, mode) as stream:
        stream.write(json.dumps(value, indent=1, sort_keys=True).encode() + b"\n")


def read_json(path: Path) -> Any:
    """What such a file says. Raises StoreError."""
    with typed_errors(path):
        return json.loads(path.read_bytes())
