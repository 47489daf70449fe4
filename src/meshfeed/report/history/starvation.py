"""Waits that come back every so many steps: the loader's queue runs empty at the edges of something.

At such an edge much is read at once: a shuffle's window opens its shards, an epoch begins, a budget of
announced bytes is used up. Between the edges nobody waits, so means hide it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshfeed.arrays import Floats, Longs
from meshfeed.metrics import FOLLOWS
from meshfeed.report.history.loop import seconds_of
from meshfeed.report.reader import RankHistory, RunHistory
from meshfeed.report.words import counted, duration

_FEWEST_EDGES, _SHORTEST = 5, 3  # edges, and steps between two of them
_APART_S, _APART_STEP, _APART_MEDIAN = 0.001, 0.1, 10.0  # an edge: seconds, part of a step, usual waits
_APART_EDGES = 0.05  # part of the usual edge: less is a hiccup
_NEAR, _REGULAR = 0.1, 0.75  # how far a distance may be from a multiple of the median one; how many are not
_MOST_WAITING = 0.5  # part of the rank's own waiting that the edges are
_KEEPS_UP = 0.9  # part of the time in which a producer may work and still get ahead


@dataclass(frozen=True, slots=True)
class Starvation:
    """Waits of one rank that come back regularly.

    Attributes:
        rank, stage: which, and what it waits for there.
        every: steps from one edge to the next.
        edges: their number; first, last: their first and last step.
        wait_s: mean seconds at an edge.
        share: part of all that the rank waits for its own work, 0 to 1.
        step_s: seconds of its median step.
        busy: part of the time in which its producer works, 0 to 1.
        is_over: whether the last three edges that would follow have not come.
        edge_of: what the recipe begins anew after about as many steps, in words; "" if nothing.
    """

    rank: int
    stage: str
    every: int
    edges: int
    first: int
    last: int
    wait_s: float
    share: float
    step_s: float
    busy: float
    is_over: bool
    edge_of: str


def starvation_of(history: RunHistory) -> Starvation | None:
    """The rank that waits longest at regular edges; None if no rank does."""
    own = np.array([stage not in FOLLOWS for stage in history.stages])
    edges = history.starts[-1].edges if history.starts else {}
    found = (_of_rank(rank, history.stages, own, edges) for rank in history.ranks.values())
    return max(filter(None, found), key=lambda each: each.edges * each.wait_s, default=None)


def _of_rank(
    rank: RankHistory, stages: tuple[str, ...], own: np.ndarray, edges: Mapping[str, float]
) -> Starvation | None:
    seconds = seconds_of(rank)
    steady = (np.diff(rank.start, prepend=-1) <= 0) & np.isfinite(seconds)
    if not steady.any():
        return None
    step, seconds = rank.step[steady], seconds[steady]
    wait, work = rank.wait[steady] * own, rank.work[steady] * own
    waited = wait.sum(axis=1)
    step_s = float(np.median(seconds))
    least = max(_APART_S, _APART_STEP * step_s, _APART_MEDIAN * float(np.median(waited)))
    high = np.flatnonzero(waited > least)
    if high.size < _FEWEST_EDGES:
        return None
    longest = np.sort(waited[high])[::-1]
    half = longest[longest.cumsum().searchsorted(longest.sum() / 2)]
    # the usual edge is that of half of the waiting, or, where one hiccup is as long, of half of the waits
    for usual in (half, np.median(longest)):
        found = _regular_in(step, waited, high[waited[high] > _APART_EDGES * usual])
        if found is not None:
            break
    else:
        return None
    high, begins, every = found
    at = wait[high].sum(axis=0)
    return Starvation(
        rank=rank.rank,
        stage=stages[int(at.argmax())],
        every=round(every),
        edges=int(begins.size),
        first=int(step[begins[0]]),
        last=int(step[begins[-1]]),
        wait_s=float(waited[high].sum() / begins.size),
        share=float(waited[high].sum() / waited.sum()),
        step_s=step_s,
        busy=min(float(work.sum() / seconds.sum()), 1.0),
        is_over=bool(step[-1] - step[begins[-1]] > 3 * every),
        edge_of=_named(every, edges),
    )


def _regular_in(step: Longs, waited: Floats, high: Longs) -> tuple[Longs, Longs, float] | None:
    """Steps that wait long, those of them at which an edge begins, and how far apart edges are.

    None unless they are regular, and most of the waiting.
    """
    begins = high[np.diff(high, prepend=-2) > 1]  # one edge may keep several steps waiting
    if begins.size < _FEWEST_EDGES or waited[high].sum() < _MOST_WAITING * waited.sum():
        return None
    distances = np.diff(step[begins])
    every = float(np.median(distances))
    times = np.maximum(np.rint(distances / every), 1)
    near = np.maximum(_NEAR * every, 1) if every > 4 else 0.5  # any number is 1 from a multiple of 3
    regular = np.abs(distances - times * every) <= near
    return (high, begins, every) if every >= _SHORTEST and regular.mean() >= _REGULAR else None


def _named(every: float, edges: Mapping[str, float]) -> str:
    """The edge of the recipe that is nearest to this distance, if any is near."""
    near = {name: abs(steps - every) for name, steps in edges.items()}
    name = min(near, key=near.__getitem__, default="")
    return name if name and near[name] <= max(_NEAR * every, 1) else ""


def starvation_words(found: Starvation) -> str:
    """What comes back, and what to change, in a few sentences."""
    what = "outside every stage" if found.stage == "other" else f"for {found.stage}"
    where = f", where {found.edge_of} begins" if found.edge_of else ""
    text = (
        f"Rank {found.rank} starves every {found.every:,} steps{where}: {duration(found.wait_s)} {what}, "
        f"{found.edges:,} times, {found.share:.0%} of all that it waits."
    )
    if found.is_over:
        return f"{text} It stopped after step {found.last:,}."
    if found.busy > _KEEPS_UP:
        return (
            f"{text} Its producer works {found.busy:.0%} of the time and cannot catch up in between: reading "
            f"further ahead would not help, a faster {found.stage} does."
        )
    ahead = counted(math.ceil(found.wait_s / max(found.step_s, 1e-9)), "step")
    smaller = ", or a smaller Blocks(window=)" if "window" in found.edge_of else ""
    return (
        f"{text} In between it keeps up: its producer works {found.busy:.0%} of the time. So let it get "
        f"{ahead} further ahead, by a larger prefetch, or read_ahead_bytes for remote storage{smaller}."
    )
