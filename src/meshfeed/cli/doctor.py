"""meshfeed doctor: what this machine offers, and what meshfeed will do with it."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

import meshfeed as mf
from meshfeed.cli import machine, recipes, storage
from meshfeed.cli.command import OK, WRONG, Console, Table, add_command, print_json, whole
from meshfeed.cli.finding import Finding

_COLOURS = {"ok": "green", "note": "yellow", "bad": "red"}
_WIDTH = 140

_KEYS = {
    "findings": "one object per check, with the keys below",
    "topic": "what was checked",
    "verdict": "ok; note (works, but differently); bad (will fail)",
    "says": "what was found, and what follows",
    "figures": "measurements, name with unit -> number; null where there are none",
}


def add_parser(subparsers: Any) -> None:
    """Add `doctor` to argparse's subparsers."""
    parser = add_command(
        subparsers,
        "doctor",
        run,
        help="what this machine offers: deliveries, limits, packages, memory, storage",
        description="Look at this machine as a training rank would: versions, optional packages, deliveries, "
        "limits, shared memory, page-locking, the cache folder, disks, and stores, local or remote.",
        examples="""
            meshfeed doctor
            meshfeed doctor --layout tp8-cp2-dp4-pp2 --ranks-per-node 8
            meshfeed doctor s3://bucket/corpus --storage region=eu-west-1 --cache /local/cache
            meshfeed doctor --json | jq '.findings[] | select(.verdict != "ok")'
        """,
        wrong="something will fail: a finding is bad",
        keys=_KEYS,
    )
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="stores, local or remote: check that they can be read, and how fast",
    )
    parser.add_argument(
        "--layout", metavar="LAYOUT", help="also show the delivery that this layout would use"
    )
    parser.add_argument(
        "--ranks-per-node",
        type=whole(1),
        default=8,
        metavar="N",
        help="ranks that share a machine, for --layout (8)",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="measure the disk that holds this folder (the temporary folder)",
    )
    recipes.add_storage_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 where one of them is bad."""
    layout = mf.Layout.parse(args.layout, ranks_per_node=args.ranks_per_node) if args.layout else None
    options, cache = recipes.storage_options(args.storage), mf.Cache(args.cache)
    findings = [*machine.findings(layout), storage.cache_folder(cache)]
    findings.append(storage.disk(args.dir or Path(tempfile.gettempdir())))
    for path in args.paths:
        findings += storage.place(path, options, cache)
    if args.json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        _print(findings)
    return WRONG if any(finding.verdict == "bad" for finding in findings) else OK


def _print(findings: list[Finding]) -> None:
    console = Console()
    table = Table("", "what", "finding", title="meshfeed doctor", title_justify="left")
    for finding in findings:
        mark = Text(finding.verdict, style=_COLOURS[finding.verdict])
        table.add_row(mark, Text(finding.topic), Text(finding.says))
    console.print(table, width=min(console.width, _WIDTH))
