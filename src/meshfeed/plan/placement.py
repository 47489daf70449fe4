"""Gives the groups of a filled step their ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshfeed.plan.fill import Filled
from meshfeed.plan.problem import Microbatch
from meshfeed.plan.types import FloatArray, IntArray, LongArray


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
