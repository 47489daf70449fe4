"""Text -> token store: parts are encoded on any machine and merged in order.

    OUT.preparing/      until it is done: the job (see `job`), its parts, and `out/`, which becomes OUT
    OUT/                appears complete, at one moment; in object storage, see `storage_output`
        tokens.bin .idx .sums, dataset.json    the store; in train/ and validation/ where there are both
        parts.*, part_sizes.*    images, audio and video, if any; see `parts.store`
        origins.npy     the record that each document was, beside dataset.json; see `formats.prepared`
        errors.jsonl    malformed records, if any
        tokenizer.json  if it was trained here
        named.json      files that records name, if any; see `inputs.named`
        manifest.json   the request and the results

The output depends on the inputs and the request alone: not on engine, workers, parts, or kills.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from meshfeed.errors import MeshfeedError, PrepareError
from meshfeed.files import Cache, Folder, typed_errors
from meshfeed.files.url import is_http, is_remote, local_path, without_secrets
from meshfeed.formats.prepared import FORMAT, MANIFEST
from meshfeed.prepare.encoding.encodings import Encoding
from meshfeed.prepare.encoding.multimodal import Multimodal
from meshfeed.prepare.encoding.text import TRAINED
from meshfeed.prepare.engines.local import Local, num_cores
from meshfeed.prepare.engines.tasks import Engine
from meshfeed.prepare.inputs.files import KINDS, MULTIMODAL_KINDS, changed_since, cut, find_inputs
from meshfeed.prepare.inputs.named import NAMED, as_it_is, first_changed
from meshfeed.prepare.inputs.records import RECORD_BYTES, encodings_of, refuse_column
from meshfeed.prepare.inputs.samples import SampleColumns
from meshfeed.prepare.job.encode_part import refuse_malformed
from meshfeed.prepare.job.folder import clear, forget_unbegun, held
from meshfeed.prepare.job.job import JOB, Job, Request, load_job, read_json, write_json
from meshfeed.prepare.job.merge import merge
from meshfeed.prepare.job.output import OnDisk, Output
from meshfeed.prepare.job.part_file import Malformed, PartSummary, part_path, summary_of_part
from meshfeed.prepare.job.storage_output import InStorage
from meshfeed.prepare.job.train_bpe import train_bpe
from meshfeed.prepare.job.writer import PIECE_BYTES

_MOST_PART_BYTES, _LEAST_PART_BYTES, _PARTS = 16 << 20, 256 << 10, 64


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        doing: "encoding", "merging" or "uploading".
        done_parts, num_parts: of this stage.
        num_documents, num_tokens, num_bytes: encoded so far, earlier runs included; bytes alone are uploaded.
    """

    doing: str
    done_parts: int
    num_parts: int
    num_documents: int = 0
    num_tokens: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result.

    Attributes:
        path: of the folder, or its URL.
        manifest: content of its manifest.json.
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

    out: the folder to make, or its URL: s3://, gs://, az://.

    inputs: files, folders, globs, URLs: .txt and source files are a document each, .jsonl(.gz, .zst) one per
    line, .parquet one per row; with images, audio or video, tars of WebDataset instead of text files. They
    keep the order given; within a folder, they are sorted by name.
    pattern, kind: see `find_inputs`.
    dedup: keep the first of the documents with the same text.
    validation: share of the documents, chosen by their text, that goes to out/validation and not out/train.
    max_errors: malformed records that may be left out, listed in out/errors.jsonl.
    max_record_bytes: limit of a document's line, file or row, uncompressed; a longer one ends the run.
    text_encoding: of text and JSON lines, as Python calls it; of several, separated by commas, the first that
    decodes a text file, or a line of JSON, is used.
    engine: runs the encoding; None for a process per core of this machine.
    resume: continue an earlier run of the same job, if there is one; a finished run is kept as it is. A run
    of another job is an error, or dropped with `overwrite`.
    overwrite: replace an earlier run's output at `out`, and no other files, once the new one is complete.
    work: for an output in storage: a folder on a disk, seen by all machines of the engine, in which the job
    has its own until all is uploaded; None for one in the node's cache (see `Cache`), with `Local` alone.
    part_bytes: input per part; None for a size that suits the input. The output does not depend on it.
    on_progress: called from time to time.
    on_passed_over: called once if folders have files that are not read: suffix -> number.

    Raises PrepareError, StoreError. Encoded parts are kept for `resume` in any case; a run that ends before
    the first leaves nothing.
    """
    if not 0 <= validation < 1:
        raise PrepareError(f"--validation {validation}: a share of all documents, from 0 to less than 1")
    if (part_bytes is not None and part_bytes < 1) or max_errors < 0 or max_record_bytes < 1:
        raise PrepareError(
            f"part_bytes={part_bytes}, max_errors={max_errors}, max_record_bytes={max_record_bytes}: must be "
            f"at least 1, 0 and 1"
        )
    engine = engine or Local(num_cores())
    output = _output(os.fspath(out), work, engine)
    kinds = MULTIMODAL_KINDS if isinstance(encoding, Multimodal) else KINDS
    names = [os.fspath(each) for each in inputs]
    files, passed_over = find_inputs(names, pattern=pattern, kind=kind, kinds=kinds)
    if passed_over:
        on_passed_over(passed_over)
    refuse_column(encoding, files)
    encodings = encodings_of(text_encoding, files)
    request = Request(files, encoding.request(), dedup, validation, encodings)
    with held(output):
        output.refuse_existing(request, resume=resume, overwrite=overwrite)
        if (output.work / JOB).exists() and not (resume or overwrite):
            raise PrepareError(
                f"{output.work}: an earlier run did not finish; continue it with --resume, or start over "
                f"with --overwrite"
            )
        manifest = output.finished(request) if resume else None
        if manifest is not None and _has_changed(_read_named(output), request, overwrite=overwrite):
            manifest = None
        if manifest is None:
            limits = {"max_malformed": max_errors, "max_record_bytes": max_record_bytes}
            job = _job(output.work, request, encoding, limits, part_bytes, resume=resume, overwrite=overwrite)
            manifest = _published(job, output, engine, on_progress, overwrite=overwrite)
        with typed_errors(output.work):
            (output.work / JOB).unlink(missing_ok=True)  # done: the folder goes, too
    return Prepared(output.url, manifest)


def _output(out: str, work: str | os.PathLike[str] | None, engine: Engine) -> Output:
    """The output that a path or URL names. work: folder to work in. Raises PrepareError, StoreError."""
    shown = without_secrets(out)
    if not is_remote(out):
        if work is not None:
            raise PrepareError(
                f"--work {os.fspath(work)}: only for an output in storage; one on a disk is "
                f"made next to {shown}"
            )
        target = Path(local_path(out)).absolute()
        for pair in (each for suffix in (".bin", ".idx") if (each := Path(f"{target}{suffix}")).exists()):
            raise PrepareError(
                f"{pair}: would be opened in place of {target}; move it away, or choose another --out"
            )
        return OnDisk(target)
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
    """Encode, merge and publish the rest; returns the manifest."""

    def uploading(done_bytes: int, num_bytes: int) -> None:
        done, total = (-(-each // PIECE_BYTES) for each in (done_bytes, num_bytes))
        on_progress(Progress("uploading", done, total, num_bytes=done_bytes))

    with _noted(job):
        output.begin()
        manifest = _merged(job, _encoded(job, engine, on_progress, overwrite=overwrite), on_progress)
        stores = manifest["stores"].values()
        has_parts = any(store.get("num_parts", 1) for store in stores)
        if any(store["num_documents"] for store in stores) and not has_parts:
            raise PrepareError(
                "no document has a part: name their columns by --image-column, --audio-column or "
                "--video-column; text alone is prepared without --multimodal, and may be mixed with what "
                "has parts"
            )
        output.publish(uploading, overwrite=overwrite)
    return manifest


@contextmanager
def _noted(job: Job) -> Generator[None]:
    """Adds to an error what is kept of the job."""
    try:
        yield
    except (MeshfeedError, KeyboardInterrupt) as error:
        kept = "finished parts are kept; continue with --resume"
        if forget_unbegun(job.folder):
            kept = "no part was finished, so nothing is kept; run it again"
        error.add_note(f"{job.folder}: {kept}")
        raise


def _job(
    work: Path,
    request: Request,
    encoding: Encoding,
    limits: Mapping[str, Any],
    part_bytes: int | None,
    *,
    resume: bool,
    overwrite: bool,
) -> Job:
    """The job of the folder, under these limits, or a new one."""
    job = _earlier(work, request, overwrite=overwrite) if resume and (work / JOB).exists() else None
    if job is not None:
        with typed_errors(work):
            for stale in (work / "parts").glob("*.tmp"):
                stale.unlink(missing_ok=True)
        job = replace(job, **limits)
    else:
        clear(work)
        if part_bytes is None:  # enough parts for all workers, and little lost by a kill
            total = sum(each.size_bytes for each in request.inputs)
            part_bytes = min(max(total // _PARTS, _LEAST_PART_BYTES), _MOST_PART_BYTES)
        columns = encoding.columns
        spans = cut(request.inputs, columns.names, part_bytes, whole_rows=isinstance(columns, SampleColumns))
        job = Job(work, request, spans, **limits)
        if encoding.train_bpe is not None:
            train_bpe(work / TRAINED, encoding.train_bpe, job)
        job.encoder()  # raises its errors now
    job.save()
    return job


def _earlier(work: Path, request: Request, *, overwrite: bool) -> Job | None:
    """The job of a folder. One of another request raises PrepareError, or is None with `overwrite`."""
    try:
        job = load_job(work)
        _refuse_other(work, job.request.record(), request.record())
    except PrepareError:
        if overwrite:
            return None
        raise
    return job


def _refuse_other(work: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    name = next((name for name in {**new, **old} if old.get(name) != new.get(name)), None)
    if name is None:
        return
    was: Any = old.get(name)
    now: Any = new.get(name)
    if name == "inputs":
        was, now = next((a, b) for a, b in zip_longest(was, now) if a != b)
    raise PrepareError(
        f"{work}: of another job: {name} was {was} and is {now}; resume with the same inputs and options, or "
        f"start over with --overwrite"
    )


def _has_changed(named: Mapping[str, str], request: Request, *, overwrite: bool) -> bool:
    """Whether files that records name have changed. Raises ChangedError for one, except with `overwrite`."""
    changed = first_changed(named, [each.url for each in request.inputs])
    if changed is not None and not overwrite:
        raise changed_since(changed)
    return changed is not None


def _read_named(output: Output) -> dict[str, str]:
    """The files that records of a finished output name. Raises StoreError."""
    if NAMED not in output.names():
        return {}
    file = as_it_is(Folder(output.url).file(NAMED))
    return json.loads(file.peek([(0, file.size_bytes)])[0])


def _encoded(
    job: Job, engine: Engine, on_progress: Callable[[Progress], None], *, overwrite: bool
) -> list[PartSummary]:
    """Encode the missing parts; returns the summary of each part."""
    summaries: dict[int, PartSummary] = {}
    malformed: list[Malformed] = []
    progress = Progress("encoding", 0, job.num_parts)

    def count(part: int) -> None:
        nonlocal progress
        summary = summaries[part] = summary_of_part(part_path(job.folder, part))
        malformed.extend(summary.malformed)
        progress = replace(
            progress,
            done_parts=progress.done_parts + 1,
            num_documents=progress.num_documents + summary.num_documents,
            num_tokens=progress.num_tokens + summary.num_tokens,
            num_bytes=progress.num_bytes + summary.num_bytes,
        )

    missing: list[int] = []
    for part in range(job.num_parts):
        path = part_path(job.folder, part)
        if path.exists() and _has_changed(summary_of_part(path).named, job.request, overwrite=overwrite):
            path.unlink()
            (job.folder / "out" / MANIFEST).unlink(missing_ok=True)
        count(part) if path.exists() else missing.append(part)
    on_progress(progress)
    refuse_malformed(job, malformed)
    with closing(engine.encode(job.folder, missing)) as parts:
        for part in parts:
            count(part)
            on_progress(progress)
            refuse_malformed(job, malformed)
    return [summaries[part] for part in range(job.num_parts)]


def _merged(
    job: Job, summaries: Sequence[PartSummary], on_progress: Callable[[Progress], None]
) -> dict[str, Any]:
    """Merge the parts into the job's `out`, its manifest last, unless that is done; returns the manifest."""
    out = job.folder / "out"
    if (out / MANIFEST).exists():
        return read_json(out / MANIFEST)
    with typed_errors(out):
        if out.exists():
            shutil.rmtree(out)
        out.mkdir()
    made = merge(job, summaries, out, lambda part: on_progress(Progress("merging", part + 1, job.num_parts)))
    trained = job.folder / TRAINED
    if trained.exists():
        with typed_errors(trained):
            shutil.copyfile(trained, out / TRAINED)
    job.refuse_changed()
    named: dict[str, str] = {}
    for url, version in (each for summary in summaries for each in summary.named.items()):
        if named.setdefault(url, version) != version:
            raise changed_since(url)
    if named:
        write_json(out / NAMED, named)
    manifest = {"format": FORMAT, "request": job.request.record()} | made
    write_json(out / MANIFEST, manifest)
    return manifest
