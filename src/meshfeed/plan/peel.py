"""Filling a whole step: the longest sequences are peeled off what is left, microbatch by microbatch.

The ranks of a microbatch meet, so its blocks must be equal; two microbatches need not be. And where ranks
are full of tokens, blocks are equal only if their sequences are alike, since a token costs more in a long
sequence. So:

*Aim.* A microbatch takes its part of the remaining tokens from the long end. Their number and mean work say
what every rank in it should hold: its tokens and its load.

*Seed.* Each block starts with one of the longest sequences left, on the narrowest group that can take it.
The first block, completed as near the aim as it comes, settles the load that the others must reach.

*Complete.* What a block still misses, t tokens and w work, asks for sequences of mean length `rho = (w -
alpha t) / t`. It takes one of about rho while several are missing; where two are, it solves `a + b = t`,
`a^2 + b^2 = rho t`; at the end it takes the longest that fits. All blocks choose together, and half of what
they miss at once, so that NumPy carries the work. Some hundred sequences to choose from fill a block to a
fraction of a percent.

*Widen.* Blocks that stayed incomplete give their sequences back, and their ranks are seeded again on wider
groups: fewer blocks, each of more sequences, come nearer.

*Finish.* The last microbatch takes all that is left, by least load or as above, whichever is more even.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from meshfeed.errors import PlanError
from meshfeed.plan.fill import EXACT, Filled, Ranked, fill_evenly, size_index
from meshfeed.plan.types import LongArray

FloatArray = npt.NDArray[np.float64]

FULL = 0.995
"""Part of its load at which a block is complete. More takes wider groups and the shortest sequences."""

MARGIN = 0.001
"""How far above the mean the last microbatch's blocks are filled; what is over goes on the lightest."""

MAX_WIDENING = 3
"""How many times the blocks that stay incomplete are widened."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What each rank of a microbatch should hold.

    Attributes:
        tokens: real tokens.
        load: work.
        per_token: work of a token at the mean.
    """

    tokens: float
    load: float
    per_token: float


@dataclass(slots=True)
class Blocks:
    """The blocks of a microbatch while they are being filled.

    Attributes:
        size_at, sizes: index into room.sizes of each, and the size; int64 [num_blocks].
        goal, missing: work that each should hold on all its ranks together, and what of it is missing;
            float64.
        tokens: real tokens that it should still take; float64.
        free: padded tokens that it still can take; int64.
        taken: (place in the Ranked, block) of the sequences they hold, as taken; int64 [k] each.
    """

    size_at: LongArray
    sizes: LongArray
    goal: FloatArray
    missing: FloatArray
    tokens: FloatArray
    free: LongArray
    taken: list[tuple[LongArray, LongArray]] = field(default_factory=list)

    @classmethod
    def of(cls, ranked: Ranked, size_at: LongArray, aim: Aim) -> Blocks:
        """Empty blocks. Their tokens are those that the load needs at the mean length, as far as they go."""
        sizes, limits = np.array(ranked.room.sizes)[size_at], np.array(ranked.room.limits)[size_at]
        goal = aim.load * sizes
        tokens = np.minimum(limits, goal / aim.per_token)
        return cls(size_at, sizes, goal, goal.copy(), tokens, limits)

    def take(self, ranked: Ranked, places: LongArray, blocks: LongArray) -> None:
        """Give each of these sequences to a block."""
        at = self.size_at[blocks]
        np.subtract.at(self.missing, blocks, ranked.load[at, places] * self.sizes[blocks])
        np.subtract.at(self.tokens, blocks, ranked.lengths[places])
        np.subtract.at(self.free, blocks, ranked.padded[at, places])
        self.taken.append((places, blocks))

    @classmethod
    def join(cls, parts: list[Blocks]) -> Blocks:
        """Several as one, in their order."""
        offset = np.cumsum([0, *(part.size_at.size for part in parts)])
        taken = [(places, held_by + at) for part, at in zip(parts, offset) for places, held_by in part.taken]
        return cls(
            np.concatenate([part.size_at for part in parts]),
            np.concatenate([part.sizes for part in parts]),
            np.concatenate([part.goal for part in parts]),
            np.concatenate([part.missing for part in parts]),
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.free for part in parts]),
            taken,
        )

    def load(self) -> FloatArray:
        """Work on each rank of each; float64."""
        return (self.goal - self.missing) / self.sizes

    def held(self) -> float:
        """Work of all sequences that they hold."""
        return float((self.goal - self.missing).sum())

    def only(self, mask: npt.NDArray[np.bool_]) -> Blocks:
        """Some of the blocks."""
        index = np.cumsum(mask) - 1
        taken = [(places[mask[held_by]], index[held_by[mask[held_by]]]) for places, held_by in self.taken]
        return Blocks(
            self.size_at[mask],
            self.sizes[mask],
            self.goal[mask],
            self.missing[mask],
            self.tokens[mask],
            self.free[mask],
            taken,
        )

    def wanted(self, ranked: Ranked, blocks: LongArray) -> tuple[FloatArray, LongArray]:
        """The length that each of these blocks would best take next, and how many of it; float64, int64."""
        cost, align = ranked.cost, ranked.room.align
        tokens, missing = self.tokens[blocks], self.missing[blocks]
        most = np.minimum(self.free[blocks], cost.reach(missing, self.sizes[blocks]))
        t = np.maximum(tokens, 1e-9)
        rho = missing / t - cost.alpha
        two = (t + np.sqrt(np.maximum(2 * rho * t - t * t, 0))) / 2
        several = np.where(rho > 0, rho, t)
        length = np.minimum(np.where(rho >= t, most, np.where(rho >= t / 2, two, several)), most)
        # half of many at once, as far as their padding surely fits
        padded = length + 2 * align.sequence * self.sizes[blocks]
        many = np.minimum(tokens, self.free[blocks] * length / padded) / np.maximum(2 * length, 1)
        return length, np.where((rho > 0) & (rho < t / 4), many, 1).astype(np.int64).clip(min=1)


def complete(ranked: Ranked, left: LongArray, blocks: Blocks) -> LongArray:
    """Let blocks take sequences until each is complete or finds none that fits; returns what is left.

    left: places in `ranked`, ascending, so by descending length; int64 [k].
    """
    trying = np.flatnonzero(blocks.missing > (1 - FULL) / 2 * blocks.goal)
    ascending = -ranked.lengths[left]
    while trying.size and left.size:
        wanted, many = blocks.wanted(ranked, trying)
        if many.max() > 1:
            trying, wanted = np.repeat(trying, many), np.repeat(wanted, many)
        order = np.argsort(-wanted, kind="stable")
        trying, wanted = trying[order], wanted[order]
        # the longest of at most that length; where several blocks want the same one, the next after it:
        # places [4 4 5 9] -> [4 5 6 9]
        at = np.searchsorted(ascending, -wanted)
        turn = np.arange(at.size)
        at = np.maximum.accumulate(at - turn) + turn
        found = at < left.size
        trying, at = trying[found], at[found]
        blocks.take(ranked, left[at], trying)
        keep = np.ones(left.size, bool)
        keep[at] = False
        left, ascending = left[keep], ascending[keep]
        if many.max() > 1:
            trying = np.unique(trying)
        trying = trying[blocks.missing[trying] > (1 - FULL) / 2 * blocks.goal[trying]]
    return left


def aim_of(ranked: Ranked, left: LongArray, budget: float) -> Aim:
    """What a rank should hold if the microbatch takes `budget` tokens from the long end of what is left."""
    tokens = np.cumsum(ranked.lengths[left])
    count = int(np.searchsorted(tokens, budget)) + 1
    taken = float(tokens[:count][-1])
    per_token = float(ranked.work[left[:count]].sum()) / taken
    share = min(budget, taken) / ranked.room.num_ranks
    return Aim(share, share * per_token, per_token)


def settle(ranked: Ranked, left: LongArray, aim: Aim) -> tuple[Blocks, LongArray]:
    """The first block, on the narrowest group that comes near the aim, and what is left after it."""
    room = ranked.room
    seed = left[:1]
    narrowest = int(size_index(ranked, seed, aim.load, 0)[0])
    best, best_left, best_filled = None, left, -1.0
    for index in range(narrowest, len(room.sizes)):
        own = Aim(aim.tokens, max(aim.load, float(ranked.load[index, seed[0]])), aim.per_token)
        block = Blocks.of(ranked, np.array([index]), own)
        block.take(ranked, seed, np.zeros(1, np.int64))
        rest = complete(ranked, left[1:], block)
        if block.missing[0] > (1 - FULL) * block.goal[0] and rest.size:
            # one sequence too many is better than one too few: the tokens must go somewhere
            length = min(max(aim.per_token - ranked.cost.alpha, 1), float(block.free[0]))
            at = int(np.searchsorted(-ranked.lengths[rest], -length))
            if at < rest.size:
                block.take(ranked, rest[at : at + 1], np.zeros(1, np.int64))
                rest = np.delete(rest, at)
        filled = 1 - float(block.missing[0] / block.goal[0])
        if filled > best_filled:
            best, best_left, best_filled = block, rest, filled
        if filled >= FULL:
            break
    if best is None:
        raise PlanError("no cp size to try")  # the narrowest always is
    return best, best_left


def seed(ranked: Ranked, left: LongArray, ranks: int, load: float, tightness: int) -> LongArray:
    """Which sequences the blocks of `ranks` ranks start with and on what size.

    Returns (places in `ranked`, index into room.sizes), int64 [num_blocks] each: the longest that are left,
    each on the narrowest group that holds 2^tightness of it at `load` or less, if there is one.
    """
    room = ranked.room
    sizes, limits = np.array(room.sizes), np.array(room.limits)
    seeds: list[LongArray] = []
    while ranks:
        usable = int(np.searchsorted(sizes, ranks, side="right"))
        most = np.minimum(limits[:usable], ranked.cost.reach(load * sizes[:usable] * EXACT, sizes[:usable]))
        first = int(np.searchsorted(-ranked.lengths[left], -most[-1]))
        offered = left[first : first + ranks // room.sizes[0]]
        if not offered.size:
            break
        size_at = np.searchsorted(most / 2**tightness, ranked.lengths[offered]).clip(max=usable - 1)
        used = np.cumsum(sizes[size_at])
        count = int(np.searchsorted(used, ranks, side="right"))
        seeds.append(np.stack((offered[:count], size_at[:count])))
        left = np.delete(left, np.s_[first : first + count])
        ranks -= int(used[count - 1])
    return np.concatenate(seeds, axis=1) if seeds else np.zeros((2, 0), np.int64)


def complete_all(ranked: Ranked, left: LongArray, ranks: int, aim: Aim) -> tuple[list[Blocks], LongArray]:
    """Blocks for `ranks` ranks, as full of the aim's load as they come, and what is left after them."""
    done: list[Blocks] = []
    lacking, left = fill_ranks(ranked, left, ranks, aim, 0)
    for tightness in range(1, MAX_WIDENING + 1):  # until what is missing no longer matters
        short = lacking.missing > (1 - FULL) * lacking.goal
        if not left.size or lacking.missing[short].sum() <= (1 - FULL) * aim.load * ranks:
            break
        done.append(lacking.only(~short))
        lacking = lacking.only(short)
        freed = int(lacking.sizes.sum())
        offered = np.sort(np.concatenate((left, *(places for places, _ in lacking.taken))))
        wider, rest = fill_ranks(ranked, offered, freed, aim, tightness)
        if aim.load * freed - wider.held() < lacking.missing.sum():
            lacking, left = wider, rest
    return [*done, lacking], left


def fill_ranks(
    ranked: Ranked, left: LongArray, ranks: int, aim: Aim, tightness: int
) -> tuple[Blocks, LongArray]:
    """One try: seed blocks and complete them."""
    places, size_at = seed(ranked, left, ranks, aim.load, tightness)
    blocks = Blocks.of(ranked, size_at, aim)
    blocks.take(ranked, places, np.arange(places.size))
    return blocks, complete(ranked, left[~np.isin(left, places, assume_unique=True)], blocks)


def filled_of(ranked: Ranked, blocks: Blocks) -> Filled:
    """A microbatch out of blocks, the widest first."""
    size_at = blocks.size_at
    places, held_by = (np.concatenate(column) for column in zip(*blocks.taken))
    order = np.argsort(-size_at, kind="stable")
    place_of = np.empty(order.size, np.int32)
    place_of[order] = np.arange(order.size)
    sizes = blocks.sizes[order]
    loads = np.bincount(
        place_of[held_by], weights=ranked.load[size_at[held_by], places], minlength=order.size
    )
    return Filled(places, place_of[held_by], sizes, loads.astype(np.float64))


def finish(ranked: Ranked, left: LongArray, tolerance: float) -> Filled:
    """The microbatch that takes all that is left."""
    room = ranked.room
    aim = aim_of(ranked, left, np.inf)
    for margin in (MARGIN, tolerance):
        load = max(aim.load * (1 + margin), float(ranked.load[-1, left[0]]))
        parts, over = complete_all(ranked, left, room.num_ranks, replace(aim, load=load))
        blocks = Blocks.join(parts)
        if lay_over(ranked, blocks, over) and (blocks.load() <= aim.load * (1 + tolerance)).all():
            return filled_of(ranked, blocks)
    return fill_evenly(ranked, left, tolerance)


def lay_over(ranked: Ranked, blocks: Blocks, over: LongArray) -> bool:
    """Give each of these sequences to the block of least load that has room; says whether all found one."""
    load, free = blocks.load(), blocks.free.copy()
    chosen = np.zeros(over.size, np.int64)
    for turn, place in enumerate(over.tolist()):
        fits = np.where(free >= ranked.lengths[place], load, np.inf)
        block = int(fits.argmin()) if fits.size else 0
        if not fits.size or np.isinf(fits[block]):
            return False
        chosen[turn] = block
        load[block] += ranked.load[blocks.size_at[block], place]
        free[block] -= ranked.padded[blocks.size_at[block], place]
    blocks.take(ranked, over, chosen)
    return True


def peel(ranked: Ranked, num_microbatches: int, tolerance: float) -> list[Filled]:
    """Fill the microbatches of a step; fewer where fewer suffice.

    What finds no room is in `left` of the last one. tolerance: see `Packing.tolerance`.
    """
    left = np.arange(ranked.lengths.size)
    filled: list[Filled] = []
    for m in range(num_microbatches - 1):
        if not left.size:
            return filled
        budget = float(ranked.lengths[left].sum()) / (num_microbatches - m)
        blocks, left = fill_microbatch(ranked, left, aim_of(ranked, left, budget))
        filled.append(filled_of(ranked, blocks))
    if left.size:
        # one of many microbatches may be out by more: the step's objective is their sum
        filled.append(finish(ranked, left, tolerance * min(len(filled) + 1, 3)))
    return filled


def fill_microbatch(ranked: Ranked, left: LongArray, aim: Aim) -> tuple[Blocks, LongArray]:
    """The blocks of one microbatch, and what is left after them."""
    ranks = ranked.room.num_ranks
    if ranked.load[-1, left[0]] <= aim.load:
        blocks, rest = fill_ranks(ranked, left, ranks, aim, 0)
        if aim.load * ranks - blocks.held() <= (1 - FULL) * aim.load * ranks:
            return blocks, rest
    # the aim falls between what whole sequences make, or the longest one exceeds it
    first, left = settle(ranked, left, aim)
    load = float(first.load()[0])
    others, left = complete_all(ranked, left, ranks - int(first.sizes[0]), replace(aim, load=load))
    return Blocks.join([first, *others]), left
