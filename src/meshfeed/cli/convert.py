"""meshfeed convert: one format of tokens into another."""

from __future__ import annotations

import argparse
import time
from typing import Any

from meshfeed.cli.command import OK, add_command, print_json, say, show_progress, whole
from meshfeed.cli.recipes import add_storage_options, storage_options
from meshfeed.prepare.convert import Conversion
from meshfeed.prepare.convert_write import SINKS
from meshfeed.report.words import counted
from meshfeed.store import open_store
from meshfeed.store.mds_sample import DTYPE_CODES

_DTYPES = tuple(DTYPE_CODES.values())
_KEYS = {
    "source, destination, format": "what was read and what was written",
    "num_documents, num_tokens, columns": "of both",
    "dropped": "columns that were left behind",
    "size_bytes, elapsed_s": "of the destination, and seconds of this run",
}


def add_parser(subparsers: Any) -> None:
    """Add `convert` to argparse's subparsers."""
    parser = add_command(
        subparsers,
        "convert",
        run,
        help="one format of tokens into another: .bin/.idx, MDS, Parquet",
        description="Write a token store again in another format: Megatron's .bin/.idx, MDS or Parquet. "
        "Documents, their order, their tokens and the columns beside them stay what they are; what the other "
        "format cannot hold is refused, unless --drop names it. The output appears whole or not at all; a "
        "run that is killed leaves at most something called OUT.*.tmp beside it, to be deleted.",
        examples="""
            meshfeed convert corpus corpus.parquet
            meshfeed convert corpus corpus-mds --to mds
            meshfeed convert tokens.parquet corpus --to megatron --column input_ids --dtype int32
            meshfeed convert s3://bucket/mds corpus.bin --drop url --drop meta
        """,
        keys=_KEYS,
    )
    parser.add_argument(
        "source",
        metavar="PATH",
        help="path or URL: .bin/.idx, Parquet, or a folder with dataset.json, MDS or Parquet files",
    )
    parser.add_argument(
        "destination", metavar="OUT", help="path to write: a prefix, a folder for MDS, or a file for Parquet"
    )
    parser.add_argument(
        "--to", choices=list(SINKS), help="the format to write, where no suffix of the destination tells"
    )
    parser.add_argument("--column", metavar="NAME", help="of the tokens, in MDS and Parquet")
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
    parser.add_argument(
        "--shard-bytes", type=whole(1), metavar="N", help="of a shard of MDS at most; 67108864 by default"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the destination, if it is a store")
    add_storage_options(parser)


def run(args: argparse.Namespace) -> int:
    """Convert, with progress on stderr and a summary on stdout; 0. Raises StoreError."""
    begin = time.monotonic()
    source = open_store(
        args.source,
        column=args.column,
        dtype=args.source_dtype,
        cache=args.cache,
        options=storage_options(args.storage),
    )
    conversion = Conversion(
        source,
        args.destination,
        to=args.to,
        dtype=args.dtype,
        drop=args.drop,
        shard_bytes=args.shard_bytes,
        overwrite=args.overwrite,
    )
    show_progress("converting", conversion.run(), quiet=args.json)
    facts: dict[str, Any] = conversion.facts() | {"elapsed_s": round(time.monotonic() - begin, 3)}
    if args.json:
        print_json(facts)
        return OK
    counts = ", ".join(counted(facts[f"num_{what}s"], what) for what in ("document", "token"))
    dropped = f"; dropped {', '.join(args.drop)}" if args.drop else ""
    say(
        f"{facts['destination']} ({facts['format']}): {counts}, {facts['size_bytes']:,} bytes in "
        f"{facts['elapsed_s']} s; columns {', '.join(facts['columns'])}{dropped}"
    )
    return OK
