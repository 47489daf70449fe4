"""Common parts of rules for packs: a rank's real tokens, and the fields computed from the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Allocate, Array, Arrays
from meshfeed.plan import Slices
from meshfeed.roles import Field
from meshfeed.sequence.rule import Portion

Longs = npt.NDArray[np.int64]

PLAN_FIELDS = (
    Field(name="position_ids", dtype="int64", split=True, stored=False),
    Field(name="sequence_ids", dtype="int32", split=True, pad=-1, stored=False),
    Field(name="padding_mask", dtype="bool", split=True, pad=1, stored=False),
    Field(name="cu_seqlens", dtype="int32", stored=False),
    Field(name="cu_seqlens_padded", dtype="int32", stored=False),
    Field(name="max_seqlen", dtype="int32", stored=False),
)
"""Fields of a pack computed from lengths alone; see `Documents` for their shapes."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The real tokens of a rank's own slices: iterates (slice, offset in the pack, start, size).

    Attributes:
        own: the slices.
        real: tokens of each without padding; int64 [m].
        num_tokens: tokens of this rank, including padding and dummies.
    """

    own: Slices
    real: Longs
    num_tokens: int

    @classmethod
    def of(cls, portion: Portion) -> Self:
        """The pieces of a portion's one pack."""
        own = portion.own
        num_tokens = int(own.sizes.sum()) if len(portion.draws) else portion.idle_tokens
        return cls(own, real_sizes(own, portion.pack.lengths), num_tokens)

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        at = np.cumsum(self.own.sizes) - self.own.sizes
        rows = zip(at.tolist(), self.own.start.tolist(), self.real.tolist())
        return ((i, offset, start, size) for i, (offset, start, size) in enumerate(rows) if size > 0)


def real_sizes(slices: Slices, lengths: Longs) -> Longs:
    """Tokens of each slice without padding; sequence i has lengths[i] real tokens; int64 [m]."""
    return np.maximum(np.minimum(slices.stop, lengths[slices.sequence]) - slices.start, 0)


def holder_of(held: Slices, sequence: int, start: int) -> int:
    """The held slice that contains an own slice; slices ascend by sequence and start."""
    first, stop = np.searchsorted(held.sequence, [sequence, sequence + 1])
    return int(first + np.searchsorted(held.start[first:stop], start, side="right") - 1)


def fields_of_plan(portion: Portion, pieces: Pieces, names: Sequence[str], allocate: Allocate) -> Arrays:
    """The named PLAN_FIELDS of a portion's one pack."""
    arrays: Arrays = {}
    own, some = pieces.own, np.flatnonzero(pieces.real)
    at = (np.cumsum(own.sizes) - own.sizes)[some]
    edges = zip([0, *(at + pieces.real[some]).tolist()], [*at.tolist(), pieces.num_tokens])
    gaps = [slice(a, b) for a, b in edges if a < b]
    for field in PLAN_FIELDS:
        if field.name not in names or not field.split:
            continue
        out = arrays[field.name] = allocate((1, pieces.num_tokens), field.dtype)
        if field.name == "position_ids":
            _count(out[0], at, own.start[some], 1)
        elif field.name == "sequence_ids":
            _count(out[0], at, own.sequence[some], 0)
        else:
            out[:] = False
        for gap in gaps:
            out[0, gap] = field.pad
    return arrays | {name: value for name, value in _lengths_of(portion).items() if name in names}


def _count(row: Array, at: Longs, first: npt.NDArray[np.integer], by: int) -> None:
    """From each index `at` on, count from `first` in steps of `by`; int64 [m], `at` ascending."""
    row[:] = by
    # as differences, summed in place: no loop over runs, and no allocation of this size
    reached = np.append(by * at[:1], first[:-1] + by * (np.diff(at) - 1))
    row[at] = first - reached
    np.cumsum(row, out=row, dtype=row.dtype)


def _lengths_of(portion: Portion) -> dict[str, Array]:
    pack = portion.pack
    cu_seqlens, padded = pack.cu_seqlens, pack.cu_seqlens_padded
    if not len(portion.draws):
        cu_seqlens = np.zeros(2, np.int32)
        padded = np.array([0, portion.idle_tokens * pack.cp_size], np.int32)
    return {
        "cu_seqlens": np.array(cu_seqlens),
        "cu_seqlens_padded": np.array(padded),
        "max_seqlen": np.array(np.diff(padded).max(initial=0), np.int32),
    }
