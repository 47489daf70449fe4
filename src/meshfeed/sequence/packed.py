"""The fields of a pack that are computed from the plan, for all rules that pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from meshfeed.columns import Allocate, Arrays, Columns
from meshfeed.roles import Field
from meshfeed.sequence.runs import Portion, Runs
from meshfeed.sequence.table import FieldTable, RunField, table_of

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

_APART = 64  # tokens: each pack begins at a multiple of 64 bytes, whatever a token takes


def fields_of_plan(portion: Portion, names: Sequence[str], allocate: Allocate) -> Arrays:
    """The named PLAN_FIELDS of a portion's one pack."""
    return fields_of_packs([portion], names, allocate)[0]


def fields_of_packs(portions: Sequence[Portion], names: Sequence[str], allocate: Allocate) -> list[Arrays]:
    """The named PLAN_FIELDS of each portion's one pack. One pass makes those of all of them."""
    made = [lengths_of_plan(portion, names) for portion in portions]
    places, num_tokens = places_of(portions)
    for same in zip(*(runs_of_plan(portion, names) for portion in portions)):
        field = same[0].field
        out = allocate((num_tokens,), field.dtype)
        replace(same[0], runs=runs_at(places, [each.runs for each in same])).write(out)
        for arrays, portion, place in zip(made, portions, places):
            arrays[field.name] = out[place : place + portion.num_tokens].reshape(1, portion.num_tokens)
    return made


def places_of(portions: Sequence[Portion]) -> tuple[list[int], int]:
    """Where each portion's one pack begins in a field of all of them, and the field's tokens."""
    rooms = [-(-portion.num_tokens // _APART) * _APART for portion in portions]
    return [0, *accumulate(rooms)][: len(rooms)], sum(rooms)


def runs_at(places: Sequence[int], runs: Sequence[Runs]) -> Runs:
    """The runs of several packs, each in a field of its own, in a field of all of them; see `places_of`."""
    if len(runs) == 1:
        return runs[0]
    at = np.concatenate([each.at + place for each, place in zip(runs, places)])
    start, size = (np.concatenate([getattr(r, name) for r in runs]) for name in ("start", "size"))
    return Runs(at, start, size)


def runs_of_plan(portion: Portion, names: Sequence[str]) -> list[RunField]:
    """The named PLAN_FIELDS that cp splits, as runs."""
    own, at = portion.own_tokens
    positions = Runs(at, own.start - portion.starts[own.sequence], own.sizes)
    if portion.pack.tail:  # the dummy has positions, too
        positions = runs_at((0, 0), (positions, portion.tail_tokens))
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


def table_of_pack(
    portion: Portion,
    columns: Columns | None,
    names: Sequence[str],
    fields: Sequence[RunField],
    ready: Arrays | None = None,
) -> FieldTable:
    """The named fields of a portion's one pack, PLAN_FIELDS among them.

    fields: the others that are runs. columns: that these follow; if None, only fields without a column are
    made. ready: the named ones that are no runs.
    """
    every, ready = [*fields, *runs_of_plan(portion, names)], lengths_of_plan(portion, names) | (ready or {})
    return table_of((1, portion.num_tokens), columns, names, every, [ready])


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
