"""Fills a step, from the longest sequences on: which ones share a cp group.

The ranks of a microbatch wait for each other, so its groups must be equal; two microbatches need not be. And
where ranks are full of tokens, groups are equal only if their sequences are alike, since a token costs more
in a long sequence. So two moves fill a step; `deal` stands for both where packs hold few sequences:

*Reach.* Each microbatch but the last takes its share of the tokens that are left, from the long end, until
its groups hold what every rank should. This *target* follows from the number and the mean work of these
tokens.

- *Seed.* Each group starts with one of the longest sequences left, on the narrowest size that can take it.
- *Complete.* A group that misses t tokens and w work needs sequences of mean length
  `rho = (w - alpha t) / t`. While several are missing, it takes one of about rho. If two are, it solves
  `a + b = t`, `a^2 + b^2 = rho t`; at the end it takes the longest that fits. All groups choose at the same
  time, and half of what they miss at once, so that NumPy does the work. With some hundred sequences to choose
  from, a group is filled to a fraction of a percent.
- *Widen.* The first group, completed as near the target as it comes, sets the load that the others must
  reach. Groups that stay incomplete return their sequences. Their ranks are seeded again with wider groups:
  fewer groups of more sequences each come nearer to the target.

*Place.* The last microbatch takes all that is left. A sequence needs the narrowest group that holds it and
does not exceed the mean load; the number of groups of each size follows from the work of their sequences.
Longest first, each goes to the least loaded of the groups that are wide enough and have room (LPT, Graham
1969). If the result is uneven, all groups are widened and the microbatch is filled again; this ends, because
a group of all ranks is always even. Sequences that find no room go to groups of any microbatch that have
some, first where the load is furthest below that microbatch's largest.

Each move pays for itself. Over traces and random draws, placing alone makes steps 1 to 4 % longer at a fixed
cp, and groups several times as wide if cp is dynamic; reaching alone makes steps 0.4 % longer, 10 % at worst.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from meshfeed.arrays import Bools, Floats, Ints, Longs
from meshfeed.intervals import distinct
from meshfeed.native import ARRAY, LONGS, WHOLE, compiled
from meshfeed.plan.packing import TOLERANCE, CostModel, Room

MAX_WIDENING = 3
"""How many times the groups that stay incomplete are widened."""

FAR = 0.1
"""Groups that miss more than this share of their target are widened more than once. If all incomplete ones
were, the mean cp would be a quarter higher, for 0.06 % of a step; 1 % where lengths are few and alike."""

FULL = 0.998
"""Share of its target at which a group is complete. A larger share needs wider groups and the shortest
sequences."""

EXACT = 1 + 1e-9
"""Tolerance for rounding when loads that should be equal are compared."""

WORTH = 1.3
"""A cp group is not widened to balance loads if communication then takes this share more work."""


_complete = compiled(
    "mf_complete",
    *(ARRAY, WHOLE, LONGS, LONGS, ARRAY),
    *(WHOLE, LONGS, LONGS, ARRAY, ARRAY, ARRAY, LONGS, LONGS),
    *(WHOLE, LONGS, LONGS, LONGS, LONGS, ARRAY),
)

_place = compiled(
    "mf_place",
    *(WHOLE, LONGS, LONGS, ARRAY),
    *(WHOLE, LONGS, LONGS, WHOLE, LONGS),
    *(LONGS, LONGS, ARRAY, ARRAY, ARRAY),
)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences by descending length, with all that the filler needs of them.

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
    lengths: Longs
    padded: Longs
    load: Floats
    work: Floats

    @classmethod
    def of(cls, lengths: Longs, cost: CostModel, room: Room) -> Sequences:
        """lengths: descending, each at most room.longest."""
        sizes = room.size_of[:, None]
        padded = room.align.padded(lengths, sizes)
        load, work = cost.load(lengths, sizes), cost.work(lengths)
        if cost.ring_tokens:
            work = (load * sizes)[narrowest_holding(room, padded), np.arange(lengths.size)]
        return cls(room, cost, lengths, padded, load, work)

    def tokens(self, members: Longs) -> int:
        """Real tokens of some of them together. members: indices, int64 [k]."""
        return int(self.lengths[members].sum())


def narrowest_holding(room: Room, padded: Longs) -> Longs:
    """Index into room.sizes of the narrowest group that holds each sequence; int64 [n].

    padded: padded tokens on a group of each size; int64 [num_sizes, n].
    """
    return (padded <= room.limit_of[:, None]).argmax(axis=0)


def narrowest_sizes(sequences: Sequences, members: Longs, mean_load: float, tightness: int) -> Longs:
    """Index into room.sizes of the narrowest adequate group of each member; int64 [k], never ascending.

    Adequate: the group holds it and each rank's part of it is at most mean_load; with a tightness t, it takes
    at most 1 / 2^t of either. The widest if no size is adequate.
    """
    limits, sizes = sequences.room.limit_of[:, None], sequences.room.size_of[:, None]
    holds = sequences.padded[:, members] * 2**tightness <= limits
    light = sequences.load[:, members] * 2**tightness <= mean_load * EXACT
    adequate = holds & light
    if sequences.cost.ring_tokens:
        # a wider group would wait for keys and values: its ranks do more work together
        fits, together = sequences.padded[:, members] <= limits, sequences.load[:, members] * sizes
        adequate[:-1] |= fits[:-1] & (together[1:] > together[:-1] * WORTH)
    adequate[-1] = True
    return adequate.argmax(axis=0)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The groups of one microbatch.

    Attributes:
        members: indices in a Sequences, int64 [k].
        group: the group of each member; int32 [k].
        group_sizes: ranks of each group, descending, so that groups side by side are aligned; int64
            [num_groups].
        loads: load on each rank of each group; float64 [num_groups].
    """

    members: Longs
    group: Ints
    group_sizes: Longs
    loads: Floats

    @property
    def top(self) -> float:
        """The largest load."""
        return float(self.loads.max(initial=0.0))


@dataclass(frozen=True, slots=True)
class Filled:
    """A step: its microbatches, and the sequences that found no room; ascending indices, int64 [k]."""

    microbatches: list[Microbatch]
    left: Longs


def fill_step(sequences: Sequences, num_microbatches: int) -> Filled:
    """Fill the microbatches of a step; fewer where fewer suffice."""
    cost = sequences.cost
    # where keys and values cross nodes, widening makes steps up to 1.5 times as long
    widenings = MAX_WIDENING if 2 * cost.ring_tokens <= (WORTH - 1) * cost.alpha else 0
    left, made = np.arange(sequences.lengths.size), list[Microbatch]()
    tokens = sequences.tokens(left)
    for remaining in range(num_microbatches, 1, -1):
        if left.size:
            target = target_of(sequences, left[: -(-left.size // remaining)], tokens / remaining)
            microbatch, left = reach(sequences, left, target, widenings)
            made.append(microbatch)
            tokens -= sequences.tokens(microbatch.members)
    if not left.size:
        return Filled(made, left)
    # one of many microbatches may be uneven by more, since the step's time is their sum: for 0.1 % of it the
    # mean cp is a fifth to a third lower
    last, over = place_evenly(sequences, left, TOLERANCE * min(len(made) + 1, 3))
    return spread(sequences, Filled([*made, last], over))


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


def place_evenly(sequences: Sequences, members: Longs, tolerance: float) -> tuple[Microbatch, Longs]:
    """Place sequences on wider and wider groups until loads are equal within `tolerance`.

    If no try reaches that, returns the best: the fewest tokens without room, then the least load. Without
    wider groups, steps in the fewest microbatches take 3.5 % longer.
    """
    room = sequences.room
    enough = float(sequences.work[members].sum()) / room.num_ranks * (1 + tolerance)
    tries = [place_all(sequences, members, 0)]

    def score(tried: tuple[Microbatch, Longs]) -> tuple[int, float]:
        return sequences.tokens(tried[1]), tried[0].top

    for tightness in range(1, room.sizes[-1].bit_length() + 1):
        if score(min(tries, key=score)) <= (0, enough) or tries[-1][0].group_sizes[-1] == room.sizes[-1]:
            break
        tries.append(place_all(sequences, members, tightness))
    return min(tries, key=score)


def place_all(
    sequences: Sequences, members: Longs, tightness: int, *, narrow: bool = False
) -> tuple[Microbatch, Longs]:
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


def group_counts(sequences: Sequences, members: Longs, size_at: Longs, mean_load: float) -> Longs:
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
    lengths: Longs,
    padded: Longs,
    load: Floats,
    members: Longs,
    size_at: Longs,
    index_of_group: Longs,
    free: Longs,
    slots: Longs,
    loads: Floats,
) -> Ints:
    """Give each member to the least loaded group that has room for it; its group, or -1; int32 [k].

    lengths, padded, load: as in `Sequences`, by descending length.
    members: indices in these. size_at: index into the sizes of the narrowest group that may take each; int64
    [k], never ascending. index_of_group: that of each group; int64 [num_groups], never ascending.
    free, slots, loads: the padded tokens and the sequences that each group can still take, and its load;
    int64, int64, float64 [num_groups]. All three are updated.
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
    free[:], slots[:] = room, spare
    return np.array(group, np.int32)


# -- reach: groups that take sequences until each holds its target ------------------------------------------


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

    size_at: Longs
    sizes: Longs
    goal: Floats
    missing: Floats
    tokens: Floats
    free: Longs
    slots: Longs
    members: Longs
    group: Longs

    @classmethod
    def of(cls, sequences: Sequences, seeds: Longs, size_at: Longs, target: Target) -> Groups:
        """Groups of these sizes with one sequence each, which should reach the target."""
        room = sequences.room
        sizes, limits = room.size_of[size_at], room.limit_of[size_at]
        goal: Floats = np.multiply(target.load, sizes)
        tokens: Floats = np.minimum(limits, goal / target.work_per_token)
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

    def take(self, sequences: Sequences, members: Longs, group: Longs) -> None:
        """Give each of these sequences to a group."""
        at = self.size_at[group]
        np.subtract.at(self.missing, group, sequences.load[at, members] * self.sizes[group])
        np.subtract.at(self.tokens, group, sequences.lengths[members])
        np.subtract.at(self.free, group, sequences.padded[at, members])
        np.subtract.at(self.slots, group, 1)
        self.members = np.concatenate((self.members, members))
        self.group = np.concatenate((self.group, group))

    def open(self) -> Bools:
        """Which of them miss their goal and can take another sequence; bool [num_groups]."""
        return (self.missing > (1 - FULL) * self.goal) & (self.slots > 0)

    def only(self, mask: Bools) -> Groups:
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

    def wanted(self, sequences: Sequences, groups: Longs) -> tuple[Floats, Longs]:
        """The best length for each of these groups to take next, and how many of it; float64, int64."""
        missing, free, slots = self.missing[groups], self.free[groups], self.slots[groups]
        most = np.minimum(free, sequences.cost.reach(missing, self.sizes[groups]))
        t = np.maximum(self.tokens[groups], 1e-9)
        rho = missing / t - sequences.cost.alpha
        if window := sequences.cost.window:
            # tokens past the window cost 2 w: a mean of rho is that of sequences of w^2 / (2 w - rho)
            long = window * window / np.maximum(2 * window - rho, 1e-9)
            rho = np.where(rho > window, long, rho)
        two = (t + np.sqrt(np.maximum(2 * rho * t - t * t, 0))) / 2
        length = np.minimum(np.select([rho >= t, rho >= t / 2, rho > 0], [most, two, rho], most), most)
        # half of them at once, as far as they surely fit with padding
        padded = length + 2 * sequences.room.align.sequence * self.sizes[groups]
        many = np.minimum(t, free * length / padded) / np.maximum(2 * length, 1)
        many = np.where((rho > 0) & (rho < t / 4), many, 1).astype(np.int64)
        return length, np.minimum(many, slots).clip(min=1)


def reach(sequences: Sequences, left: Longs, target: Target, widenings: int) -> tuple[Microbatch, Longs]:
    """Fill the next microbatch; returns it, and the sequences left after it.

    left: indices in `sequences`, ascending; int64 [k], k >= 1. widenings: how many times groups that stay
    incomplete are widened.
    """
    first, left = reach_first(sequences, left, target)
    size = int(first.sizes[0])
    load = float(first.goal[0] - first.missing[0]) / size
    others, left = reach_all(
        sequences, left, sequences.room.num_ranks - size, Target(load, target.work_per_token), widenings
    )
    return _microbatch(sequences, [first, *others]), left


def target_of(sequences: Sequences, longest: Longs, share: float) -> Target:
    """What a rank should hold if a microbatch takes its share of the tokens left.

    longest: the longest sequences left, that many that they hold a share; indices in `sequences`, ascending.
    """
    tokens = np.cumsum(sequences.lengths[longest])
    count = int(np.searchsorted(tokens, share)) + 1
    work_per_token = float(sequences.work[longest[:count]].sum()) / float(tokens[count - 1])
    return Target(share / sequences.room.num_ranks * work_per_token, work_per_token)


def first_within(sequences: Sequences, left: Longs, length: float, begin: int = 0) -> int:
    """The place of the longest of some sequences, from a place on, that is at most so long; log k steps.

    left: indices in `sequences`, ascending; int64 [k].
    """
    return bisect_left(left, -length, begin, key=lambda member: -sequences.lengths[member])


def reach_first(sequences: Sequences, left: Longs, target: Target) -> tuple[Groups, Longs]:
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
            at = first_within(sequences, rest, length)
            group.take(sequences, rest[at : at + 1], np.zeros(rest[at : at + 1].size, np.int64))
            rest = _without(rest, np.s_[at : at + 1])
        if index == widest or not group.open()[0]:
            return group, rest
        index += 1


def reach_all(
    sequences: Sequences, left: Longs, ranks: int, target: Target, widenings: int
) -> tuple[list[Groups], Longs]:
    """Groups for these ranks, each as near to the target as possible, and the sequences left after them.

    widenings: see `reach`.
    """
    done: list[Groups] = []
    for tightness in range(widenings + 1):
        at, size_at = seed_groups(sequences, left, ranks, target.load, tightness)
        groups = Groups.of(sequences, left[at], size_at, target)
        left = complete(sequences, _without(left, at), groups)
        still_open = groups.open() & (groups.missing > (FAR if tightness else 0) * groups.goal)
        if tightness == widenings or not still_open.any():
            done.append(groups)
            break
        done.append(groups.only(~still_open))
        ranks = int(groups.sizes[still_open].sum())
        free = np.zeros(sequences.lengths.size, bool)
        free[left] = free[groups.members[still_open[groups.group]]] = True
        left = np.flatnonzero(free)
    return done, left


def _without(left: Longs, at: Longs | slice) -> Longs:
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
    sequences: Sequences, left: Longs, ranks: int, load: float, tightness: int
) -> tuple[Longs, Longs]:
    """Which sequences the groups of these ranks start with, and on which size.

    Returns (indices in `left`, indices in room.sizes), int64 [num_groups] each: the longest that are left,
    each on the narrowest size that holds 2^tightness of it at `load` or less, if there is one.
    """
    sizes, limits = sequences.room.size_of, sequences.room.limit_of
    most = np.minimum(limits, sequences.cost.reach(load * sizes * EXACT, sizes))
    seeds, size_at = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    end = 0
    while ranks:
        usable = int(np.searchsorted(sizes, ranks, side="right"))
        # those before `end` are taken, or too long for a wider size
        first = first_within(sequences, left, float(most[usable - 1]), end)
        offered = sequences.lengths[left[first : first + ranks // int(sizes[0])]]
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


def complete(sequences: Sequences, left: Longs, groups: Groups) -> Longs:
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
        trying = distinct(trying)
        trying = trying[groups.open()[trying]]
    return left
