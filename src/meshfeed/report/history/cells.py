"""The values of cells: always a measured value, the largest of those in the cell.

Nothing is averaged: a single wait of 500 ms among a million steps stays visible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshfeed.metrics import RunHistory
from meshfeed.report.history.axis import Axis, Rows
from meshfeed.report.history.loop import asked_at, seconds_of


@dataclass(frozen=True, slots=True)
class Heat:
    """The longest waits of single steps, by row and column; NaN without a measurement.

    Attributes:
        total: f64[g, c], seconds over all stages; rank, step: i64[g, c], the rank and step of that wait.
        by_stage: f64[g, c, k], the longest wait for each stage, possibly of different ranks and steps.
    """

    total: np.ndarray
    rank: np.ndarray
    step: np.ndarray
    by_stage: np.ndarray


@dataclass(frozen=True, slots=True)
class Moments:
    """For each column, the step with the longest wait of a rank.

    A row of several ranks shows the one that waited longest in that step.

    Attributes:
        step: i64[c]; -1 for none.
        rank: i64[g, c], the rank shown in a row; -1 for none.
        begin: f64[g, c], seconds from the first rank's request of the step to this rank's.
        seconds: f64[g, c], until it asked for the next step; NaN for the last step of a start.
        wait, work: f64[g, c, k], seconds by stage: waits of the loop, work of the producer.
    """

    step: np.ndarray
    rank: np.ndarray
    begin: np.ndarray
    seconds: np.ndarray
    wait: np.ndarray
    work: np.ndarray


def heat_of(history: RunHistory, axis: Axis, rows: Rows) -> Heat:
    """The maxima of all cells."""
    shape, num_stages = (len(rows), len(axis)), len(history.stages)
    total, rank_of, step_of = np.full(shape, -1.0), np.full(shape, -1), np.full(shape, -1)
    by_stage = np.full((*shape, num_stages), -1.0)
    for number, rank in history.ranks.items():
        column = axis.column_of(rank.start, rank.step)
        known = np.flatnonzero(column >= 0)
        waited = rank.wait.sum(axis=1)
        order = known[np.lexsort((waited[known], column[known]))]
        last = np.flatnonzero(np.diff(column[order], append=-1) != 0)  # the longest of each column
        at, best = column[order][last], order[last]
        stages = np.full((len(axis), num_stages), -1.0)
        np.maximum.at(stages, column[known], rank.wait[known])
        for row in rows.rows_of(number).tolist():
            longer = waited[best] > total[row, at]
            to, taken = at[longer], best[longer]
            total[row, to], rank_of[row, to], step_of[row, to] = waited[taken], number, rank.step[taken]
            np.maximum(by_stage[row], stages, out=by_stage[row])
    missing = total < 0
    total[missing] = np.nan
    by_stage[missing] = np.nan
    return Heat(total, rank_of, step_of, by_stage)


def moments_of(history: RunHistory, axis: Axis, rows: Rows, heat: Heat) -> Moments:
    """The worst step of every column, for all rows."""
    shape, num_stages = (len(rows), len(axis)), len(history.stages)
    step = np.full(len(axis), -1)
    if len(rows) and len(axis):
        worst = np.where(np.isnan(heat.total), -1.0, heat.total).argmax(axis=0)
        step = heat.step[worst, np.arange(len(axis))]
    found = Moments(
        step=step,
        rank=np.full(shape, -1),
        begin=np.full(shape, np.nan),
        seconds=np.full(shape, np.nan),
        wait=np.full((*shape, num_stages), np.nan),
        work=np.full((*shape, num_stages), np.nan),
    )
    most, earliest = np.full(shape, -1.0), np.full(len(axis), np.inf)
    for number, rank in history.ranks.items():
        column = axis.column_of(rank.start, rank.step)
        there = np.flatnonzero(column >= 0)
        there = there[rank.step[there] == step[column[there]]]
        at, waited = column[there], rank.wait[there].sum(axis=1)
        asked, seconds = asked_at(rank), seconds_of(rank)
        np.minimum.at(earliest, at, asked[there])
        for row in rows.rows_of(number).tolist():
            longer = waited > most[row, at]
            to, taken = at[longer], there[longer]
            most[row, to], found.rank[row, to] = waited[longer], number
            found.begin[row, to], found.seconds[row, to] = asked[taken], seconds[taken]
            found.wait[row, to], found.work[row, to] = rank.wait[taken], rank.work[taken]
    found.begin[:] -= earliest
    return found
