"""Filling a step: which sequences share a cp group, microbatch by microbatch, from the longest on.

The ranks of a microbatch wait for each other, so its groups must be equal; two microbatches need not be. And
where ranks are full of tokens, groups are equal only if their sequences are alike, since a token costs more
in a long sequence. So two moves fill a step:

*Reach.* Each microbatch but the last takes its share of the tokens that are left, from the long end, until
its groups hold what every rank should; see `reach`.

*Place.* The last microbatch takes all that is left, each sequence on the least loaded group; see `place`.
Sequences that find no room there go to the least loaded group of any microbatch that has some.

Each move pays for itself. Over traces and random draws, placing alone makes steps 1 to 4 % longer at a fixed
cp, and groups several times as wide if cp is dynamic; reaching alone makes steps 0.4 % longer, 10 % at worst.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from meshfeed.plan.place import place, place_all, place_evenly
from meshfeed.plan.problem import Microbatch, Sequences, narrowest_holding, narrowest_sizes
from meshfeed.plan.reach import reach
from meshfeed.plan.types import LongArray

MAX_WIDENING = 3
"""How many times the groups that stay incomplete are widened."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A step: its microbatches, and the sequences that found no room; ascending indices, int64 [k]."""

    microbatches: list[Microbatch]
    left: LongArray


def fill_step(sequences: Sequences, num_microbatches: int, tolerance: float) -> Filled:
    """Fill the microbatches of a step; fewer where fewer suffice.

    tolerance: see `Packing.tolerance`.
    If communication has a price, the step is also filled without widening groups; the better result wins.
    """
    if not sequences.cost.ring_tokens:
        return _filled(sequences, num_microbatches, tolerance, MAX_WIDENING)
    # either one alone makes steps up to seven times as long, in few microbatches of full ranks
    steps = [_filled(sequences, num_microbatches, tolerance, widenings) for widenings in (MAX_WIDENING, 0)]
    return min(steps, key=lambda step: (sequences.tokens(step.left), sum(m.top for m in step.microbatches)))


def _filled(sequences: Sequences, num_microbatches: int, tolerance: float, widenings: int) -> Filled:
    """widenings: see `reach`."""
    left, made = np.arange(sequences.lengths.size), list[Microbatch]()
    for remaining in range(num_microbatches, 1, -1):
        if left.size:
            microbatch, left = reach(sequences, left, remaining, widenings)
            made.append(microbatch)
    if not left.size:
        return Filled(made, left)
    most = sequences.room.most_sequences
    # one of many microbatches may be uneven by more, since the step's time is their sum: for 0.1 % of it the
    # mean cp is a fifth to a third lower
    last, over = place_evenly(sequences, left[:most], tolerance * min(len(made) + 1, 3))
    return spread(sequences, Filled([*made, last], np.concatenate((over, left[most:]))))


def spread(sequences: Sequences, step: Filled) -> Filled:
    """Give what is left to groups with room in any microbatch, those furthest below its largest load first.

    If packs hold few sequences, the last microbatch has no places for all short ones: without this, steps of
    32 sequences a pack take 24 % longer at a fixed cp.
    """
    room, rest, microbatches = sequences.room, np.sort(step.left), step.microbatches
    if not rest.size:
        return step
    num_groups = [one.group_sizes.size for one in microbatches]
    before = np.cumsum([0, *num_groups])
    members = np.concatenate([one.members for one in microbatches])
    group = np.concatenate([one.group + first for one, first in zip(microbatches, before)])
    index = np.searchsorted(room.sizes, np.concatenate([one.group_sizes for one in microbatches]))
    free = np.array(room.limits)[index]
    np.subtract.at(free, group, sequences.padded[index[group], members])
    slots = room.max_sequences - np.bincount(group, minlength=index.size)
    tops = np.repeat([one.top for one in microbatches], num_groups)
    widest_first = np.argsort(-index, kind="stable")
    gaps = (np.concatenate([one.loads for one in microbatches]) - tops)[widest_first]
    narrowest = narrowest_sizes(sequences, rest, float(tops.max()), 0)
    into = place(
        *(sequences.lengths, sequences.padded, sequences.load, rest, narrowest),
        *(index[widest_first], free[widest_first], slots[widest_first], gaps),
    )
    held = into >= 0
    members, group = np.append(members, rest[held]), np.append(group, widest_first[into[held]])
    loads = np.empty_like(tops)
    loads[widest_first] = gaps + tops[widest_first]
    of = np.searchsorted(before, group, side="right") - 1
    made = [
        Microbatch(
            members[of == m],
            (group[of == m] - before[m]).astype(np.int32),
            one.group_sizes,
            loads[before[m] : before[m + 1]],
        )
        for m, one in enumerate(microbatches)
    ]
    return Filled(made, rest[~held])


def deal(sequences: Sequences, num_microbatches: int) -> Filled:
    """Deal all sequences out, each to the microbatch with the most ranks free, and fill the narrowest groups.

    So there are as many packs as possible, which hold the most sequences if each holds few. Sequences that
    need a wider group than the narrowest are dealt by the group.

    Without it, steps of few sequences a pack are equally short, but finding them takes longer: in 9 of 21
    random cases, planning did not end within 5 s.
    """
    room = sequences.room
    size_at = narrowest_holding(room, sequences.padded).tolist()
    hands: list[list[int]] = [[] for _ in range(num_microbatches)]
    taken = [(0, m) for m in range(num_microbatches)]  # heap of (ranks x places for sequences, microbatch)
    first = 0
    while first < len(size_at):
        index, end, places = size_at[first], first + 1, room.sizes[size_at[first]]
        if index:
            most = min(room.max_sequences, room.limits[index] // int(sequences.padded[index, first]))
            while end < min(first + most, len(size_at)) and size_at[end] == index:
                end += 1
            places *= room.max_sequences
        before, m = taken[0]
        hands[m].extend(range(first, end))
        heapq.heapreplace(taken, (before + places, m))
        first = end
    dealt = [place_all(sequences, np.array(hand), 0, narrow=True) for hand in hands if hand]
    return Filled([one for one, _ in dealt], np.concatenate([left for _, left in dealt]))
