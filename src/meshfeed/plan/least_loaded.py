"""Filling one microbatch with all that it is given: sequences -> cp groups, the least loaded first.

*Size.* Each sequence goes to the narrowest cp group that holds it and does not exceed the mean load; the
number of groups of each size follows from the work of their sequences.

*Fill.* Longest first, each sequence goes to the group with the least load among those at least as wide as
its own (LPT, Graham 1969). Where the outcome is unbalanced, all groups are made wider and the microbatch
filled again: a group of all ranks is always balanced, so this ends.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from meshfeed.native import POINTER, WHOLE, address, addresses, compiled
from meshfeed.plan.cost import CostModel
from meshfeed.plan.policy import Room
from meshfeed.plan.types import FloatArray, IntArray, LongArray

EXACT = 1 + 1e-9
"""Room for rounding where loads that should be equal are compared."""

_place = compiled(
    "mf_place",
    *(WHOLE, POINTER, POINTER, POINTER),
    *(WHOLE, POINTER, POINTER, WHOLE, POINTER),
    *(POINTER, POINTER, POINTER, POINTER, POINTER),
)
WORTH = 1.3
"""A cp group is not widened, to even out loads, if communication then takes so much more work."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences by descending length, with all that filling asks of them.

    Attributes:
        room, cost: what a microbatch holds, and what a sequence costs.
        lengths: real tokens; int64 [n].
        padded: padded tokens on a cp group of each size; int64 [num_sizes, n].
        load: load on each rank of such a group; float64 [num_sizes, n].
        work: load on all ranks together of the narrowest group that holds it; float64 [n]. Wider groups
            communicate more.
    """

    room: Room
    cost: CostModel
    lengths: LongArray
    padded: LongArray
    load: FloatArray
    work: FloatArray

    @classmethod
    def of(cls, lengths: LongArray, cost: CostModel, room: Room) -> Sequences:
        """lengths: descending, each at most room.longest."""
        sizes = np.array(room.sizes)[:, None]
        padded = room.align.padded(lengths, sizes)
        load, work = cost.load(lengths, sizes), cost.work(lengths)
        if cost.ring_tokens:
            work = (load * sizes)[narrowest_holding(room, padded), np.arange(lengths.size)]
        return cls(room, cost, lengths, padded, load, work)


@dataclass(frozen=True, slots=True)
class FilledMicrobatch:
    """One microbatch.

    Attributes:
        members: indices in a Sequences, int64 [k].
        group: the group of each member, or -1 where it found no room; int32 [k].
        group_sizes: ranks of each group, descending, which puts them side by side aligned; int64
            [num_groups].
        loads: load on each rank of each group; float64 [num_groups].
    """

    members: LongArray
    group: IntArray
    group_sizes: LongArray
    loads: FloatArray

    @property
    def left(self) -> LongArray:
        """Members that found no room; int64."""
        return self.members[self.group < 0]


def narrowest_holding(room: Room, padded: LongArray) -> LongArray:
    """Index into room.sizes of the narrowest group that holds each sequence; int64 [n].

    padded: padded tokens on a group of each size; int64 [num_sizes, n].
    """
    return (padded <= np.array(room.limits)[:, None]).argmax(axis=0)


def narrowest_sizes(sequences: Sequences, members: LongArray, mean_load: float, tightness: int) -> LongArray:
    """Index into room.sizes of the narrowest adequate group of each member; int64 [k], never ascending.

    Adequate: the group holds it and each rank's part of it is at most mean_load; with a tightness t, it takes
    at most 1 / 2^t of either. Where no size does, the widest.
    """
    limits, sizes = np.array(sequences.room.limits)[:, None], np.array(sequences.room.sizes)[:, None]
    holds = sequences.padded[:, members] * 2**tightness <= limits
    light = sequences.load[:, members] * 2**tightness <= mean_load * EXACT
    adequate = holds & light
    if sequences.cost.ring_tokens:
        # a wider group would wait for keys and values: its ranks do more work together
        fits, together = sequences.padded[:, members] <= limits, sequences.load[:, members] * sizes
        adequate[:-1] |= fits[:-1] & (together[1:] > together[:-1] * WORTH)
    adequate[-1] = True
    return adequate.argmax(axis=0)


def group_counts(sequences: Sequences, members: LongArray, size_at: LongArray, mean_load: float) -> LongArray:
    """How many groups of each size a microbatch is cut into; int64 [num_sizes].

    Widest first, as many as the work, the tokens and the number of sequences of that size and above fill;
    what is left over in the last of them is for narrower sequences.
    """
    room = sequences.room
    counts = np.zeros(len(room.sizes), np.int64)
    taken, ranks_due = 0, 0.0
    for index in range(len(room.sizes) - 1, 0, -1):
        size, mine = room.sizes[index], members[size_at == index]
        by_work = sequences.work[mine].sum() / mean_load
        by_tokens = sequences.padded[index, mine].sum() * size / room.limits[index]
        by_slots = mine.size * size / room.max_sequences
        ranks_due += max(by_work, by_tokens, by_slots)
        wanted = int(np.ceil((ranks_due - taken) / size - 1e-9))
        counts[index] = min(max(wanted, 0), (room.num_ranks - taken) // size)
        taken += int(counts[index]) * size
    counts[0] = (room.num_ranks - taken) // room.sizes[0]
    return counts


def fill(
    sequences: Sequences, members: LongArray, tightness: int, *, narrow: bool = False
) -> FilledMicrobatch:
    """Put the members of a microbatch on groups of ranks.

    members: ascending indices in `sequences`, int64 [k], k >= 1. tightness: see `narrowest_sizes`. narrow:
    however unequal the loads become, each sequence goes to the narrowest group that holds it.
    """
    room = sequences.room
    mean_load = np.inf if narrow else float(sequences.work[members].sum()) / room.num_ranks
    size_at = narrowest_sizes(sequences, members, mean_load, tightness)
    counts = group_counts(sequences, members, size_at, mean_load)
    index_of_group = np.repeat(np.arange(len(room.sizes))[::-1], counts[::-1])
    free, loads = np.array(room.limits)[index_of_group], np.zeros(index_of_group.size)
    slots = np.full(index_of_group.size, room.max_sequences)
    group = place(sequences, members, size_at, index_of_group, free, slots, loads)
    return FilledMicrobatch(members, group, np.array(room.sizes)[index_of_group], loads)


def place(
    sequences: Sequences,
    members: LongArray,
    size_at: LongArray,
    index_of_group: LongArray,
    free: LongArray,
    slots: LongArray,
    loads: FloatArray,
) -> IntArray:
    """Give each member to the least loaded group that has room for it; its group, or -1; int32 [k].

    members: ascending indices in `sequences`. size_at: index into room.sizes of the narrowest group that may
    take each; int64 [k], never ascending. index_of_group: that of each group; int64 [num_groups], never
    ascending.
    free, slots, loads: the padded tokens and the sequences that each group can still take, and its load;
    int64, int64, float64 [num_groups]. loads is updated; the others may be.
    """
    if _place is not None:
        placed, heaps = np.empty(members.size, np.int32), np.empty((2 * free.size, 2))
        members = np.ascontiguousarray(members)
        _place(
            *(sequences.lengths.size, address(sequences.lengths)),
            *(address(sequences.padded), address(sequences.load)),
            *(members.size, *addresses(members, size_at)),
            *(free.size, *addresses(index_of_group, free, slots)),
            *(address(loads), address(placed), address(heaps)),
        )
        return placed
    lengths, padded, load = (
        array[..., members].tolist() for array in (sequences.lengths, sequences.padded, sequences.load)
    )
    size_of_group, room, spare = index_of_group.tolist(), free.tolist(), slots.tolist()
    group: list[int] = []
    lightest: list[tuple[float, int]] = []  # heap of (load, group)
    parked: list[tuple[int, float, int]] = []  # heap of (-room, load, group) too full so far
    opened = 0
    for item, (length, index) in enumerate(zip(lengths, size_at.tolist())):
        while opened < len(size_of_group) and size_of_group[opened] >= index:
            if spare[opened]:
                heapq.heappush(lightest, (float(loads[opened]), opened))
            opened += 1
        # sequences only get shorter, so a group is parked and comes back once for each of its sequences
        while parked and length <= -parked[0][0]:
            heapq.heappush(lightest, heapq.heappop(parked)[1:])
        while lightest and room[lightest[0][1]] < length:
            loaded, full = heapq.heappop(lightest)
            heapq.heappush(parked, (-room[full], loaded, full))
        if not lightest:
            group.append(-1)
            continue
        loaded, chosen = lightest[0]
        at = size_of_group[chosen]
        room[chosen] -= padded[at][item]
        spare[chosen] -= 1
        loads[chosen] = loaded + load[at][item]
        if spare[chosen]:
            heapq.heapreplace(lightest, (loaded + load[at][item], chosen))
        else:
            heapq.heappop(lightest)
        group.append(chosen)
    return np.array(group, np.int32)


def longest_first(work: FloatArray, num_groups: int) -> IntArray:
    """Give each piece of work to the least loaded group, the largest first; its group, int32 [n].

    work: float64 [n].
    """
    order = np.argsort(-work, kind="stable")
    group = np.empty(work.size, np.int32)
    if _place is None:
        lightest = [(0.0, g) for g in range(num_groups)]
        for item, each in zip(order.tolist(), work[order].tolist()):
            loaded, group[item] = lightest[0]
            heapq.heapreplace(lightest, (loaded + each, int(group[item])))
        return group
    nothing, zeros = np.zeros(work.size, np.int64), np.zeros((2, num_groups), np.int64)
    slots = np.full(num_groups, work.size + 1)
    loads, heaps = np.zeros(num_groups), np.empty((2 * num_groups, 2))
    load, placed, members = work[order], np.empty(work.size, np.int32), np.arange(work.size)
    _place(
        *(work.size, address(nothing), address(nothing), address(load)),
        *(work.size, *addresses(members, nothing)),
        *(num_groups, *addresses(zeros[0], zeros[1], slots)),
        *(address(loads), address(placed), address(heaps)),
    )
    group[order] = placed
    return group


def spread(sequences: Sequences, filled: list[FilledMicrobatch], rest: LongArray) -> list[FilledMicrobatch]:
    """Give the rest, and what the last microbatch has no room for, to any pack that has.

    Where packs hold few sequences, the shortest are too many for the last microbatch. Each goes to the group
    that is furthest below the largest load of its microbatch.
    rest: ascending indices in `sequences`, int64 [k].
    What still finds no room is `left` of the last microbatch.
    """
    room, last = sequences.room, filled[-1]
    rest = np.sort(np.concatenate((last.left, rest)))
    if not rest.size:
        return filled
    num_groups = [one.group_sizes.size for one in filled]
    before = np.cumsum([0, *num_groups])
    held = [one.group >= 0 for one in filled]
    members = [one.members[mine] for one, mine in zip(filled, held)]
    group = [one.group[mine] + first for one, mine, first in zip(filled, held, before)]
    index = np.searchsorted(room.sizes, np.concatenate([one.group_sizes for one in filled]))
    loads = np.concatenate([one.loads for one in filled])
    of_held, all_held = np.concatenate(group), np.concatenate(members)
    free = np.array(room.limits)[index]
    np.subtract.at(free, of_held, sequences.padded[index[of_held], all_held])
    slots = room.max_sequences - np.bincount(of_held, minlength=index.size)
    tops = np.repeat([one.loads.max(initial=0.0) for one in filled], num_groups)
    widest_first = np.argsort(-index, kind="stable")
    gaps = (loads - tops)[widest_first]
    narrowest = narrowest_sizes(sequences, rest, float(tops.max()), 0)
    chosen = place(
        sequences, rest, narrowest, index[widest_first], free[widest_first], slots[widest_first], gaps
    )
    loads[widest_first] = gaps + tops[widest_first]
    chosen = np.where(chosen < 0, -1, widest_first[chosen])
    microbatch = np.where(chosen < 0, len(filled), np.searchsorted(before, chosen, side="right")) - 1
    made: list[FilledMicrobatch] = []
    for m, one in enumerate(filled):
        more = microbatch == m
        own = np.concatenate((group[m] - before[m], np.where(chosen < 0, -1, chosen - before[m])[more]))
        made.append(
            FilledMicrobatch(
                np.concatenate((members[m], rest[more])),
                own.astype(np.int32),
                one.group_sizes,
                loads[before[m] : before[m + 1]],
            )
        )
    return made


def fill_evenly(sequences: Sequences, members: LongArray, tolerance: float) -> FilledMicrobatch:
    """Fill a microbatch, on wider and wider groups until its loads are equal within `tolerance`.

    Gives the best seen where that is never reached: first the fewest tokens without room, then the least
    load.
    """
    room = sequences.room
    mean_load = float(sequences.work[members].sum()) / room.num_ranks

    def score(filled: FilledMicrobatch) -> tuple[int, float]:
        return int(sequences.lengths[filled.left].sum()), float(filled.loads.max(initial=0.0))

    best = filled = fill(sequences, members, 0)
    for tightness in range(1, room.sizes[-1].bit_length() + 1):
        if score(best) <= (0, mean_load * (1 + tolerance)) or filled.group_sizes[-1] == room.sizes[-1]:
            break
        filled = fill(sequences, members, tightness)
        best = min(best, filled, key=score)
    return best


def deal(sequences: Sequences, num_microbatches: int) -> list[FilledMicrobatch]:
    """Deal all sequences out, each to the microbatch with the most ranks free, and fill the narrowest groups.

    So packs are as many as they can be, and hold the most sequences where each holds few. Sequences that need
    a wider group than the narrowest are dealt by the group.
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
    return [fill(sequences, np.array(hand), 0, narrow=True) for hand in hands if hand]
