"""Which rank encodes which part of a step. Pure."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Bools, Floats, Ints, Longs
from meshfeed.errors import PlanError
from meshfeed.intervals import numbers_in
from meshfeed.multimodal.native import compiled
from meshfeed.native import ARRAY, LONGS, WHOLE
from meshfeed.plan.account import least_pile
from meshfeed.plan.types import Encoder, StepPlan

_share = compiled("mf_share", *(WHOLE, LONGS, LONGS, LONGS), *(ARRAY, LONGS, ARRAY))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderPlan:
    """The parts of one kind in one step. Equal only to itself.

    An entry is a part in a row of the step's plan. A part across the end of a row has an entry for each of
    its rows, and one that no row holds has none. Entries are in the order of the parts.

    Attributes:
        encoder: which ranks share parts.
        part: which of the parts given each is; int64 [k].
        work: of the encoder on the part; float64 [k].
        row: the row of the step's plan that holds tokens of it; int32 [k].
        microbatch: of that row; int32 [k].
        rank: the dp_cp rank that encodes it; with "with sample", where all ranks of a cp group do, the one
            that would if they shared; see `handed`; int32 [k].
        first_rank, cp_size: the cp group that holds the row, and so needs the output: its first dp_cp rank,
            and how many; int32 [k].
        loads: work of each rank in each microbatch; float64 [num_microbatches, num_ranks].
    """

    encoder: Encoder
    part: Longs
    work: Floats
    row: Ints
    microbatch: Ints
    rank: Ints
    first_rank: Ints
    cp_size: Ints
    loads: Floats

    def __post_init__(self) -> None:
        entries = (self.part, self.work, self.row, self.microbatch, self.rank, self.first_rank, self.cp_size)
        for array in (*entries, self.loads):
            array.flags.writeable = False

    def is_near(self, rank: int) -> Bools:
        """Which entries a rank encodes, or may need the output of; bool [k]."""
        in_group = (self.first_rank <= rank) & (rank < self.first_rank + self.cp_size)
        return in_group | (self.rank == rank)

    @property
    def max_over_mean(self) -> float:
        """The busiest rank's work over the mean of all ranks, microbatches together; 1 without work."""
        return self._over_mean(self.loads.max(axis=1, initial=0.0))

    @property
    def bound(self) -> float:
        """No choice of ranks for these parts brings `max_over_mean` below this."""
        num_ranks, least = self.loads.shape[1], self.loads.mean(axis=1)
        for m, mean in enumerate(least.tolist()):
            work = self.work[self.microbatch == m]
            if work.size:
                least[m] = max(mean, least_pile(np.sort(work)[::-1], num_ranks))
        return self._over_mean(least)

    def _over_mean(self, busiest: Floats) -> float:
        mean = self.loads.sum() / self.loads.shape[1]
        return float(busiest.sum() / mean) if mean else 1.0

    @property
    def handed(self) -> Floats:
        """Work of all parts that each rank gets in each microbatch; float64, as `loads`.

        With "with sample", every rank of a cp group gets and encodes all parts of its pack, so the sum over
        ranks counts parts more than once.
        """
        if self.encoder != "with sample":
            return self.loads
        num_microbatches, num_ranks = self.loads.shape
        rank = numbers_in(self.first_rank, self.cp_size)
        at = self.microbatch.astype(np.int64).repeat(self.cp_size) * num_ranks + rank
        sums = np.bincount(at, self.work.repeat(self.cp_size), self.loads.size).astype(np.float64)
        return sums.reshape(num_microbatches, num_ranks)


def plan_encoder(
    plan: StepPlan,
    sequence: npt.ArrayLike,
    work: npt.ArrayLike,
    *,
    encoder: Encoder = "with sample",
    start: npt.ArrayLike | None = None,
    tokens: npt.ArrayLike | None = None,
) -> EncoderPlan:
    """Give each part, the largest first, to the least loaded rank: a pure function of its arguments.

    plan: of the step, for any number of parts, including none.
    sequence: place in the global batch of the sequence of each part, as in `Parts.sample`; int [p].
    work: of the encoder on each, in any unit; float [p].
    encoder: see `Encoder`.
    start, tokens: the first token of each in its sequence, and how many it has; int [p]. Needed if the plan
        has cut sequences.
    Raises PlanError for arrays of other shapes, a sequence that the batch does not have, negative work, or
    missing start and tokens.
    """
    if encoder not in get_args(Encoder):
        raise PlanError(f"encoder={encoder!r}: choose one of {', '.join(get_args(Encoder))}")
    of, cost = np.asarray(sequence, np.int64).ravel(), np.asarray(work, np.float64).ravel()
    num_sequences = int(plan.sequence.max(initial=-1)) + 1
    if of.size != cost.size or not ((of >= 0) & (of < num_sequences)).all():
        raise PlanError(
            f"{of.size} sequences and work on {cost.size} parts; give one of each for every part, of a batch "
            f"of {num_sequences} sequences"
        )
    if not is_work(cost):
        raise PlanError(f"work: {cost.min()} to {cost.max()}; it is finite, and 0 or more")
    part, row = _rows(plan, of, start, tokens)
    cost, microbatch = cost[part], plan.microbatch[row]
    first_rank, cp_size = plan.first_rank[row], plan.cp_size[row]
    # the ranks that share parts: their first, and how many
    pool, size = first_rank, cp_size
    if encoder == "balanced":
        pool, size = np.zeros_like(first_rank), np.full_like(cp_size, plan.num_ranks)
    num_places = plan.num_microbatches * plan.num_ranks
    begin = microbatch.astype(np.int64) * plan.num_ranks
    place = share(cost, begin + pool, size.astype(np.int64), num_places)
    loads = np.bincount(place, cost, num_places).astype(np.float64)
    return EncoderPlan(
        encoder=encoder,
        part=part,
        work=cost,
        row=row.astype(np.int32),
        microbatch=microbatch,
        rank=(place - begin).astype(np.int32),
        first_rank=first_rank,
        cp_size=cp_size,
        loads=loads.reshape(plan.num_microbatches, plan.num_ranks),
    )


def share(work: Floats, first: Longs, size: Longs, num_places: int) -> Longs:
    """Give each piece of work to the least loaded place of its pool, the largest first; int64 [n].

    work: float64 [n]. first, size: the first place of its pool, and how many there are; int64 [n]. Pools are
    the same or apart. num_places: of all pools.
    """
    shared, given = np.flatnonzero(size > 1), first.copy()
    if not shared.size:
        return given
    order = shared[descending(work[shared])]
    if _share is not None:
        pools = np.stack((np.zeros(num_places, np.int64), np.arange(num_places)), axis=1)
        _share(*(order.size, order, first, size), *(work, given, pools))
        return given
    heaps = dict[int, list[tuple[float, int]]]()
    for piece in order.tolist():
        begin = int(first[piece])
        heap = heaps.setdefault(begin, [(0.0, place) for place in range(begin, begin + int(size[piece]))])
        load, given[piece] = heap[0]
        heapq.heapreplace(heap, (load + float(work[piece]), int(given[piece])))
    return given


def is_work(works: Floats) -> bool:
    """Whether all of it is finite, and 0 or more."""
    return bool(works.min(initial=0) >= 0 and works.max(initial=0) < np.inf)


def descending(work: Floats) -> Longs:
    """Indices, the largest work first, and the first of nearly equal ones.

    Several times as fast as a stable argsort. work: from 0; float64 [n].
    """
    shift, largest = work.size.bit_length(), np.iinfo(np.int64).max
    # the bits of numbers from 0 ascend as they do; the lowest make place for the index
    keys = (largest - (work + 0.0).view(np.int64)) >> shift << shift | np.arange(work.size)
    keys.sort()
    return keys & ((1 << shift) - 1)


def _rows(
    plan: StepPlan, of: Longs, start: npt.ArrayLike | None, tokens: npt.ArrayLike | None
) -> tuple[Longs, Longs]:
    """Pairs of a part and a row that holds some of it; int64 [k] each."""
    # the rows of a sequence follow each other
    if not plan.oversize.size and plan.kept.size == plan.lengths.size:
        return np.arange(of.size), of
    counts = np.bincount(plan.sequence)
    num_rows = counts[of]
    part, row = np.arange(of.size).repeat(num_rows), numbers_in((counts.cumsum() - counts)[of], num_rows)
    held = plan.microbatch[row] >= 0
    if plan.oversize.size:
        if start is None or tokens is None:
            raise PlanError("the plan has cut sequences: give the start and the tokens of each part")
        begin, count = np.asarray(start, np.int64).ravel(), np.asarray(tokens, np.int64).ravel()
        if not begin.size == count.size == of.size:
            raise PlanError(f"start of {begin.size}, tokens of {count.size}, for {of.size} parts")
        begin, end = begin[part], (begin + count)[part]
        held &= (begin < plan.start[row] + plan.lengths[row]) & (end > plan.start[row])
    return part[held], row[held]
