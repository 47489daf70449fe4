"""Context parallelism: which tokens of a pack each rank of a cp group holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meshfeed.errors import PlanError
from meshfeed.plan.types import IntArray, LongArray, Pack

CpSplit = Literal["zigzag", "contiguous"]
"""zigzag: chunks r and 2*cp-1-r of each sequence, so that causal attention costs every rank the same.
contiguous: the r-th of cp equal chunks."""


@dataclass(frozen=True, slots=True)
class Slices:
    """Token ranges of a pack's sequences, in the order in which they are held.

    Attributes:
        sequence: which sequence of the pack; int32 [m].
        start, stop: tokens of that sequence, padding included; int64 [m].
    """

    sequence: IntArray
    start: LongArray
    stop: LongArray

    def __post_init__(self) -> None:
        for array in (self.sequence, self.start, self.stop):
            array.flags.writeable = False

    @property
    def sizes(self) -> LongArray:
        """Tokens of each slice; int64 [m]."""
        return self.stop - self.start


def slices_of(pack: Pack, cp_ranks: Sequence[int], split: CpSplit) -> Slices:
    """The slices that some ranks of a pack's cp group hold between them, neighbours joined.

    Zigzag after Megatron-core and Llama 3 (chunk r and its mirror image 2*cp-1-r). For one rank this is
    what it works on; for several, what a reader must have to serve them all.
    Raises PlanError where cp does not divide the padded lengths, or the split is unknown.
    """
    if split not in ("zigzag", "contiguous"):
        raise PlanError(f"cp split {split!r}: choose 'zigzag' or 'contiguous'")
    cp, lengths = pack.cp_size, pack.padded_lengths
    every = np.arange(lengths.size, dtype=np.int32)
    if len(cp_ranks) == cp:
        return Slices(every, np.zeros_like(lengths), lengths)
    if split == "zigzag":
        ranks = np.asarray(cp_ranks)
        num_chunks, chunks = 2 * cp, np.sort(np.concatenate((ranks, 2 * cp - 1 - ranks)))
    else:
        num_chunks, chunks = cp, np.sort(np.asarray(cp_ranks))
    if (lengths % num_chunks).any():
        raise PlanError(
            f"padded lengths {lengths[lengths % num_chunks > 0][:3]} do not split in {num_chunks}"
        )
    # chunks [0 1 6 7] -> runs [0 2) [6 8)
    breaks = np.flatnonzero(np.diff(chunks) > 1)
    first = chunks[np.concatenate(([0], breaks + 1))]
    last = chunks[np.concatenate((breaks, [chunks.size - 1]))] + 1
    size = (lengths // num_chunks)[:, None]
    return Slices(
        sequence=every.repeat(first.size),
        start=(size * first).ravel(),
        stop=(size * last).ravel(),
    )
