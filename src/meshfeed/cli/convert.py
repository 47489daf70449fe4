"""meshfeed convert: any store that mf.open reads -> a token store."""

from __future__ import annotations

import argparse
import time
from typing import Any

from meshfeed.cli.command import OK, add_command, print_json, say, show_progress
from meshfeed.cli.recipes import add_storage_options, storage_options
from meshfeed.formats.mds_sample import DTYPE_CODES
from meshfeed.prepare.convert import Conversion
from meshfeed.report.words import counted
from meshfeed.store import open_store
from meshfeed.store.index import DTYPES

_KEYS = {
    "source, destination, format": "what was read, and what was written",
    "num_documents, num_tokens, columns": "what both hold",
    "dropped": "columns left out",
    "size_bytes, elapsed_s": "size of the destination; seconds that this run took",
}


def add_parser(subparsers: Any) -> None:
    """Add `convert` to argparse's subparsers."""
    parser = add_command(
        subparsers,
        "convert",
        run,
        help="make a token store (.bin/.idx) of MDS, litdata, Parquet or JSON lines",
        description="Write tokens of another format as a token store: the .bin/.idx pair that Megatron "
        "reads or, with columns beside the tokens, a folder with dataset.json. Documents keep their order "
        "and tokens. A column must have a number for each token; --drop leaves others behind. The output "
        "appears whole or not at all; a run that is killed leaves only files called *.tmp, to be deleted.",
        examples="""
            meshfeed convert s3://bucket/mds corpus --drop url --drop meta
            meshfeed convert tokens.parquet corpus --column input_ids --dtype int32
        """,
        keys=_KEYS,
    )
    parser.add_argument("source", metavar="PATH", help="path or URL, of any format that mf.open reads")
    parser.add_argument("destination", metavar="OUT", help="path to write: a prefix, or a folder for columns")
    parser.add_argument("--column", metavar="NAME", help="the column of tokens, if there are several")
    parser.add_argument(
        "--source-dtype",
        choices=tuple(DTYPE_CODES.values()),
        metavar="DTYPE",
        help="dtype of tokens in an MDS column of plain bytes",
    )
    parser.add_argument(
        "--dtype",
        choices=[dtype.name for dtype in DTYPES.values()],
        metavar="DTYPE",
        help="dtype to write, such as uint16; it must hold every token (default: the source's)",
    )
    parser.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="NAME",
        help="leave this column out (of .bin/.idx also: sequences, modes); may be repeated",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the destination if it is a store")
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
        source, args.destination, dtype=args.dtype, drop=args.drop, overwrite=args.overwrite
    )
    show_progress("converting", conversion.run(), quiet=args.json)
    facts: dict[str, Any] = conversion.facts() | {"elapsed_s": round(time.monotonic() - begin, 3)}
    if args.json:
        print_json(facts)
        return OK
    counts = ", ".join(counted(facts[f"num_{what}s"], what) for what in ("document", "token"))
    dropped = f"; dropped {', '.join(args.drop)}" if args.drop else ""
    say(
        f"{facts['destination']}: {counts}, {facts['size_bytes']:,} bytes in {facts['elapsed_s']} s; "
        f"columns {', '.join(facts['columns'])}{dropped}"
    )
    return OK
