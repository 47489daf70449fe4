"""meshfeed prepare: text -> token store."""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from meshfeed.cli.command import OK, Console, add_command, print_json, say, whole
from meshfeed.errors import PrepareError
from meshfeed.formats.prepared import ERRORS
from meshfeed.formats.tokenizer import KNOWN
from meshfeed.prepare import (
    Chats,
    Encoding,
    Engine,
    Local,
    OnRay,
    OnSlurm,
    Prepared,
    Progress,
    Text,
    prepare,
)
from meshfeed.prepare.encoders import DTYPES
from meshfeed.prepare.inputs import KINDS
from meshfeed.prepare.records import RECORD_BYTES
from meshfeed.report.words import counted

_KEYS = {
    "path, format": "the folder that was made, or its URL, and by what",
    "stores": "folder in it ('.', or train and validation) -> num_documents, num_tokens, dtype, fingerprint",
    "num_duplicates, num_malformed": "documents that were left out",
    "num_malformed_inputs": "files that malformed documents are in",
    "num_inputs, elapsed_s": "files that were read, and seconds of this run",
}

_SUFFIXES = 8  # that are named of files that are not read


def add_parser(subparsers: Any) -> None:
    """Add `prepare` to argparse's subparsers."""
    parser = add_command(
        subparsers,
        "prepare",
        run,
        help="make a token store of text",
        description="Make a token store of .txt, source, JSONL(.gz, .zst) and Parquet files. What comes "
        "out is the same, byte for byte, for any number of workers and after any number of kills.",
        examples="""
            meshfeed prepare corpus/*.jsonl.zst --out tokens --tokenizer tokenizer.json --eod --resume
            meshfeed prepare src/ --glob '*.py' --out code --train-bpe 32000 --eod --dedup exact
            meshfeed prepare s3://bucket/raw/ --out s3://bucket/tokens --tokenizer llama/ --validation 0.01
            meshfeed prepare chats.jsonl --out chats --tokenizer llama/ --chat --chat-date 2025-06-01
        """,
        keys=_KEYS,
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="PATH",
        help="files, folders (without linked folders in them), quoted globs or URLs, in this order",
    )
    parser.hints = {"--out": "PATH names inputs, --out DIR the folder to make"}
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="folder or URL (s3://, gs://, az://) to write; `mf.open(DIR)` opens it",
    )
    _add_tokens(parser)
    _add_documents(parser)
    _add_run(parser)


def _add_tokens(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("tokens")
    chosen = how.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--tokenizer", metavar="FILE", help=f"{KNOWN}; or 'none' for columns of token lists")
    chosen.add_argument(
        "--train-bpe",
        type=whole(1),
        metavar="SIZE",
        help="train a byte-level BPE of SIZE tokens on the input",
    )
    how.add_argument("--eod", action="store_true", help="end each document with the tokenizer's EOS token")
    how.add_argument("--eod-token", metavar="TOKEN", help="end each document with this token or token id")
    how.add_argument("--dtype", default="auto", choices=("auto", *DTYPES), help="dtype of the tokens")
    how.add_argument(
        "--chat",
        action="store_true",
        help="read conversations; write tokens and a loss mask with the tokenizer's chat template",
    )
    how.add_argument(
        "--chat-template", metavar="FILE", help="a chat template to use instead of the tokenizer's own"
    )
    how.add_argument(
        "--train-on",
        choices=("assistant", "last"),
        help="messages that bear loss: all of the assistant (default), or its last",
    )
    how.add_argument(
        "--chat-date",
        type=_date,
        metavar="DATE",
        help="date for templates that print today's date, such as 2025-06-01",
    )


def _add_documents(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("documents")
    what.add_argument(
        "--column",
        "--key",
        help="top-level column of JSON and Parquet (text; with --chat messages)",
    )
    what.add_argument(
        "--glob",
        action="append",
        metavar="PATTERN",
        help="read only files with these names from folders, such as '*.py'; may be repeated",
    )
    what.add_argument("--format", choices=KINDS, help="format of all inputs (by default, from the suffix)")
    what.add_argument("--dedup", choices=("exact",), help="keep one of the documents with the same text")
    what.add_argument(
        "--validation",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of documents, by their text, for DIR/validation; the others go to DIR/train",
    )
    what.add_argument(
        "--max-errors",
        type=whole(0),
        default=0,
        metavar="N",
        help=f"skip at most N malformed records and list them in DIR/{ERRORS} (0: the first stops the run)",
    )
    what.add_argument(
        "--max-record-bytes",
        type=whole(1),
        default=RECORD_BYTES,
        metavar="N",
        help=f"limit of a line, text file or row, uncompressed ({RECORD_BYTES:,}); more stops the run",
    )
    what.add_argument(
        "--encoding",
        default="utf-8",
        metavar="NAME,...",
        help="encodings to try for each text file or JSON line, such as utf-8,latin-1 (utf-8)",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    run_ = parser.add_argument_group("run")
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    run_.add_argument(
        "--workers",
        type=whole(1),
        default=cores,
        metavar="N",
        help=f"parallel workers (here {cores})",
    )
    run_.add_argument(
        "--engine", choices=("local", "ray", "slurm"), default="local", help="where workers run (local)"
    )
    run_.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="Ray cluster, host:port or auto ($RAY_ADDRESS; without either, Ray starts on this machine)",
    )
    run_.add_argument(
        "--sbatch",
        metavar="OPTIONS",
        help="options of sbatch in one argument, such as --sbatch='--partition=cpu'",
    )
    run_.add_argument("--resume", action="store_true", help="resume an earlier run, if there is one")
    run_.add_argument(
        "--overwrite",
        action="store_true",
        help="replace DIR if prepare made it: a folder at the end, in one step; a URL object by object",
    )
    run_.add_argument(
        "--work",
        metavar="DIR",
        help="for a URL: folder for parts and output until the upload, on a disk that all nodes see with "
        "--engine ray or slurm ($MESHFEED_CACHE, else the system's temporary folder)",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare and show progress; returns 0. Raises MeshfeedError with a note on how to resume."""
    begun = time.monotonic()
    encoding = _encoding(args)
    # what Ray or Slurm print must not mix with the answer
    with redirect_stdout(sys.stderr), _progress(quiet=args.json) as on_progress:
        made = prepare(
            args.inputs,
            args.out,
            encoding,
            pattern=args.glob,
            kind=args.format,
            dedup=args.dedup is not None,
            validation=args.validation,
            max_errors=args.max_errors,
            max_record_bytes=args.max_record_bytes,
            text_encoding=args.encoding,
            engine=_engine(args),
            resume=args.resume,
            overwrite=args.overwrite,
            work=args.work,
            on_progress=on_progress,
            on_passed_over=_tell_passed_over,
        )
    told = {name: value for name, value in made.manifest.items() if name != "request"}
    told |= {"path": made.path, "num_inputs": len(made.manifest["request"]["inputs"])}
    told["elapsed_s"] = round(time.monotonic() - begun, 3)
    if args.json:
        print_json(told)
    else:
        _print(made)
    for name, store in made.manifest["stores"].items():
        if not store["num_documents"]:
            where = _place(made, name)
            say(f"meshfeed: {where}: has no documents, so no Feed can read it", sys.stderr)
    return OK


def _tell_passed_over(passed_over: Mapping[str, int]) -> None:
    most = sorted(passed_over, key=lambda suffix: (-passed_over[suffix], suffix))[:_SUFFIXES]
    kinds = [f"{passed_over[suffix]:,} {suffix or 'without a suffix'}" for suffix in most]
    kinds += ["..."] if len(most) < len(passed_over) else []
    total = counted(sum(passed_over.values()), "file")
    told = f"{total} of other suffixes not read ({', '.join(kinds)}); --glob chooses by name"
    say(f"meshfeed: {told}", sys.stderr)


def _place(made: Prepared, name: str) -> str:
    return made.path if name == "." else f"{made.path}/{name}"


def _date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as bad:
        raise argparse.ArgumentTypeError(f"{text!r} is not a date; write one such as 2025-06-01") from bad


def _encoding(args: argparse.Namespace) -> Encoding:
    """Raises PrepareError for options without effect."""
    eod = args.eod_token if args.eod_token is not None else args.eod
    if not args.chat:
        if args.chat_template or args.chat_date or args.train_on:
            raise PrepareError("--chat-template, --chat-date and --train-on need --chat")
        return Text(
            tokenizer=None if args.tokenizer == "none" else args.tokenizer,
            train_bpe=args.train_bpe,
            column=args.column,
            eod=eod,
            dtype=args.dtype,
        )
    if args.train_bpe is not None or eod is not False:
        raise PrepareError(
            "--chat: the template ends each message; leave --train-bpe, --eod and --eod-token out"
        )
    return Chats(
        tokenizer=args.tokenizer,
        template=args.chat_template,
        train_on=args.train_on or "assistant",
        date=args.chat_date,
        column=args.column,
        dtype=args.dtype,
    )


def _engine(args: argparse.Namespace) -> Engine:
    if args.ray_address is not None and args.engine != "ray":
        raise PrepareError(f"--ray-address {args.ray_address}: has no effect without --engine ray")
    if args.sbatch is not None and args.engine != "slurm":
        raise PrepareError(f"--sbatch {args.sbatch}: has no effect without --engine slurm")
    if args.engine == "ray":
        return OnRay(args.workers, args.ray_address)
    if args.engine == "slurm":
        return OnSlurm(args.workers, shlex.split(args.sbatch or ""))
    return Local(args.workers)


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
        task, doing, first, begun = None, "", None, 0.0

        def on_progress(progress: Progress) -> None:
            nonlocal task, doing, first, begun
            if task is None or first is None or progress.doing != doing:
                doing, first, begun = progress.doing, progress, time.monotonic()
                done = progress.done_parts  # done by an earlier run, so not part of the rate
                task = bars.add_task(doing, total=progress.num_parts, completed=done, rate="")
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
        say(f"{_place(made, name)}: {counts} ({store['dtype']})")
    if manifest["num_duplicates"]:
        say(f"{counted(manifest['num_duplicates'], 'repeated document')} skipped")
    if manifest["num_malformed"]:
        left = counted(manifest["num_malformed"], "malformed document")
        files = counted(manifest.get("num_malformed_inputs", 0), "file")
        say(f"{left} in {files} skipped; see {made.path}/{ERRORS}")
