"""Packs swap sequences until no cost of any is far above its target.

Each pack above a target, the furthest first, tries packs that are far below the same target. The two swap up
to two sequences each for the other's, if that makes the larger excess of the two smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshfeed.native import ARRAY, LONGS, WHOLE, compiled
from meshfeed.plan.types import FloatArray, LongArray

MOST_COSTS = 4
"""As many as loops.c has places for."""

TRIES, MOST_SWEEPS = 4, 12
"""How many other packs a pack above its target tries in a sweep; the number of sweeps."""

ENOUGH = 0.25
"""A swap that removes this share of the difference between two packs is made without seeking a better one."""

WORTH = 4
"""A sweep in which fewer than one in this many packs found a swap is the last."""

MOST_CHOSEN = 8
"""How many sequences of a pack are considered, evenly spread from its first to its last."""

_swap = compiled(
    "mf_swap",
    *(LONGS, ARRAY, WHOLE, WHOLE),
    *(WHOLE, ARRAY, LONGS),
    *(WHOLE, LONGS, LONGS, LONGS, ARRAY),
    *(WHOLE, LONGS, LONGS),
    *(LONGS, ARRAY, ARRAY),
)


@dataclass(slots=True)
class Contents:
    """The packs of a step while they swap.

    Attributes:
        cost: each cost of each sequence on a rank of a group of each size, and 0 for no sequence; float64
            [num_costs, num_sizes, n + 1].
        padded: padded tokens of each on such a group; int64 [num_sizes, n + 1].
        size_at: index into the sizes, of each pack; int64 [num_packs].
        free, slots: padded tokens, and sequences, that each pack can still take; int64 [num_packs].
        excess: each cost of each pack above its target; float64 [num_costs, num_packs].
        members: the sequences of each pack, ascending; the rest is undefined; int64 [num_packs, most].
        counts: how many each pack has; int64 [num_packs].
    """

    cost: FloatArray
    padded: LongArray
    size_at: LongArray
    free: LongArray
    slots: LongArray
    excess: FloatArray
    members: LongArray
    counts: LongArray


def swap(contents: Contents, tolerance: float, worth: int = WORTH) -> int:
    """Swap until no excess is above the tolerance, or few swaps help; returns how many were made.

    contents: its arrays are changed; at most MOST_COSTS costs. worth: see `WORTH`.
    """
    if _swap is not None:
        return _swapped(_swap, contents, tolerance, worth)
    num_packs, num_swaps = contents.counts.size, 0
    for sweep in range(MOST_SWEEPS):
        before, worst = num_swaps, contents.excess.max(axis=0)
        above = [p for p in np.argsort(-worst, kind="stable").tolist() if worst[p] > tolerance]
        lowest = np.argsort(contents.excess, axis=1, kind="stable")
        turns = [sweep * TRIES] * len(lowest)
        for p in above:
            at = int(contents.excess[:, p].argmax())
            now = float(contents.excess[at, p])
            if now <= tolerance:
                continue
            first, turns[at] = turns[at], turns[at] + 1
            least, best = now - tolerance / 10, None
            for turn in range(first, first + min(TRIES, num_packs)):
                q = int(lowest[at, turn % num_packs])
                if q == p or contents.excess[at, q] >= now:
                    continue
                enough = max(tolerance, now - ENOUGH * (now - float(contents.excess[at, q])))
                found = _best_swap(contents, p, q, enough, least)
                if found is not None:
                    least, best = found[0], (q, *found[1:])
                if best is not None and least <= enough:
                    break
            if best is not None:
                _make(contents, p, *best)
                num_swaps += 1
        if (num_swaps - before) * worth <= len(above):
            break
    return num_swaps


def _swapped(compiled_swap: Callable[..., int], contents: Contents, tolerance: float, worth: int) -> int:
    """`swap` in one compiled call."""
    num_costs, num_sizes, num_columns = contents.cost.shape
    num_packs = contents.counts.size
    bounds = np.array([MOST_SWEEPS, TRIES, worth], np.int64)
    limits = np.array([tolerance, tolerance / 10, ENOUGH])
    lowest, heaps = np.empty((num_costs, num_packs), np.int64), np.empty((num_costs, num_packs, 2))
    above = np.empty((num_packs, 2))
    return compiled_swap(
        *(bounds, limits, num_costs, num_sizes),
        *(num_columns, contents.cost, contents.padded),
        *(num_packs, contents.size_at, contents.free, contents.slots, contents.excess),
        *(contents.members.shape[1], contents.members, contents.counts),
        *(lowest, heaps, above),
    )


@dataclass(frozen=True, slots=True)
class Choices:
    """No, one or two sequences of a pack: every choice. Its own size comes before that of the other pack.

    Attributes:
        items: the sequences, n for none; int64 [k, 2].
        num: how many sequences each choice has; int64 [k].
        padded: padded tokens of each choice on a group of either size; int64 [2, k].
        cost: each cost of it; float64 [num_costs, 2, k].
    """

    items: LongArray
    num: LongArray
    padded: LongArray
    cost: FloatArray

    @classmethod
    def of(cls, contents: Contents, pack: int, other: int) -> Choices:
        """Those of a pack, for another."""
        count, none = int(contents.counts[pack]), contents.padded.shape[1] - 1
        chosen = min(count, MOST_CHOSEN)
        items = np.append(contents.members[pack, np.arange(chosen) * count // max(chosen, 1)], none)
        first, second = _up_to_two(chosen)
        sizes = contents.size_at[[pack, other], None]
        padded, cost = contents.padded[sizes, items], contents.cost[:, sizes, items]
        return cls(
            np.stack((items[first], items[second]), axis=1),
            (first < chosen).astype(np.int64) + (second < chosen),
            padded[:, first] + padded[:, second],
            cost[:, :, first] + cost[:, :, second],
        )


@lru_cache(maxsize=MOST_CHOSEN + 1)
def _up_to_two(count: int) -> tuple[LongArray, LongArray]:
    """All choices of none, one and two of `count` indices, where `count` stands for none; int64 [k] each."""
    two = np.triu_indices(count, 1)
    one = np.arange(-1, count) % (count + 1)
    return np.append(one, two[0]), np.append(np.full(one.size, count), two[1])


def _best_swap(
    contents: Contents, p: int, q: int, enough: float, below: float
) -> tuple[float, tuple[Choices, int], tuple[Choices, int]] | None:
    """The first swap of two packs that leaves at most `enough`, or else the one that leaves least.

    Returns the larger excess of the two, and what p and q give; None if it is not less than `below`.
    """
    gives, takes = Choices.of(contents, p, q), Choices.of(contents, q, p)
    more = takes.num - gives.num[:, None]
    fits = (contents.free[p] + gives.padded[0][:, None] >= takes.padded[1]) & (contents.slots[p] >= more)
    fits &= (contents.free[q] + takes.padded[0] >= gives.padded[1][:, None]) & (contents.slots[q] >= -more)
    excess = np.full(fits.shape, -np.inf)
    for c in range(len(contents.excess)):
        ours, theirs = gives.cost[c, :, :, None], takes.cost[c]
        np.maximum(excess, contents.excess[c, p] - ours[0] + theirs[1], out=excess)
        np.maximum(excess, contents.excess[c, q] - theirs[0] + ours[1], out=excess)
    excess[~fits] = np.inf
    near = np.flatnonzero((excess <= enough) & (excess < below))
    at = int(near[0]) if near.size else int(excess.argmin())
    a, b = divmod(at, takes.num.size)
    if excess[a, b] >= below:
        return None
    return float(excess[a, b]), (gives, a), (takes, b)


def _make(contents: Contents, p: int, q: int, gives: tuple[Choices, int], takes: tuple[Choices, int]) -> None:
    """Let p and q swap what they give each other."""
    for pack, (ours, a), (theirs, b) in ((p, gives, takes), (q, takes, gives)):
        count = int(contents.counts[pack])
        kept = np.setdiff1d(contents.members[pack, :count], ours.items[a])
        now = np.union1d(kept, theirs.items[b, : theirs.num[b]])
        contents.members[pack, : now.size], contents.counts[pack] = now, now.size
        contents.slots[pack] += ours.num[a] - theirs.num[b]
        contents.free[pack] += ours.padded[0, a] - theirs.padded[1, b]
        contents.excess[:, pack] = contents.excess[:, pack] - ours.cost[:, 0, a] + theirs.cost[:, 1, b]
