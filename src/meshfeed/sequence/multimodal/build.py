"""Columns and the index -> the fields of a pack: of its text, of its parts, and of their exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import cast

import numpy as np

from meshfeed.columns import Allocate, Array, Arrays, Columns
from meshfeed.parts import Kind
from meshfeed.plan import Slices
from meshfeed.roles import Field
from meshfeed.sequence.multimodal.decode import IS_BAD, blanks_of
from meshfeed.sequence.multimodal.encoders import Chosen, Shared, parts_of_pack
from meshfeed.sequence.multimodal.index import PartsOfDraws
from meshfeed.sequence.processor import Processor, patches_of
from meshfeed.sequence.runs import Longs, Portion, Runs, runs_of
from meshfeed.sequence.table import RunField

MROPE = Field(name="mrope_position_ids", dtype="int64", split=True, stored=False)
"""Computed from the index alone, so that every stage has it; see `Multimodal`."""

Values = dict[str, tuple[Array, int]]
"""Field -> what it has at every token of the whole documents, and how far ahead it looks."""


def text_values(
    among: PartsOfDraws, portion: Portion, columns: Columns | None, names: Sequence[str], dropped: Longs
) -> Values:
    """The named fields that have a value for each token. dropped: parts whose documents bear no loss."""
    made: Values = {}
    whole, tokens = among.whole, None
    # without such a field, columns may be without tokens
    if columns is not None and {"tokens", "labels", "loss_mask"} & set(names):
        tokens = np.asarray(columns["tokens"])
    if {"labels", "loss_mask"} & set(names):
        bears = np.ones(whole.repeats.size, np.bool_)
        bears[whole.placeholders] = False
        if dropped.size:
            bears &= ~np.isin(np.arange(whole.text.size), whole.parts.sample[dropped]).repeat(whole.text)
        bears = bears.repeat(whole.repeats)
        made["loss_mask"] = bears, 1
        if tokens is not None:
            made["labels"] = np.where(bears, tokens.repeat(whole.repeats), 0), 1
    if tokens is not None and "tokens" in names:
        made["tokens"] = tokens.repeat(whole.repeats), 0
    mine = parts_of_pack(among, portion)
    for kind in among.processors:
        if f"{kind}_index" in names:
            made[f"{kind}_index"] = whole.outputs(mine[whole.parts.take(mine).of_kind(kind)]), 0
    return made


def text_fields(fields: Sequence[Field], values: Values, portion: Portion) -> list[RunField]:
    """The fields of this rank's tokens; each follows its values."""
    runs = _in_documents(portion)
    return [RunField(f, runs[values[f.name][1]], 1, f.name) for f in fields if f.name in values]


def _in_documents(portion: Portion) -> tuple[Runs, Runs]:
    """The own tokens of a pack among those of its whole documents, and their labels."""
    own, at = portion.own_tokens
    whole = Slices(np.arange(len(portion.draws), dtype=np.int32), 0 * portion.whole, portion.whole)
    return runs_of(own, whole, at)


def mrope_field(among: PartsOfDraws, portion: Portion, allocate: Allocate) -> Array:
    """Positions of this rank's tokens, 0 in time at the first one of each piece; int64 [1, tokens, 3]."""
    positions, lengths, starts = among.mrope(), among.whole.lengths, portion.starts
    if starts.any():
        positions -= positions[np.cumsum(lengths) - lengths + starts, 0].repeat(lengths)[:, None]
    out = allocate((1, portion.num_tokens, 3), MROPE.dtype)
    out[:] = MROPE.pad
    _in_documents(portion)[0].copy(positions.T, out[0].T)
    tail = portion.tail_tokens  # the dummy counts from 0, as in position_ids
    tail.copy(np.arange((tail.start + tail.size).max(initial=0)), out[0].T)
    return out


def part_fields(
    processors: Mapping[Kind, Processor],
    chosen: Chosen,
    columns: Columns | None,
    names: Sequence[str],
    allocate: Allocate,
) -> Arrays:
    """The named fields of the parts that this rank encodes."""
    arrays: Arrays = {}
    bad = np.zeros(0, np.int64)
    decoded = {"bad_parts", *(each.name for processor in processors.values() for each in processor.fields)}
    if columns is not None and IS_BAD in columns and not decoded.isdisjoint(names):
        bad = np.flatnonzero((np.asarray(columns[IS_BAD]) > 0) & chosen.is_own)
    blanks = blanks_of(chosen, bad)
    for kind, processor in processors.items():
        of_kind = chosen.parts.of_kind(kind)
        is_own = chosen.is_own[of_kind]
        own = of_kind[is_own]
        if f"{kind}_cu_seqlens" in names:
            places = chosen.places[own]
            sequences, patches = chosen.among.ask(patches_of, processor.rule, places)
            ends = np.cumsum(patches.repeat(sequences))
            arrays[f"{kind}_cu_seqlens"] = np.append(0, ends).astype(np.int32)
        for each in processor.fields:
            if each.name in names and columns is not None:
                values = compress(cast(Sequence[Array], columns.get(each.name, ())), is_own)
                both = zip(own.tolist(), values)
                made = [blanks[i][each.name] if i in blanks else value for i, value in both]
                arrays[each.name] = each.joined(made, allocate)
    if "bad_parts" in names and columns is not None:
        arrays["bad_parts"] = np.stack(chosen.in_documents(bad), axis=1)
    return arrays


def route_fields(shared: Shared, microbatch: int, names: Sequence[str]) -> Arrays:
    """The named fields of the exchange of encoder outputs."""
    return {
        f"{kind}_{name}": array.copy()
        for kind, routes in shared.routes.items()
        for name, array in routes[microbatch].arrays.items()
        if f"{kind}_{name}" in names
    }
