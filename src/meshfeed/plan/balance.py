"""Equal work on every rank, in as many microbatches as make the step shortest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshfeed.plan.account import objective_bound, step_time
from meshfeed.plan.fill import fill_step
from meshfeed.plan.least_loaded import FilledMicrobatch, Sequences
from meshfeed.plan.policy import Packing, Room
from meshfeed.plan.types import FloatArray, IntArray, LongArray

MORE_COUNTS = 3
"""How many numbers of microbatches are tried beyond the least."""


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

    Tries the least number that holds the batch and then more, as long as one more quantum could shorten the
    step by more than the tolerance. Takes the least number whose predicted step is within the tolerance of
    the shortest one tried.
    """
    placements = placements_of(lengths, packing, room, quantum=quantum, bubble_share=bubble_share)
    tried = [next(placements)]
    if packing.microbatches is not None:
        return tried[0]
    for _ in range(MORE_COUNTS):
        count = tried[-1].num_microbatches + quantum
        bound = objective_bound(
            lengths,
            packing.cost,
            num_ranks=room.num_ranks,
            widest=room.sizes[-1],
            num_microbatches=count,
            bubble_share=bubble_share,
        )
        if min(one.step_time for one in tried) <= bound * (1 + packing.tolerance):
            break
        tried.append(next(placements))
    longest = min(one.step_time for one in tried) * (1 + packing.tolerance)
    return next(one for one in tried if one.step_time <= longest)


def placements_of(
    lengths: LongArray, packing: Packing, room: Room, *, quantum: int, bubble_share: float
) -> Iterator[Placement]:
    """A placement for each number of microbatches that holds the batch, from the least on."""
    order = np.argsort(-lengths, kind="stable")
    sequences = Sequences.of(lengths[order], packing.cost, room)
    limit = room.limits[-1] * (room.num_ranks // room.sizes[-1])
    by_sequences = -(-lengths.size // room.most_sequences)
    least = max(-(-int(sequences.padded[0].sum()) // limit), by_sequences, packing.microbatches or 1)
    count = -(-least // quantum) * quantum
    while True:
        filled = fill_step(sequences, count, packing.tolerance)
        left = filled[-1].left
        if not left.size:
            microbatch, first_rank, cp_size = np.zeros((3, lengths.size), np.int32)
            loads = np.zeros((count, room.num_ranks))
            first_ranks = first_ranks_of(filled, room, exchange=packing.objective == "step")
            for m, (one, first) in enumerate(zip(filled, first_ranks)):
                members = order[one.members]
                microbatch[members] = m
                first_rank[members] = first[one.group]
                cp_size[members] = one.group_sizes[one.group]
                loads[m] = loads_by_rank(one, first, room.num_ranks)
            yield Placement(microbatch, first_rank, cp_size, count, step_time(loads, packing, bubble_share))
        # what is left would fill so many more, if it were packed well
        more = max(int(sequences.lengths[left].sum()) // limit, left.size // room.most_sequences)
        count += max(quantum, more // quantum * quantum)


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
