"""Context parallelism: which tokens of a pack each rank of a cp group holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from meshfeed.errors import PlanError
from meshfeed.plan.types import IntArray, LongArray, Pack

CpSplit = Literal["zigzag", "pack_zigzag", "contiguous", "pack_contiguous"]
"""zigzag: chunks r and 2*cp-1-r of each sequence, so that causal attention costs every rank the same.
pack_zigzag: chunks r and 2*cp-1-r of the pack as a whole, wherever its sequences begin; for attention that
does not see sequences. contiguous: the r-th of cp equal chunks of each sequence. pack_contiguous: the r-th of
cp equal runs of the pack, wherever its sequences begin; for layers that pass a state from token to token."""


@dataclass(frozen=True)
class Slices:
    """Token ranges of a pack's sequences, in the order in which they are held.

    Attributes:
        sequence: which sequence of the pack; int32 [m]. The one after the last is the dummy at its end.
        start, stop: tokens of that sequence, padding included; int64 [m].
    """

    sequence: IntArray
    start: LongArray
    stop: LongArray

    @cached_property
    def sizes(self) -> LongArray:
        """Tokens of each slice; int64 [m]."""
        return self.stop - self.start

    @cached_property
    def offsets(self) -> LongArray:
        """Where each begins if all are stored one after the other; int64 [m]."""
        return np.cumsum(self.sizes) - self.sizes

    def only(self, mask: npt.NDArray[np.bool_]) -> Slices:
        """Some of the slices."""
        return Slices(self.sequence[mask], self.start[mask], self.stop[mask])


def cuts_packs(split: CpSplit) -> bool:
    """Whether a split cuts packs as a whole, not each sequence."""
    return split in ("pack_zigzag", "pack_contiguous")


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
    check_split(split)
    num_chunks, first, last = chunk_runs(cp_ranks, pack.cp_size, split)
    whole = cuts_packs(split)
    bounds = pack.cu_seqlens_padded.astype(np.int64)
    if pack.tail:
        bounds = np.append(bounds, pack.num_tokens)
    lengths = bounds[-1:] if whole else np.diff(bounds)
    if (lengths % num_chunks).any():
        bad = lengths[lengths % num_chunks > 0][:3]
        raise PlanError(f"padded lengths {bad} do not split in {num_chunks}; pad with Align.padded")
    size = (lengths // num_chunks)[:, None]
    start, stop = (size * first).ravel(), (size * last).ravel()
    if whole:
        return cut_at(bounds, start, stop)
    return Slices(np.repeat(np.arange(lengths.size, dtype=np.int32), first.size), start, stop)


def chunk_runs(cp_ranks: Sequence[int], cp_size: int, split: CpSplit) -> tuple[int, LongArray, LongArray]:
    """Into how many chunks a sequence is cut, and the runs of chunks [first, last) that some ranks hold.

    Ranks 0 and 1 of cp 4, zigzag: chunks 0 1 6 7 of 8 -> first [0 6], last [2 8].
    """
    ranks = np.sort(np.asarray(cp_ranks, np.int64))
    if ranks.size == cp_size:
        return 1, np.array([0]), np.array([1])
    num_chunks, chunks = cp_size, ranks
    if split in ("zigzag", "pack_zigzag"):
        num_chunks, chunks = 2 * cp_size, np.concatenate((ranks, 2 * cp_size - 1 - ranks[::-1]))
    breaks = np.flatnonzero(np.diff(chunks) > 1)
    return num_chunks, chunks[np.append(0, breaks + 1)], chunks[np.append(breaks, chunks.size - 1)] + 1


def cut_at(bounds: LongArray, start: LongArray, stop: LongArray) -> Slices:
    """Ranges of a pack -> slices of its sequences.

    bounds: sequence starts and the pack's end, int64 [k + 1]. start, stop: ranges, ascending, int64 [m].
    """
    inside = bounds[((bounds[:, None] > start) & (bounds[:, None] < stop)).any(axis=1)]
    starts, stops = np.unique(np.concatenate((start, inside))), np.unique(np.concatenate((stop, inside)))
    filled = starts < stops  # an empty pack has the one range [0, 0)
    starts, stops = starts[filled], stops[filled]
    sequence = np.searchsorted(bounds, starts, side="right") - 1
    return Slices(sequence.astype(np.int32), starts - bounds[sequence], stops - bounds[sequence])
