"""How every benchmark here measures: contestants in turn, several rounds, medians, ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def in_turn(contestants: Mapping[str, Callable[[], object]], rounds: int = 7) -> dict[str, list[float]]:
    """Seconds of each contestant in each round, one after the other, so that all see the same machine.

    A first round, not counted, warms caches and allocators.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for counted in [False, *([True] * rounds)]:
        for name, run in contestants.items():
            began = time.perf_counter()
            run()
            if counted:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(of: list[float], to: list[float]) -> float:
    """Median over rounds of `of` / `to`: how many times longer the first takes."""
    return statistics.median(a / b for a, b in zip(of, to))


def verdict(name: str, value: float, aim: float, *, at_least: bool) -> str:
    """One line: a ratio beside its aim."""
    holds = value >= aim if at_least else value <= aim
    return f"{name}: {value:.3f} (aim {'≥' if at_least else '≤'} {aim}) {'holds' if holds else 'FALLS SHORT'}"
