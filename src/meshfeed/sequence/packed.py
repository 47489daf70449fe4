"""The fields of a pack that are computed from the plan, for all rules that pack."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Allocate, Array, Arrays
from meshfeed.roles import Field
from meshfeed.sequence.compact import RunField
from meshfeed.sequence.runs import Longs, Portion, Runs

PLAN_FIELDS = (
    Field(name="position_ids", dtype="int64", split=True, stored=False),
    Field(name="sequence_ids", dtype="int32", split=True, pad=-1, stored=False),
    Field(name="padding_mask", dtype="bool", split=True, pad=1, stored=False),
    Field(name="cu_seqlens", dtype="int32", stored=False),
    Field(name="cu_seqlens_padded", dtype="int32", stored=False),
    Field(name="max_seqlen", dtype="int32", stored=False),
)
"""Fields of a pack computed from lengths alone; see `Documents` for their shapes."""

RUN_FIELDS = ("own_cu_seqlens", "continues")
"""Names of the fields that a pack has on every stage under cp_split="pack_contiguous", beside PLAN_FIELDS.

own_cu_seqlens int32 [pieces + 1]: where sequences, padded, begin in this rank's run, then its end.
continues bool []: whether the first piece continues a sequence of the rank before.
"""


def fields_of_plan(portion: Portion, names: Sequence[str], allocate: Allocate) -> Arrays:
    """The named PLAN_FIELDS of a portion's one pack."""
    arrays: Arrays = {}
    (own, at), num_tokens = portion.own_tokens, portion.num_tokens
    tail = portion.tail_tokens
    edges = zip([0, *(at + own.sizes).tolist()], [*at.tolist(), num_tokens])
    gaps, counted = [(a, b) for a, b in edges if a < b], num_tokens - int(tail.size.sum())
    for field in PLAN_FIELDS:
        if field.name not in names or not field.split:
            continue
        out = arrays[field.name] = allocate((1, num_tokens), field.dtype)
        if field.name == "position_ids":
            first = own.start - portion.starts[own.sequence]
            _count(out[0], np.append(at, tail.at), np.append(first, tail.start), 1)
        elif field.name == "sequence_ids":
            _count(out[0], at, own.sequence, 0)
        else:
            out[:] = False
        for start, stop in gaps:  # of padding, only the dummy at the end of a pack has positions
            out[0, start : min(stop, counted) if field.name == "position_ids" else stop] = field.pad
    return arrays | lengths_of_plan(portion, names)


def runs_of_plan(portion: Portion, names: Sequence[str]) -> list[RunField]:
    """The named PLAN_FIELDS that cp splits, in compact form."""
    (own, at), tail = portion.own_tokens, portion.tail_tokens
    positions = Runs(at, own.start - portion.starts[own.sequence], own.sizes)
    if tail.at.size:
        both = ((positions.at, tail.at), (positions.start, tail.start), (positions.size, tail.size))
        positions = Runs(*(np.concatenate(pair) for pair in both))
    runs_and_steps = {
        "position_ids": (positions, 1),
        "sequence_ids": (Runs(at, own.sequence.astype(np.int64), own.sizes), 0),
        "padding_mask": (Runs(at, np.zeros_like(at), own.sizes), 0),
    }
    made: list[RunField] = []
    for field in PLAN_FIELDS:
        if field.name in names and field.split:
            made.append(RunField(field, *runs_and_steps[field.name]))
    return made


def _count(row: Array, at: Longs, first: npt.NDArray[np.integer], by: int) -> None:
    """From each index `at` on, count from `first` in steps of `by`; int64 [m], `at` ascending."""
    row[:] = by
    # as differences, summed in place: no loop over runs, and no allocation of this size
    reached = np.append(by * at[:1], first[:-1] + by * (np.diff(at) - 1))
    row[at] = first - reached
    np.cumsum(row, out=row, dtype=row.dtype)


def lengths_of_plan(portion: Portion, names: Sequence[str]) -> Arrays:
    """The named PLAN_FIELDS that are the same on every cp rank; under pack_contiguous RUN_FIELDS too."""
    pack = portion.pack
    cu_seqlens, padded = pack.cu_seqlens, pack.cu_seqlens_padded
    longest = np.diff(padded).max(initial=0)
    if pack.max_sequences is not None:
        # the dummy, then entries without a token
        more, longest = pack.max_sequences + 2 - padded.size, pack.num_tokens
        cu_seqlens, padded = (np.append(ends, [ends[-1] + pack.tail] * more) for ends in (cu_seqlens, padded))
    elif not len(portion.draws):
        longest = portion.idle_tokens * pack.cp_size
        cu_seqlens, padded = np.zeros(2, np.int32), np.array([0, longest])
    arrays: Arrays = {
        "cu_seqlens": np.array(cu_seqlens, np.int32),
        "cu_seqlens_padded": np.array(padded, np.int32),
        "max_seqlen": np.array(longest, np.int32),
    }
    arrays = {name: array for name, array in arrays.items() if name in names}
    return arrays | (_own_run(portion) if portion.split == "pack_contiguous" else {})


def _own_run(portion: Portion) -> Arrays:
    """The RUN_FIELDS of a portion's one pack."""
    most, pieces = portion.pack.max_sequences, [portion.own, portion.tail]
    sizes = np.concatenate([piece.sizes for piece in pieces])
    first = np.concatenate([piece.start for piece in pieces])[:1]
    if not sizes.size:  # all ranks together have one padded sequence without a token
        sizes, first = np.array([portion.num_tokens]), np.array([portion.pack.cp_rank])
    ends = np.zeros((sizes.size if most is None else most + 1) + 1, np.int32)
    np.cumsum(sizes, out=ends[1 : sizes.size + 1])
    ends[sizes.size :] = portion.num_tokens
    return {"own_cu_seqlens": ends, "continues": np.array(first[0] > 0)}
