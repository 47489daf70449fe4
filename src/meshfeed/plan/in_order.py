"""Plans in stream order: nothing is balanced."""

import numpy as np
import numpy.typing as npt

from meshfeed.errors import PlanError
from meshfeed.plan.placement import Placement
from meshfeed.plan.policy import Packing, asked_microbatches
from meshfeed.plan.problem import Room
from meshfeed.plan.types import Align, LongArray, StepPlan


def plan_fixed(
    lengths: npt.NDArray[np.int64],
    *,
    dp: int,
    cp: int,
    micro_batch_size: int,
    align: Align | None = None,
    order: npt.NDArray[np.int64] | None = None,
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
