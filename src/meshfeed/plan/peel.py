"""Filling a whole step: the longest sequences are peeled off a pool, microbatch by microbatch, block by block.

The ranks of a microbatch meet, so its blocks must be equal; two microbatches need not be. And where ranks are full of
tokens, blocks are equal only if their sequences are alike, since a token costs more in a long sequence. So:

*Aim.* A microbatch takes its part of the remaining tokens from the long end of the pool. Their number and mean work
say what every rank in it should hold: its tokens and its load.

*Complete.* A block starts with the longest sequence left, on the narrowest group that can take it. What is still
missing, t tokens and w work, asks for sequences of mean length `rho = (w - alpha t) / t`. Take one near rho while
several are missing; where two are, solve `a + b = t`, `a^2 + b^2 = rho t`; at the end the longest that fits. A pool
of a few hundred sequences fills a block to a fraction of a percent this way; where it cannot, the block is tried again
on a wider group, which needs more sequences and so lands closer.

*Finish.* The last microbatch must take all that is left: by least load if that comes out even; else its blocks are
completed to little more than the mean load.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshfeed.plan.cost import CostModel
from meshfeed.plan.fill import EXACT, Filled, Ranked, fill, fill_evenly
from meshfeed.plan.policy import Room
from meshfeed.plan.polish import polish

MAX_WIDENING = 3
"""How many sizes beyond the narrowest adequate one a block is tried on. More gain nothing measurable."""

FULL = 0.995
"""Part of its load at which a block counts as complete. Nearer costs wider groups and the pool's shortest sequences."""


class Pool:
    """The lengths still to be placed: a multiset that finds the nearest length in O(log n)."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """lengths: descending, as in a Ranked."""
        self.first_place: dict[int, int] = {}
        self.count: dict[int, int] = {}
        for place, length in enumerate(lengths):
            self.first_place.setdefault(length, place)
            self.count[length] = self.count.get(length, 0) + 1
        self.alive = list(self.count)[::-1]  # distinct lengths, ascending
        self.tokens = sum(lengths)

    def take(self, length: int) -> None:
        """Remove one sequence of this length."""
        self.tokens -= length
        self.count[length] -= 1
        if self.count[length] == 0:
            del self.alive[bisect_left(self.alive, length)]

    def give_back(self, lengths: Sequence[int]) -> None:
        """Undo `take` of each."""
        for length in lengths:
            if self.count[length] == 0:
                self.alive.insert(bisect_left(self.alive, length), length)
            self.count[length] += 1
            self.tokens += length

    def longest(self, most: float) -> int:
        """The longest length of at most `most`; 0 for none."""
        at = bisect_right(self.alive, most)
        return self.alive[at - 1] if at else 0

    def shortest(self, least: float) -> int:
        """The shortest length of at least `least`; 0 for none."""
        at = bisect_left(self.alive, least)
        return self.alive[at] if at < len(self.alive) else 0

    def nearest(self, length: float) -> int:
        """The length nearest to this one, the shorter of two as near; 0 for none."""
        below, above = self.longest(length), self.shortest(length)
        return above if above and (not below or above - length < length - below) else below

    def place(self, length: int) -> int:
        """The place in the Ranked of one sequence of this length, another one at each call."""
        self.first_place[length] += 1
        return self.first_place[length] - 1

    def rest(self) -> list[int]:
        """Places of all that is left, ascending."""
        return [p for x in reversed(self.alive) for p in range(self.first_place[x], self.first_place[x] + self.count[x])]


class Aim(NamedTuple):
    """What a rank of a microbatch should hold.

    Attributes:
        tokens: real tokens.
        load: work.
        rho: the mean length, weighed by tokens, at which the two agree.
    """

    tokens: float
    load: float
    rho: float


class Block(NamedTuple):
    """A cp group and what it was given: its size, sequence lengths, and work on all its ranks together."""

    size: int
    lengths: list[int]
    work: float


@dataclass(frozen=True, slots=True)
class Group:
    """A cp group size, with what completing a block of it asks for.

    Attributes:
        size: ranks.
        limit: padded tokens that it holds.
        multiple: padding multiple of a sequence on it.
        work: length -> load on each of its ranks times size.
        cost: the cost model.
    """

    size: int
    limit: int
    multiple: int
    work: dict[int, float]
    cost: CostModel

    def holds(self, length: int, load: float) -> bool:
        """Whether this sequence fits, and leaves every rank at or below `load`."""
        return length <= self.limit and self.work[length] <= load * self.size * EXACT


def groups_of(ranked: Ranked, room: Room, cost: CostModel) -> list[Group]:
    """One Group for each size of the room, ascending."""
    lengths = ranked.lengths.tolist()
    return [
        Group(size, limit, room.align.sequence_multiple(size), dict(zip(lengths, (load * size).tolist())), cost)
        for size, limit, load in zip(room.sizes, room.limits, ranked.load)
    ]


def wanted_length(pool: Pool, cost: CostModel, tokens: float, work: float, most: float) -> int:
    """The next sequence of a block that lacks so many tokens and so much work; 0 where none of <= `most` is left."""
    rho = (work - cost.alpha * tokens) / tokens if tokens > 0 else math.inf
    if rho >= tokens:
        return pool.longest(most)
    if rho >= tokens / 2:
        length = pool.nearest((tokens + math.sqrt(2 * rho * tokens - tokens * tokens)) / 2)
    elif rho > 0:
        length = pool.nearest(rho)
    else:
        length = pool.longest(tokens)
    return length if length <= most else pool.longest(most)


def complete(pool: Pool, group: Group, seed: int, aim: Aim, *, overshoot: bool) -> Block:
    """Take sequences out of the pool for one block, `seed` first, until it is complete.

    overshoot: let a last sequence exceed the aim where none fits below it.
    """
    goal = aim.load * group.size
    tokens, missing, free = aim.tokens * group.size, goal, group.limit
    lengths: list[int] = []
    length = seed
    while length:
        pool.take(length)
        lengths.append(length)
        tokens -= length
        missing -= group.work[length]
        free -= -(-length // group.multiple) * group.multiple
        if missing <= (1 - FULL) / 2 * goal:
            break
        length = wanted_length(pool, group.cost, tokens, missing, min(free, group.cost.reach(missing, group.size)))
        if not length and overshoot:
            length = pool.nearest(aim.rho)
            length = length if length <= free else pool.longest(free)
    return Block(group.size, lengths, goal - missing)


def aim_of(pool: Pool, groups: Sequence[Group], budget: float, num_ranks: int) -> Aim:
    """What a rank should hold if the microbatch takes `budget` tokens from the long end of the pool. budget > 0."""
    narrow = groups[0]
    tokens, work = 0.0, 0.0
    for length in reversed(pool.alive):
        count = min(pool.count[length], math.ceil((budget - tokens) / length))
        tokens += count * length
        work += count * narrow.work[length]
        if tokens >= budget:
            break
    per_token = work / tokens
    share = min(budget, tokens) / num_ranks
    return Aim(share, share * per_token, max(per_token - narrow.cost.alpha, 0.0))


def next_block(pool: Pool, groups: Sequence[Group], free_ranks: int, aim: Aim, *, first: bool) -> Block:
    """The block of the longest sequence that the free ranks can take; one without sequences where they take none.

    first: the microbatch's first block, which settles its load.
    """
    usable = [group for group in groups if group.size <= free_ranks]
    widest = usable[-1]
    # the first block may be heavier than the aim: its longest sequence must go somewhere
    load = math.inf if first else aim.load
    seed = pool.longest(min(widest.limit, widest.cost.reach(load * widest.size * EXACT, widest.size)))
    if not seed:
        return Block(usable[0].size, [], 0.0)
    adequate = [group for group in usable if group.holds(seed, aim.load)] or [widest]
    best, best_fill = Block(widest.size, [], 0.0), -1.0
    for group in adequate[: MAX_WIDENING + 1]:
        own = aim
        if first:
            own = aim._replace(load=max(aim.load, group.work[seed] / group.size))
        else:  # what its load needs at the mean length, as far as it goes
            tokens = min(group.limit / group.size, aim.load / (group.cost.alpha + aim.rho))
            own = aim._replace(tokens=tokens)
        block = complete(pool, group, seed, own, overshoot=first)
        pool.give_back(block.lengths)
        filled = block.work / (own.load * group.size)
        if filled > best_fill:
            best, best_fill = block, filled
        if filled >= FULL:
            break
    for length in best.lengths:
        pool.take(length)
    return best


def peel(ranked: Ranked, room: Room, cost: CostModel, num_microbatches: int, tolerance: float) -> list[Filled]:
    """Fill the microbatches of a step; fewer where fewer suffice. What finds no room is in the last one's `left`."""
    pool = Pool(ranked.lengths.tolist())
    groups = groups_of(ranked, room, cost)
    filled: list[Filled] = []
    for m in range(num_microbatches - 1):
        if not pool.alive:
            return filled
        aim = aim_of(pool, groups, pool.tokens / (num_microbatches - m), room.num_ranks)
        filled.append(filled_of(pool, complete_all(pool, groups, room.num_ranks, aim, settle=True)))
    if pool.alive:
        filled.append(finish(pool, groups, ranked, room, tolerance))
    return filled


def complete_all(pool: Pool, groups: Sequence[Group], num_ranks: int, aim: Aim, *, settle: bool) -> list[Block]:
    """The blocks of one microbatch. settle: the first block, as near the aim as it comes, says what the others hold."""
    blocks: list[Block] = []
    free_ranks = num_ranks
    while free_ranks and pool.alive:
        first = settle and not blocks
        block = next_block(pool, groups, free_ranks, aim, first=first)
        if first:
            aim = aim._replace(load=block.work / block.size)
        blocks.append(block)
        free_ranks -= block.size
    return blocks


def finish(pool: Pool, groups: Sequence[Group], ranked: Ranked, room: Room, tolerance: float) -> Filled:
    """The microbatch that takes all that is left in the pool."""
    rest = np.array(pool.rest(), np.int64)
    narrow = polish(ranked, fill(ranked, rest, room, 0), room)
    if not narrow.left.size and narrow.top_load <= float(ranked.work[rest].sum()) / room.num_ranks * (2 - FULL):
        return narrow
    aim = aim_of(pool, groups, pool.tokens, room.num_ranks)
    heaviest = groups[-1].work[pool.alive[-1]] / groups[-1].size
    for margin in (1 - FULL, tolerance):
        load = max(aim.load, heaviest) * (1 + margin)
        blocks = complete_all(pool, groups, room.num_ranks, aim._replace(load=load), settle=False)
        if not pool.alive:
            return filled_of(pool, blocks)
        for block in blocks:
            pool.give_back(block.lengths)
    return fill_evenly(ranked, rest, room, tolerance)


def filled_of(pool: Pool, blocks: list[Block]) -> Filled:
    """A microbatch out of its blocks, the widest first."""
    blocks = sorted(blocks, key=lambda block: -block.size)
    members = [pool.place(length) for block in blocks for length in block.lengths]
    return Filled(
        members=np.array(members, np.int64),
        block=np.repeat(np.arange(len(blocks), dtype=np.int32), [len(block.lengths) for block in blocks]),
        block_sizes=np.array([block.size for block in blocks], np.int64),
        loads=np.array([block.work / block.size for block in blocks]),
    )
