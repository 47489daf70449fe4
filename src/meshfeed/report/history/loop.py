"""A step as its training loop lived it: asked for, waited for, handed over, trained.

A log knows when a step was handed over, and how long the loop had waited for it before that.
"""

from __future__ import annotations

import numpy as np

from meshfeed.metrics import RankHistory


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
