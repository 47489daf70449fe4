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

from meshfeed.plan.cost import CostModel
from meshfeed.plan.policy import Room
from meshfeed.plan.types import FloatArray, IntArray, LongArray

EXACT = 1 + 1e-9
"""Room for rounding where loads that should be equal are compared."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences by descending length, with all that filling asks of them.

    Attributes:
        room, cost: what a microbatch holds, and what a sequence costs.
        lengths: real tokens; int64 [n].
        padded: padded tokens on a cp group of each size; int64 [num_sizes, n].
        load: load on each rank of such a group; float64 [num_sizes, n].
        work: load on one rank that has it whole, before communication; float64 [n].
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
        return cls(room, cost, lengths, padded, cost.load(lengths, sizes), cost.work(lengths))


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


def narrowest_sizes(sequences: Sequences, members: LongArray, mean_load: float, tightness: int) -> LongArray:
    """Index into room.sizes of the narrowest adequate group of each member; int64 [k], never ascending.

    Adequate: the group holds it and each rank's part of it is at most mean_load; with a tightness t, it takes
    at most 1 / 2^t of either. Where no size does, the widest.
    """
    limits = np.array(sequences.room.limits)[:, None]
    holds = sequences.padded[:, members] * 2**tightness <= limits
    light = sequences.load[:, members] * 2**tightness <= mean_load * EXACT
    adequate = holds & light
    adequate[-1] = True
    return adequate.argmax(axis=0)


def group_counts(sequences: Sequences, members: LongArray, size_at: LongArray, mean_load: float) -> LongArray:
    """How many groups of each size a microbatch is cut into; int64 [num_sizes].

    Widest first, as many as the work and the tokens of sequences of that size and above fill; what is left
    over in the last of them is for narrower sequences.
    """
    room = sequences.room
    counts = np.zeros(len(room.sizes), np.int64)
    taken, ranks_due = 0, 0.0
    for index in range(len(room.sizes) - 1, 0, -1):
        size, mine = room.sizes[index], members[size_at == index]
        by_work = sequences.work[mine].sum() / mean_load
        by_tokens = sequences.padded[index, mine].sum() * size / room.limits[index]
        ranks_due += max(by_work, by_tokens)
        wanted = int(np.ceil((ranks_due - taken) / size - 1e-9))
        counts[index] = min(max(wanted, 0), (room.num_ranks - taken) // size)
        taken += int(counts[index]) * size
    counts[0] = (room.num_ranks - taken) // room.sizes[0]
    return counts


def fill(sequences: Sequences, members: LongArray, tightness: int) -> FilledMicrobatch:
    """Put the members of a microbatch on groups of ranks.

    members: ascending indices in `sequences`, int64 [k], k >= 1. tightness: see `narrowest_sizes`.
    """
    room = sequences.room
    mean_load = float(sequences.work[members].sum()) / room.num_ranks
    size_at = narrowest_sizes(sequences, members, mean_load, tightness)
    counts = group_counts(sequences, members, size_at, mean_load)
    group_sizes = np.repeat(room.sizes[::-1], counts[::-1])
    index_of_group = np.repeat(np.arange(len(room.sizes))[::-1], counts[::-1]).tolist()
    free = [room.limits[index] for index in index_of_group]
    lengths, padded, load = (
        array[..., members].tolist() for array in (sequences.lengths, sequences.padded, sequences.load)
    )
    group: list[int] = []
    lightest: list[tuple[float, int]] = []  # heap of (load, group)
    parked: list[tuple[int, float, int]] = []  # heap of (-free, load, group) too full so far
    opened = 0
    for item, (length, index) in enumerate(zip(lengths, size_at.tolist())):
        while opened < len(index_of_group) and index_of_group[opened] >= index:
            heapq.heappush(lightest, (0.0, opened))
            opened += 1
        # sequences only get shorter, so a group is parked and comes back once for each of its sequences
        while parked and length <= -parked[0][0]:
            heapq.heappush(lightest, heapq.heappop(parked)[1:])
        while lightest and free[lightest[0][1]] < length:
            loaded, full = heapq.heappop(lightest)
            heapq.heappush(parked, (-free[full], loaded, full))
        if not lightest:
            group.append(-1)
            continue
        loaded, chosen = lightest[0]
        at = index_of_group[chosen]
        free[chosen] -= padded[at][item]
        heapq.heapreplace(lightest, (loaded + load[at][item], chosen))
        group.append(chosen)
    loads = np.zeros(group_sizes.size)
    for loaded, chosen in (*lightest, *(entry[1:] for entry in parked)):
        loads[chosen] = loaded
    return FilledMicrobatch(members, np.array(group, np.int32), group_sizes, loads)


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
