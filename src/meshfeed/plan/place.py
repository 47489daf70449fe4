"""The least loaded first: each sequence goes to the cp group with the least load, the longest first.

This is LPT (Graham 1969) with room for tokens and for sequences. `narrowest_sizes` and `group_counts` say on
which groups: each sequence needs the narrowest that holds it and does not exceed the mean load, and the
number of groups of each size follows from the work of their sequences.
"""

from __future__ import annotations

import heapq

import numpy as np

from meshfeed.native import POINTER, WHOLE, address, addresses, compiled
from meshfeed.plan.problem import EXACT, Sequences
from meshfeed.plan.types import FloatArray, IntArray, LongArray

WORTH = 1.3
"""A cp group is not widened, to even out loads, if communication then takes so much more work."""

_place = compiled(
    "mf_place",
    *(WHOLE, POINTER, POINTER, POINTER),
    *(WHOLE, POINTER, POINTER, WHOLE, POINTER),
    *(POINTER, POINTER, POINTER, POINTER, POINTER),
)


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
