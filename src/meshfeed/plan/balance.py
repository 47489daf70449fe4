"""Equal work on every rank: several ways to fill a step, of which the best is kept.

`peel` is nearly always it. The others are for batches that it cannot split: few sequences, or all alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshfeed.plan.best_fit import best_fit
from meshfeed.plan.exact import MOST, exact
from meshfeed.plan.fill import Filled, Ranked, fill, fill_evenly
from meshfeed.plan.peel import finish, peel
from meshfeed.plan.policy import Packing, Room
from meshfeed.plan.polish import polish
from meshfeed.plan.types import LongArray

SAND = (0.03, 0.1, 0.0)
"""Parts of the work that `deal` spreads evenly, in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class Bubble:
    """What a pipeline adds to a step: the largest microbatch, `share` times."""

    share: float = 0.0

    def objective(self, loads: npt.ArrayLike) -> float:
        """Sum of the microbatches' largest loads, and the bubble. loads: float64 [num_microbatches]."""
        tops = np.asarray(loads, np.float64)
        return float(tops.sum() + self.share * tops.max(initial=0.0))


def balance(
    lengths: LongArray, packing: Packing, room: Room, *, quantum: int, bubble: Bubble
) -> tuple[list[Filled], LongArray, int]:
    """Fill as few microbatches as hold the batch, or as many as the packing asks for.

    lengths: each from 1 to room.longest; int64 [n], n >= 1.
    Returns the microbatches, the order that their members refer to (places in `lengths` by descending
    length, int64 [n]) and the number of microbatches, a multiple of quantum; those past the list's end are
    dummies.
    """
    order = np.argsort(-lengths, kind="stable")
    ranked = Ranked.of(lengths[order], packing.cost, room)
    limit = room.limits[-1] * room.num_blocks
    least = max(-(-int(ranked.padded[0].sum()) // limit), packing.microbatches or 1)
    if room.sizes == (room.num_ranks,) and lengths.size > MOST:
        # nothing to balance: all ranks are one block
        least = max(least, best_fit(ranked.padded[0], limit)[1])
    count = -(-least // quantum) * quantum
    while True:
        ideal = bubble.objective(np.full(count, ranked.work.sum() / room.num_ranks / count))
        best, best_objective, left = None, np.inf, np.inf
        for filled in ways(ranked, count, packing.tolerance):
            missing = tokens_left(ranked, filled)
            left = min(left, missing)
            filled = [polish(ranked, mb) for mb in filled]
            objective = bubble.objective([mb.top_load for mb in filled])
            if missing == 0 and objective < best_objective:
                best, best_objective = filled, objective
            if best_objective <= ideal * (1 + packing.tolerance):
                break
        if best is not None:
            return best, order, count
        # what is left would fill so many more, if it were packed well
        count += max(quantum, int(left) // limit // quantum * quantum)


def tokens_left(ranked: Ranked, filled: list[Filled]) -> int:
    """Tokens that the last microbatch of a step has no room for."""
    return int(ranked.lengths[filled[-1].left].sum())


def ways(ranked: Ranked, num_microbatches: int, tolerance: float) -> Iterator[list[Filled]]:
    """ExchangeDelivery to fill a step, the likeliest first."""
    room = ranked.room
    if room.sizes == (room.num_ranks,):
        yield from fit_tightly(ranked, num_microbatches)
    yield peel(ranked, num_microbatches, tolerance)
    yield share_out(ranked, num_microbatches, tolerance)
    if len(room.sizes) == 1:
        yield spread(ranked, num_microbatches)
    for sand in SAND:
        yield deal(ranked, num_microbatches, sand, tolerance)
    yield from fit_tightly(ranked, num_microbatches)
    if len(room.sizes) == 1 and ranked.lengths.size <= MOST:
        optimum = exact(ranked, num_microbatches)
        if optimum is not None:
            yield optimum


def share_out(ranked: Ranked, num_microbatches: int, tolerance: float) -> list[Filled]:
    """Give microbatches equal work first, by least load, and fill each of them then.

    Where `peel` makes them unequal, for narrow groups, this keeps a pipeline's bubble small.
    """
    whole = Room(
        num_microbatches, (1,), (ranked.room.limits[-1] * ranked.room.num_blocks,), ranked.room.align
    )
    shared = fill(replace(ranked, room=whole), np.arange(ranked.lengths.size), 0)
    carried = shared.left
    filled: list[Filled] = []
    for m in range(num_microbatches):
        members = np.sort(np.concatenate((carried, shared.members[shared.block == m])))
        if members.size:
            filled.append(finish(ranked, members, tolerance))
            carried = filled[-1].left
    return filled


def spread(ranked: Ranked, num_microbatches: int) -> list[Filled]:
    """At one cp size: balance the blocks of all microbatches as if they met."""
    all_ranks = replace(ranked.room, num_ranks=ranked.room.num_ranks * num_microbatches)
    one = fill(replace(ranked, room=all_ranks), np.arange(ranked.lengths.size), 0)
    return meet(ranked, one.members, one.block, num_microbatches)


def fit_tightly(ranked: Ranked, num_microbatches: int) -> Iterator[list[Filled]]:
    """The fewest blocks of the widest size, whatever their loads; nothing where they are too many."""
    room = ranked.room
    block, num_blocks = best_fit(ranked.padded[-1], room.limits[-1])
    if num_blocks <= num_microbatches * room.num_blocks:
        yield meet(ranked, np.arange(block.size), block, num_microbatches)


def meet(
    ranked: Ranked, members: LongArray, block: npt.NDArray[np.integer], num_microbatches: int
) -> list[Filled]:
    """Blocks of the widest size -> microbatches, by load: the heaviest together make the sum of largest
    loads least.

    members: places in `ranked`; block: the block of each, -1 for none. What has none goes to the last
    microbatch.
    """
    room = ranked.room
    per_microbatch = room.num_blocks
    num_blocks = per_microbatch * num_microbatches
    loads = np.bincount(block[block >= 0], weights=ranked.load[-1, members[block >= 0]], minlength=num_blocks)
    rank_of_block = np.empty(num_blocks, np.int64)
    heaviest_first = np.argsort(-loads, kind="stable")
    rank_of_block[heaviest_first] = np.arange(num_blocks)
    place = np.where(block >= 0, rank_of_block[block], num_blocks)
    sizes = np.full(per_microbatch, room.sizes[-1], np.int64)
    filled: list[Filled] = []
    for m in range(num_microbatches):
        here = place // per_microbatch == m
        if m == num_microbatches - 1:
            here |= block < 0
        at = np.where(block[here] >= 0, place[here] % per_microbatch, -1).astype(np.int32)
        own = heaviest_first[m * per_microbatch : (m + 1) * per_microbatch]
        filled.append(Filled(members[here], at, sizes, loads[own].astype(np.float64)))
    return filled


def take(lengths: LongArray, offered: npt.NDArray[np.bool_], budget: float) -> LongArray:
    """The longest of what is offered, then the longest that still fits, until nothing does; int64 [k],
    ascending.

    lengths: descending, int64 [n]. offered: bool [n]; those taken are struck out. budget: tokens.
    """
    taken: list[LongArray] = []
    while True:
        places = (
            np.flatnonzero(offered[np.searchsorted(-lengths, -budget) :])
            if budget > 0
            else np.zeros(0, np.int64)
        )
        places = places + np.searchsorted(-lengths, -budget)
        total = np.cumsum(lengths[places])
        count = int(np.searchsorted(total, budget, side="right"))
        if count == 0:
            return np.sort(np.concatenate(taken)) if taken else np.zeros(0, np.int64)
        taken.append(places[:count])
        offered[places[:count]] = False
        budget -= float(total[count - 1])


def deal(ranked: Ranked, num_microbatches: int, sand: float, tolerance: float) -> list[Filled]:
    """Deal sequences to microbatches first, longest first, and fill each of them then.

    sand: part of the work, in the shortest sequences, that is dealt evenly instead, for every microbatch to
    fill its gaps with. What a microbatch has no room for goes to the next one.
    """
    work = np.cumsum(ranked.work[::-1])[::-1]
    is_sand = work <= work[0] * sand
    first_sand = int(is_sand.argmax()) if is_sand.any() else work.size
    offered = ~is_sand
    carried = np.zeros(0, np.int64)
    tokens = ranked.padded[0]
    tokens_left = int(tokens.sum())
    filled: list[Filled] = []
    for m in range(num_microbatches):
        own_sand = np.arange(first_sand, work.size)[m::num_microbatches]
        have = np.concatenate((carried, own_sand))
        if m == num_microbatches - 1:
            body = np.flatnonzero(offered)
        else:
            body = take(tokens, offered, np.ceil(tokens_left / (num_microbatches - m)) - tokens[have].sum())
        members = np.sort(np.concatenate((have, body)))
        if not members.size:
            continue
        filled.append(fill_evenly(ranked, members, tolerance))
        carried = filled[-1].left
        tokens_left -= int(tokens[members].sum() - tokens[carried].sum())
    return filled
