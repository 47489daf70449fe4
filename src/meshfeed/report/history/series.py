"""The job over time: per column a mean and, for several steps, their extreme."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshfeed.metrics import RankHistory, RunHistory
from meshfeed.report.history.axis import Axis
from meshfeed.report.history.loop import seconds_of


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity by column. NaN without a measurement.

    Attributes:
        mean: f64[c], over steps, and over ranks for values per rank.
        extreme: f64[c], the largest single value; for queue depths, the smallest.
    """

    mean: np.ndarray
    extreme: np.ndarray


@dataclass(frozen=True, slots=True)
class Job:
    """All ranks together, by column.

    Attributes:
        time: f64[c], unix seconds of the first step's begin.
        wait: seconds a step that a rank waited; step: seconds that a step took.
        read, fetched, delivered: bytes per second of all ranks.
        queue_depth, padding, imbalance: of a rank.
    """

    time: np.ndarray
    wait: Series
    step: Series
    read: Series
    fetched: Series
    delivered: Series
    queue_depth: Series
    padding: Series
    imbalance: Series


def job_of(history: RunHistory, axis: Axis) -> Job:
    """Every series of a run."""
    offset = np.concatenate(([0], np.cumsum(axis.stop - axis.first)))
    place = {number: _places(axis, rank, offset) for number, rank in history.ranks.items()}

    def reduced(
        value: Callable[[RankHistory], np.ndarray], by: np.ufunc, empty: float
    ) -> np.ndarray:  # f64[steps]
        steps = np.full(int(offset[-1]), empty)
        for number, rank in history.ranks.items():
            values = value(rank).astype(np.float64)
            known = (place[number] >= 0) & np.isfinite(values)
            by.at(steps, place[number][known], values[known])
        steps[~np.isfinite(steps)] = np.nan
        return steps

    def largest(value: Callable[[RankHistory], np.ndarray]) -> np.ndarray:
        return reduced(value, np.maximum, -np.inf)

    def of_ranks(value: Callable[[RankHistory], np.ndarray], lowest: bool = False) -> Series:
        num = reduced(lambda rank: np.isfinite(value(rank)), np.add, 0.0)
        total = reduced(value, np.add, 0.0)
        extreme = reduced(value, np.minimum, np.inf) if lowest else largest(value)
        mean = _fold(total, axis, offset, np.add) / _positive(_fold(num, axis, offset, np.add))
        return Series(mean, _fold(extreme, axis, offset, np.fmin if lowest else np.fmax))

    seconds = largest(seconds_of)

    def of_job(value: Callable[[RankHistory], np.ndarray]) -> Series:
        steps = reduced(value, np.add, 0.0)
        steps[np.isnan(seconds)] = np.nan
        spent = _positive(_fold(np.nan_to_num(seconds), axis, offset, np.add))
        mean = _fold(np.nan_to_num(steps), axis, offset, np.add) / spent
        return Series(mean, _fold(steps / _positive(seconds), axis, offset, np.fmax))

    return Job(
        time=_fold(reduced(lambda rank: rank.time, np.minimum, np.inf), axis, offset, np.fmin),
        wait=of_ranks(lambda rank: rank.wait.sum(axis=1)),
        step=of_ranks(seconds_of),
        read=of_job(lambda rank: rank.bytes_read),
        fetched=of_job(lambda rank: rank.bytes_fetched),
        delivered=of_job(lambda rank: rank.delivered_bytes),
        queue_depth=of_ranks(lambda rank: rank.queue_depth, lowest=True),
        padding=of_ranks(lambda rank: rank.padding),
        imbalance=of_ranks(lambda rank: rank.imbalance),
    )


def _places(axis: Axis, rank: RankHistory, offset: np.ndarray) -> np.ndarray:
    """i64[n]: index of each row's step among all steps of the axis; -1 if it is not among them."""
    column = axis.column_of(rank.start, rank.step)
    return np.where(column >= 0, offset[column] + rank.step - axis.first[column], -1) if len(axis) else column


def _fold(steps: np.ndarray, axis: Axis, offset: np.ndarray, by: np.ufunc) -> np.ndarray:
    """f64[c]: the steps of each column, reduced."""
    return by.reduceat(steps, offset[:-1]) if len(axis) else np.zeros(0)


def _positive(values: np.ndarray) -> np.ndarray:
    """The values with NaN instead of 0, for use as a divisor."""
    return np.where(values > 0, values, np.nan)
