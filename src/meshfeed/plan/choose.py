"""How many microbatches: the number with the shortest step, filled with equal work on every rank.

The step time of a number is predicted without filling it; see `candidates`. The prediction is nearly always
met, so mostly one number is filled.
"""

from __future__ import annotations

import math

import numpy as np

from meshfeed.plan.account import step_time
from meshfeed.plan.candidates import Candidates, Forecast
from meshfeed.plan.fill import deal, fill_step
from meshfeed.plan.placement import Placement, placement_of
from meshfeed.plan.policy import Packing, asked_microbatches
from meshfeed.plan.problem import Room, Sequences, narrowest_holding
from meshfeed.plan.types import LongArray

MOST_MISSES = 1
"""This many numbers in a row that do not shorten the step end the search, without a bubble or ring_tokens."""

WHERE_DEALT = 4
"""How many numbers are tried once one was dealt out; after each that leaves sequences, 1/4 more."""


def choose(
    lengths: LongArray, packing: Packing, room: Room, *, quantum: int, bubble_share: float
) -> Placement:
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
    unsure = bubble_share or not packing.tolerance or packing.cost.ring_tokens
    most_misses = math.inf if unsure else MOST_MISSES
    candidates = Candidates(Forecast(sequences, packing, bubble_share), quantum, packing.tolerance)
    candidates.begin(fewest_microbatches(sequences, packing, quantum), alone=not chooses)
    best: tuple[float, Placement] | None = None
    misses, dealt = 0, False
    while best is None or not (misses >= most_misses or candidates.are_ruled_out(best[0])):
        count = candidates.take(first=best is None)
        filled = fill_step(sequences, count, packing.tolerance)
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
        placement, loads = placement_of(
            filled, count, room.num_ranks, order, exchange=packing.objective == "step"
        )
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


def ranks_taken(sequences: Sequences, members: LongArray) -> int:
    """How many ranks, of all microbatches, the packs of these sequences take at least; 0 if one holds all."""
    room = sequences.room
    if room.max_sequences >= members.size:
        return 0
    sizes = np.array(room.sizes)[narrowest_holding(room, sequences.padded[:, members])]
    return int(sizes.sum()) // room.max_sequences
