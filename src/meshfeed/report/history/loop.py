"""How long steps take in their loop, from request to request, and how much of it is the loop's own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshfeed.report.reader import RankHistory, RunHistory


@dataclass(frozen=True, slots=True)
class Outside:
    """The longest time that a loop spent on one step outside the loader.

    Attributes:
        rank, step: of that time.
        busy_s: seconds from asking for the step to asking for the next, without its waits.
        median_s: of the same rank's steps.
    """

    rank: int
    step: int
    busy_s: float
    median_s: float


def seconds_of(rank: RankHistory) -> np.ndarray:
    """f64[n]: seconds from one request to the next, at least the waits; NaN for a start's last step."""
    return np.maximum(rank.seconds, rank.wait.sum(axis=1))


def longest_outside(history: RunHistory) -> Outside | None:
    """Over all ranks, without the first step of each start; None if no step is finished."""
    worst: Outside | None = None
    for number, rank in history.ranks.items():
        busy = seconds_of(rank) - rank.wait.sum(axis=1)
        # the first includes one-time work, such as compiling kernels
        busy[np.diff(rank.start, prepend=-1) != 0] = np.nan
        if np.isnan(busy).all():
            continue
        at = int(np.nanargmax(busy))
        if worst is None or busy[at] > worst.busy_s:
            worst = Outside(number, int(rank.step[at]), float(busy[at]), float(np.nanmedian(busy)))
    return worst
