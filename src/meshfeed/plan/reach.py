"""Reaching a target: cp groups take sequences, from the longest on, until each holds its target.

*Target.* What every rank should hold follows from the microbatch's share of the tokens: their number and mean
work.

*Seed.* Each group starts with one of the longest sequences left, on the narrowest size that can take it.

*Complete.* A group that misses t tokens and w work needs sequences of mean length `rho = (w - alpha t) / t`.
While several are missing, it takes one of about rho. If two are, it solves `a + b = t`, `a^2 + b^2 = rho t`;
at the end it takes the longest that fits. All groups choose at the same time, and half of what they miss at
once, so that NumPy does the work. With some hundred sequences to choose from, a group is filled to a fraction
of a percent.

*Widen.* The first group, completed as near the target as it comes, sets the load that the others must reach.
Groups that stay incomplete return their sequences. Their ranks are seeded again with wider groups: fewer
groups of more sequences each come nearer to the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshfeed.native import ARRAY, LONGS, WHOLE, compiled
from meshfeed.plan.problem import EXACT, Microbatch, Sequences, narrowest_sizes
from meshfeed.plan.types import FloatArray, LongArray

FULL = 0.998
"""Share of its target at which a group is complete. A larger share needs wider groups and the shortest
sequences."""

_complete = compiled(
    "mf_complete",
    *(ARRAY, WHOLE, LONGS, LONGS, ARRAY),
    *(WHOLE, LONGS, LONGS, ARRAY, ARRAY, ARRAY, LONGS, LONGS),
    *(WHOLE, LONGS, LONGS, LONGS, LONGS, ARRAY),
)


@dataclass(frozen=True, slots=True)
class Target:
    """What each rank of a microbatch should hold: its load, and the work per real token."""

    load: float
    work_per_token: float


@dataclass(slots=True)
class Groups:
    """Some cp groups of a microbatch while they are being filled.

    Attributes:
        size_at, sizes: index into room.sizes of each, and the size; int64 [num_groups].
        goal, missing: work that each should hold on all its ranks together, and the part still missing;
            float64.
        tokens: real tokens that it should still take; float64.
        free, slots: padded tokens, and sequences, that it can still take; int64.
        members, group: the sequences in the groups, as indices in a Sequences, and the group of each; int64
            [k].
    """

    size_at: LongArray
    sizes: LongArray
    goal: FloatArray
    missing: FloatArray
    tokens: FloatArray
    free: LongArray
    slots: LongArray
    members: LongArray
    group: LongArray

    @classmethod
    def of(cls, sequences: Sequences, seeds: LongArray, size_at: LongArray, target: Target) -> Groups:
        """Groups of these sizes with one sequence each, which should reach the target."""
        room = sequences.room
        sizes, limits = room.size_of[size_at], room.limit_of[size_at]
        goal: FloatArray = np.multiply(target.load, sizes)
        tokens: FloatArray = np.minimum(limits, goal / target.work_per_token)
        return cls(
            size_at,
            sizes,
            goal,
            missing=goal - sequences.load[size_at, seeds] * sizes,
            tokens=tokens - sequences.lengths[seeds],
            free=limits - sequences.padded[size_at, seeds],
            slots=np.full(seeds.size, room.max_sequences - 1),
            members=seeds,
            group=np.arange(seeds.size),
        )

    def take(self, sequences: Sequences, members: LongArray, group: LongArray) -> None:
        """Give each of these sequences to a group."""
        at = self.size_at[group]
        np.subtract.at(self.missing, group, sequences.load[at, members] * self.sizes[group])
        np.subtract.at(self.tokens, group, sequences.lengths[members])
        np.subtract.at(self.free, group, sequences.padded[at, members])
        np.subtract.at(self.slots, group, 1)
        self.members = np.concatenate((self.members, members))
        self.group = np.concatenate((self.group, group))

    def open(self) -> npt.NDArray[np.bool_]:
        """Which of them miss their goal and can take another sequence; bool [num_groups]."""
        return (self.missing > (1 - FULL) * self.goal) & (self.slots > 0)

    def only(self, mask: npt.NDArray[np.bool_]) -> Groups:
        """Some of the groups."""
        held = mask[self.group]
        return Groups(
            self.size_at[mask],
            self.sizes[mask],
            self.goal[mask],
            self.missing[mask],
            self.tokens[mask],
            self.free[mask],
            self.slots[mask],
            self.members[held],
            (np.cumsum(mask) - 1)[self.group[held]],
        )

    def wanted(self, sequences: Sequences, groups: LongArray) -> tuple[FloatArray, LongArray]:
        """The best length for each of these groups to take next, and how many of it; float64, int64."""
        missing, free, slots = self.missing[groups], self.free[groups], self.slots[groups]
        most = np.minimum(free, sequences.cost.reach(missing, self.sizes[groups]))
        t = np.maximum(self.tokens[groups], 1e-9)
        rho = missing / t - sequences.cost.alpha
        if window := sequences.cost.window:
            # tokens past the window cost 2 w: a mean of rho is that of sequences of w^2 / (2 w - rho)
            long = window * window / np.maximum(2 * window - rho, 1e-9)
            rho = np.where(rho > window, long, rho)
        rho = np.where((rho > 0) & (rho * slots < t), t / slots, rho)
        two = (t + np.sqrt(np.maximum(2 * rho * t - t * t, 0))) / 2
        length = np.minimum(np.select([rho >= t, rho >= t / 2, rho > 0], [most, two, rho], most), most)
        # half of them at once, as far as they surely fit with padding
        padded = length + 2 * sequences.room.align.sequence * self.sizes[groups]
        many = np.minimum(t, free * length / padded) / np.maximum(2 * length, 1)
        many = np.where((rho > 0) & (rho < t / 4), many, 1).astype(np.int64)
        return length, np.minimum(many, slots).clip(min=1)


def reach(
    sequences: Sequences, left: LongArray, remaining: int, widenings: int
) -> tuple[Microbatch, LongArray]:
    """Fill the next of the remaining microbatches; returns it, and the sequences left after it.

    left: indices in `sequences`, ascending; int64 [k], k >= 1. widenings: how many times groups that stay
    incomplete are widened.
    """
    target = target_of(sequences, left, remaining)
    first, left = reach_first(sequences, left, target)
    size = int(first.sizes[0])
    load = float(first.goal[0] - first.missing[0]) / size
    others, left = reach_all(
        sequences, left, sequences.room.num_ranks - size, Target(load, target.work_per_token), widenings
    )
    return _microbatch(sequences, [first, *others]), left


def target_of(sequences: Sequences, left: LongArray, num_microbatches: int) -> Target:
    """What a rank should hold if the next of `num_microbatches` takes its share of the sequences left.

    left: indices in `sequences`, ascending, so by descending length; int64 [k].
    """
    tokens = np.cumsum(sequences.lengths[left])
    share = float(tokens[-1]) / num_microbatches
    count = int(np.searchsorted(tokens, share)) + 1
    work_per_token = float(sequences.work[left[:count]].sum()) / float(tokens[count - 1])
    return Target(share / sequences.room.num_ranks * work_per_token, work_per_token)


def reach_first(sequences: Sequences, left: LongArray, target: Target) -> tuple[Groups, LongArray]:
    """The longest sequence and others on the narrowest group that reaches the target, and the sequences left.

    The widest group if no size reaches it.
    """
    seed, widest = left[:1], len(sequences.room.sizes) - 1
    index = int(narrowest_sizes(sequences, seed, target.load, 0)[0])
    while True:
        load = max(target.load, float(sequences.load[index, seed[0]]))
        group = Groups.of(sequences, seed, np.array([index]), Target(load, target.work_per_token))
        rest = complete(sequences, left[1:], group)
        if group.open()[0]:
            # one sequence too many is better than one too few: the tokens must go somewhere. Without
            # it, steps with ring_tokens are up to three times as long
            length = min(max(target.work_per_token - sequences.cost.alpha, 1), float(group.free[0]))
            at = int(np.searchsorted(-sequences.lengths[rest], -length))
            group.take(sequences, rest[at : at + 1], np.zeros(rest[at : at + 1].size, np.int64))
            rest = _without(rest, np.s_[at : at + 1])
        if index == widest or not group.open()[0]:
            return group, rest
        index += 1


def reach_all(
    sequences: Sequences, left: LongArray, ranks: int, target: Target, widenings: int
) -> tuple[list[Groups], LongArray]:
    """Groups for these ranks, each as near to the target as possible, and the sequences left after them.

    widenings: see `reach`.
    """
    done: list[Groups] = []
    for tightness in range(widenings + 1):
        at, size_at = seed_groups(sequences, left, ranks, target.load, tightness)
        groups = Groups.of(sequences, left[at], size_at, target)
        left = complete(sequences, _without(left, at), groups)
        still_open = groups.open()
        if tightness == widenings or not still_open.any():
            done.append(groups)
            break
        done.append(groups.only(~still_open))
        ranks = int(groups.sizes[still_open].sum())
        free = np.zeros(sequences.lengths.size, bool)
        free[left] = free[groups.members[still_open[groups.group]]] = True
        left = np.flatnonzero(free)
    return done, left


def _without(left: LongArray, at: LongArray | slice) -> LongArray:
    """What is left without some places; np.delete takes several times as long."""
    stays = np.ones(left.size, np.bool_)
    stays[at] = False
    return left[stays]


def _microbatch(sequences: Sequences, parts: list[Groups]) -> Microbatch:
    """All groups of a microbatch, the widest first."""
    size_at = np.concatenate([part.size_at for part in parts])
    members = np.concatenate([part.members for part in parts])
    before = np.cumsum([0, *(part.sizes.size for part in parts)])
    group = np.concatenate([part.group + offset for part, offset in zip(parts, before)])
    load = sequences.load[size_at[group], members]
    order = np.argsort(-size_at, kind="stable")
    position = np.argsort(order)
    loads = np.bincount(position[group], weights=load, minlength=order.size).astype(np.float64)
    sizes = sequences.room.size_of[size_at[order]]
    return Microbatch(members, position[group].astype(np.int32), sizes, loads)


def seed_groups(
    sequences: Sequences, left: LongArray, ranks: int, load: float, tightness: int
) -> tuple[LongArray, LongArray]:
    """Which sequences the groups of these ranks start with, and on which size.

    Returns (indices in `left`, indices in room.sizes), int64 [num_groups] each: the longest that are left,
    each on the narrowest size that holds 2^tightness of it at `load` or less, if there is one.
    """
    sizes, limits = sequences.room.size_of, sequences.room.limit_of
    most = np.minimum(limits, sequences.cost.reach(load * sizes * EXACT, sizes))
    ascending = -sequences.lengths[left]
    seeds, size_at = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    end = 0
    while ranks:
        usable = int(np.searchsorted(sizes, ranks, side="right"))
        # those before `end` are taken, or too long for a wider size
        first = max(end, int(np.searchsorted(ascending, -most[usable - 1])))
        offered = -ascending[first : first + ranks // int(sizes[0])]
        if not offered.size:
            break
        narrowest = np.minimum(np.searchsorted(most[:usable] / 2**tightness, offered), usable - 1)
        used = np.cumsum(sizes[narrowest])
        count = int(np.searchsorted(used, ranks, side="right"))
        end = first + count
        seeds.append(np.arange(first, end))
        size_at.append(narrowest[:count])
        ranks -= int(used[count - 1])
    return np.concatenate(seeds), np.concatenate(size_at)


def complete(sequences: Sequences, left: LongArray, groups: Groups) -> LongArray:
    """Let groups take sequences until each is complete or finds none that fits; returns those left."""
    if _complete is not None:
        cost, num_groups = sequences.cost, groups.sizes.size
        padding = 2.0 * sequences.room.align.sequence
        rates = np.array([cost.alpha, cost.window or 0, cost.ring_tokens, padding, 1 - FULL], np.float64)
        left, taken = left.astype(np.int64), np.empty((2, left.size), np.int64)
        many, heap = np.empty(num_groups, np.int64), np.empty((num_groups, 2))
        num_taken = _complete(
            *(rates, sequences.lengths.size, sequences.lengths, sequences.padded, sequences.load),
            *(num_groups, groups.size_at, groups.sizes, groups.goal, groups.missing, groups.tokens),
            *(groups.free, groups.slots),
            *(left.size, left, *taken, many, heap),
        )
        groups.members = np.concatenate((groups.members, taken[0, :num_taken]))
        groups.group = np.concatenate((groups.group, taken[1, :num_taken]))
        return left[: left.size - num_taken]
    trying = np.flatnonzero(groups.open())
    ascending = -sequences.lengths[left]
    while trying.size and left.size:
        wanted, many = groups.wanted(sequences, trying)
        trying, wanted = np.repeat(trying, many), np.repeat(wanted, many)
        order = np.argsort(-wanted, kind="stable")
        trying, wanted = trying[order], wanted[order]
        # the longest of at most that length; if several groups want the same one, the next after it:
        # indices [4 4 5 9] -> [4 5 6 9]
        at = np.searchsorted(ascending, -wanted)
        turn = np.arange(at.size)
        at = np.maximum.accumulate(at - turn) + turn
        found = at < left.size
        trying, at = trying[found], at[found]
        groups.take(sequences, left[at], trying)
        left, ascending = np.delete(left, at), np.delete(ascending, at)
        trying = np.unique(trying)
        trying = trying[groups.open()[trying]]
    return left
