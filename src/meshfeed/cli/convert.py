"""meshfeed convert: one format of tokens into another."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from meshfeed.prepare.convert import Conversion
from meshfeed.prepare.convert_write import SINKS
from meshfeed.store import open_store
from meshfeed.store.mds_sample import DTYPE_CODES

_DTYPES = tuple(DTYPE_CODES.values())
_EXAMPLES = """\
examples:
  meshfeed convert corpus corpus.parquet                 Megatron's .bin/.idx to Parquet
  meshfeed convert corpus corpus-mds --to mds            to MDS, for MosaicML Streaming
  meshfeed convert tokens.parquet corpus --to megatron --column input_ids --dtype int32
  meshfeed convert s3://bucket/mds corpus.bin --drop url --drop meta

Documents, their order and their tokens stay what they are, and columns beside the tokens come along. What the
other format cannot hold is refused, unless --drop names it. The output appears whole or not at all; a run
that is killed leaves at most something called OUT.*.tmp beside it, to be deleted.
"""


def add_parser(subparsers: Any) -> None:
    """Add `convert` to argparse's subparsers."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "convert",
        help="one format of tokens into another: .bin/.idx, MDS, Parquet",
        description="Write a token store again in another format: Megatron's .bin/.idx, MDS or Parquet.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", help="path or URL: .bin/.idx, Parquet, or a folder with dataset.json, MDS or Parquet files"
    )
    parser.add_argument(
        "destination", help="path to write: a prefix, a folder for MDS, or a file for Parquet"
    )
    parser.add_argument(
        "--to", choices=list(SINKS), help="the format to write, where no suffix of the destination tells"
    )
    parser.add_argument("--column", help="of the tokens, in MDS and Parquet")
    parser.add_argument(
        "--source-dtype",
        choices=_DTYPES,
        metavar="DTYPE",
        help="of the tokens, in a column of plain bytes in MDS",
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        metavar="DTYPE",
        help="of the tokens to write, which must hold each: uint16, int32 ...; the source's by default",
    )
    parser.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="NAME",
        help="a column to leave behind (also: sequences, modes, of .bin/.idx); may be given again",
    )
    parser.add_argument("--shard-bytes", type=int, help="of a shard of MDS at most; 67108864 by default")
    parser.add_argument("--overwrite", action="store_true", help="replace the destination, if it is a store")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and no progress")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert, with progress on stderr and a summary on stdout; exit code 0."""
    begin = time.monotonic()
    conversion = Conversion(
        open_store(args.source, column=args.column, dtype=args.source_dtype),
        args.destination,
        to=args.to,
        dtype=args.dtype,
        drop=args.drop,
        shard_bytes=args.shard_bytes,
        overwrite=args.overwrite,
    )
    _show_progress(conversion.run(), quiet=args.json)
    facts: dict[str, Any] = conversion.facts() | {"elapsed_s": round(time.monotonic() - begin, 3)}
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    print(
        f"{facts['destination']} ({facts['format']}): {facts['num_documents']:,} documents, "
        f"{facts['num_tokens']:,} tokens, {facts['size_bytes']:,} bytes in {facts['elapsed_s']} s; columns "
        f"{', '.join(facts['columns'])}{'; dropped ' if args.drop else ''}{', '.join(args.drop)}"
    )
    return 0


def _show_progress(parts: Iterator[float], *, quiet: bool) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True) as progress:
        task = progress.add_task("converting", total=1.0)
        for done in parts:
            progress.update(task, completed=done)
