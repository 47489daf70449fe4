"""Equal work on every rank, in the number of microbatches with the shortest step.

More microbatches cost their overhead. Fewer cost balance where ranks are full of tokens, and a longer bubble
in a pipeline. What a number of microbatches would take is predicted without filling it: the filler gives each
microbatch an equal share of the tokens, the longest sequences first. The prediction is nearly always met, so
mostly one number is filled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from meshfeed.plan.account import least_pile, step_time
from meshfeed.plan.fill import fill_step
from meshfeed.plan.least_loaded import FilledMicrobatch, Sequences
from meshfeed.plan.policy import Packing, Room
from meshfeed.plan.types import FloatArray, IntArray, LongArray

MORE_COUNTS = 8
"""How many numbers of microbatches beyond the least are considered, one by one. A pipeline whose bubble asks
for many more has some of those considered too."""

HOPELESS = 1.05
"""A number of microbatches is not considered if equal work on all ranks would take so much longer with it
than with the least."""

MOST_MISSES = 2
"""So many numbers in a row that do not shorten a step without a bubble end the search."""

SLACK, TIGHT = 0.08, 0.06
"""Where fewer than SLACK of the places for tokens are free, ranks are hard to balance: one microbatch without
any free place takes some TIGHT longer than predicted, as in the traces of the benchmarks."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the sequences of a step go.

    Attributes:
        microbatch, first_rank, cp_size: as in `StepPlan`; int32 [n].
        num_microbatches: some of the last ones may be empty.
        step_time: see `account.step_time`.
    """

    microbatch: IntArray
    first_rank: IntArray
    cp_size: IntArray
    num_microbatches: int
    step_time: float


def balance(
    lengths: LongArray, packing: Packing, room: Room, *, quantum: int, bubble_share: float
) -> Placement:
    """Fill as many microbatches as the packing asks for, or as many as make the step shortest.

    lengths: each from 1 to room.longest; int64 [n], n >= 1.
    quantum: the number of microbatches is a multiple of it.
    bubble_share: the pipeline idles for so many times the largest microbatch.

    Fills the least number of microbatches that is predicted to be near the shortest step, then others, until
    one is within the tolerance of all predictions that are left. With a tolerance of 0 it fills them all.
    """
    order = np.argsort(-lengths, kind="stable")
    sequences = Sequences.of(lengths[order], packing.cost, room)
    limit = room.limits[-1] * (room.num_ranks // room.sizes[-1])
    tokens = int(sequences.padded[0].sum())
    fewest = packing.microbatches if isinstance(packing.microbatches, int) else 1
    by_sequences = -(-lengths.size // room.most_sequences)
    least = -(-max(-(-tokens // limit), by_sequences, fewest) // quantum) * quantum
    # a pack of fixed shape costs its capacity, so the fewest are best
    chooses = packing.microbatches is None and not packing.fixed_shapes
    near = 1 + packing.tolerance / 2  # the other half is for predictions that are too high
    misses = 0
    best: Placement | None = None
    untried: dict[int, float] = {}
    tried: set[int] = set()
    while best is None or untried:
        # without a bubble, and with room, the least needs no prediction: mostly it is even
        guess = chooses and best is None and not bubble_share and tightness(tokens / (least * limit)) == 0
        if not untried:
            untried = {least: 0.0}
            if chooses and not guess:
                untried = predicted_steps(sequences, packing, least, quantum, bubble_share)
        if best and packing.tolerance:
            hard = misses == MOST_MISSES and not bubble_share
            if hard or best.step_time <= near * min(untried.values()):
                break
        count = next_count(untried, tokens / limit, packing.tolerance)
        del untried[count]
        tried.add(count)
        misses += best is not None
        filled = fill_step(sequences, count, packing.tolerance)
        left = filled[-1].left
        if left.size:
            # fewer would mostly leave more; what is left would fill so many more, if it were packed well
            more = max(int(sequences.lengths[left].sum()) // limit, left.size // room.most_sequences)
            beyond = count + max(quantum, more // quantum * quantum)
            untried = {least: untried[least]} if least in untried else {}
            if best or untried:
                others = predicted_steps(sequences, packing, beyond, quantum, bubble_share)
                untried |= {count: time for count, time in others.items() if count not in tried}
            least = min(untried, default=beyond)
            continue
        placement = placement_of(filled, order, count, packing, room, bubble_share)
        if best is None or placement.step_time < best.step_time:
            best, misses = placement, 0
        enough = 1 + packing.tolerance
        if guess and best.step_time > enough * ideal_step(sequences, packing, least + quantum):
            untried = predicted_steps(sequences, packing, least, quantum, bubble_share)
            del untried[least]
    return best


def next_count(predicted: dict[int, float], full: float, tolerance: float) -> int:
    """The least number of microbatches that is likely to be near the shortest step.

    predicted: step time of each. full: microbatches that the tokens would fill to the last place.
    """
    likely = {
        count: time * (1 + TIGHT / count * tightness(full / count)) for count, time in predicted.items()
    }
    near = min(likely.values()) * (1 + tolerance / 4)
    return min(count for count, time in likely.items() if time <= near)


def tightness(taken: float) -> float:
    """0 where at least SLACK of the places for tokens are free, 1 where all are taken; taken: their share."""
    return max(0.0, 1 - (1 - taken) / SLACK)


def ideal_step(sequences: Sequences, packing: Packing, count: int) -> float:
    """Step time with equal work on all ranks, without a pipeline's bubble."""
    even = float(np.cumsum(sequences.work)[-1]) / sequences.room.num_ranks
    return even + count * packing.cost.microbatch_overhead


def predicted_steps(
    sequences: Sequences, packing: Packing, least: int, quantum: int, bubble_share: float
) -> dict[int, float]:
    """Numbers of microbatches worth filling, from `least` on, and the step time predicted for each.

    The prediction: each microbatch takes an equal share of the tokens, from the longest sequence on. The work
    of a share is spread evenly over the ranks, but no microbatch is shorter than its longest sequence on the
    widest group.
    """
    overhead, num_ranks = packing.cost.microbatch_overhead, sequences.room.num_ranks
    work = sequences.work
    work_before = np.concatenate(([0.0], np.cumsum(work)))
    even = float(work_before[-1]) / num_ranks
    # the derivative of what equal work would take, `(1 + bubble_share / k) even + k overhead`, is 0 here
    shortest = math.sqrt(bubble_share * even / overhead) if overhead else 0.0
    far = [more for more in (12, 16, 24, 32, 48, 64) if least + more * quantum <= shortest]
    counts = least + quantum * np.array([*range(MORE_COUNTS + 1), *far])
    ideal = (1 + bubble_share / counts) * even + counts * overhead
    counts = counts[ideal <= ideal[0] * HOPELESS]
    tokens_before = np.concatenate(([0.0], np.cumsum(sequences.lengths)))
    # one row for each microbatch of each count
    starts = np.cumsum(counts) - counts
    count = np.repeat(counts, counts)
    index = np.arange(count.size) - np.repeat(starts, counts)
    share = tokens_before[-1] * np.stack((index, index + 1)) / count
    # work of the first tokens; a sequence on the edge counts in part
    at = np.searchsorted(tokens_before, share, side="right").clip(max=work.size) - 1
    work_share = work_before[at] + (share - tokens_before[at]) * (work[at] / sequences.lengths[at])
    first = np.searchsorted(tokens_before, share[0])
    longest = np.where(first < work.size, sequences.load[-1, first.clip(max=work.size - 1)], 0)
    tops = np.maximum((work_share[1] - work_share[0]) / num_ranks, longest)
    top = np.maximum.reduceat(tops, starts)
    busy = np.full(counts.size, max(even, float(longest[0])))
    if packing.objective == "microbatch":
        busy = np.diff(np.cumsum(tops)[starts + counts - 1], prepend=0)
    blocks = num_ranks // sequences.room.sizes[-1]
    if blocks > 1:
        busy = np.maximum(busy, least_pile(sequences.load[-1], blocks))
    if bubble_share:
        piles = [least_pile(sequences.load[-1], blocks * count) for count in counts.tolist()]
        top = np.maximum(top, piles)
    return dict(zip(counts.tolist(), (busy + bubble_share * top + counts * overhead).tolist()))


def placement_of(
    filled: list[FilledMicrobatch],
    order: LongArray,
    count: int,
    packing: Packing,
    room: Room,
    bubble_share: float,
) -> Placement:
    """Ranks for the groups of filled microbatches. order: the sequence that each of their members is."""
    microbatch, first_rank, cp_size = np.zeros((3, order.size), np.int32)
    loads = np.zeros((count, room.num_ranks))
    for m, (one, first) in enumerate(
        zip(filled, first_ranks_of(filled, room, exchange=packing.objective == "step"))
    ):
        members = order[one.members]
        microbatch[members] = m
        first_rank[members] = first[one.group]
        cp_size[members] = one.group_sizes[one.group]
        loads[m] = loads_by_rank(one, first, room.num_ranks)
    return Placement(microbatch, first_rank, cp_size, count, step_time(loads, packing, bubble_share))


def loads_by_rank(filled: FilledMicrobatch, first_rank: LongArray, num_ranks: int) -> FloatArray:
    """Work of each rank in a microbatch; float64 [num_ranks]."""
    loads = np.zeros(num_ranks)
    for first, size, load in zip(first_rank.tolist(), filled.group_sizes.tolist(), filled.loads.tolist()):
        loads[first : first + size] = load
    return loads


def first_ranks_of(filled: list[FilledMicrobatch], room: Room, *, exchange: bool) -> list[LongArray]:
    """The first rank of every group of every microbatch; int64 [num_groups] each.

    Groups stand side by side, the widest first. exchange: groups of one size change places so that what ranks
    do in all microbatches together is even: the heaviest group goes where least was done so far.
    """
    done = np.zeros(room.num_ranks)
    first_ranks: list[LongArray] = []
    for microbatch in filled:
        sizes = microbatch.group_sizes
        first = np.cumsum(sizes) - sizes
        if exchange:
            free = np.ones(room.num_ranks, bool)
            for size in np.unique(sizes)[::-1].tolist():
                own = np.flatnonzero(sizes == size)
                open_ranges = np.flatnonzero(free.reshape(-1, size).all(axis=1))
                so_far = done.reshape(-1, size).max(axis=1)[open_ranges]
                least_done = open_ranges[np.argsort(so_far, kind="stable")[: own.size]]
                heaviest = own[np.argsort(-microbatch.loads[own], kind="stable")]
                first[heaviest] = least_done * size
                free.reshape(-1, size)[least_done] = False
            done += loads_by_rank(microbatch, first, room.num_ranks)
        first_ranks.append(first)
    return first_ranks
