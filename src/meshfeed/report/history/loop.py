"""Times of a step in its training loop: requested, received, finished.

A log contains the time at which a step was received, and the wait before that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshfeed.report.reader import RankHistory, RunHistory


@dataclass(frozen=True, slots=True)
class Outside:
    """The longest time that a loop spent on one step outside the loader.

    Attributes:
        rank, step: of that time.
        busy_s: seconds from receiving the step to asking for the next.
        median_s: of the same rank's steps.
    """

    rank: int
    step: int
    busy_s: float
    median_s: float


def asked_at(rank: RankHistory) -> np.ndarray:
    """f64[n]: unix seconds at which the loop asked for each step."""
    return rank.time - rank.wait.sum(axis=1)


def seconds_of(rank: RankHistory) -> np.ndarray:
    """f64[n]: seconds from one request to the next, including the wait; NaN for a start's last step."""
    asked, waited = asked_at(rank), rank.wait.sum(axis=1)
    seconds = np.full(asked.size, np.nan)
    # waits and times come from different clocks
    seconds[:-1] = np.where(np.diff(rank.start) == 0, np.maximum(np.diff(asked), waited[:-1]), np.nan)
    return seconds


def longest_outside(history: RunHistory) -> Outside | None:
    """Over all ranks, without the first step of each start; None if no step is finished."""
    worst: Outside | None = None
    for number, rank in history.ranks.items():
        busy = np.full(rank.time.size, np.nan)
        busy[:-1] = np.where(np.diff(rank.start) == 0, asked_at(rank)[1:] - rank.time[:-1], np.nan)
        # the first includes one-time work, such as compiling kernels
        busy[np.diff(rank.start, prepend=-1) != 0] = np.nan
        if np.isnan(busy).all():
            continue
        at = int(np.nanargmax(busy))
        if worst is None or busy[at] > worst.busy_s:
            worst = Outside(number, int(rank.step[at]), float(busy[at]), float(np.nanmedian(busy)))
    return worst
