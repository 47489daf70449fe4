"""The columns and rows of a picture: steps in the order of training, and ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshfeed.metrics import RunHistory
from meshfeed.report.history.waits import Waits, stragglers

_MOST_CELLS, _MOST_COLUMNS, _MOST_ROWS, _WORST_ROWS = 20_480, 720, 64, 16


@dataclass(frozen=True, slots=True)
class Axis:
    """Columns of equally many steps; no column spans a resume.

    Attributes:
        start: i64[c], the start of the run that a column belongs to.
        first: i64[c], its first step; stop: i64[c], the step after its last.
        left_out: number of the earliest starts that do not fit and are not shown.
    """

    start: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.start)

    def column_of(self, start: np.ndarray, step: np.ndarray) -> np.ndarray:
        """i64[n]: the column of each step of each start; -1 for none."""
        if not len(self):
            return np.full(step.shape, -1)
        # a key that grows with the start first and the step second: columns are sorted by it
        span = int(max(self.stop.max(), step.max(initial=0))) + 1
        at = np.searchsorted(self.start * span + self.first, start * span + step, side="right") - 1
        inside = (at >= 0) & (self.start[at] == start) & (step < self.stop[at])
        return np.where(inside, at, -1)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a picture: first the worst single ranks, then all ranks in groups, in order.

    Attributes:
        first, stop: i64[g], a row shows ranks first..stop - 1.
        marked: bool[g], whether it is a single rank that stands out.
        alone: number of leading rows for the worst single ranks; 0 if every row is one rank.
    """

    first: np.ndarray
    stop: np.ndarray
    marked: np.ndarray
    alone: int = 0

    def __len__(self) -> int:
        return len(self.first)

    def rows_of(self, rank: int) -> np.ndarray:
        """i64: the rows that a rank belongs to, one or two."""
        return np.flatnonzero((self.first <= rank) & (rank < self.stop))


def rows_of(waits: Waits) -> Rows:
    """A row per rank; for more than 64 ranks, the worst 16 alone and at most 48 groups of adjacent ranks."""
    ranks, apart = waits.ranks, stragglers(waits)
    if len(ranks) <= _MOST_ROWS:
        return Rows(ranks, ranks + 1, apart)
    by_wait = np.lexsort((-waits.wait.sum(axis=1), ~apart))
    worst = by_wait[:_WORST_ROWS]
    num_ranks = int(ranks[-1]) + 1
    size = 1
    while -(-num_ranks // size) > _MOST_ROWS - _WORST_ROWS:
        size *= 2  # groups are then nodes, or several whole nodes
    first = np.arange(0, num_ranks, size)
    return Rows(
        np.concatenate((ranks[worst], first)),
        np.concatenate((ranks[worst] + 1, np.minimum(first + size, num_ranks))),
        np.concatenate((apart[worst], np.zeros(len(first), bool))),
        alone=len(worst),
    )


def axis_of(history: RunHistory, num_rows: int) -> Axis:
    """As many columns as fit on the page with `num_rows` rows; one per step if possible."""
    bounds = _bounds(history)
    most = max(min(_MOST_COLUMNS, _MOST_CELLS // max(num_rows, 1)), 1)
    left_out, bounds = max(len(bounds) - most, 0), bounds[-most:]
    size, sizes = 1, np.array([stop - first for _, first, stop in bounds], np.int64)
    while np.sum(-(-sizes // size)) > most:
        size += max(size // 8, 1)
    start, first, stop = [], [], []
    for number, low, high in bounds:
        edges = np.arange(low, high, size)
        start.append(np.full(len(edges), number))
        first.append(edges)
        stop.append(np.minimum(edges + size, high))
    none = [np.zeros(0, np.int64)]
    return Axis(
        np.concatenate(start or none), np.concatenate(first or none), np.concatenate(stop or none), left_out
    )


def _bounds(history: RunHistory) -> list[tuple[int, int, int]]:
    """(start, first step, step after the last) of the starts that have steps, in order."""
    num_starts = max(len(history.starts), 1)
    low = np.full(num_starts, np.iinfo(np.int64).max)
    high = np.zeros(num_starts, np.int64)
    for rank in history.ranks.values():
        np.minimum.at(low, rank.start, rank.step)
        np.maximum.at(high, rank.start, rank.step + 1)
    return [(s, int(low[s]), int(high[s])) for s in range(num_starts) if high[s] > low[s]]
