"""The planner's entry point: lengths in, a frozen plan out, the same on every rank."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from meshfeed.errors import PlanError
from meshfeed.plan.choose import choose
from meshfeed.plan.encoders.even_out import even_out
from meshfeed.plan.encoders.swap import MOST_COSTS
from meshfeed.plan.packing import Packing, asked_microbatches, shape_of
from meshfeed.plan.place import Placement
from meshfeed.plan.problem import Room, room_of, rows_of
from meshfeed.plan.types import Align, CpSplit, FloatArray, LongArray, StepPlan, is_count


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
    encoder_work: npt.ArrayLike | None = None,
) -> StepPlan:
    """Plan one step: a pure function of its arguments, for any lengths and any number of ranks.

    lengths: real tokens of each sequence of the global batch, in stream order; int [n], n >= 0.
    dp, cp: the layout's sizes. The plan is for their dp * cp ranks; dynamic_cp chooses cp groups of its own.
    pp, vpp: pipeline stages and virtual stages per rank, which weigh the pipeline's bubble.
    quantum: the number of microbatches is a multiple of this; None for the packing's own.
    cp_split: how cp ranks will split the packs; only "pack_contiguous" needs less padding than the others.
    encoder_work: work of an encoder on the images, audio or video of each sequence, in any unit, on the ranks
        that hold the sequence; float [n], or [num_encoders, n] for up to 3 encoders. Packs are then balanced
        for these as well as for the language model; "in_order" ignores it. None for no encoder.

    Every sequence that is kept is in one pack, and no rank has more than packing.capacity padded tokens in a
    microbatch, no pack more than packing.max_sequences. A rank without sequences in a microbatch gets a
    dummy, an empty pack.
    Raises PlanError for a sequence that is too long under oversize="error", a negative length, a size below
    1, a capacity below the alignment, or encoder_work that is negative or of another shape.
    """
    if not all(map(is_count, (dp, cp, pp, vpp, 1 if quantum is None else quantum))):
        raise PlanError(
            f"dp={dp}, cp={cp}, pp={pp}, vpp={vpp}, quantum={quantum}: each is a whole number from 1 on"
        )
    quantum = quantum or packing.quantum or (pp if vpp > 1 else 1)
    room = room_of(packing, dp=dp, cp=cp, split=cp_split)
    whole = _whole(lengths)
    works = None if encoder_work is None else _works(encoder_work, whole.size)
    rows = rows_of(whole, longest=room.longest, policy=packing.oversize)
    kept = rows.lengths[rows.kept]
    if packing.policy == "in_order" or not kept.size:
        placed = in_order(kept, packing, room, quantum=quantum)
    else:
        placed = choose(kept, packing, room, quantum=quantum, bubble_share=(pp - 1) / vpp)
        if works is not None:
            # a piece of a sequence has its share of the parts
            of = rows.sequence[rows.kept]
            placed = even_out(placed, kept, works[:, of] * (kept / whole[of]), packing, room)
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


def _whole(lengths: npt.ArrayLike) -> LongArray:
    given = np.asarray(lengths)
    if given.size and (given.dtype.kind not in "iu" or given.ndim != 1):
        raise PlanError(f"lengths: {given.dtype} {list(given.shape)}; give whole numbers in one dimension")
    return given.astype(np.int64).ravel()


def _works(encoder_work: npt.ArrayLike, num_sequences: int) -> FloatArray:
    given = np.asarray(encoder_work)
    works = np.atleast_2d(given)
    if given.dtype.kind not in "iuf" or works.ndim > 2 or works.shape[-1] != num_sequences:
        raise PlanError(
            f"encoder_work: {given.dtype} {list(given.shape)}; give the work on each of {num_sequences} "
            f"sequences"
        )
    if len(works) >= MOST_COSTS:
        raise PlanError(f"encoder_work of {len(works)} encoders: at most {MOST_COSTS - 1}")
    if not (np.isfinite(works) & (works >= 0)).all():
        raise PlanError(f"encoder_work: {works.min()} to {works.max()}; work is finite, and 0 or more")
    return works.astype(np.float64)
