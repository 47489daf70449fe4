"""How every benchmark here measures: contestants in turn, several rounds, medians, ratios; and what it gives.

A benchmark is a file bench_NAME.py with a function that yields rows; `main` gives it a command line:

    python benchmarks/bench_NAME.py [--short] [--json FILE]

--short takes seconds and makes no claim: it shows that the benchmark runs. run.py makes the table of
docs/figures.md of the rows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # corpora, servers and worlds of real ranks
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles what it imports late, measured

NOT_MEASURED = 77
"""Exit status of a benchmark that lacks a program; the reason is the last line of its errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure.

    Attributes:
        name: what was measured; the same in a short run.
        against: the peer or limit of the same run that a ratio divides by; "" for a figure by itself.
        value: in `unit`; "×" is a ratio to `against`.
        aim: what it should reach: at least this where `at_least`, otherwise at most. None for no aim.
        runs: values of several runs, of which `value` is the median.
    """

    name: str
    against: str = ""
    value: float
    unit: str = "×"
    aim: float | None = None
    at_least: bool = False
    runs: Sequence[float] = ()

    @property
    def holds(self) -> bool:
        """Whether the aim is reached; true where there is none."""
        if self.aim is None:
            return True
        return self.value >= self.aim if self.at_least else self.value <= self.aim

    @property
    def figure(self) -> str:
        """The value to three digits, or to as many as tell a miss from the target, with its unit."""
        shown = (_digits(self.value, more) for more in range(18))
        aim = "" if self.aim is None or self.holds else _digits(self.aim)
        value = f"{next(digits for digits in shown if digits != aim)} {self.unit}".rstrip()
        low, high = (_digits(of(self.runs, default=0.0)) for of in (min, max))
        return value if low == high else f"{value} ({low} to {high}, {len(self.runs)} runs)"

    @property
    def target(self) -> str:
        """The aim with its direction; "" where there is none."""
        return "" if self.aim is None else f"{'≥' if self.at_least else '≤'} {_digits(self.aim)}"

    def __str__(self) -> str:
        against = f" : {self.against}" if self.against else ""
        aim = f" (aim {self.target}) {'holds' if self.holds else 'FALLS SHORT'}" if self.target else ""
        return f"{self.name}{against} = {self.figure}{aim}"


class Missing(Exception):
    """A program that a benchmark needs is not installed."""


def needs(program: str) -> None:
    """Raise Missing where a program is not installed."""
    if not any(shutil.which(program, path=path) for path in (None, "/usr/sbin:/sbin")):
        raise Missing(f"needs {program} (sudo .ci/services installs it)")


def main(doc: str | None, measured: Callable[[bool], Iterable[Row]]) -> None:
    """The command line of a benchmark: print its rows, and write them where --json asks for it."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="seconds, and no claim about speed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    args = parser.parse_args()
    rows: list[Row] = []
    try:
        for row in measured(args.short):
            print(row, flush=True)
            rows.append(row)
    except Missing as missing:
        print(missing, file=sys.stderr)
        raise SystemExit(NOT_MEASURED) from None
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False))


def in_turn(contestants: Mapping[str, Callable[[], object]], rounds: int = 7) -> dict[str, list[float]]:
    """Seconds of each contestant in each round, one after the other, so that all see the same machine.

    Where there are several, a first round, not counted, warms caches and allocators.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for counted in [*([False] * (rounds > 1)), *([True] * rounds)]:
        for name, run in contestants.items():
            began = time.perf_counter()
            run()
            if counted:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def from_ranks(
    target: Callable[..., None], num_ranks: int, num_results: int, *args: object, by: str = "forkserver"
) -> Iterator[Any]:
    """What num_ranks processes put into their queue; each runs target(rank, port, results, *args).

    port: of 127.0.0.1, free for their rendezvous. by: how they start; "spawn" where they need a GPU, which
    the imports that a fork server shares can claim. Raises SystemExit where a process fails.
    """
    context: Any = multiprocessing.get_context(by)
    imported_once = ["meshfeed.feed.feed", "meshfeed.store.indexed", "megatron.core.datasets.data_schedule"]
    context.set_forkserver_preload(imported_once)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = context.Queue()
    ranks = [context.Process(target=target, args=(rank, port, results, *args)) for rank in range(num_ranks)]
    try:
        for process in ranks:
            process.start()
        while num_results:
            try:
                yield results.get(timeout=1)
                num_results -= 1
            except queue.Empty:
                if any(process.exitcode for process in ranks):
                    raise SystemExit("a rank failed; its error is above") from None
        for process in ranks:
            process.join()
    finally:
        for process in ranks:
            process.kill()


def ratio(of: list[float], to: list[float]) -> float:
    """Median over rounds of `of` / `to`: how many times longer the first takes."""
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def _digits(value: float, more: int = 0) -> str:
    """Three digits or more, thousands apart."""
    if abs(value) >= 100:
        return f"{value:,.{more}f}"
    return f"{value:.{3 + more}f}".rstrip("0").rstrip(".") if abs(value) >= 0.1 else f"{value:.{2 + more}g}"
