"""Every benchmark, one after the other, and the tables that are made of their rows.

    python benchmarks/run.py                      all (`make bench`); continues a run that was interrupted
    python benchmarks/run.py --only read,order    measure these again, and keep the others' rows
    python benchmarks/run.py --tables             measure nothing: make the tables again out of results.json

Rows go to results.json, each with its runs: date, processor and value of the last nine. The tables show their
median and range: all rows in docs/figures.md, the hardest of each area in README.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from measure import NOT_MEASURED, Row

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS, UNFINISHED = HERE / "results.json", ROOT / "bench-out"
PAGES = {"README.md": True, "docs/figures.md": False}  # whether a page shows the hardest rows alone
BEGIN, END = "<!-- figures: made by benchmarks/run.py -->\n", "<!-- end of figures -->"
AREAS = (
    ("order", "roles", "planner", "memory"),
    ("read", "start", "import", "megatron_index"),
    ("bytes", "clients", "stream"),
    ("delivery", "join", "regroup"),
    ("exchange", "rl"),
    ("decoding", "multimodal", "video"),
    ("prepare",),
    ("exposure", "metrics"),
)
"""Benchmarks that measure one thing that users care for."""
MOST_RUNS = 9
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
        kept = json.loads(RESULTS.read_text())["benchmarks"] if RESULTS.exists() else {}
        found = kept | {name: joined(kept.get(name, {}), new) for name, new in measure_all(only).items()}
        ordered = {name: found.get(name, {"not_measured": "make bench takes it"}) for name in NAMES}
        RESULTS.write_text(written({"machine": machine(), "benchmarks": ordered}))
        shutil.rmtree(UNFINISHED, ignore_errors=True)
    results = json.loads(RESULTS.read_text())
    for name, only_hardest in PAGES.items():
        page = ROOT / name
        page.write_text(with_table(page.read_text(), results, only_hardest=only_hardest))


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


def joined(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What a benchmark gave now, and the runs of its rows before."""
    runs = {(row["name"], row["against"]): row["runs"] for row in before.get("rows", ())}
    for row in now.get("rows", ()):
        this = [datetime.now(UTC).date().isoformat(), processor(), row.pop("value")]
        row["runs"] = [*runs.get((row["name"], row["against"]), ()), this][-MOST_RUNS:]
    return now


def row_of(stored: dict[str, Any]) -> Row:
    """A row of results.json: the median of its runs."""
    values: list[float] = [value for _, _, value in stored["runs"]]
    told: dict[str, Any] = stored | {"value": statistics.median(values), "runs": values}
    return Row(**told)


def written(results: dict[str, Any]) -> str:
    """The text of results.json: a line for each row."""
    text = json.dumps(results, ensure_ascii=False)
    return re.sub(r' ?(\{"name"|"\w+": \{"(?:rows|not_measured)")', r"\n\1", text) + "\n"


def processor() -> str:
    """Its name, family and model, as the system tells them."""
    info = Path("/proc/cpuinfo")
    told = dict(re.findall(r"^(.*?)\s*: (.*)$", info.read_text(), re.M)) if info.exists() else {}
    if "model name" not in told:
        return platform.machine()
    return f"{told['model name']} (family {told.get('cpu family')}, model {told.get('model')})"


def machine() -> str:
    """Where the figures were taken, as a phrase."""
    names = ("torch", "megatron-core")
    versions = (f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in names)
    cores = f"{len(os.sched_getaffinity(0))} cores"
    return ", ".join((processor(), cores, "no GPU", f"Python {platform.python_version()}", *versions))


def with_table(page: str, results: dict[str, Any], *, only_hardest: bool) -> str:
    """The page with its table made again out of the results."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"the page has no {BEGIN.strip()} … {END}")
    return before + BEGIN + table(results, only_hardest=only_hardest) + end + after


def table(results: dict[str, Any], *, only_hardest: bool) -> str:
    """Markdown: a line for each row, or for the hardest of each benchmark; missed targets in bold."""
    rows_of = {
        name: [row_of(row) for row in given.get("rows", ())] for name, given in results["benchmarks"].items()
    }
    aimed = [row for rows in rows_of.values() for row in rows if row.aim is not None]
    missed = f"{sum(not row.holds for row in aimed)} of {len(aimed)} miss it"
    link = " ([Figures](docs/figures.md))" if only_hardest else ""
    lines = [
        f"Measured on {results['machine']}.",
        f"Of all rows with a target, {missed}{link}; these are in bold.",
        "",
        "| benchmark | what | against | figure | target |",
        "|---|---|---|---|---|",
    ]
    shown = [(name, row) for name, rows in rows_of.items() for row in rows]
    if only_hardest:
        shown = [each for area in AREAS for each in hardest(area, rows_of)]
    for name, row in shown:
        figure = row.figure if row.holds else f"**{row.figure}**"
        lines.append(f"| `{name}` | {row.name} | {row.against} | {figure} | {row.target} |")
    if not only_hardest:
        for name, given in results["benchmarks"].items():
            if why := given.get("not_measured"):
                lines.append(f"| `{name}` | not measured: {why} | | | |")
    return "\n".join(lines) + "\n"


def hardest(area: Iterable[str], rows_of: Mapping[str, Iterable[Row]]) -> list[tuple[str, Row]]:
    """The row of an area that reaches the least share of its target; none where no row has one."""

    def reached(row: Row) -> float:
        """The share of the target that is reached: below 1 where it is missed."""
        assert row.aim is not None
        if row.value == row.aim:  # a count that is what it should be, such as 0 of 0, is far from missing it
            return math.inf
        return row.value / row.aim if row.at_least else row.aim / row.value if row.value > 0 else math.inf

    rows = [(name, row) for name in area for row in rows_of.get(name, ()) if row.aim is not None]
    return sorted(rows, key=lambda each: reached(each[1]))[:1]


if __name__ == "__main__":
    main()
