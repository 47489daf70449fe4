"""The planner's entry points, how many microbatches a step has, and which ranks its packs get.

`plan_step` takes the number with the shortest step, filled with equal work on every rank. More microbatches
cost their overhead. Fewer are harder to balance if ranks are full of tokens, and lengthen the bubble of a
pipeline. The step time of a number is predicted without filling it. A bound on it costs nothing; a prediction
follows how the filler gives each microbatch an equal share of the tokens, the longest sequences first, and
more beside a sequence that exceeds it. The prediction is nearly always met, so mostly one number is filled.

The policy in_order balances nothing: it fills packs in the order of the stream.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Floats, Ints, Longs
from meshfeed.errors import PlanError
from meshfeed.plan.account import least_pile
from meshfeed.plan.fill import Filled, Microbatch, Sequences, deal, fill_step, narrowest_holding
from meshfeed.plan.packing import (
    TOLERANCE,
    Packing,
    Room,
    Uncut,
    asked_microbatches,
    room_of,
    rows_of,
    shape_of,
    step_time,
)
from meshfeed.plan.types import Align, CpSplit, StepPlan
from meshfeed.whole import of_kind, whole_numbers

MOST_MISSES = 1
"""This many numbers in a row that do not shorten the step end the search, without a bubble or ring_tokens."""

WHERE_DEALT = 4
"""How many numbers are tried once one was dealt out; after each that leaves sequences, 1/4 more.

With 8, groups are twice as wide, which pays only where communication costs nothing; see docs/planner.md."""


MORE_COUNTS = 8
"""How many numbers of microbatches beyond the least are considered, one by one. If a pipeline's bubble asks
for many more, some of those are considered, too."""

HOPELESS = 1.25
"""A number of microbatches is not considered if equal work on all ranks would take so much longer with it
than with the least."""

SLACK, TIGHT = 0.08, 0.06
"""If less than SLACK of the places for tokens is free, ranks are hard to balance. One microbatch without a
free place takes about TIGHT longer than predicted, by the traces of the benchmarks."""


def plan_step(
    lengths: npt.ArrayLike,
    packing: Packing,
    *,
    dp: int,
    cp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    quantum: int | None = None,
    cp_split: CpSplit = "zigzag",
    uncut: Uncut | None = None,
) -> StepPlan:
    """Plan one step: a pure function of its arguments, for any lengths and any number of ranks.

    lengths: real tokens of each sequence of the global batch, in stream order; int [n], n >= 0.
    dp, cp: the layout's sizes. The plan is for their dp * cp ranks; dynamic_cp chooses cp groups of its own.
    pp, vpp: pipeline stages and virtual stages per rank, which weigh the pipeline's bubble.
    quantum: the number of microbatches is a multiple of this; None for the packing's own.
    cp_split: how cp ranks will split the packs; only "pack_contiguous" needs less padding than the others.
    uncut: ranges of tokens, such as those of images, through which truncate and split do not cut.

    Every sequence that is kept, or under "split" each piece of it, is in one pack. No rank has more than
    packing.capacity padded tokens in a microbatch, no pack more than packing.max_sequences. A rank without
    sequences in a microbatch gets a dummy, an empty pack.
    Raises PlanError for a sequence that is too long under oversize="error", an uncut range that
    is too long under "split", a negative length, a size below 1, or a capacity below the alignment.
    """
    of_kind(PlanError, Packing, packing=packing)
    dp, cp, pp, vpp, quantum = whole_numbers(
        PlanError, 1, optional=["quantum"], dp=dp, cp=cp, pp=pp, vpp=vpp, quantum=quantum
    )
    room, given = room_of(packing, dp=dp, cp=cp, split=cp_split), np.asarray(lengths)
    if given.size and (given.dtype.kind not in "iu" or given.ndim != 1):
        raise PlanError(f"lengths: {given.dtype} {list(given.shape)}; give whole numbers in one dimension")
    whole = given.astype(np.int64).ravel()
    return planned(whole, packing, room, pp=pp, vpp=vpp, quantum=quantum, uncut=uncut)


def planned(
    lengths: Longs,
    packing: Packing,
    room: Room,
    *,
    pp: int,
    vpp: int,
    quantum: int | None = None,
    uncut: Uncut | None = None,
) -> StepPlan:
    """`plan_step` of arguments that were checked. room: of the packing; int64 [n]."""
    quantum = quantum or packing.quantum or (pp if vpp > 1 else 1)
    rows = rows_of(lengths, longest=room.longest, policy=packing.oversize, uncut=uncut)
    kept = rows.lengths[rows.kept]
    if packing.policy == "in_order" or not kept.size:
        placed = in_order(kept, packing, room, quantum=quantum)
    else:
        placed = choose(kept, packing, room, quantum=quantum, bubble_share=(pp - 1) / vpp)
    microbatch = np.full(rows.lengths.size, -1, np.int32)
    first_rank = np.zeros(rows.lengths.size, np.int32)
    cp_size = np.full(rows.lengths.size, room.sizes[0], np.int32)
    microbatch[rows.kept], first_rank[rows.kept] = placed.microbatch, placed.first_rank
    cp_size[rows.kept] = placed.cp_size
    return StepPlan(
        lengths=rows.lengths,
        microbatch=microbatch,
        first_rank=first_rank,
        cp_size=cp_size,
        num_microbatches=placed.num_microbatches,
        num_ranks=room.num_ranks,
        idle_cp_size=room.sizes[0],
        align=room.align,
        shape=shape_of(packing),
        sequence=rows.sequence,
        start=rows.start,
        oversize=rows.oversize,
    )


def plan_fixed(
    lengths: Longs,
    *,
    dp: int,
    cp: int,
    micro_batch_size: int,
    align: Align | None = None,
    order: Longs | None = None,
) -> StepPlan:
    """Deal sequences out in order: `micro_batch_size` to each dp rank, microbatch by microbatch.

    lengths: real tokens of each sequence, int64 [n], n >= 0. This is the order in which Megatron's
    samplers deal a global batch.
    order: the sequences in another order, int64 [n]. If given, each dp rank gets as many as without it, but
    consecutive ones of this order over all its microbatches.
    If n does not fill the last microbatch, some ranks get fewer sequences there or none (a dummy); every rank
    still gets the same number of microbatches.
    Raises PlanError for a size below 1.
    """
    if min(dp, cp, micro_batch_size) < 1:
        raise PlanError(f"dp={dp}, cp={cp}, micro_batch_size={micro_batch_size}: each is at least 1")
    place = np.arange(lengths.size)
    if order is not None:
        place[order] = np.argsort(place // micro_batch_size % dp, kind="stable")
    dp_rank = place // micro_batch_size % dp
    return StepPlan(
        lengths=np.array(lengths, np.int64),
        microbatch=(place // (micro_batch_size * dp)).astype(np.int32),
        first_rank=(dp_rank * cp).astype(np.int32),
        cp_size=np.full(lengths.size, cp, np.int32),
        num_microbatches=-(-lengths.size // (micro_batch_size * dp)),
        num_ranks=dp * cp,
        idle_cp_size=cp,
        align=align or Align(),
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the sequences of a step go.

    Attributes:
        microbatch, first_rank, cp_size: as in `StepPlan`; int32 [n].
        num_microbatches: some of the last ones may be empty.
    """

    microbatch: Ints
    first_rank: Ints
    cp_size: Ints
    num_microbatches: int


def choose(lengths: Longs, packing: Packing, room: Room, *, quantum: int, bubble_share: float) -> Placement:
    """Fill as many microbatches as the packing asks for, or as many as make the step shortest.

    lengths: each from 1 to room.longest; int64 [n], n >= 1.
    quantum: the number of microbatches is a multiple of it.
    bubble_share: the pipeline idles for this many times the largest microbatch.

    The most promising numbers are filled, until the best is within the tolerance of the others' estimates. If
    packs hold too few sequences for groups as wide as equal loads need, the first number is dealt out to the
    narrowest groups, and few others are tried.
    """
    order = np.argsort(-lengths, kind="stable")
    sequences = Sequences.of(lengths[order], packing.cost, room)
    # a pack of fixed shape costs its capacity, so the fewest are best
    chooses = packing.microbatches is None and not packing.fixed_shapes
    # a bubble makes several numbers nearly equal, and predictions ignore the communication of wide groups:
    # one that misses its prediction says little about the others
    unsure = bubble_share or packing.cost.ring_tokens
    most_misses = math.inf if unsure else MOST_MISSES
    candidates = Candidates(Forecast(sequences, packing, bubble_share), quantum)
    candidates.begin(fewest_microbatches(sequences, packing, quantum), alone=not chooses)
    best: tuple[float, Placement] | None = None
    misses, dealt = 0, False
    while best is None or not (misses >= most_misses or candidates.are_ruled_out(best[0])):
        count = candidates.take(first=best is None)
        filled = fill_step(sequences, count)
        left = filled.left
        if left.size:
            # well packed, the rest would fill this many more
            tokens = sequences.tokens(left)
            more = max(tokens // room.most_tokens, ranks_taken(sequences, left) // room.num_ranks)
            if best is None and room.max_sequences < lengths.size:
                # wide groups are few packs
                filled = deal(sequences, count)
                dealt = not filled.left.size
            if dealt:
                more, most_misses = max(more, count // 4), WHERE_DEALT
                chooses |= asked_microbatches(packing) > 0 and not packing.fixed_shapes
            candidates.begin(count + max(quantum, more // quantum * quantum), alone=not chooses)
            if best is not None or not dealt:
                misses += best is not None
                continue
        placement, loads = placement_of(filled, count, room.num_ranks, order)
        if not chooses:
            return placement
        misses += 1
        taken = step_time(loads, packing, bubble_share)
        if best is None or taken < best[0]:
            best, misses = (taken, placement), misses if dealt else 0
    return best[1]


def fewest_microbatches(sequences: Sequences, packing: Packing, quantum: int) -> int:
    """How many the sequences need at least, and the packing asks for; a multiple of quantum."""
    room = sequences.room
    tokens = int(sequences.padded[0].sum())
    # no two of these share a group: only the widest holds them, and only one at a time
    alone = sequences.padded[-1] * 2 > room.limits[-1]
    for index in range(len(room.sizes) - 1):
        alone &= sequences.padded[index] > room.limits[index]
    needed = max(
        -(-tokens // room.most_tokens),
        -(-ranks_taken(sequences, np.arange(sequences.lengths.size)) // room.num_ranks),
        -(-int(np.count_nonzero(alone)) // (room.num_ranks // room.sizes[-1])),
        asked_microbatches(packing),
    )
    return -(-needed // quantum) * quantum


def ranks_taken(sequences: Sequences, members: Longs) -> int:
    """How many ranks, of all microbatches, the packs of these sequences take at least; 0 if one holds all."""
    room = sequences.room
    if room.max_sequences >= members.size:
        return 0
    sizes = room.size_of[narrowest_holding(room, sequences.padded[:, members])]
    return int(sizes.sum()) // room.max_sequences


class Forecast:
    """Step times of one batch, by the number of microbatches, in units of load.

    bubble_share: the pipeline idles for this many times the largest microbatch.
    """

    def __init__(self, sequences: Sequences, packing: Packing, bubble_share: float) -> None:
        self._sequences, self._packing, self._bubble_share = sequences, packing, bubble_share
        room, self._overhead = sequences.room, packing.cost.microbatch_overhead
        self._num_ranks, self._blocks = room.num_ranks, room.num_ranks // room.sizes[-1]
        self._most_tokens = room.most_tokens
        self._full = int(sequences.padded[0].sum()) / room.most_tokens
        # equal sequences are as easy to balance on full ranks as on others
        self._unlike = min(1.0, int(sequences.lengths[0]) / int(sequences.lengths[-1]) - 1)
        # as views, whose elements become floats when they are read
        self._longest_load = cast(Sequence[float], sequences.load[-1].data)
        work_before = np.concatenate(([0.0], np.cumsum(sequences.work)))
        self._work_before = cast(Sequence[float], work_before.data)
        self._even = self._work_before[-1] / room.num_ranks

    def bounds(self, least: int, quantum: int) -> dict[int, float]:
        """Numbers of microbatches that may be worth filling, from `least` on, ascending.

        Each with a bound: the step time with equal work on all ranks. No step takes less.
        """
        # here the derivative of the time of equal work, `(1 + bubble_share / k) even + k overhead`, is 0
        shortest = math.sqrt(self._bubble_share * self._even / self._overhead) if self._overhead else 0.0
        # steps of 16 stages take twice as long without these
        far = [more for more in (12, 16, 24, 32, 48, 64) if least + more * quantum <= shortest]
        bounds: dict[int, float] = {}
        for more in (*range(MORE_COUNTS + 1), *far):
            count = least + more * quantum
            bubble = self._bubble_share / count * self._even
            bound = self._even + bubble + count * self._overhead
            if bound <= bounds.get(least, bound) * HOPELESS:
                bounds[count] = bound
        return bounds

    def has_room(self, count: int) -> bool:
        """Whether this many microbatches have free places for tokens, and no bubble."""
        return not self._bubble_share and self.penalty(count) == 1

    def penalty(self, count: int) -> float:
        """How many times its prediction a step is likely to take; 1 if ranks are not full of tokens, or
        sequences are equal."""
        tight = max(0.0, 1 - (1 - self._full / count) / SLACK)
        return 1 + TIGHT / count * tight * self._unlike

    def predicted(self, count: int) -> float:
        """The predicted step time with this many microbatches."""
        top, busy = self._tops(count)
        # a lower bound for piles of whole sequences
        if self._blocks > 1:
            busy = max(busy, least_pile(self._least_loads, self._blocks))
        if self._bubble_share:
            top = max(top, least_pile(self._least_loads, self._blocks * count))
        return busy + self._bubble_share * top + count * self._overhead

    def _tops(self, count: int) -> tuple[float, float]:
        """The largest load of any microbatch, and the sum of the largest of each.

        Each microbatch takes an equal share of the tokens that are left, from the longest sequence on. The
        work of a share is spread evenly over the ranks, but no microbatch is shorter than its longest
        sequence on the widest group. Where that exceeds the share, the other ranks take as much.
        """
        tokens_before, longest_load = self._tokens_before, self._longest_load
        total = tokens_before[-1]
        top = together = start = work_before = 0.0
        # the microbatches from `since` on take equal shares of the tokens from `origin` on
        origin, since = 0.0, 0
        for m in range(count):
            end = origin + (total - origin) * (m + 1 - since) / (count - since)
            work = self._work_of(end)
            even = (work - work_before) / self._num_ranks
            first = bisect_left(tokens_before, start)
            load = max(even, longest_load[first] if first < len(longest_load) else 0.0)
            top, together = max(top, load), together + load
            if load > even:
                fits = min(
                    self._tokens_of(work_before + load * self._num_ranks), total, start + self._most_tokens
                )
                origin = end = max(end, fits)
                since = m + 1
                work = self._work_of(end)
            start, work_before = end, work
        return top, together

    def _work_of(self, tokens: float) -> float:
        """Work of the first tokens; a sequence on the edge counts in part."""
        at = min(bisect_right(self._tokens_before, tokens), len(self._longest_load)) - 1
        part = (tokens - self._tokens_before[at]) / self._sequences.lengths.item(at)
        return self._work_before[at] + part * self._sequences.work.item(at)

    def _tokens_of(self, work: float) -> float:
        """How many of the first tokens make this much work."""
        at = min(bisect_right(self._work_before, work), len(self._longest_load)) - 1
        part = (work - self._work_before[at]) / self._sequences.work.item(at)
        return self._tokens_before[at] + part * self._sequences.lengths.item(at)

    @cached_property
    def _tokens_before(self) -> Sequence[float]:
        return cast(Sequence[float], np.concatenate(([0.0], np.cumsum(self._sequences.lengths))).data)

    @cached_property
    def _least_loads(self) -> Floats:
        """Load of each sequence on the widest group if it did not communicate, descending; float64 [n]."""
        widest = self._sequences.room.sizes[-1]
        return np.sort(self._packing.cost.work(self._sequences.lengths))[::-1] / widest


class Candidates:
    """Numbers of microbatches that were not filled yet, each with an estimate of its step time.

    The estimate is first the bound, and the prediction once it matters.
    """

    def __init__(self, forecast: Forecast, quantum: int) -> None:
        self._forecast, self._quantum = forecast, quantum
        self._promised: dict[int, float] = {}
        self._bounds: dict[int, float] = {}
        self._predicted: set[int] = set()
        self._least = 0

    def begin(self, least: int, *, alone: bool) -> None:
        """Consider the numbers from `least` on, or it alone, and the least of the earlier ones.

        The least of the earlier numbers stays unless it was taken: only that one is always considered.
        """
        kept = {self._least: self._promised[self._least]} if self._least in self._promised else {}
        bounds = self._forecast.bounds(least, self._quantum)
        bounds = {least: bounds[least]} if alone else bounds
        self._promised, self._bounds = kept | bounds, self._bounds | bounds
        self._predicted &= kept.keys()
        self._least = min(self._promised)

    def take(self, *, first: bool) -> int:
        """Take the least number whose step is likely to be near the shortest.

        first: if the least number has room and no bubble, take it without a prediction; it is mostly even.
        """
        count = min(self._promised)
        if len(self._promised) > 1 and not (first and self._forecast.has_room(count)):
            near = self._likely(self._least_by(self._likely)) * (1 + TOLERANCE / 10)
            count = next(count for count in sorted(self._promised) if self._is_within(near, count))
        del self._promised[count]
        return count

    def are_ruled_out(self, step_time: float) -> bool:
        """Whether this step time is within the tolerance of the estimates of all numbers."""
        promised = self._promised
        if not promised or step_time <= min(map(self._bounds.__getitem__, promised)) * (1 + TOLERANCE):
            return True
        # half of the tolerance, because predictions may be too high
        return step_time <= promised[self._least_by(promised.__getitem__)] * (1 + TOLERANCE / 2)

    def _likely(self, count: int) -> float:
        return self._promised[count] * self._forecast.penalty(count)

    def _is_within(self, near: float, count: int) -> bool:
        """Whether its predicted step is likely not to be longer."""
        if self._likely(count) <= near:
            self._predict(count)
        return self._likely(count) <= near

    def _least_by(self, time: Callable[[int], float]) -> int:
        """The predicted number with the least time."""
        while (count := min(self._promised, key=time)) not in self._predicted:
            self._predict(count)
        return count

    def _predict(self, count: int) -> None:
        if count not in self._predicted:
            self._promised[count] = self._forecast.predicted(count)
            self._predicted.add(count)


# -- the ranks of packs --------------------------------------------------------------------------------------


def in_order(lengths: Longs, packing: Packing, room: Room, *, quantum: int) -> Placement:
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


def next_fit(padded: Longs, *, limit: int, max_sequences: int, multiple: int) -> tuple[Longs, int]:
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
    filled: Filled, num_microbatches: int, num_ranks: int, order: Longs
) -> tuple[Placement, Floats]:
    """Ranks for the groups, and the work of each rank: float64 [num_microbatches, num_ranks].

    order: the sequence of each member of a microbatch; int64 [n]. Groups are side by side, the widest first.
    """
    microbatch, first_rank, cp_size = np.zeros((3, order.size), np.int32)
    loads = np.zeros((num_microbatches, num_ranks))
    for m, one in enumerate(filled.microbatches):
        members, first = order[one.members], np.cumsum(one.group_sizes) - one.group_sizes
        microbatch[members] = m
        first_rank[members] = first[one.group]
        cp_size[members] = one.group_sizes[one.group]
        loads[m] = loads_by_rank(one, first, num_ranks)
    return Placement(microbatch, first_rank, cp_size, num_microbatches), loads


def loads_by_rank(one: Microbatch, first_rank: Longs, num_ranks: int) -> Floats:
    """Work of each rank in a microbatch; float64 [num_ranks]."""
    loads = np.zeros(num_ranks)
    for first, size, load in zip(first_rank.tolist(), one.group_sizes.tolist(), one.loads.tolist()):
        loads[first : first + size] = load
    return loads
