"""A plan, and what it says of one rank: its packs, and its slices of them. The same on every rank.

A *dp_cp rank* is a rank's place among the ranks that split one global batch: dp * cp_size + cp, from 0. A
cp group is a block of consecutive dp_cp ranks. Arrays are read-only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Bools, Ints, Longs
from meshfeed.errors import PlanError
from meshfeed.intervals import distinct
from meshfeed.whole import is_whole, of_kind, settle, whole, whole_numbers

_MOST_TOKENS = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Align:
    """Multiples that padding must reach; each combines with what the cp split itself needs by lcm.

    Attributes:
        sequence: every sequence is padded to a multiple of this (tp for sequence parallel, say).
        pack: every rank's share of a pack is padded to a multiple of this (32 or 128 for fp8, say).
        in_runs: context parallelism cuts packs into one run per rank, so sequences need no multiple.
            `plan_step` sets this for cp_split="pack_contiguous".
    """

    sequence: int = 1
    pack: int = 1
    in_runs: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        settle(self)
        for name in ("sequence", "pack"):
            if not is_whole(getattr(self, name)):
                raise PlanError(
                    f"Align({name}={getattr(self, name)!r}): a multiple is a whole number from 1 on"
                )

    def padded(self, lengths: Longs, cp_size: int | npt.NDArray[np.integer]) -> Longs:
        """Lengths rounded up to whole multiples of lcm(sequence, 2 * cp_size); int64, same shape.

        A cp group of one needs no chunks, hence no factor of 2; nor do runs of a pack, which need no cp_size.
        """
        multiple = self.sequence_multiple(cp_size)
        return -(-lengths // multiple) * multiple

    def sequence_multiple(self, cp_size: int | npt.NDArray[np.integer]) -> Longs:
        """The multiple that a sequence's padded tokens reach on a cp group of this size; int64."""
        cp = np.asarray(cp_size, np.int64)
        return np.lcm(self.sequence, np.where((cp > 1) & (not self.in_runs), 2 * cp, 1))

    def pack_multiple(self, cp_size: int | npt.NDArray[np.integer]) -> Longs:
        """The multiple that a whole pack's padded tokens reach on a cp group of this size; int64."""
        cp = np.asarray(cp_size, np.int64)
        return np.lcm(self.pack * cp, self.sequence_multiple(cp_size))

    def limit(self, capacity: int, cp_size: int | npt.NDArray[np.integer]) -> Longs:
        """The most tokens of a pack on a cp group, capacity tokens on each rank; int64, 0 if none fit."""
        multiple = self.pack_multiple(cp_size)
        tokens = min(capacity, _MOST_TOKENS) * np.asarray(cp_size, np.int64)
        return np.minimum(tokens, _MOST_TOKENS) // multiple * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class PackShape:
    """The common shape of all packs on cp groups of one size.

    Attributes:
        capacity: padded tokens of each rank, not rounded to the alignment yet.
        max_sequences: the most sequences of a pack; its cu_seqlens have two more entries.
    """

    capacity: int
    max_sequences: int


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """One step: every sequence's microbatch and ranks. Equal only to itself.

    A row is a sequence, in stream order. If too long ones are split, a row is a piece of a sequence: its
    tokens start ... start + length. The pieces of a sequence are consecutive rows.

    Attributes:
        lengths: real tokens of each row, also of rows that are left out; int64 [n].
        microbatch: the microbatch that holds it, or -1 if it is left out (empty or dropped); int32 [n].
        first_rank: first dp_cp rank of the cp group that holds it; int32 [n].
        cp_size: size of that group; int32 [n].
        num_microbatches: the same on every rank of the step.
        num_ranks: dp_cp ranks.
        idle_cp_size: cp group size of a rank without sequences in a microbatch.
        align: padding multiples.
        shape: of every pack; None if packs are as large as their sequences.
        sequence: index in the global batch of each row's sequence; int32 [n]. If not given, row i is all of
            sequence i.
        start: first token of each row in that sequence; int64 [n]. If not given, 0.
        oversize: indices in the global batch of sequences too long to hold, which were truncated, split or
            dropped; int32 [k].
    """

    lengths: Longs
    microbatch: Ints
    first_rank: Ints
    cp_size: Ints
    num_microbatches: int
    num_ranks: int
    idle_cp_size: int
    align: Align
    shape: PackShape | None = None
    sequence: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    start: Longs = field(default_factory=lambda: np.zeros(0, np.int64))
    oversize: Ints = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        if not self.sequence.size:
            object.__setattr__(self, "sequence", np.arange(self.lengths.size, dtype=np.int32))
            object.__setattr__(self, "start", np.zeros(self.lengths.size, np.int64))
        arrays = (self.lengths, self.microbatch, self.first_rank, self.cp_size, self.sequence, self.start)
        for array in (*arrays, self.oversize):
            array.flags.writeable = False

    @property
    def empty(self) -> Ints:
        """Rows without a token, which no pack holds; int32 [k]."""
        return np.flatnonzero(self.lengths == 0).astype(np.int32)

    @cached_property
    def kept(self) -> Longs:
        """Rows that some pack holds; int64 [k]."""
        return np.flatnonzero(self.microbatch >= 0)

    @cached_property
    def tokens(self) -> int:
        """Real tokens of all packs."""
        return int(self.lengths[self.kept].sum())

    @cached_property
    def sum_sq(self) -> int:
        """Sum of the squared real lengths of the rows in all packs."""
        lengths = self.lengths[self.kept]
        return exact_sum(lengths, lengths)

    @cached_property
    def idle_tokens(self) -> int:
        """Tokens on each rank of a pack without a sequence, all padding."""
        return int(self.align.pack_multiple(self.idle_cp_size)) // self.idle_cp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """What one cp group processes in one microbatch. Empty for a dummy microbatch.

    Attributes:
        sequences: indices of rows of the plan, in packing order; int32 [k].
        cu_seqlens: sequence starts in real tokens, then their end; int32 [k + 1].
        cu_seqlens_padded: the same with each sequence padded; int32 [k + 1].
        cp_size, cp_rank: the cp group that splits the pack, and this rank's place in it.
        tail: tokens after the last sequence, all padding: a dummy sequence, which makes packs equal in shape.
        max_sequences: of packs of one shape; None for others.
    """

    sequences: Ints
    cu_seqlens: Ints
    cu_seqlens_padded: Ints
    cp_size: int
    cp_rank: int
    tail: int = 0
    max_sequences: int | None = None

    def __post_init__(self) -> None:
        for array in (self.sequences, self.cu_seqlens, self.cu_seqlens_padded):
            array.flags.writeable = False

    @property
    def lengths(self) -> Longs:
        """Real tokens of each sequence; int64 [k]."""
        return np.subtract(self.cu_seqlens[1:], self.cu_seqlens[:-1], dtype=np.int64)

    @property
    def padded_lengths(self) -> Longs:
        """Padded tokens of each sequence; int64 [k]."""
        return np.subtract(self.cu_seqlens_padded[1:], self.cu_seqlens_padded[:-1], dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole pack, all padding included."""
        return int(self.cu_seqlens_padded[-1]) + self.tail


def packs_of(plan: StepPlan, dp_cp_rank: int, *, together: int = 1) -> list[Pack]:
    """The packs that one rank works on, one for each microbatch.

    dp_cp_rank: dp * cp_size + cp of the rank, 0 to plan.num_ranks - 1; not its global rank.
    together: how many consecutive microbatches make one pack, to be read at once.
    Raises PlanError for another rank.
    """
    of_kind(PlanError, StepPlan, plan=plan)
    dp_cp_rank = whole(dp_cp_rank)
    (together,) = whole_numbers(PlanError, 1, together=together)
    if not (is_whole(dp_cp_rank, 0) and dp_cp_rank < plan.num_ranks):
        raise PlanError(
            f"dp_cp_rank={dp_cp_rank!r}: the plan has ranks 0 to {plan.num_ranks - 1}, counted in dp and cp"
        )
    return packs_of_rank(plan, dp_cp_rank, together)


def packs_of_rank(plan: StepPlan, dp_cp_rank: int, together: int) -> list[Pack]:
    """See `packs_of`, of arguments that are known to be right."""
    has_rank = (plan.first_rank <= dp_cp_rank) & (dp_cp_rank < plan.first_rank + plan.cp_size)
    mine = np.flatnonzero(has_rank & (plan.microbatch >= 0))
    mine = mine[np.argsort(plan.microbatch[mine], kind="stable")].astype(np.int32)
    edges = np.arange(0, plan.num_microbatches + together, together)
    microbatch, lengths, cp_size = plan.microbatch[mine], plan.lengths[mine], plan.cp_size[mine]
    bounds = np.searchsorted(microbatch, edges).tolist()
    padded, shape = _padded(plan, mine, microbatch), plan.shape
    ends, padded_ends = _ends(lengths), _ends(padded)
    packs: list[Pack] = []
    for start, stop in pairwise(bounds):
        size = int(cp_size[start]) if start < stop else plan.idle_cp_size
        first = int(plan.first_rank[mine[start]]) if start < stop else dp_cp_rank // size * size
        used = int(padded_ends[stop] - padded_ends[start])
        if used > _MOST_TOKENS:
            raise PlanError(f"a pack of {used} tokens does not fit cu_seqlens (int32); lower the capacity")
        packs.append(
            Pack(
                sequences=mine[start:stop],
                cu_seqlens=(ends[start : stop + 1] - ends[start]).astype(np.int32),
                cu_seqlens_padded=(padded_ends[start : stop + 1] - padded_ends[start]).astype(np.int32),
                cp_size=size,
                cp_rank=dp_cp_rank - first,
                tail=0 if shape is None else int(plan.align.limit(shape.capacity, size)) - used,
                max_sequences=None if shape is None else shape.max_sequences,
            )
        )
    return packs


def rows_in_packs(plan: StepPlan) -> tuple[Longs, Longs, Longs]:
    """Padded tokens of each row, its first token in its pack, and the tokens of that pack; int64 [n] each.

    As in `packs_of` of the ranks that hold it. 0 for rows that no pack holds.
    """
    rows = plan.kept[np.lexsort((plan.first_rank[plan.kept], plan.microbatch[plan.kept]))]
    pack = plan.microbatch[rows].astype(np.int64) * plan.num_ranks + plan.first_rank[rows]
    padded, last = _padded(plan, rows, pack), np.flatnonzero(np.diff(pack, append=-1))
    ends, of = _ends(padded), np.searchsorted(last, np.arange(rows.size))
    firsts = ends[np.append(0, last[:-1] + 1)[: last.size]]
    totals = ends[last + 1] - firsts
    if plan.shape is not None:
        totals = plan.align.limit(plan.shape.capacity, plan.cp_size[rows[last]])
    found = np.zeros((3, plan.lengths.size), np.int64)
    found[:, rows] = padded, ends[:-1] - firsts[of], totals[of]
    return found[0], found[1], found[2]


def _padded(plan: StepPlan, rows: Longs | Ints, pack: Longs | Ints) -> Longs:
    """Padded tokens of some rows; the last one of a pack carries the pack's own padding, if it needs some.

    pack: a number for the pack of each row; those of a pack are together.
    """
    size = plan.cp_size[rows]
    padded = plan.align.padded(plan.lengths[rows], size)
    if plan.shape is None and (plan.align.pack > 1 or plan.align.in_runs):
        last = np.flatnonzero(np.diff(pack, append=-1))
        totals = np.diff(_ends(padded)[last + 1], prepend=0)
        padded[last] += -totals % plan.align.pack_multiple(size[last])
    return padded


def _ends(lengths: Longs) -> Longs:
    # [3 2] -> [0 3 5]
    ends = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends


def exact_sum(values: Longs, times: Longs | None = None) -> int:
    """The sum of integers, or of their products, as a Python int that cannot overflow.

    values, times: each from 0 to below 2**62 (without times) or 2**31; int64 [n].
    """
    products = values if times is None else values * times
    # halves of 31 bits: their sums cannot overflow for any number of rows that fits memory
    return (int((products >> 31).sum()) << 31) + int((products & (2**31 - 1)).sum())


Encoder = Literal["with sample", "group", "balanced"]
"""Who encodes images, audio and video. with sample: every rank of a cp group encodes all parts of its pack.
group: the ranks of a cp group share the parts of their pack. balanced: all dp_cp ranks share the parts of a
microbatch. Whoever shares sends each output to the rank that has its token."""
NoLoss = Literal["error", "allow"]
"""What becomes of a step in which no token bears loss: it is refused before it is read, or given as it is."""
CpSplit = Literal["zigzag", "contiguous", "pack_contiguous"]
"""zigzag: chunks r and 2*cp-1-r of each sequence, so that causal attention costs every rank the same.
contiguous: the r-th of cp equal chunks of each sequence. pack_contiguous: the r-th of cp equal runs of the
pack, wherever its sequences begin; for layers that pass a state from token to token."""


@dataclass(frozen=True)
class Slices:
    """Token ranges of a pack's sequences, in the order in which they are held.

    Attributes:
        sequence: which sequence of the pack; int32 [m]. The one after the last is the dummy at its end.
        start, stop: tokens of that sequence, padding included; int64 [m].
    """

    sequence: Ints
    start: Longs
    stop: Longs

    @cached_property
    def sizes(self) -> Longs:
        """Tokens of each slice; int64 [m]."""
        return self.stop - self.start

    @cached_property
    def offsets(self) -> Longs:
        """Where each begins if all are stored one after the other; int64 [m]."""
        return np.cumsum(self.sizes) - self.sizes

    def only(self, mask: Bools) -> Slices:
        """Some of the slices."""
        return Slices(self.sequence[mask], self.start[mask], self.stop[mask])


def cuts_packs(split: CpSplit) -> bool:
    """Whether a split cuts packs as a whole, not each sequence."""
    return split == "pack_contiguous"


def check_split(split: str) -> None:
    """Raises PlanError for an unknown split."""
    if split not in get_args(CpSplit):
        raise PlanError(f"cp split {split!r}: choose one of {', '.join(get_args(CpSplit))}")


def slices_of(pack: Pack, cp_ranks: Sequence[int], split: CpSplit) -> Slices:
    """The slices that some ranks of a pack's cp group hold together, neighbours joined.

    Zigzag after Megatron-core and Llama 3 (chunk r and its mirror image 2*cp-1-r). For one rank this is
    what it works on; for several, what a reader must have to serve them all.
    Raises PlanError if cp does not divide the padded lengths, or the split is unknown.
    """
    of_kind(PlanError, Pack, pack=pack)
    check_split(split)
    return held_slices(pack, cp_ranks, split)


def held_slices(pack: Pack, cp_ranks: Sequence[int], split: CpSplit) -> Slices:
    """See `slices_of`, of a known split."""
    num_chunks, first, last = chunk_runs(cp_ranks, pack.cp_size, split)
    whole = cuts_packs(split)
    bounds = pack.cu_seqlens_padded.astype(np.int64)
    if pack.tail:
        bounds = np.append(bounds, pack.num_tokens)
    lengths = bounds[-1:] if whole else bounds[1:] - bounds[:-1]
    if num_chunks == 1 and not whole:
        return Slices(np.arange(lengths.size, dtype=np.int32), np.zeros_like(lengths), lengths)
    if (lengths % num_chunks).any():
        bad = lengths[lengths % num_chunks > 0][:3]
        raise PlanError(f"padded lengths {bad} do not split in {num_chunks}; pad with Align.padded")
    size = (lengths // num_chunks)[:, None]
    start, stop = (size * first).ravel(), (size * last).ravel()
    if whole:
        return cut_at(bounds, start, stop)
    return Slices(np.repeat(np.arange(lengths.size, dtype=np.int32), first.size), start, stop)


def chunk_runs(cp_ranks: Sequence[int], cp_size: int, split: CpSplit) -> tuple[int, Longs, Longs]:
    """Into how many chunks a sequence is cut, and the runs of chunks [first, last) that some ranks hold.

    Ranks 0 and 1 of cp 4, zigzag: chunks 0 1 6 7 of 8 -> first [0 6], last [2 8].
    """
    try:
        if len(cp_ranks) == cp_size:
            return 1, np.array([0]), np.array([1])
        ranks = np.sort(np.asarray(cp_ranks, np.int64))
    except (OverflowError, TypeError, ValueError):
        ranks = np.zeros(0, np.int64)
    if ranks.shape == (0,) or ranks[0] < 0 or ranks[-1] >= cp_size:
        raise PlanError(f"cp_ranks={cp_ranks!r}: give some of the {cp_size} ranks of the pack's cp group")
    num_chunks, chunks = cp_size, ranks
    if split == "zigzag":
        num_chunks, chunks = 2 * cp_size, np.concatenate((ranks, 2 * cp_size - 1 - ranks[::-1]))
    breaks = np.flatnonzero(np.diff(chunks) > 1)
    return num_chunks, chunks[np.append(0, breaks + 1)], chunks[np.append(breaks, chunks.size - 1)] + 1


def cut_at(bounds: Longs, start: Longs, stop: Longs) -> Slices:
    """Ranges of a pack -> slices of its sequences.

    bounds: sequence starts and the pack's end, int64 [k + 1]. start, stop: ranges, ascending, int64 [m].
    """
    inside = bounds[((bounds[:, None] > start) & (bounds[:, None] < stop)).any(axis=1)]
    starts, stops = distinct(np.concatenate((start, inside))), distinct(np.concatenate((stop, inside)))
    filled = starts < stops  # an empty pack has the one range [0, 0)
    starts, stops = starts[filled], stops[filled]
    sequence = np.searchsorted(bounds, starts, side="right") - 1
    return Slices(sequence.astype(np.int32), starts - bounds[sequence], stops - bounds[sequence])
