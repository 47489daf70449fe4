"""meshfeed prepare: text -> token store."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from meshfeed.errors import MeshfeedError, PrepareError
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
from meshfeed.prepare.join import ERRORS
from meshfeed.store.tokenizer import KNOWN

_EPILOG = """\
examples:
  meshfeed prepare corpus/*.jsonl.zst --out tokens --tokenizer tokenizer.json --eod
  meshfeed prepare src/ --glob '*.py' --out code --train-bpe 32000 --eod --dedup exact
  meshfeed prepare s3://bucket/parquet/ --out tokens --tokenizer llama/ --column content --validation 0.01
  meshfeed prepare chats.jsonl --out chats --tokenizer llama/ --chat
  meshfeed prepare corpus.jsonl --out tokens --tokenizer bytes --resume   # goes on where a killed run was

The output is the same, byte for byte, for any number of workers and after any number of kills.
Exit status: 0 done, 1 interrupted, 2 refused or failed; what was encoded is kept for --resume.
"""


def add_parser(subparsers: Any) -> None:
    """Add `prepare` to argparse's subparsers."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "prepare",
        help="make a token store of text",
        description="Make a token store of .txt, source, JSONL(.gz, .zst) and Parquet files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "inputs", nargs="+", metavar="IN", help="files, folders, quoted globs or URLs, in this order"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to make; `mf.open(DIR)` opens it")
    _add_tokens(parser)
    _add_documents(parser)
    _add_run(parser)
    parser.set_defaults(run=run)


def _add_tokens(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("what becomes a token")
    chosen = how.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--tokenizer", help=f"{KNOWN}; or 'none' for columns of token lists")
    chosen.add_argument(
        "--train-bpe",
        type=int,
        metavar="SIZE",
        help="train a byte-level BPE with so many tokens on the input",
    )
    how.add_argument("--eod", action="store_true", help="end each document with the tokenizer's own end")
    how.add_argument("--eod-token", metavar="TOKEN", help="end each document with this token, or its number")
    how.add_argument("--dtype", default="auto", choices=("auto", *DTYPES), help="of the tokens")
    how.add_argument(
        "--chat",
        action="store_true",
        help="of conversations: tokens and a loss mask, by the tokenizer's chat template",
    )
    how.add_argument("--chat-template", metavar="FILE", help="to take instead of the tokenizer's own")
    how.add_argument(
        "--train-on",
        default="assistant",
        choices=("assistant", "last"),
        help="which messages of a conversation bear loss",
    )


def _add_documents(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what becomes a document")
    what.add_argument(
        "--column", "--key", help="of JSON and Parquet; 'text' if not given, with --chat 'messages'"
    )
    what.add_argument("--glob", metavar="PATTERN", help="names to take from folders, such as '*.py'")
    what.add_argument("--format", choices=KINDS, help="of all inputs, whatever their names")
    what.add_argument("--dedup", choices=("exact",), help="of documents with the same text, keep the first")
    what.add_argument(
        "--validation",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the documents, chosen by their text: to DIR/validation, the others to DIR/train",
    )
    what.add_argument(
        "--max-errors",
        type=int,
        default=0,
        metavar="N",
        help=f"malformed records to let pass, listed in DIR/{ERRORS}; by default the first stops the run",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    run_ = parser.add_argument_group("the run")
    cores = len(os.sched_getaffinity(0))
    run_.add_argument("--workers", type=int, default=cores, help=f"processes, here {cores}")
    run_.add_argument(
        "--engine", choices=("local", "ray", "slurm"), default="local", help="who encodes (local)"
    )
    run_.add_argument(
        "--ray-address", metavar="ADDRESS", help="of a cluster; else $RAY_ADDRESS, else Ray here"
    )
    run_.add_argument("--sbatch", metavar="OPTIONS", default="", help="of Slurm, such as '--partition=cpu'")
    run_.add_argument("--resume", action="store_true", help="go on with what an earlier run has left, if any")
    run_.add_argument("--overwrite", action="store_true", help="replace DIR, once the new one is whole")
    run_.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Prepare, showing how far it is; exit code 0, 1 where it was interrupted, 2 where it failed."""
    begun = time.monotonic()
    try:
        encoding = _encoding(args)
        with _shown(Console(stderr=True)) as on_progress:
            made = prepare(
                args.inputs,
                args.out,
                encoding,
                pattern=args.glob,
                kind=args.format,
                dedup=args.dedup is not None,
                validation=args.validation,
                max_errors=args.max_errors,
                engine=_engine(args),
                resume=args.resume,
                overwrite=args.overwrite,
                on_progress=on_progress,
            )
    except MeshfeedError as error:
        for line in (error, *getattr(error, "__notes__", ())):
            print(f"meshfeed: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("meshfeed: interrupted; go on with --resume", file=sys.stderr)
        return 1
    _print(made, time.monotonic() - begun, as_json=args.json)
    return 0


def _encoding(args: argparse.Namespace) -> Encoding:
    eod = args.eod_token if args.eod_token is not None else args.eod
    if not args.chat:
        return Text(
            tokenizer=None if args.tokenizer == "none" else args.tokenizer,
            train_bpe=args.train_bpe,
            column=args.column,
            eod=eod,
            dtype=args.dtype,
        )
    if args.train_bpe is not None or eod is not False:
        raise PrepareError(
            "--chat: its template says what ends; leave --train-bpe, --eod and --eod-token out"
        )
    return Chats(
        tokenizer=args.tokenizer,
        template=args.chat_template,
        train_on=args.train_on,
        column=args.column,
        dtype=args.dtype,
    )


def _engine(args: argparse.Namespace) -> Engine:
    if args.engine == "ray":
        return OnRay(args.workers, args.ray_address)
    if args.engine == "slurm":
        return OnSlurm(args.workers, shlex.split(args.sbatch))
    return Local(args.workers)


@contextmanager
def _shown(console: Console) -> Generator[Callable[[Progress], None], None, None]:
    """What is told of each progress; a bar with rates on a terminal, nothing elsewhere."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} parts  {task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task, doing, first, begun = None, "", None, 0.0

        def on_progress(progress: Progress) -> None:
            nonlocal task, doing, first, begun
            if task is None or first is None or progress.doing != doing:
                doing, first, begun = progress.doing, progress, time.monotonic()
                done = progress.done_parts  # of an earlier run: it says nothing of how long the rest takes
                task = bars.add_task(doing, total=progress.num_parts, completed=done, rate="")
            spent_s = max(time.monotonic() - begun, 1e-3)
            rate = ""
            if progress.num_bytes > first.num_bytes:
                mb = (progress.num_bytes - first.num_bytes) / 1e6 / spent_s
                tokens = (progress.num_tokens - first.num_tokens) / spent_s
                rate = f"{mb:,.1f} MB/s  {tokens:,.0f} tokens/s"
            bars.update(task, completed=progress.done_parts, rate=rate)

        yield on_progress


def _print(made: Prepared, spent_s: float, *, as_json: bool) -> None:
    manifest = made.manifest
    if as_json:
        told = {name: value for name, value in manifest.items() if name != "request"}
        told |= {"path": str(made.path), "seconds": round(spent_s, 3)}
        told["num_inputs"] = len(manifest["request"]["inputs"])
        print(json.dumps(told, indent=2))
        return
    for name, store in manifest["stores"].items():
        where = made.path if name == "." else made.path / name
        counts = f"{store['num_documents']:,} documents, {store['num_tokens']:,} tokens"
        print(f"{where}: {counts} ({store['dtype']})")
    if manifest["num_duplicates"]:
        print(f"{manifest['num_duplicates']:,} documents left out that were there already")
    if manifest["num_malformed"]:
        print(f"{manifest['num_malformed']:,} malformed documents left out, see {made.path / ERRORS}")
