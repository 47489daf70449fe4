"""meshfeed report: a run's log as one page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from meshfeed.cli.command import OK, add_command, print_json, say, write_text
from meshfeed.metrics import read_run
from meshfeed.report.history.page import page
from meshfeed.report.history.summary import summary_of
from meshfeed.report.history.waits import waits_of
from meshfeed.report.words import duration

_KEYS = {
    "out": "the page",
    "says": "what to look at first, in a sentence",
    "steps": "how many, from the first that was trained to the last",
    "starts": "from which step, under which layout; one object a start",
    "wait_share": "part of all ranks' time that their loops were kept waiting, 0 to 1",
    "worst": "rank and stage to look at first: its wait_s a step, share of its time, median_wait_s; or null",
    "longest": "the longest wait of a single step: rank, stage, step, wait_s; null for none",
    "outside": "the longest that a loop was busy with a step: rank, step, busy_s, median_s; null for none",
    "ranks": "rank, wait_s: stage -> mean seconds a step; first steps of starts left out throughout",
}


def add_parser(subparsers: Any) -> None:
    """Add `report` to argparse's subparsers."""
    parser = add_command(
        subparsers,
        "report",
        run,
        help="one page of a run: who waited for what and when, mixture, traffic, resumes",
        description="Write one self-contained HTML page of a run log, which Feed(..., metrics=RunLog(DIR)) "
        "makes. The run may be finished or live.",
        examples="""
            meshfeed report runs/7b
            meshfeed report runs/7b --out 7b.html
            meshfeed report runs/7b --json | jq '.worst'
        """,
        keys=_KEYS,
    )
    parser.add_argument("log", metavar="DIR", help="folder of the run log")
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="FILE", help="page to write (report.html)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and say what it says; 0. Raises MetricsError; MeshfeedError where it cannot write."""
    history = read_run(args.log)
    summary = summary_of(history, waits_of(history))
    write_text(args.out, page(history, Path(args.log).resolve().name))
    if args.json:
        print_json({"out": args.out, **summary})
    else:
        say(summary["says"])
        if (outside := summary["outside"]) is not None:
            longest, median = (duration(outside[name]) for name in ("busy_s", "median_s"))
            say(f"Longest outside the loader: step {outside['step']:,}, {longest}; the median is {median}.")
    return OK
