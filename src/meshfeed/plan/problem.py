"""The rows of a batch, the room of its ranks and the costs there; groups of sequences, and their places."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from meshfeed.arrays import Floats, Ints, Longs
from meshfeed.errors import PlanError
from meshfeed.intervals import numbered
from meshfeed.plan.packing import CostModel, Oversize, Packing, sizes_of
from meshfeed.plan.types import Align, CpSplit, check_split

EXACT = 1 + 1e-9
"""Tolerance for rounding when loads that should be equal are compared."""

WORTH = 1.3
"""A cp group is not widened to balance loads if communication then takes this share more work."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step: sequences, or pieces of them, in stream order.

    Attributes:
        lengths: tokens of each row; int64 [n].
        kept: rows that some pack must hold, which have a token and are not dropped; bool [n].
        sequence: the sequence of the batch that a row is of; int32 [n].
        start: the row's first token in that sequence; int64 [n].
        oversize: sequences that were too long; int32 [k].
    """

    lengths: Longs
    kept: np.ndarray[tuple[int], np.dtype[np.bool_]]
    sequence: Ints
    start: Longs
    oversize: Ints


@dataclass(frozen=True, slots=True)
class Uncut:
    """Ranges of tokens that no row may hold a share of, such as those of an image.

    Attributes:
        sequence: which of the batch; int64 [k], ascending.
        begin, end: tokens of that sequence; those of one sequence ascend and do not overlap; int64 [k] each.
    """

    sequence: Longs
    begin: Longs
    end: Longs

    def of(self, sequence: int) -> tuple[Longs, Longs]:
        """Begins and ends in one sequence."""
        first, stop = np.searchsorted(self.sequence, (sequence, sequence + 1))
        return self.begin[first:stop], self.end[first:stop]


def rows_of(lengths: Longs, *, longest: int, policy: Oversize, uncut: Uncut | None = None) -> Rows:
    """Deal with sequences of more than `longest` tokens.

    truncate keeps their first `longest` tokens, drop keeps none, split makes equal pieces, as few as fit:
    25 tokens with longest = 10 -> 9 + 8 + 8. A cut within an uncut range moves, which can take more pieces:
    truncate keeps what is before it, and split cuts before it, or behind it where nothing is before it.
    Raises PlanError for such a sequence under "error", for a negative length, and under "split" for an uncut
    range of more than `longest` tokens.
    """
    if lengths.size and lengths.min() < 0:
        raise PlanError(f"sequence {int(lengths.argmin())}: {lengths.min()} tokens; a length is 0 or more")
    too_long = np.flatnonzero(lengths > longest).astype(np.int32)
    if too_long.size and policy == "error":
        first = int(too_long[0])
        raise PlanError(
            f"sequence {first} of the batch: {lengths[first]} tokens > {longest}, the most that capacity x "
            f"the widest cp group holds ({too_long.size} such sequences); "
            f"raise capacity or cp, or set oversize='split', 'truncate' or 'drop' (--oversize)"
        )
    if not too_long.size:
        whole, start = np.arange(lengths.size, dtype=np.int32), np.zeros(lengths.size, np.int64)
        return Rows(lengths, lengths > 0, whole, start, too_long)
    if uncut is not None and policy in ("truncate", "split"):
        return _rows_around(lengths, longest, policy == "split", uncut, too_long)
    num_pieces = np.ones(lengths.size, np.int64)
    if policy == "split":
        num_pieces = np.maximum(-(-lengths // longest), 1)
    sequence, piece = numbered(num_pieces)
    share, longer = np.divmod(lengths, num_pieces)
    # 25 in 3: shares 8 8 8, the first one longer by a token
    start = piece * share[sequence] + np.minimum(piece, longer[sequence])
    rows = share[sequence] + (piece < longer[sequence])
    if policy == "truncate":
        rows = np.minimum(rows, longest)
    kept = (rows > 0) & (rows <= longest)
    return Rows(rows.astype(np.int64), kept, sequence.astype(np.int32), start.astype(np.int64), too_long)


def _rows_around(lengths: Longs, longest: int, splits: bool, uncut: Uncut, too_long: Ints) -> Rows:
    """The rows of sequences of which some must be cut, and not within an uncut range."""
    num_pieces = np.ones(lengths.size, np.int64)
    stops = {int(i): _cuts(i, int(lengths[i]), longest, splits, *uncut.of(i)) for i in too_long.tolist()}
    num_pieces[too_long] = [len(each) for each in stops.values()]
    sequence, _ = numbered(num_pieces)
    start, rows = np.zeros(sequence.size, np.int64), lengths[sequence]
    first = np.cumsum(num_pieces) - num_pieces
    for i, ends in stops.items():
        mine = slice(first[i], first[i] + len(ends))
        start[mine] = [0, *ends[:-1]]
        rows[mine] = ends - start[mine]
    return Rows(rows, rows > 0, sequence.astype(np.int32), start, too_long)


def _cuts(sequence: int, length: int, longest: int, splits: bool, begin: Longs, end: Longs) -> list[int]:
    """Where the rows of a sequence end."""

    def before(cut: int) -> int:
        at = int(np.searchsorted(begin, cut)) - 1
        return int(begin[at]) if at >= 0 and cut < end[at] else cut

    if not splits:
        return [before(longest)]
    ends = [0]
    while (left := length - ends[-1]) > 0:
        num_pieces = -(-left // longest)
        cut = before(ends[-1] + -(-left // num_pieces))
        if cut == ends[-1]:  # an uncut range begins here
            cut = int(end[np.searchsorted(begin, cut)])
        if cut - ends[-1] > longest:
            raise PlanError(
                f"sequence {sequence} of the batch: tokens {ends[-1]} to {cut} are of an image, say, which "
                f"is not split, and {cut - ends[-1]} > {longest}, the most that capacity x the widest cp "
                f"group holds; raise capacity or cp, make parts smaller, or set oversize='truncate' or "
                f"'drop' (--oversize)"
            )
        ends.append(cut)
    return ends[1:]


@dataclass(frozen=True)
class Room:
    """What the ranks of one microbatch can hold.

    Attributes:
        num_ranks: dp_cp ranks.
        sizes: cp group sizes, ascending; see `packing.check_sizes`.
        limits: padded tokens that a whole group of each size can hold, ascending: the capacity of its ranks,
            rounded down to the alignment, and what all wider ones hold at most.
        align: padding multiples.
        max_sequences: sequences that a group of any size can hold.
    """

    num_ranks: int
    sizes: tuple[int, ...]
    limits: tuple[int, ...]
    align: Align
    max_sequences: int

    @cached_property
    def size_of(self) -> Longs:
        """The sizes, by index; int64 [num_sizes]."""
        return np.array(self.sizes)

    @cached_property
    def limit_of(self) -> Longs:
        """The limits, by index; int64 [num_sizes]."""
        return np.array(self.limits)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that some group can hold."""
        return max(self.limits)

    @property
    def most_tokens(self) -> int:
        """Padded tokens that a microbatch can hold, on the widest groups."""
        return self.limits[-1] * (self.num_ranks // self.sizes[-1])


def room_of(packing: Packing, *, dp: int, cp: int, split: CpSplit = "zigzag") -> Room:
    """The room of dp x cp ranks under a packing and a split.

    Raises PlanError for cp_sizes that do not nest, an unknown split, or a capacity below the alignment.
    """
    check_split(split)
    sizes: tuple[int, ...] = (cp,)
    if packing.policy == "dynamic_cp":
        sizes = sizes_of(packing, dp * cp)
    align = replace(packing.align, in_runs=True) if split == "pack_contiguous" else packing.align
    limits = _limits(align, packing.capacity, sizes)
    if min(limits) == 0:
        size = sizes[limits.index(0)]
        multiple = int(align.pack_multiple(size))
        raise PlanError(
            f"capacity={packing.capacity}: a pack on {size} ranks is a multiple of {multiple} tokens; "
            f"raise capacity to {math.ceil(multiple / size)} or lower the alignment {packing.align}"
        )
    # what a narrower group alone could hold has no place if loads ask for a wider one
    ascending = np.minimum.accumulate(limits[::-1])[::-1]
    return Room(
        num_ranks=dp * cp,
        sizes=sizes,
        limits=tuple(ascending.tolist()),
        align=align,
        max_sequences=int(packing.max_sequences or np.iinfo(np.int32).max),
    )


@lru_cache(maxsize=64)  # asked for in every step
def _limits(align: Align, capacity: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(align.limit(capacity, np.array(sizes, np.int32)).tolist())


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences by descending length, with all that the filler needs of them.

    Attributes:
        room, cost: what a microbatch holds, and what a sequence costs.
        lengths: real tokens; int64 [n].
        padded: padded tokens on a cp group of each size; int64 [num_sizes, n].
        load: load on each rank of such a group; float64 [num_sizes, n].
        work: load on all ranks together of the narrowest group that holds it; float64 [n]. Wider groups
            communicate more.
    """

    room: Room
    cost: CostModel
    lengths: Longs
    padded: Longs
    load: Floats
    work: Floats

    @classmethod
    def of(cls, lengths: Longs, cost: CostModel, room: Room) -> Sequences:
        """lengths: descending, each at most room.longest."""
        sizes = room.size_of[:, None]
        padded = room.align.padded(lengths, sizes)
        load, work = cost.load(lengths, sizes), cost.work(lengths)
        if cost.ring_tokens:
            work = (load * sizes)[narrowest_holding(room, padded), np.arange(lengths.size)]
        return cls(room, cost, lengths, padded, load, work)

    def tokens(self, members: Longs) -> int:
        """Real tokens of some of them together. members: indices, int64 [k]."""
        return int(self.lengths[members].sum())


def narrowest_holding(room: Room, padded: Longs) -> Longs:
    """Index into room.sizes of the narrowest group that holds each sequence; int64 [n].

    padded: padded tokens on a group of each size; int64 [num_sizes, n].
    """
    return (padded <= room.limit_of[:, None]).argmax(axis=0)


def narrowest_sizes(sequences: Sequences, members: Longs, mean_load: float, tightness: int) -> Longs:
    """Index into room.sizes of the narrowest adequate group of each member; int64 [k], never ascending.

    Adequate: the group holds it and each rank's part of it is at most mean_load; with a tightness t, it takes
    at most 1 / 2^t of either. The widest if no size is adequate.
    """
    limits, sizes = sequences.room.limit_of[:, None], sequences.room.size_of[:, None]
    holds = sequences.padded[:, members] * 2**tightness <= limits
    light = sequences.load[:, members] * 2**tightness <= mean_load * EXACT
    adequate = holds & light
    if sequences.cost.ring_tokens:
        # a wider group would wait for keys and values: its ranks do more work together
        fits, together = sequences.padded[:, members] <= limits, sequences.load[:, members] * sizes
        adequate[:-1] |= fits[:-1] & (together[1:] > together[:-1] * WORTH)
    adequate[-1] = True
    return adequate.argmax(axis=0)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The groups of one microbatch.

    Attributes:
        members: indices in a Sequences, int64 [k].
        group: the group of each member; int32 [k].
        group_sizes: ranks of each group, descending, so that groups side by side are aligned; int64
            [num_groups].
        loads: load on each rank of each group; float64 [num_groups].
    """

    members: Longs
    group: Ints
    group_sizes: Longs
    loads: Floats

    @property
    def top(self) -> float:
        """The largest load."""
        return float(self.loads.max(initial=0.0))


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
