"""The optimum for a handful of sequences, at one cp size."""

from __future__ import annotations

import numpy as np

from meshfeed.plan.fill import EXACT, Filled, FloatArray, Ranked

MOST = 10
"""Sequences that `exact` takes: its work grows as 3 to their number, some 20 ms here."""


def exact(ranked: Ranked, num_microbatches: int) -> list[Filled] | None:
    """The least sum over microbatches of the largest load, by dynamic programming over subsets; None if none
    fits.

    First over the blocks of a microbatch (the least largest load for every subset), then over microbatches.
    """
    room = ranked.room
    count = ranked.lengths.size
    subsets = np.arange(1 << count)
    holds = (subsets[:, None] >> np.arange(count)) & 1
    load = np.where(holds @ ranked.padded[-1] <= room.limits[-1], holds @ ranked.load[-1], np.inf)
    blocks = min(room.num_ranks // room.sizes[-1], count)
    block_tables, block_choices = _fold(load, blocks, combine=np.maximum)
    step_tables, step_choices = _fold(block_tables[-1], min(num_microbatches, count), combine=np.add)
    if np.isinf(step_tables[-1][-1]):
        return None
    filled: list[Filled] = []
    for of_step in _unfold(step_choices, int(subsets[-1])):
        parts = [np.flatnonzero(holds[part]) for part in _unfold(block_choices, of_step)]
        members = np.concatenate(parts)
        held_by = np.repeat(np.arange(len(parts), dtype=np.int32), [part.size for part in parts])
        loads = np.array([float(ranked.load[-1, part].sum()) for part in parts])
        sizes = np.full(len(parts), room.sizes[-1], np.int64)
        if members.size:
            filled.append(Filled(members, held_by, sizes, loads))
    return filled


def _fold(cost: FloatArray, times: int, combine: np.ufunc) -> tuple[list[FloatArray], list[np.ndarray]]:
    """Split every subset in up to `times` parts so that their combined cost is least.

    cost: of each subset as one part; float64 [2^n]. Returns the costs with 1, 2, ... parts, and which part
    each choice splits off; [2^n] each.
    """
    tables, choices = [cost], [np.arange(cost.size)]
    for _ in range(times - 1):
        best, choice = tables[-1].copy(), np.zeros(cost.size, np.int64)
        for subset in range(1, cost.size):
            parts = _submasks(subset)
            total = combine(cost[parts], tables[-1][subset ^ parts])
            at = int(total.argmin())
            if total[at] * EXACT < best[subset]:
                best[subset], choice[subset] = total[at], parts[at]
        tables.append(best)
        choices.append(choice)
    return tables, choices


def _unfold(choices: list[np.ndarray], subset: int) -> list[int]:
    """The parts that `_fold` chose for a subset."""
    parts: list[int] = []
    for choice in reversed(choices):
        parts.append(int(choice[subset]))
        subset ^= parts[-1]
    return parts


def _submasks(mask: int) -> np.ndarray:
    """All subsets of a subset: 5 -> [0 1 4 5]; int64."""
    found = np.zeros(1, np.int64)
    bit = 1
    while bit <= mask:
        if mask & bit:
            found = np.concatenate((found, found | bit))
        bit <<= 1
    return found
