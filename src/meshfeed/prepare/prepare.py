"""Text -> token store, by parts that are encoded anywhere and joined in order.

    OUT.preparing/      until it is done: the job (see `job`), its parts, and `out/`, which becomes OUT
    OUT/                appears at one moment, whole; in object storage, see `storage`
        tokens.bin .idx .sums, dataset.json    the store; in train/ and validation/ where there are both
        origins.npy     which document is from where
        errors.jsonl    malformed records, if any
        tokenizer.json  where it was trained here
        manifest.json   what was asked, and what came out

What comes out is a function of the inputs and of what was asked: not of engine, workers, parts, or kills.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from meshfeed.errors import MeshfeedError, PrepareError
from meshfeed.files import Cache, typed_errors
from meshfeed.files.url import is_http, is_remote, local_path, without_secrets
from meshfeed.files.writer import PIECE_BYTES
from meshfeed.prepare.disk import OnDisk
from meshfeed.prepare.encode import refuse_malformed
from meshfeed.prepare.encoders import TRAINED, Encoding
from meshfeed.prepare.engine import Engine, Local
from meshfeed.prepare.folder import clear, forget_unbegun, held, refuse_unfinished
from meshfeed.prepare.inputs import cut, find_inputs
from meshfeed.prepare.job import Job, Limits, Request, job_in, read_json, write_json
from meshfeed.prepare.merge import merge
from meshfeed.prepare.output import Output
from meshfeed.prepare.part_file import Malformed, part_path, summary_of_part
from meshfeed.prepare.records import RECORD_BYTES, encodings_of
from meshfeed.prepare.storage import InStorage
from meshfeed.prepare.train import train_bpe
from meshfeed.store.prepared import FORMAT, MANIFEST

_MOST_PART_BYTES, _LEAST_PART_BYTES, _PARTS = 16 << 20, 256 << 10, 64


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        doing: "encoding", "merging" or "uploading".
        done_parts, num_parts: in this.
        num_documents, num_tokens, num_bytes: encoded so far, before this run too; uploaded, bytes alone.
    """

    doing: str
    done_parts: int
    num_parts: int
    num_documents: int
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was made.

    Attributes:
        path: of the folder, or its URL.
        manifest: what lies in its manifest.json.
    """

    path: str
    manifest: dict[str, Any]


def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    encoding: Encoding,
    *,
    pattern: str | Sequence[str] | None = None,
    kind: str | None = None,
    dedup: bool = False,
    validation: float = 0.0,
    max_errors: int = 0,
    max_record_bytes: int = RECORD_BYTES,
    text_encoding: str = "utf-8",
    engine: Engine | None = None,
    resume: bool = False,
    overwrite: bool = False,
    work: str | os.PathLike[str] | None = None,
    part_bytes: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_passed_over: Callable[[Mapping[str, int]], None] = lambda passed_over: None,
) -> Prepared:
    """Make a token store of files of text; `mf.open(out)` opens it.

    out: a folder to make, or its URL: s3://, gs://, az://.

    inputs: files, folders, globs, URLs: .txt and source files are a document each, .jsonl(.gz, .zst) one per
    line, .parquet one per row. They stay in the order given, those of a folder in that of their names.
    pattern, kind: see `find_inputs`.
    dedup: of documents with the same text, the first stays.
    validation: share of the documents, chosen by their text, that goes to out/validation and not out/train.
    max_errors: malformed records that are let pass, listed in out/errors.jsonl.
    max_record_bytes: of a document's line, file or row, uncompressed; a longer one ends the run.
    text_encoding: of text and JSON lines, as Python calls it; of several, joined by commas, the first that
    decodes a text file, or a line of JSON, is taken.
    engine: who encodes; None for a process per core of this machine.
    resume: go on with what a run of the same job has left, or with nothing; done is done.
    overwrite: what an earlier run has put at `out` is replaced, once the new one is whole; nothing else is.
    work: for an output in storage: folder on a disk, seen by all machines of the engine, in which the job has
    one of its own until all is uploaded; None for one in the node's cache (see `Cache`), with `Local` alone.
    part_bytes: of input that is encoded as one; None for what suits its size. Nothing that comes out depends
    on it.
    on_progress: is told now and then how far it is.
    on_passed_over: is told at the begin which files of folders are not read, if any: suffix -> how many.

    Raises PrepareError, StoreError. What was encoded stays for `resume`, whatever happens; a run that ends
    before anything was leaves nothing.
    """
    if not 0 <= validation < 1:
        raise PrepareError(f"--validation {validation}: a share of all documents, from 0 to less than 1")
    if (part_bytes is not None and part_bytes < 1) or max_errors < 0 or max_record_bytes < 1:
        raise PrepareError(
            f"part_bytes={part_bytes}, max_errors={max_errors}, max_record_bytes={max_record_bytes}: must be "
            f"at least 1, 0 and 1"
        )
    engine = engine or Local(os.cpu_count() or 1)
    output = _output(os.fspath(out), work, engine)
    found = find_inputs([os.fspath(each) for each in inputs], pattern=pattern, kind=kind)
    if found.passed_over:
        on_passed_over(found.passed_over)
    encodings = encodings_of(text_encoding, found.inputs)
    request = Request(found.inputs, encoding.request(), dedup, validation, encodings)
    with held(output):
        output.refuse_existing(request, resume=resume, overwrite=overwrite)
        if not (resume or overwrite):
            refuse_unfinished(output.work)
        manifest = output.finished(request) if resume else None
        if manifest is None:
            limits = Limits(max_errors, max_record_bytes)
            job = _job(output.work, request, encoding, limits, part_bytes, resume=resume)
            manifest = _published(job, output, engine, on_progress, overwrite=overwrite)
        clear(output.work)
    return Prepared(output.url, manifest)


def _output(out: str, work: str | os.PathLike[str] | None, engine: Engine) -> Output:
    """The output that a path or URL names. work: folder to work in. Raises PrepareError, StoreError."""
    shown = without_secrets(out)
    if not is_remote(out):
        if work is not None:
            raise PrepareError(
                f"--work {os.fspath(work)}: only for an output in storage; one on a disk is "
                f"made beside {shown}"
            )
        return OnDisk(Path(local_path(out)).absolute())
    if is_http(out):
        raise PrepareError(f"{shown}: cannot write to a web server; give s3://, gs://, az:// or a path")
    if work is None and not isinstance(engine, Local):
        raise PrepareError(
            f"{shown}: its parts may be encoded on other machines; name a folder that all of them see: "
            f"--work DIR"
        )
    parent = Cache().make() / "preparing" if work is None else Path(work).absolute()
    digest = hashlib.blake2b(out.rstrip("/").encode(), digest_size=4).hexdigest()
    name = shown.rstrip("/").rpartition("/")[2]
    return InStorage(out, parent / f"{name}-{digest}.preparing")


def _published(
    job: Job, output: Output, engine: Engine, on_progress: Callable[[Progress], None], *, overwrite: bool
) -> dict[str, Any]:
    """Encode, join and publish what is not yet; the manifest."""
    try:
        output.begin()
        _encode(job, engine, on_progress)
        manifest = _merged(job, on_progress)
        output.publish(partial(_uploading, on_progress), overwrite=overwrite)
    except (MeshfeedError, KeyboardInterrupt) as error:
        told = "finished parts are kept; continue with --resume"
        if forget_unbegun(job.folder):
            told = "no part was finished, so nothing is kept; run it again"
        error.add_note(f"{job.folder}: {told}")
        raise
    return manifest


def _uploading(on_progress: Callable[[Progress], None], done_bytes: int, num_bytes: int) -> None:
    done, total = (-(-each // PIECE_BYTES) for each in (done_bytes, num_bytes))
    on_progress(Progress("uploading", done, total, 0, 0, done_bytes))


def _job(
    work: Path, request: Request, encoding: Encoding, limits: Limits, part_bytes: int | None, *, resume: bool
) -> Job:
    """The job of the folder, which is this one, or a new one."""
    job = job_in(work) if resume else None
    if job is None:
        clear(work, lock=False)
        spans = cut(request.inputs, encoding.columns.names, part_bytes or _part_bytes(request))
        job = Job(work, request, limits, spans)
        if encoding.train_bpe is not None:
            train_bpe(work / TRAINED, encoding.train_bpe, request.inputs, spans, job.reading)
        job.encoder()  # or it is refused now
        job.save()
        return job
    _refuse_other(work, job.request.told(), request.told())
    with typed_errors(work):
        for stale in (work / "parts").glob("*.tmp"):
            stale.unlink(missing_ok=True)
    if job.limits != limits:
        job = replace(job, limits=limits)
        job.save()
    return job


def _part_bytes(request: Request) -> int:
    """So many that there is work for all, and that what a kill loses is little."""
    total = sum(each.size_bytes for each in request.inputs)
    return min(max(total // _PARTS, _LEAST_PART_BYTES), _MOST_PART_BYTES)


def _refuse_other(work: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    differ = [name for name in new if old.get(name) != new[name]]
    if not differ:
        return
    was: Any = old.get(differ[0])
    is_: Any = new[differ[0]]
    if differ[0] == "inputs":
        was, is_ = next((a, b) for a, b in zip_longest(was, is_) if a != b)
    if isinstance(was, dict) and isinstance(is_, dict):
        was, is_ = _where_they_differ(was, is_), _where_they_differ(is_, was)
    raise PrepareError(
        f"{work}: of another job: {differ[0]} was {was} and is {is_}; resume with the same inputs and "
        f"options, or start over with --overwrite"
    )


def _where_they_differ(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Of one, what the other has otherwise or not at all; and which file it is of."""
    return {name: one[name] for name in one if name == "url" or name not in other or one[name] != other[name]}


def _encode(job: Job, engine: Engine, on_progress: Callable[[Progress], None]) -> None:
    """Have every part encoded that is not there yet."""
    malformed: list[Malformed] = []
    progress = Progress("encoding", 0, job.num_parts, 0, 0, 0)

    def count(part: int) -> bool:
        """Whether the part is done; if so, it is counted."""
        nonlocal progress
        summary = summary_of_part(part_path(job.folder, part))
        if summary is None:
            return False
        malformed.extend(summary.malformed)
        progress = replace(
            progress,
            done_parts=progress.done_parts + 1,
            num_documents=progress.num_documents + summary.num_documents,
            num_tokens=progress.num_tokens + summary.num_tokens,
            num_bytes=progress.num_bytes + summary.num_bytes,
        )
        return True

    missing = [part for part in range(job.num_parts) if not count(part)]
    on_progress(progress)
    refuse_malformed(job, malformed)
    with closing(engine.encode(job.folder, missing)) as parts:
        for part in parts:
            count(part)
            on_progress(progress)
            refuse_malformed(job, malformed)


def _merged(job: Job, on_progress: Callable[[Progress], None]) -> dict[str, Any]:
    """Join the parts into the folder's `out`, its manifest last, unless that lies there; the manifest."""
    out = job.folder / "out"
    if (out / MANIFEST).exists():
        return read_json(out / MANIFEST)
    with typed_errors(out):
        if out.exists():
            shutil.rmtree(out)
        out.mkdir()
    made = merge(job, out, lambda part: on_progress(Progress("merging", part + 1, job.num_parts, 0, 0, 0)))
    trained = job.folder / TRAINED
    if trained.exists():
        with typed_errors(trained):
            (out / trained.name).write_bytes(trained.read_bytes())
    job.refuse_changed()
    manifest = {"format": FORMAT, "request": job.request.told()} | made
    write_json(out / MANIFEST, manifest)
    return manifest
