"""Waits by rank and stage, summed over a run, and the rank and stage to look at first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshfeed.metrics import FOLLOWS
from meshfeed.report.history.loop import seconds_of
from meshfeed.report.reader import RunHistory
from meshfeed.report.words import duration

_NOTHING = 0.001  # share of time below which a wait is ignored
_APART = 2.0  # multiple of the median that stands out


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits of all ranks' loops.

    Attributes:
        ranks: i64[r], ascending.
        hosts: of each of them.
        stages: k names.
        num_steps: i64[r], number of steps summed.
        seconds: f64[r], their duration; for the last step of a start, only its wait.
        wait: f64[r, k], seconds waited in these steps.
        longest: f64[r, k], the longest wait of a single step; longest_step: i64[r, k], that step.
    """

    ranks: np.ndarray
    hosts: tuple[str, ...]
    stages: tuple[str, ...]
    num_steps: np.ndarray
    seconds: np.ndarray
    wait: np.ndarray
    longest: np.ndarray
    longest_step: np.ndarray

    @property
    def share(self) -> float:
        """Share of all ranks' time spent waiting, 0 to 1."""
        seconds = float(self.seconds.sum())
        return min(float(self.wait.sum()) / seconds, 1.0) if seconds > 0 else 0.0

    @property
    def per_step(self) -> np.ndarray:
        """f64[r, k]: mean seconds a step."""
        return self.wait / np.maximum(self.num_steps, 1)[:, None]


@dataclass(frozen=True, slots=True)
class Worst:
    """A rank and the stage that it waits for.

    Attributes:
        rank, host: which rank, and where it ran last.
        stage: what it waits for.
        wait_s: mean seconds a step; median_wait_s: of the median rank, in the same stage.
        share: of the rank's time.
        stands_out: whether it differs from the other ranks.
        others_follow: whether other ranks wait longer, but for data from ranks like this one.
    """

    rank: int
    host: str
    stage: str
    wait_s: float
    median_wait_s: float
    share: float
    stands_out: bool
    others_follow: bool


@dataclass(frozen=True, slots=True)
class Longest:
    """The longest wait of a single step: rank, stage, step and duration."""

    rank: int
    stage: str
    step: int
    wait_s: float

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.stage}, step {self.step:,}"


def waits_of(history: RunHistory) -> Waits:
    """Sums over the whole run.

    The first step of a start includes opening, meeting and warm-up; it is omitted if a rank has others.
    """
    ranks = np.array(sorted(history.ranks), np.int64)
    num_steps, seconds = np.zeros(len(ranks), np.int64), np.zeros(len(ranks))
    wait, longest = np.zeros((2, len(ranks), len(history.stages)))
    longest_step = np.full(wait.shape, -1, np.int64)
    for row, rank in enumerate(history.ranks[each] for each in ranks.tolist()):
        steady = np.flatnonzero(np.diff(rank.start, prepend=-1) <= 0)
        keep = steady if steady.size else np.arange(rank.step.size)
        num_steps[row], waited, took = keep.size, rank.wait[keep], seconds_of(rank)[keep]
        seconds[row] = np.where(np.isnan(took), waited.sum(axis=1), took).sum()
        if waited.size:
            wait[row], longest[row] = waited.sum(axis=0), waited.max(axis=0)
            longest_step[row] = rank.step[keep][waited.argmax(axis=0)]
    hosts = tuple(history.ranks[each].host for each in ranks.tolist())
    return Waits(ranks, hosts, history.stages, num_steps, seconds, wait, longest, longest_step)


def worst_of(waits: Waits) -> Worst | None:
    """The rank and stage to look at first; None if no rank waited.

    Waits in deliver or exchange are waits for other ranks. They are named only if no rank waited at least
    half as long in a stage of its own.
    """
    per_step = waits.per_step
    if not per_step.size or per_step.max() <= 0:
        return None
    row, stage = _cause(waits, per_step)
    here, median = float(per_step[row, stage]), float(np.median(per_step[:, stage]))
    seconds = float(waits.seconds[row])
    share = min(float(waits.wait[row, stage]) / seconds, 1.0) if seconds > 0 else 0.0
    others = float(np.median(per_step[:, _follows(waits)].sum(axis=1)))
    return Worst(
        rank=int(waits.ranks[row]),
        host=waits.hosts[row],
        stage=waits.stages[stage],
        wait_s=here,
        median_wait_s=median,
        share=share,
        stands_out=len(waits.ranks) > 1 and here > _APART * median and share > _NOTHING,
        others_follow=waits.stages[stage] not in FOLLOWS and others > max(median, here / 4),
    )


def longest_of(waits: Waits) -> Longest | None:
    """The longest wait of a single step, preferably not for another rank; None if no rank waited."""
    if not waits.longest.size or waits.longest.max() <= 0:
        return None
    row, stage = at = _cause(waits, waits.longest)
    return Longest(
        int(waits.ranks[row]), waits.stages[stage], int(waits.longest_step[at]), float(waits.longest[at])
    )


def _follows(waits: Waits) -> np.ndarray:
    """bool[k]: stages in which a rank waits for others."""
    return np.array([stage in FOLLOWS for stage in waits.stages])


def _cause(waits: Waits, seconds: np.ndarray) -> tuple[int, int]:
    """(row, stage) of the largest of f64[r, k]: in own stages, unless a wait for others is twice as long."""
    own = np.where(_follows(waits), 0.0, seconds)
    row, stage = np.unravel_index(
        int((own if own.max() >= seconds.max() / 2 else seconds).argmax()), seconds.shape
    )
    return int(row), int(stage)


def stragglers(waits: Waits) -> np.ndarray:
    """bool[r]: the ranks that stand out in a stage of their own."""
    per_step = waits.per_step * ~_follows(waits)
    if not per_step.size:
        return np.zeros(len(waits.ranks), bool)
    a_step = waits.seconds / np.maximum(waits.num_steps, 1)
    apart = (per_step > _APART * np.median(per_step, axis=0)) & (per_step > 10 * _NOTHING * a_step[:, None])
    apart &= per_step > per_step.max() / 10
    return np.any(apart, axis=1)


def sentence(waits: Waits) -> str:
    """The summary in one sentence."""
    if not waits.num_steps.sum():
        return "No step has been trained yet."
    worst = worst_of(waits)
    if worst is None:
        return "The loader kept nobody waiting."
    single = longest_of(waits)
    longest = "" if single is None else f"The longest single wait was {duration(single.wait_s)}: {single}."
    here, median = duration(worst.wait_s), duration(worst.median_wait_s)
    share = f"{worst.share:.0%}" if worst.share >= 0.01 else f"{worst.share:.1%}"
    what = "outside every stage" if worst.stage == "other" else f"for {worst.stage}"
    if worst.share < _NOTHING:
        return f"The loader hardly kept anybody waiting: {waits.share:.2%} of the ranks' time. {longest}"
    if worst.stands_out:
        where = f" on {worst.host}" if len({*waits.hosts}) > 1 else ""
        follow = " The ranks that it serves wait with it." if worst.others_follow else ""
        return (
            f"Look at rank {worst.rank}{where}: it waits {here} a step {what}, {share} of its "
            f"time; the median rank waits {median} for that.{follow}{_together(waits, worst)}"
        )
    if len(waits.ranks) == 1:
        return f"It waits {here} a step {what}, {share} of its time. {longest}"
    return (
        f"No rank stands out: the median rank waits {median} a step {what}, the worst, rank {worst.rank}, "
        f"{here} ({share} of its time)."
    )


def _together(waits: Waits, worst: Worst) -> str:
    """That all ranks that stand out are on one host of several: then the host is slow."""
    apart = [host for host, stands_out in zip(waits.hosts, stragglers(waits)) if stands_out]
    if len(apart) < 2 or {*apart} != {worst.host} or len({*waits.hosts}) < 2:
        return ""
    return f" All {len(apart)} ranks that stand out are on {worst.host}."
