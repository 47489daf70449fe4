"""Equal work on every rank, in the number of microbatches with the shortest step.

More microbatches cost their overhead. Fewer cost balance where ranks are full of tokens, and a longer bubble
in a pipeline. What a number of microbatches would take is predicted without filling it: the filler gives each
microbatch an equal share of the tokens, the longest sequences first, and more beside a sequence that exceeds
it. The prediction is nearly always met, so mostly one number is filled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from meshfeed.plan.account import least_pile, step_time
from meshfeed.plan.fill import fill_step
from meshfeed.plan.least_loaded import FilledMicrobatch, Sequences, deal
from meshfeed.plan.policy import Packing, Room, asked_microbatches
from meshfeed.plan.types import FloatArray, IntArray, LongArray

MORE_COUNTS = 8
"""How many numbers of microbatches beyond the least are considered, one by one. A pipeline whose bubble asks
for many more has some of those considered too."""

HOPELESS = 1.25
"""A number of microbatches is not considered if equal work on all ranks would take so much longer with it
than with the least."""

MOST_MISSES = 1
"""How many numbers in a row that do not shorten a step without a bubble end the search."""

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
    Where packs hold too few sequences for groups as wide as equal loads ask for, one is dealt out to the
    narrowest groups, and few others are tried.
    """
    order = np.argsort(-lengths, kind="stable")
    sequences = Sequences.of(lengths[order], packing.cost, room)
    blocks = room.num_ranks // room.sizes[-1]
    limit = room.limits[-1] * blocks
    tokens = int(sequences.padded[0].sum())
    by_sequences = -(-lengths.size // room.most_sequences)
    # no two of these share a group: only the widest holds them, and only one at a time
    alone = sequences.padded[-1] * 2 > room.limits[-1]
    for index in range(len(room.sizes) - 1):
        alone &= sequences.padded[index] > room.limits[index]
    by_alone = -(-int(np.count_nonzero(alone)) // blocks)
    needed = max(-(-tokens // limit), by_sequences, by_alone, asked_microbatches(packing))
    least = -(-needed // quantum) * quantum
    # a pack of fixed shape costs its capacity, so the fewest are best
    chooses = packing.microbatches is None and not packing.fixed_shapes
    near = 1 + packing.tolerance / 2  # the other half is for predictions that are too high
    misses = 0
    best: Placement | None = None
    untried: dict[int, float] = {}
    tried: set[int] = set()
    dealt = False
    while best is None or untried:
        # without a bubble, and with room, the least needs no prediction: mostly it is even
        guess = chooses and best is None and not bubble_share and tightness(tokens / (least * limit)) == 0
        if not untried:
            untried = {least: 0.0}
            if chooses and not guess:
                untried = predicted_steps(sequences, packing, least, quantum, bubble_share)
        if best and (packing.tolerance or dealt):
            hard = misses >= MOST_MISSES and (dealt or not bubble_share)
            if hard or best.step_time <= near * min(untried.values()):
                break
        if best:  # the one that is most likely to be shorter, or else ends the search
            count = min(untried, key=lambda count: (untried[count], count))
        else:
            count = next_count(untried, tokens / limit, packing.tolerance)
        del untried[count]
        tried.add(count)
        misses += best is not None
        filled = fill_step(sequences, count, packing.tolerance)
        left = filled[-1].left
        if left.size and best is None and room.max_sequences < lengths.size:
            # more microbatches may ask for wider groups, so for fewer packs: deal, and try few others
            narrow = deal(sequences, count)
            if not any(one.left.size for one in narrow):
                best, dealt = placement_of(narrow, order, count, packing, room, bubble_share), True
                if packing.fixed_shapes or packing.microbatches == "fewest":
                    break
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
        if not chooses:
            break
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

    The prediction: each microbatch takes an equal share of the tokens that are left, from the longest
    sequence on. The work of a share is spread evenly over the ranks, but no microbatch is shorter than its
    longest sequence on the widest group. Where that exceeds the share, the other ranks take as much.
    """
    overhead, num_ranks = packing.cost.microbatch_overhead, sequences.room.num_ranks
    even = float(np.cumsum(sequences.work)[-1]) / num_ranks
    # the derivative of what equal work would take, `(1 + bubble_share / k) even + k overhead`, is 0 here
    shortest = math.sqrt(bubble_share * even / overhead) if overhead else 0.0
    far = [more for more in (12, 16, 24, 32, 48, 64) if least + more * quantum <= shortest]
    counts = least + quantum * np.array([*range(MORE_COUNTS + 1), *far])
    ideal = (1 + bubble_share / counts) * even + counts * overhead
    counts = counts[ideal <= ideal[0] * HOPELESS]
    top, together = predicted_tops(sequences, counts)
    busy = np.full(counts.size, max(even, float(sequences.load[-1, 0])))
    if packing.objective == "microbatch":
        busy = together
    # what piles of whole sequences hold at least; ranks need not wait for keys and values in narrower groups
    widest = sequences.room.sizes[-1]
    least_load, blocks = np.sort(packing.cost.work(sequences.lengths))[::-1] / widest, num_ranks // widest
    if blocks > 1:
        busy = np.maximum(busy, least_pile(least_load, blocks))
    if bubble_share:
        piles = [least_pile(least_load, blocks * count) for count in counts.tolist()]
        top = np.maximum(top, piles)
    return dict(zip(counts.tolist(), (busy + bubble_share * top + counts * overhead).tolist()))


def predicted_tops(sequences: Sequences, counts: LongArray) -> tuple[FloatArray, FloatArray]:
    """The largest load of any microbatch, and the sum of the largest of each, for each of some counts.

    counts: numbers of microbatches, int64 [k]. Returns float64 [k] twice; see `predicted_steps`.
    """
    room, work = sequences.room, sequences.work
    limit = float(room.limits[-1] * (room.num_ranks // room.sizes[-1]))
    work_before = np.concatenate(([0.0], np.cumsum(work)))
    tokens_before = np.concatenate(([0.0], np.cumsum(sequences.lengths)))
    total = tokens_before[-1]
    top, together = np.zeros((2, counts.size))
    # equal shares of all tokens from `origin` on, which the microbatches from `since` on take
    start, origin, since = np.zeros((3, counts.size))
    for m in range(int(counts.max())):
        live = m < counts
        end = origin + (total - origin) * (m + 1 - since) / np.maximum(counts - since, 1)
        # work of the first tokens; a sequence on the edge counts in part
        edges = np.stack((start, np.where(live, end, start)))
        at = np.searchsorted(tokens_before, edges, side="right").clip(max=work.size) - 1
        before = work_before[at] + (edges - tokens_before[at]) * (work[at] / sequences.lengths[at])
        even = (before[1] - before[0]) / room.num_ranks
        first = np.searchsorted(tokens_before, start)
        longest = np.where(first < work.size, sequences.load[-1, first.clip(max=work.size - 1)], 0)
        load = np.where(live, np.maximum(even, longest), 0)
        top, together = np.maximum(top, load), together + load
        raised = live & (longest > even)
        if raised.any():
            # beside a longest sequence that exceeds the share, the others take more than theirs
            done = before[0] + load * room.num_ranks
            at = np.searchsorted(work_before, done, side="right").clip(max=work.size) - 1
            more = tokens_before[at] + (done - work_before[at]) * (sequences.lengths[at] / work[at])
            more = np.minimum(np.minimum(more, total), start + limit)
            end = np.where(raised, np.maximum(end, more), end)
            origin, since = np.where(raised, end, origin), np.where(raised, m + 1, since)
        start = np.where(live, end, start)
    return top, together


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
