"""A run as a map of ranks by steps: rows of adjacent ranks, columns of equally many steps.

The value of a cell is the largest measurement in it. Nothing is averaged: a single wait of 500 ms
among a million steps stays visible.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from meshfeed.report.history.loop import seconds_of
from meshfeed.report.reader import RankHistory, RunHistory

_MOST_CELLS, _MOST_COLUMNS, _MOST_ROWS = 16_384, 720, 64


class Grid:
    """The steps of all starts, in the order of training, and the columns and rows that show them.

    Attributes:
        ranks: i64[r], ascending.
        start: i64[c], the start of the run that a column belongs to; no column spans a resume.
        first, stop: i64[c], its first step, and the step after its last.
        rows: i64[g], the index in `ranks` of each row's first rank.
        row_stop: i64[g], the same for the rank after its last.
        columns: i64[c], the index of each column's first step among all steps.
    """

    def __init__(self, history: RunHistory) -> None:
        self._histories = [rank for _, rank in sorted(history.ranks.items())]
        self.ranks = np.array([rank.rank for rank in self._histories], np.int64)
        self.rows = self._rows()
        self.row_stop = np.append(self.rows, self.ranks.size)[1:]
        bounds = self._bounds(len(history.starts))
        sizes = np.array([high - low for low, high in bounds.values()], np.int64)
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        size = self._steps_a_column(sizes)
        columns = [
            (start, step, min(step + size, high), offset + step - low)
            for (start, (low, high)), offset in zip(bounds.items(), offsets.tolist())
            for step in range(low, high, size)
        ]
        self.start, self.first, self.stop, self.columns = np.array(columns, np.int64).reshape(-1, 4).T
        # the row of each rank's history that holds a step; -1 for none
        self._index = np.full((self.ranks.size, int(offsets[-1])), -1)
        shift = np.zeros(len(history.starts), np.int64)
        shift[list(bounds)] = offsets[:-1] - [low for low, _ in bounds.values()]
        for row, rank in enumerate(self._histories):
            self._index[row, shift[rank.start] + rank.step] = np.arange(rank.step.size)

    def _rows(self) -> np.ndarray:
        """A row per rank; for more than 64 ranks, at most 64 groups of adjacent ranks."""
        size = 1
        while len(groups := np.unique(self.ranks // size)) > _MOST_ROWS:
            size *= 2  # groups are then nodes, or several whole nodes
        return np.searchsorted(self.ranks // size, groups)

    def _bounds(self, num_starts: int) -> dict[int, tuple[int, int]]:
        """Start -> its first step, and the step after its last, for starts with steps."""
        low, high = np.full(num_starts, np.iinfo(np.int64).max), np.zeros(num_starts, np.int64)
        for rank in self._histories:
            np.minimum.at(low, rank.start, rank.step)
            np.maximum.at(high, rank.start, rank.step + 1)
        return {start: (int(low[start]), int(high[start])) for start in np.flatnonzero(high > low).tolist()}

    def _steps_a_column(self, sizes: np.ndarray) -> int:
        """One if every step fits on the page. A start has at least a column."""
        most = max(min(_MOST_COLUMNS, _MOST_CELLS // max(len(self.rows), 1)), len(sizes), 1)
        size = 1
        while np.sum(-(-sizes // size)) > most:
            size += max(size // 8, 1)
        return size

    def table(self, value: Callable[[RankHistory], np.ndarray]) -> np.ndarray:
        """f64[r, n]: a value by rank and step; NaN for none."""
        table = np.full(self._index.shape, np.nan)
        for row, (rank, index) in enumerate(zip(self._histories, self._index)):
            table[row, index >= 0] = value(rank)[index[index >= 0]]
        return table

    def largest(self, table: np.ndarray) -> np.ndarray:
        """f64[g, c]: the largest of each cell; NaN without a measurement."""
        by_row = np.fmax.reduceat(table, self.rows, axis=0) if table.size else table
        return np.fmax.reduceat(by_row, self.columns, axis=1) if table.size else np.zeros((len(self.rows), 0))

    @cached_property
    def _waits(self) -> np.ndarray:
        """f64[r, n]: seconds that each rank waited for each step; -1 for none."""
        return np.nan_to_num(self.table(_waited), nan=-1.0)

    # -- the map ----------------------------------------------------------------------------------------

    def heat(self, stages: list[int]) -> dict[str, np.ndarray]:
        """The longest waits of single steps, by row and column; NaN or -1 without a measurement.

        total: f64[g, c], seconds over all stages; rank, step: of that wait. by_stage: f64[g, c, k], the
        longest wait for each of the stages, possibly of others.
        """
        total = self._waits
        shape = len(self.rows), len(self.columns)
        longest, rank, step = np.full(shape, np.nan), np.full(shape, -1), np.full(shape, -1)
        column_of = np.repeat(np.arange(shape[1]), np.diff(self.columns, append=total.shape[1]))
        for row, (top, bottom) in enumerate(zip(self.rows, self.row_stop) if total.size else ()):
            best = total[top:bottom].max(axis=0)
            peak = np.maximum.reduceat(best, self.columns)
            peaks = np.flatnonzero(best == peak[column_of])
            at = peaks[np.unique(column_of[peaks], return_index=True)[1]]
            there = peak >= 0
            longest[row, there] = peak[there]
            rank[row, there] = self.ranks[top + total[top:bottom, at].argmax(axis=0)][there]
            step[row, there] = (self.first + at - self.columns)[there]
        by_stage = [self.largest(self.table(lambda rank, k=k: rank.wait[:, k])) for k in stages]
        return {"total": longest, "rank": rank, "step": step, "by_stage": _last_axis(by_stage, shape)}

    def moments(self, heat: dict[str, np.ndarray], stages: list[int]) -> dict[str, np.ndarray]:
        """The step with the longest wait in each column, and the rank of each row that waited longest in it.

        step: i64[c]. rank: i64[g, c]; -1 for none. begin: f64[g, c], seconds from the first rank's request of
        the step to this rank's. seconds: f64[g, c], until it asked for the next step; NaN for a start's last.
        wait, work: f64[g, c, k], seconds by stage: waits of the loop, work of the producer.
        """
        shape = len(self.rows), len(self.columns)
        if not shape[0] * shape[1]:
            return dict.fromkeys(("step", "rank", "begin", "seconds", "wait", "work"), np.zeros(0))
        here = np.arange(shape[1])
        step = heat["step"][np.nan_to_num(heat["total"], nan=-1.0).argmax(axis=0), here]
        at = self.columns + step - self.first
        waited = self._waits[:, at]
        who = [top + waited[top:bottom].argmax(axis=0) for top, bottom in zip(self.rows, self.row_stop)]
        shown = np.stack(who), here

        def by_stage(kind: str) -> np.ndarray:
            tables = (self.table(lambda rank, k=k: getattr(rank, kind)[:, k]) for k in stages)
            return _last_axis([table[:, at][shown] for table in tables], shape)

        asked = self.table(lambda rank: rank.time)[:, at]
        return {
            "step": step,
            "rank": np.where(waited[shown] >= 0, self.ranks[shown[0]], -1),
            "begin": asked[shown] - np.fmin.reduce(asked),
            "seconds": self.table(seconds_of)[:, at][shown],
            "wait": by_stage("wait"),
            "work": by_stage("work"),
        }

    # -- the job over time --------------------------------------------------------------------------------

    def series(self) -> dict[str, Any]:
        """By column, over all ranks: the time, and the mean and extreme step of each quantity.

        wait and step are seconds; read, fetched and delivered bytes per second of all ranks together. The
        extreme is the largest value; of queue depths, the smallest.
        """
        if not self._index.size:
            return {}
        seconds = np.fmax.reduce(self.table(seconds_of))
        begins = np.fmin.reduce(self.table(lambda rank: rank.time))
        series: dict[str, Any] = {"time": _listed(self._over(np.fmin, begins), 13)}
        for name, value in _OF_A_RANK.items():
            table, extreme = self.table(value), np.fmin if name == "queue_depth" else np.fmax
            count = self._over(np.add, np.isfinite(table).sum(axis=0))
            total = self._over(np.add, np.nansum(table, axis=0))
            series[name] = _pair(total / _positive(count), self._over(extreme, extreme.reduce(table)))
        for name, value in _OF_THE_JOB.items():
            counts = np.nansum(self.table(value), axis=0)
            counts = np.where(np.isnan(seconds), 0.0, counts)
            spent = _positive(self._over(np.add, np.nan_to_num(seconds)))
            fastest = self._over(np.fmax, counts / _positive(seconds))
            series[name] = _pair(self._over(np.add, counts) / spent, fastest)
        if all(rank.decoded is None for rank in self._histories):
            del series["decoded"]
        return series

    def _over(self, by: np.ufunc, steps: np.ndarray) -> np.ndarray:
        """f64[c]: the steps of each column, reduced."""
        return by.reduceat(steps, self.columns)


def _waited(rank: RankHistory) -> np.ndarray:
    return rank.wait.sum(axis=1)


_OF_A_RANK: dict[str, Callable[[RankHistory], np.ndarray]] = {
    "wait": _waited,
    "step": seconds_of,
    "queue_depth": lambda rank: rank.queue_depth,
    "padding": lambda rank: rank.padding,
    "imbalance": lambda rank: rank.imbalance,
}
_OF_THE_JOB: dict[str, Callable[[RankHistory], np.ndarray]] = {
    "read": lambda rank: rank.bytes_read,
    "fetched": lambda rank: rank.bytes_fetched,
    "delivered": lambda rank: rank.delivered_bytes,
    "decoded": lambda rank: np.zeros(rank.step.size) if rank.decoded is None else rank.decoded.parts,
}


def _last_axis(of_stages: list[np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    return np.moveaxis(np.array(of_stages).reshape(len(of_stages), *shape), 0, 2)


def _positive(values: np.ndarray) -> np.ndarray:
    """The values with NaN instead of 0, for use as a divisor."""
    return np.where(values > 0, values, np.nan)


def _pair(mean: np.ndarray, extreme: np.ndarray) -> dict[str, list[float | None]]:
    return {"mean": _listed(mean), "extreme": _listed(extreme)}


def _listed(values: np.ndarray, digits: int = 4) -> list[float | None]:
    """Numbers of a few significant digits for JSON; None for NaN."""
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]
