"""meshfeed prepare: text -> token store."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

import numpy as np
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from meshfeed.cli.command import OK, WRONG, Console, print_json, say
from meshfeed.cli.inspect import as_ids, decoder_of, marked
from meshfeed.cli.options import Command, argument, given, option, refuse_given, required
from meshfeed.errors import PrepareError
from meshfeed.formats.prepared import ERRORS
from meshfeed.parts import KINDS as PART_KINDS
from meshfeed.parts import Kind
from meshfeed.prepare import (
    Chats,
    Encoding,
    Engine,
    Local,
    Multimodal,
    OnRay,
    OnSlurm,
    Prepared,
    Progress,
    Text,
    prepare,
)
from meshfeed.prepare.dry_run import dry_run
from meshfeed.prepare.encoding.multimodal import SoundTrack
from meshfeed.prepare.encoding.part_headers import MOST_PIXELS
from meshfeed.prepare.encoding.text import DTYPES
from meshfeed.prepare.engines.local import num_cores
from meshfeed.prepare.inputs.files import KINDS
from meshfeed.prepare.inputs.records import RECORD_BYTES
from meshfeed.report.samples import Bearing, num_spans, texts_of
from meshfeed.report.words import counted
from meshfeed.store.tokenizer import KNOWN

_SUFFIXES = 8  # that are named of files that are not read


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    title = "tokens"

    tokenizer: str | None = option(f"{KNOWN}; or 'none' for columns of token lists", metavar="FILE")
    train_bpe: int | None = option("instead: train a byte-level BPE of N tokens on the input")
    eod: bool = option("end each document with the tokenizer's EOS token", default=False)
    eod_token: str | None = option("end each document with this token or token id", metavar="TOKEN")
    dtype: str = option("dtype of the tokens", default="auto", choices=("auto", *DTYPES))
    chat: bool = option(
        "read conversations; write tokens and a loss mask with the tokenizer's chat template", default=False
    )
    chat_template: str | None = option(
        "a chat template to use instead of the tokenizer's own", metavar="FILE"
    )
    train_on: Literal["all", "last", "each"] | None = option(
        "answers that bear loss: all (default), the last, or each in a conversation that ends with it"
    )
    chat_date: datetime.date | None = option("date for templates that print today's date, such as 2025-06-01")
    template_kwargs: str | None = option(
        """variables of the template, as JSON, such as '{"enable_thinking": false}'""", metavar="JSON"
    )
    chat_end: str | None = option(
        "special tokens that end a last answer, and a last call, where the template prints none, as GLM's",
        metavar="TOKEN[,TOKEN]",
    )
    ignore_keys: str | None = option("columns, and keys of messages, that may be lost", metavar="KEY,...")


@dataclass(frozen=True, kw_only=True)
class _Parts:
    title = "images, audio and video"

    multimodal: bool = option(
        "read WebDataset tars, JSONL, Parquet and MDS with images, audio or video; keep these beside tokens",
        default=False,
    )
    image_token: str | None = option(
        "token that stands for an image, such as '<|image_pad|>'; one each, however large", metavar="TOKEN"
    )
    image_text: str | None = option(
        "text for an image, with its token in it, such as '<|vision_start|><|image_pad|><|vision_end|>'",
        metavar="TEXT",
    )
    audio_token: str | None = option("token that stands for audio", metavar="TOKEN")
    audio_text: str | None = option("text for audio, with its token in it", metavar="TEXT")
    video_token: str | None = option("token that stands for a video", metavar="TOKEN")
    video_text: str | None = option("text for a video, with its token in it", metavar="TEXT")
    sound_track: SoundTrack | None = option(
        "make the sound of each video a part too, of the same bytes: its token behind the video's, or its "
        "tokens within the video's, as Qwen2.5-Omni may have them"
    )
    silent: bool = option("under --sound-track, take videos without sound as they are", default=False)
    image_column: str | None = option(
        "further columns, or keys of JSON, that hold images, or their paths", metavar="COLUMN,..."
    )
    audio_column: str | None = option("the same for audio", metavar="COLUMN,...")
    video_column: str | None = option("the same for video", metavar="COLUMN,...")
    parts_folder: str | None = option(
        "folder or URL that paths in JSON and Parquet begin at (default: the file's own)", metavar="DIR"
    )
    max_pixels: int = option(
        "refuse larger images and frames, before anything decodes them", default=MOST_PIXELS
    )


@dataclass(frozen=True, kw_only=True)
class _Documents:
    title = "documents"

    column: str | None = option(
        "top-level column of JSON, Parquet and Arrow (text; with --chat messages or conversations)",
        names=("--column", "--key"),
    )
    glob: list[str] | None = option(
        "read only files with these names from folders, such as '*.py'; may be repeated", metavar="PATTERN"
    )
    format: str | None = option("format of all inputs (by default, from the suffix)", choices=KINDS)
    dedup: Literal["exact"] | None = option("keep one of the documents with the same text")
    validation: float = option(
        "share of documents, by their text, for DIR/validation; the others go to DIR/train",
        default=0.0,
        metavar="SHARE",
        type=float,
    )
    max_errors: int = option(
        f"skip at most N malformed records and list them in DIR/{ERRORS}; one more stops the run",
        default=0,
        least=0,
    )
    max_record_bytes: int = option(
        "limit of a line, text file or row, uncompressed; more stops the run", default=RECORD_BYTES
    )
    encoding: str = option(
        "encodings to try for each text file or JSON line, such as utf-8,latin-1",
        default="utf-8",
        metavar="NAME,...",
    )


@dataclass(frozen=True, kw_only=True)
class _Run:
    title = "run"

    workers: int | None = option("parallel workers (default: one per core)")
    dry_run: int | None = option(
        "only show what the first N documents become, with what bears loss, and which records are refused"
    )
    engine: Literal["local", "ray", "slurm"] = option("where workers run", default="local")
    ray_address: str | None = option(
        "Ray cluster, host:port or auto ($RAY_ADDRESS; without either, Ray starts on this machine)",
        metavar="ADDRESS",
    )
    sbatch: str | None = option(
        "options of sbatch in one argument, such as --sbatch='--partition=cpu'", metavar="OPTIONS"
    )
    resume: bool = option("resume an earlier run, if there is one", default=False)
    overwrite: bool = option(
        "replace DIR if prepare made it: a folder at the end, in one step; a URL object by object",
        default=False,
    )
    work: str | None = option(
        "for a URL: folder for parts and output until the upload, on a disk that all nodes see with "
        "--engine ray or slurm ($MESHFEED_CACHE, else the system's temporary folder)",
        metavar="DIR",
    )


@dataclass(frozen=True, kw_only=True)
class Prepare(Command, _Run, _Documents, _Parts, _Tokens):
    """Make a token store of .txt, source, JSONL(.gz, .zst), Parquet and Arrow files, lists in .json files,
    and folders of datasets.save_to_disk. What comes out is the same, byte for byte, for any number of workers
    and after any number of kills. With --multimodal, samples of text, images, audio and video, whose sizes
    are read from their headers.
    """

    examples = """
        meshfeed prepare s3://bucket/raw/ --out s3://bucket/tokens --tokenizer llama/ --eod --validation 0.01
        meshfeed prepare src/ --glob '*.py' --out code --train-bpe 32000 --eod --dedup exact
        meshfeed prepare chats.jsonl --out chats --tokenizer llama/ --chat --chat-date 2025-06-01
        meshfeed prepare shards/ --multimodal --out captions --tokenizer qwen/ --image-token '<|image_pad|>'
    """
    keys = {
        "path, format": "the folder that was made, or its URL, and by what",
        "stores": "folder in it ('.', or train and validation) -> num_documents, num_tokens, ...",
        "num_duplicates, num_malformed": "documents that were left out",
        "num_malformed_inputs": "files that malformed documents are in",
        "num_inputs, elapsed_s": "files that were read, and seconds of this run",
        "dry_run, refused": "with --dry-run alone: input, record, tokens, bear_loss, spans, texts; reason",
    }

    inputs: list[str] = argument(
        "PATH",
        "files, folders (without linked folders in them), quoted globs or URLs, in this order",
        nargs="+",
    )
    out: str = required(
        "folder or URL (s3://, gs://, az://) to write; `mf.open(DIR)` opens it", metavar="DIR"
    )

    def run(self) -> int:
        begun = time.monotonic()
        if len(given(self, ("tokenizer", "train_bpe"))) != 1:
            raise PrepareError("give one of --tokenizer, --train-bpe")
        encoding = self._encoding()
        if self.dry_run is not None:
            ignored = ("engine", "ray_address", "sbatch", "dedup", "validation")
            refuse_given(self, ignored, "has no effect with --dry-run, which reads records one by one, here")
            return self._try(encoding, self.dry_run)
        # what Ray or Slurm print must not mix with the answer
        with redirect_stdout(sys.stderr), _progress(quiet=self.json) as on_progress:
            made = prepare(
                self.inputs,
                self.out,
                encoding,
                pattern=self.glob,
                kind=self.format,
                dedup=self.dedup is not None,
                validation=self.validation,
                max_errors=self.max_errors,
                max_record_bytes=self.max_record_bytes,
                text_encoding=self.encoding,
                engine=self._engine(),
                resume=self.resume,
                overwrite=self.overwrite,
                work=self.work,
                on_progress=on_progress,
                on_passed_over=_tell_passed_over,
            )
        answer = {name: value for name, value in made.manifest.items() if name != "request"}
        answer |= {"path": made.path, "num_inputs": len(made.manifest["request"]["inputs"])}
        answer["elapsed_s"] = round(time.monotonic() - begun, 3)
        if self.json:
            print_json(answer)
        else:
            _print(made)
        for name, store in made.manifest["stores"].items():
            if not store["num_documents"]:
                where = _place(made, name)
                say(f"meshfeed: {where}: has no documents, so no Feed can read it", sys.stderr)
        return OK

    def _try(self, encoding: Encoding, count: int) -> int:
        """Show what `count` documents become; write nothing."""
        console, found, refused = Console(), list[dict[str, Any]](), list[dict[str, Any]]()
        decode = None if self.tokenizer in (None, "none") else decoder_of(self.tokenizer)
        if not self.json:
            print("what bears loss stands in ⟦ ⟧")
        tried = dry_run(
            self.inputs,
            encoding,
            count,
            pattern=self.glob,
            kind=self.format,
            max_record_bytes=self.max_record_bytes,
            text_encoding=self.encoding,
        )
        for each in tried:
            where = {"input": each.input, "record": each.record}
            if each.reason is not None:
                refused.append(where | {"reason": each.reason})
                if not self.json:
                    say(f"\n{each.input}, record {each.record}: refused: {each.reason}")
                continue
            bears = np.ones(each.tokens.size, np.bool_) if each.loss_mask is None else each.loss_mask != 0
            bears[:1] = False  # nothing predicts it
            marks = bears & (each.loss_mask is not None)
            texts = texts_of(each.tokens, marks, decode or as_ids)
            facts = {"tokens": each.tokens.size, "bear_loss": int(bears.sum()), "spans": num_spans(bears)}
            found.append(where | facts | {"texts": [[isinstance(one, Bearing), str(one)] for one in texts]})
            if not self.json:
                told = f"{facts['bear_loss']:,} of {counted(each.tokens.size, 'token')} bear loss"
                say(f"\n{each.input}, record {each.record}: {told} in {counted(facts['spans'], 'span')}")
                console.print(marked(texts, "" if decode else " "), soft_wrap=True)
        of, bear = (sum(each[name] for each in found) for name in ("tokens", "bear_loss"))
        if self.json:
            print_json({"dry_run": found, "refused": refused, "tokens": of, "bear_loss": bear})
        else:
            share = f"{bear:,} of {counted(of, 'token')} bear loss ({bear / max(of, 1):.1%})"
            say(f"\n{counted(len(found), 'document')}: {share}; {len(refused)} refused; nothing was written")
        return OK if found else WRONG

    def _encoding(self) -> Encoding:
        """Raises PrepareError for options without effect."""
        if not self.multimodal:
            of_parts = (each.name for each in fields(_Parts) if each.name != "multimodal")
            refuse_given(self, of_parts, "needs --multimodal")
            return self._text()
        of_kinds: list[dict[Kind, str]] = [
            {kind: text for kind in PART_KINDS if (text := getattr(self, f"{kind}_{what}")) is not None}
            for what in ("token", "text", "column")
        ]
        tokens, around, columns = of_kinds
        return Multimodal(
            text=self._text(),
            tokens=tokens,
            around=around,
            sound_track=self.sound_track,
            silent=self.silent,
            max_pixels=self.max_pixels,
            folder=self.parts_folder,
            part_columns={name: kind for kind, names in columns.items() for name in names.split(",") if name},
        )

    def _text(self) -> Text | Chats:
        eod = self.eod_token if self.eod_token is not None else self.eod
        if not self.chat:
            names = ("chat_template", "chat_date", "chat_end", "train_on", "template_kwargs", "ignore_keys")
            refuse_given(self, names, "needs --chat")
            return Text(
                tokenizer=None if self.tokenizer == "none" else self.tokenizer,
                train_bpe=self.train_bpe,
                column=self.column,
                eod=eod,
                dtype=self.dtype,
            )
        if self.tokenizer is None or eod is not False:
            raise PrepareError(
                "--chat: the template ends each message; leave --train-bpe, --eod and --eod-token out"
            )
        return Chats(
            tokenizer=self.tokenizer,
            template=self.chat_template,
            train_on=self.train_on or "all",
            date=self.chat_date,
            column=self.column,
            dtype=self.dtype,
            variables=_variables(self.template_kwargs),
            ignore=[each for each in (self.ignore_keys or "").split(",") if each],
            end=[each for each in (self.chat_end or "").split(",") if each],
        )

    def _engine(self) -> Engine:
        for name, engine in (("ray_address", "ray"), ("sbatch", "slurm")):
            if self.engine != engine:
                refuse_given(self, (name,), f"has no effect without --engine {engine}")
        workers = self.workers or num_cores()
        if self.engine == "ray":
            return OnRay(workers, self.ray_address)
        if self.engine == "slurm":
            return OnSlurm(workers, shlex.split(self.sbatch or ""))
        return Local(workers)


def _tell_passed_over(passed_over: Mapping[str, int]) -> None:
    most = sorted(passed_over, key=lambda suffix: (-passed_over[suffix], suffix))[:_SUFFIXES]
    kinds = [f"{passed_over[suffix]:,} {suffix or 'without a suffix'}" for suffix in most]
    kinds += ["..."] if len(most) < len(passed_over) else []
    total = counted(sum(passed_over.values()), "file")
    passed = f"{total} of other suffixes not read ({', '.join(kinds)}); --glob chooses by name"
    say(f"meshfeed: {passed}", sys.stderr)


def _place(made: Prepared, name: str) -> str:
    return made.path if name == "." else f"{made.path}/{name}"


@contextmanager
def _progress(*, quiet: bool) -> Generator[Callable[[Progress], None]]:
    """A function that shows progress: a bar with rates on a terminal, nothing elsewhere."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} parts  {task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Bars(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bars:
        tasks: dict[str, tuple[Any, Progress, float]] = {}

        def on_progress(progress: Progress) -> None:
            if progress.doing not in tasks:
                done = progress.done_parts  # done by an earlier run, so not part of the rate
                task = bars.add_task(progress.doing, total=progress.num_parts, completed=done, rate="")
                tasks[progress.doing] = task, progress, time.monotonic()
            task, first, begun = tasks[progress.doing]
            spent_s = max(time.monotonic() - begun, 1e-3)
            rate = ""
            if progress.num_bytes > first.num_bytes:
                rate = f"{(progress.num_bytes - first.num_bytes) / 1e6 / spent_s:,.1f} MB/s"
            if progress.num_tokens > first.num_tokens:
                rate += f"  {(progress.num_tokens - first.num_tokens) / spent_s:,.0f} tokens/s"
            bars.update(task, completed=progress.done_parts, rate=rate)

        yield on_progress


def _print(made: Prepared) -> None:
    manifest = made.manifest
    for name, store in manifest["stores"].items():
        counts = f"{counted(store['num_documents'], 'document')}, {counted(store['num_tokens'], 'token')}"
        counts += f", {counted(store['num_parts'], 'part')}" if "num_parts" in store else ""
        say(f"{_place(made, name)}: {counts} ({store['dtype']})")
    if manifest["num_duplicates"]:
        say(f"{counted(manifest['num_duplicates'], 'repeated document')} skipped")
    if manifest["num_malformed"]:
        left = counted(manifest["num_malformed"], "malformed document")
        files = counted(manifest.get("num_malformed_inputs", 0), "file")
        say(f"{left} in {files} skipped; see {made.path}/{ERRORS}")


def _variables(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise PrepareError(f"--template-kwargs {text}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise PrepareError(f"--template-kwargs {text}: give an object of JSON")
    return cast(dict[str, Any], found)
