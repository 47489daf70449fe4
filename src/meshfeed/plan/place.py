"""Fills a step, from the longest sequences on: which ones share a cp group, and on which ranks.

The ranks of a microbatch wait for each other, so its groups must be equal; two microbatches need not be. And
where ranks are full of tokens, groups are equal only if their sequences are alike, since a token costs more
in a long sequence. So two moves fill a step:

*Reach.* Each microbatch but the last takes its share of the tokens that are left, from the long end, until
its groups hold what every rank should; see `reach`.

*Place.* The last microbatch takes all that is left. A sequence needs the narrowest group that holds it and
does not exceed the mean load; the number of groups of each size follows from the work of their sequences.
Longest first, each goes to the least loaded of the groups that are wide enough and have room (LPT, Graham
1969). If the result is uneven, all groups are widened and the microbatch is filled again; this ends, because
a group of all ranks is always even. Sequences that find no room go to the least loaded group of any
microbatch that has some.

Each move pays for itself. Over traces and random draws, placing alone makes steps 1 to 4 % longer at a fixed
cp, and groups several times as wide if cp is dynamic; reaching alone makes steps 0.4 % longer, 10 % at worst.

The policy in_order balances nothing: `in_order` fills packs in the order of the stream.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from meshfeed.native import ARRAY, LONGS, WHOLE, compiled
from meshfeed.plan.packing import Packing, asked_microbatches
from meshfeed.plan.problem import Microbatch, Room, Sequences, narrowest_holding, narrowest_sizes
from meshfeed.plan.reach import reach
from meshfeed.plan.types import FloatArray, IntArray, LongArray

MAX_WIDENING = 3
"""How many times the groups that stay incomplete are widened."""


_place = compiled(
    "mf_place",
    *(WHOLE, LONGS, LONGS, ARRAY),
    *(WHOLE, LONGS, LONGS, WHOLE, LONGS),
    *(LONGS, LONGS, ARRAY, ARRAY, ARRAY),
)


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
    room = sequences.room
    most = room.max_sequences * (room.num_ranks // room.sizes[0])  # places, on the narrowest groups
    # one of many microbatches may be uneven by more, since the step's time is their sum: for 0.1 % of it the
    # mean cp is a fifth to a third lower
    last, over = place_evenly(sequences, left[:most], tolerance * min(len(made) + 1, 3))
    return spread(sequences, Filled([*made, last], np.concatenate((over, left[most:]))))


def spread(sequences: Sequences, step: Filled) -> Filled:
    """Give what is left to groups with room in any microbatch, those furthest below its largest load first.

    If packs hold few sequences, the last microbatch has no places for all short ones: without this, steps of
    32 sequences a pack take 24 % longer at a fixed cp. It keeps the groups that there are. `deal` makes them.
    """
    room, rest, microbatches = sequences.room, np.sort(step.left), step.microbatches
    if not rest.size:
        return step
    num_groups = [one.group_sizes.size for one in microbatches]
    before = np.cumsum([0, *num_groups])
    members = np.concatenate([one.members for one in microbatches])
    group = np.concatenate([one.group + first for one, first in zip(microbatches, before)])
    index = np.searchsorted(room.sizes, np.concatenate([one.group_sizes for one in microbatches]))
    free = room.limit_of[index]
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
    need a wider group than the narrowest are dealt by the group: which groups a microbatch has follows from
    its sequences, so `spread` cannot deal.

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


def place_evenly(sequences: Sequences, members: LongArray, tolerance: float) -> tuple[Microbatch, LongArray]:
    """Place sequences on wider and wider groups until loads are equal within `tolerance`.

    If no try reaches that, returns the best: the fewest tokens without room, then the least load. Without
    wider groups, steps in the fewest microbatches take 3.5 % longer.
    """
    room = sequences.room
    enough = float(sequences.work[members].sum()) / room.num_ranks * (1 + tolerance)
    tries = [place_all(sequences, members, 0)]

    def score(tried: tuple[Microbatch, LongArray]) -> tuple[int, float]:
        return sequences.tokens(tried[1]), tried[0].top

    for tightness in range(1, room.sizes[-1].bit_length() + 1):
        if score(min(tries, key=score)) <= (0, enough) or tries[-1][0].group_sizes[-1] == room.sizes[-1]:
            break
        tries.append(place_all(sequences, members, tightness))
    return min(tries, key=score)


def place_all(
    sequences: Sequences, members: LongArray, tightness: int, *, narrow: bool = False
) -> tuple[Microbatch, LongArray]:
    """One microbatch of these sequences, and those that find no room in it.

    members: ascending indices in `sequences`, int64 [k], k >= 1. tightness: see `narrowest_sizes`. narrow:
    however unequal the loads become, each sequence goes to the narrowest group that holds it.
    """
    room = sequences.room
    mean_load = np.inf if narrow else float(sequences.work[members].sum()) / room.num_ranks
    size_at = narrowest_sizes(sequences, members, mean_load, tightness)
    counts = group_counts(sequences, members, size_at, mean_load)
    index_of_group = np.repeat(np.arange(len(room.sizes))[::-1], counts[::-1])
    free, loads = room.limit_of[index_of_group], np.zeros(index_of_group.size)
    slots = np.full(index_of_group.size, room.max_sequences)
    measures = sequences.lengths, sequences.padded, sequences.load
    group = place(*measures, members, size_at, index_of_group, free, slots, loads)
    held = group >= 0
    return Microbatch(members[held], group[held], room.size_of[index_of_group], loads), members[~held]


def group_counts(sequences: Sequences, members: LongArray, size_at: LongArray, mean_load: float) -> LongArray:
    """How many groups of each size a microbatch is cut into; int64 [num_sizes].

    Widest first, as many as the work, the tokens and the number of sequences of that size and above fill.
    Space left in the last of them is for sequences that need narrower ones.
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
    lengths: LongArray,
    padded: LongArray,
    load: FloatArray,
    members: LongArray,
    size_at: LongArray,
    index_of_group: LongArray,
    free: LongArray,
    slots: LongArray,
    loads: FloatArray,
) -> IntArray:
    """Give each member to the least loaded group that has room for it; its group, or -1; int32 [k].

    lengths, padded, load: as in `Sequences`, by descending length.
    members: indices in these. size_at: index into the sizes of the narrowest group that may take each; int64
    [k], never ascending. index_of_group: that of each group; int64 [num_groups], never ascending.
    free, slots, loads: the padded tokens and the sequences that each group can still take, and its load;
    int64, int64, float64 [num_groups]. loads is updated; the others may be.
    """
    if _place is not None:
        placed, heaps = np.empty(members.size, np.int32), np.empty((2 * free.size, 2))
        _place(
            *(lengths.size, lengths, padded, load),
            *(members.size, np.ascontiguousarray(members), size_at),
            *(free.size, index_of_group, free, slots, loads, placed, heaps),
        )
        return placed
    length_of, padded_of, load_of = (array[..., members].tolist() for array in (lengths, padded, load))
    size_of_group, room, spare = index_of_group.tolist(), free.tolist(), slots.tolist()
    group: list[int] = []
    lightest: list[tuple[float, int]] = []  # heap of (load, group)
    parked: list[tuple[int, float, int]] = []  # heap of (-room, load, group) too full so far
    opened = 0
    for item, (length, index) in enumerate(zip(length_of, size_at.tolist())):
        while opened < len(size_of_group) and size_of_group[opened] >= index:
            if spare[opened]:
                heapq.heappush(lightest, (float(loads[opened]), opened))
            opened += 1
        # sequences only get shorter, so a group is parked and returns at most once for each of its sequences
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
        room[chosen] -= padded_of[at][item]
        spare[chosen] -= 1
        loads[chosen] = loaded = loaded + load_of[at][item]
        if spare[chosen]:
            heapq.heapreplace(lightest, (loaded, chosen))
        else:
            heapq.heappop(lightest)
        group.append(chosen)
    return np.array(group, np.int32)


def longest_first(work: FloatArray, num_groups: int) -> IntArray:
    """Give each piece of work to the least loaded group, the largest first; its group, int32 [n].

    work: float64 [n].
    """
    order, zeros = np.argsort(-work, kind="stable"), np.zeros(num_groups, np.int64)
    nothing, slots = np.zeros(work.size, np.int64), np.full(num_groups, work.size + 1)
    group = np.empty(work.size, np.int32)
    group[order] = place(
        *(nothing, nothing[None], work[order][None]),
        *(np.arange(work.size), nothing, zeros, zeros.copy(), slots, np.zeros(num_groups)),
    )
    return group


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the sequences of a step go.

    Attributes:
        microbatch, first_rank, cp_size: as in `StepPlan`; int32 [n].
        num_microbatches: some of the last ones may be empty.
    """

    microbatch: IntArray
    first_rank: IntArray
    cp_size: IntArray
    num_microbatches: int


def in_order(lengths: LongArray, packing: Packing, room: Room, *, quantum: int) -> Placement:
    """`next_fit` on cp groups of the layout's size.

    lengths: each from 1 to room.longest; int64 [n], n >= 0. quantum: the number of microbatches is a multiple
    of it.
    """
    cp, per_microbatch = room.sizes[0], room.num_ranks // room.sizes[0]
    pack, num_packs = next_fit(
        room.align.padded(lengths, cp),
        limit=room.limits[0],
        max_sequences=room.max_sequences,
        multiple=per_microbatch * quantum,
    )
    needed = max(asked_microbatches(packing), -(-num_packs // per_microbatch))
    return Placement(
        microbatch=(pack // per_microbatch).astype(np.int32),
        first_rank=(pack % per_microbatch * cp).astype(np.int32),
        cp_size=np.full(lengths.size, cp, np.int32),
        num_microbatches=-(-needed // quantum) * quantum,
    )


def next_fit(padded: LongArray, *, limit: int, max_sequences: int, multiple: int) -> tuple[LongArray, int]:
    """Next-fit packs in stream order, then packs split from the tail until there are a multiple of
    `multiple`.

    padded: tokens of each sequence, each from 1 to limit; int64 [n]. limit, max_sequences: what a pack holds,
    in tokens and in sequences.
    Returns the pack of each sequence, int64 [n], and the number of packs. The rule is that of Megatron-core's
    dp_balanced scheduler: the last sequence of the last pack with two or more becomes a pack of its own, at
    the end. If nothing can be split any more (Megatron-core asserts), the number of packs is no multiple.
    """
    ends = np.cumsum(padded)
    starts: list[int] = []
    place = 0
    while place < padded.size:
        starts.append(place)
        full = int(np.searchsorted(ends, (ends[place - 1] if place else 0) + limit, side="right"))
        place = min(full, place + max_sequences)
    num_packs = len(starts)
    pack = np.searchsorted(np.array(starts), np.arange(padded.size), side="right") - 1
    # all but the first sequence of each pack can be split off: last pack first, last sequence first
    movable = np.ones(padded.size, bool)
    movable[starts] = False
    moved = np.flatnonzero(movable)[::-1][: -num_packs % multiple]
    pack[moved] = num_packs + np.arange(moved.size)
    return pack, num_packs + moved.size


def placement_of(
    filled: Filled, num_microbatches: int, num_ranks: int, order: LongArray, *, exchange: bool
) -> tuple[Placement, FloatArray]:
    """Ranks for the groups, and the work of each rank: float64 [num_microbatches, num_ranks].

    order: the sequence of each member of a microbatch; int64 [n]. exchange: see `first_ranks_of`.
    """
    microbatch, first_rank, cp_size = np.zeros((3, order.size), np.int32)
    loads = np.zeros((num_microbatches, num_ranks))
    first_ranks = first_ranks_of(filled.microbatches, num_ranks, exchange=exchange)
    for m, (one, first) in enumerate(zip(filled.microbatches, first_ranks)):
        members = order[one.members]
        microbatch[members] = m
        first_rank[members] = first[one.group]
        cp_size[members] = one.group_sizes[one.group]
        loads[m] = loads_by_rank(one, first, num_ranks)
    return Placement(microbatch, first_rank, cp_size, num_microbatches), loads


def loads_by_rank(one: Microbatch, first_rank: LongArray, num_ranks: int) -> FloatArray:
    """Work of each rank in a microbatch; float64 [num_ranks]."""
    loads = np.zeros(num_ranks)
    for first, size, load in zip(first_rank.tolist(), one.group_sizes.tolist(), one.loads.tolist()):
        loads[first : first + size] = load
    return loads


def first_ranks_of(microbatches: list[Microbatch], num_ranks: int, *, exchange: bool) -> list[LongArray]:
    """The first rank of every group of every microbatch; int64 [num_groups] each.

    Groups are side by side, the widest first. exchange: groups of one size change places so that the work of
    ranks in all microbatches together is even: the heaviest group goes to the ranks with the least so far.
    """
    done = np.zeros(num_ranks)
    first_ranks: list[LongArray] = []
    for microbatch in microbatches:
        sizes = microbatch.group_sizes
        first = np.cumsum(sizes) - sizes
        if exchange:
            free = np.ones(num_ranks, bool)
            for size in np.unique(sizes)[::-1].tolist():
                own = np.flatnonzero(sizes == size)
                end = num_ranks // size * size
                open_ranges = np.flatnonzero(free[:end].reshape(-1, size).all(axis=1))
                so_far = done[:end].reshape(-1, size).max(axis=1)[open_ranges]
                least_done = open_ranges[np.argsort(so_far, kind="stable")[: own.size]]
                heaviest = own[np.argsort(-microbatch.loads[own], kind="stable")]
                first[heaviest] = least_done * size
                free[:end].reshape(-1, size)[least_done] = False
            done += loads_by_rank(microbatch, first, num_ranks)
        first_ranks.append(first)
    return first_ranks
