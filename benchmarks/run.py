"""Every benchmark, one after the other, and the tables that are made of their rows.

    python benchmarks/run.py                      all (`make bench`); continues a run that was interrupted
    python benchmarks/run.py --only read,order    measure these again, and keep the others' rows
    python benchmarks/run.py --tables             measure nothing: make the tables again out of results.json

Rows go to results.json, the table to docs/figures.md, its headlines to README.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from measure import NOT_MEASURED, Row

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS, UNFINISHED = HERE / "results.json", ROOT / "bench-out"
PAGES = {"README.md": True, "docs/figures.md": False}  # whether a page shows one headline per benchmark
BEGIN, END = "<!-- figures: made by benchmarks/run.py -->\n", "<!-- end of figures -->"
NAMES = tuple(path.stem.removeprefix("bench_") for path in sorted(HERE.glob("bench_*.py")))


def main() -> None:
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME,...", help=f"some of {', '.join(NAMES)}")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    args = parser.parse_args()
    only = args.only.split(",") if args.only else NAMES
    if unknown := set(only) - set(NAMES):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    if not args.tables:
        kept = json.loads(RESULTS.read_text())["benchmarks"] if args.only and RESULTS.exists() else {}
        found = kept | measure_all(only)
        ordered = {name: found.get(name, {"not_measured": "make bench takes it"}) for name in NAMES}
        results = {"machine": machine(), "benchmarks": ordered}
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        shutil.rmtree(UNFINISHED)
    results = json.loads(RESULTS.read_text())
    for name, headlines in PAGES.items():
        page = ROOT / name
        page.write_text(with_table(page.read_text(), results, headlines=headlines))


def measure_all(names: Iterable[str]) -> dict[str, Any]:
    """What each benchmark gave: its rows, or why it could not be measured. Stops at the first that fails."""
    UNFINISHED.mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    for name in names:
        done = UNFINISHED / f"{name}.json"
        if done.exists():
            print(f"== {name}: kept from the run that was interrupted (in {UNFINISHED.name}/)", flush=True)
        else:
            print(f"== {name}", flush=True)
            began = time.monotonic()
            done.write_text(json.dumps(measure_one(name), ensure_ascii=False))
            print(f"   {time.monotonic() - began:.0f} s", flush=True)
        found[name] = json.loads(done.read_text())
    return found


def measure_one(name: str) -> dict[str, Any]:
    """The rows of one benchmark, or why there are none. Raises SystemExit where it fails."""
    rows = UNFINISHED / f"{name}.rows"
    command = [sys.executable, str(HERE / f"bench_{name}.py"), "--json", str(rows)]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if ended.returncode == NOT_MEASURED:
        why = ended.stderr.splitlines()[-1]
        print(f"   not measured: {why}")
        return {"not_measured": why}
    if ended.returncode:
        raise SystemExit(f"{ended.stderr}\nbench_{name}.py failed with status {ended.returncode}")
    return {"rows": json.loads(rows.read_text())}


def machine() -> str:
    """Where the figures were taken, as a phrase."""
    names = ("torch", "megatron-core")
    versions = (f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in names)
    cores = f"{len(os.sched_getaffinity(0))} cores"
    return ", ".join((cores, "no GPU", f"Python {platform.python_version()}", *versions))


def with_table(page: str, results: dict[str, Any], *, headlines: bool) -> str:
    """The page with its table made again out of the results."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"the page has no {BEGIN.strip()} … {END}")
    return before + BEGIN + table(results, headlines=headlines) + end + after


def table(results: dict[str, Any], *, headlines: bool) -> str:
    """Markdown: a line for each row, missed targets in bold."""
    lines = [
        f"Measured on {results['machine']}. Missed targets are in bold.",
        "",
        "| benchmark | what | against | figure | target |",
        "|---|---|---|---|---|",
    ]
    for name, given in results["benchmarks"].items():
        if "rows" not in given:
            lines += [] if headlines else [f"| `{name}` | not measured: {given['not_measured']} | | | |"]
            continue
        rows = [Row(**each) for each in given["rows"]]
        for row in hardest(rows) if headlines else rows:
            figure = row.figure if row.holds else f"**{row.figure}**"
            lines.append(f"| `{name}` | {row.name} | {row.against} | {figure} | {row.target} |")
    return "\n".join(lines) + "\n"


def hardest(rows: Iterable[Row]) -> list[Row]:
    """Of the headlines of a benchmark, the one that is furthest from its target or closest to missing it."""

    def reached(row: Row) -> float:
        """The share of the target that is reached: below 1 where it is missed."""
        if row.aim is None:
            return float("inf")
        return row.value / row.aim if row.at_least else row.aim / max(row.value, 1e-9)

    return sorted((row for row in rows if row.headline), key=reached)[:1]


if __name__ == "__main__":
    main()
