"""meshfeed report: a run's log as one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshfeed.cli.command import OK, print_json, say, write_text
from meshfeed.cli.options import Command, argument, option
from meshfeed.errors import MeshfeedError
from meshfeed.report import read_run
from meshfeed.report.history.page import page
from meshfeed.report.history.summary import summary_of
from meshfeed.report.history.waits import waits_of
from meshfeed.report.words import duration


@dataclass(frozen=True, kw_only=True)
class Report(Command):
    """Write one self-contained HTML page of a run log, which Feed(..., metrics=RunLog(DIR)) makes. The run
    may be finished or live.
    """

    examples = """
        meshfeed report runs/7b
        meshfeed report runs/7b --out 7b.html
        meshfeed report runs/7b --json | jq '.worst'
    """
    keys = {
        "out": "the page",
        "says": "what to look at first, in a sentence",
        "steps": "how many were given, each counted once, and none that is skipped",
        "starts": "from which step, under which layout; one object a start",
        "wait_share": "part of all ranks' time that their loops were kept waiting, 0 to 1",
        "worst": "what to look at first: rank, host, stage, wait_s a step, share of its time, median_wait_s",
        "longest": "the longest wait of a single step: rank, stage, step, wait_s; null for none",
        "outside": "the longest that a loop was busy with a step: rank, step, busy_s, median_s; or null",
        "starved": "waits that come back: rank, stage, every (steps), edges, wait_s, edge_of, ...; or null",
        "decoding": "with images and so on: limits; ranks: workers, parts, parts_per_s, busy, of_a_core",
        "ranks": "rank, wait_s: stage -> mean seconds a step; first steps of starts left out throughout",
    }

    log: str = argument("DIR", "folder of the run log")
    out: Path = option("page to write", default=Path("report.html"))

    def run(self) -> int:
        history = read_run(self.log)
        if not history.starts:
            raise MeshfeedError(
                f"{self.log}: no rank has logged that it began; wait for the run's first step, and check "
                f"that this version of meshfeed wrote the log"
            )
        summary = summary_of(history, waits_of(history))
        write_text(self.out, page(history, Path(self.log).resolve().name))
        if self.json:
            print_json({"out": self.out, **summary})
        else:
            say(summary["says"])
            if (outside := summary["outside"]) is not None:
                longest, median = (duration(outside[name]) for name in ("busy_s", "median_s"))
                step = f"{outside['step']:,}"
                say(f"Longest outside the loader: step {step}, {longest}; the median is {median}.")
        return OK
