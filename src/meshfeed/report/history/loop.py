"""A step as its training loop lived it: asked for, waited for, handed over, trained.

A log knows when a step was handed over, and how long the loop had waited for it before that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshfeed.metrics import RankHistory, RunHistory


@dataclass(frozen=True, slots=True)
class Outside:
    """The longest time that a loop was busy with one step: the loader had no part in it.

    Attributes:
        rank, step: whose, and in which step.
        busy_s: seconds from the handing over of the step to the asking for the next.
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
    """f64[n]: seconds from asking for one to asking for the next, wait included; NaN for a start's last."""
    asked, waited = asked_at(rank), rank.wait.sum(axis=1)
    seconds = np.full(asked.size, np.nan)
    # waits are measured by another clock than moments are
    seconds[:-1] = np.where(np.diff(rank.start) == 0, np.maximum(np.diff(asked), waited[:-1]), np.nan)
    return seconds


def longest_outside(history: RunHistory) -> Outside | None:
    """Of all ranks, without the first step of each start; None where no step is over."""
    worst: Outside | None = None
    for number, rank in history.ranks.items():
        busy = np.full(rank.time.size, np.nan)
        busy[:-1] = np.where(np.diff(rank.start) == 0, asked_at(rank)[1:] - rank.time[:-1], np.nan)
        busy[np.diff(rank.start, prepend=-1) != 0] = np.nan  # what is made at first, as compiled kernels
        if np.isnan(busy).all():
            continue
        at = int(np.nanargmax(busy))
        if worst is None or busy[at] > worst.busy_s:
            worst = Outside(number, int(rank.step[at]), float(busy[at]), float(np.nanmedian(busy)))
    return worst
