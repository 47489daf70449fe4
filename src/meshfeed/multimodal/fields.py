"""The parts of a pack as columns; then the fields of its text, of its parts and of their exchange.

`blanks_of` gives what stands for parts that cannot be decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Literal, cast

import numpy as np

from meshfeed.arrays import Allocate, Array, Arrays, Columns, Ints, Longs
from meshfeed.errors import PartError, RecipeError
from meshfeed.intervals import numbers_in
from meshfeed.multimodal.decoding import Bad, Decoder, PartPlace, blank_of
from meshfeed.multimodal.parts import Chosen, PartsOfDraws, PartsOfPack, Shared
from meshfeed.multimodal.processor import PartSize, Processor, last_patches_of, named, patches_of, rows_of
from meshfeed.parts import KINDS, Expansion, Kind
from meshfeed.plan import Slices
from meshfeed.roles import Field
from meshfeed.sequence.runs import Portion, Runs, runs_of
from meshfeed.sequence.table import RunField

OnBad = Literal["error", "blank", "drop"]

IS_BAD = "is_bad"
"""The column that says of each chosen part whether it is bad; uint8 [k]."""

_FEWEST = 1000  # parts that `max_bad_share` is a share of

_log = logging.getLogger("meshfeed")

MROPE = Field(name="mrope_position_ids", dtype="int64", split=True, stored=False)
"""Computed from the index alone, so that every stage has it; see `Multimodal`."""

Values = dict[str, tuple[Array, int]]
"""Field -> what it has at every token of the whole documents, and how far ahead it looks."""


def part_columns(
    places: Sequence[PartPlace],
    processors: Mapping[Kind, Processor],
    decoder: Decoder,
    names: frozenset[str] | None,
    on_bad: OnBad,
    max_bad_share: float | None,
) -> dict[str, list[Array] | Array]:
    """The named columns of some parts, an array for each part; None for all. With on_bad, IS_BAD too.

    Of a bad part, they are zeros. max_bad_share: see `Multimodal`; None outside of a run, which counts and
    logs none. Raises PartError for a bad part, unless it may become zeros.
    """
    columns: dict[str, list[Array] | Array] = {}
    made = decoder.decode(places)
    for at, part in zip(places, made):
        if isinstance(part, Bad):
            _refuse(decoder, at, part, on_bad, max_bad_share)
    for kind, processor in processors.items():
        mine = [(at.promise.rows, part) for at, part in zip(places, made) if at.promise.kind == kind]
        for each in processor.columns if mine else ():
            if names is None or each.name in names:
                columns[each.name] = [
                    each.blank(rows[each.name]) if isinstance(part, Bad) else part[each.name]
                    for rows, part in mine
                ]
    if on_bad != "error":
        columns[IS_BAD] = np.array([isinstance(part, Bad) for part in made], np.uint8)
    return columns


def blanks_of(chosen: Chosen, which: Longs) -> dict[int, Mapping[str, Array]]:
    """The fields of what stands for some of the chosen parts, from the index alone. Raises RecipeError."""
    blanks: dict[int, Mapping[str, Array]] = {}
    for kind, processor in chosen.among.processors.items() if which.size else ():
        mine = np.intersect1d(chosen.parts.of_kind(kind), which)
        rows = chosen.among.ask(rows_of, processor, chosen.places[mine])
        for k, i in enumerate(mine.tolist()):
            counts = {name: int(count[k]) for name, count in rows.items()}
            try:
                blanks[i] = blank_of(processor, PartSize.of(chosen.parts, i), counts)
            except Exception as error:
                raise named(error, processor, chosen.among.told(int(chosen.places[i]))) from error
    return blanks


def _refuse(decoder: Decoder, at: PartPlace, bad: Bad, on_bad: OnBad, max_bad_share: float | None) -> None:
    """Raise unless it may become zeros; log the first one of each source."""
    where, costs = at.told(), decoder.costs
    if not bad.is_broken:
        raise RecipeError(f"{where}: {bad.why}")
    if on_bad == "error":
        raise PartError(
            f"{where} cannot be decoded: {bad.why}; repair or remove it, or pass over it with "
            f"Multimodal(on_bad='blank') or 'drop'"
        )
    if max_bad_share is None:
        return
    if costs.bad > max_bad_share * max(costs.parts, _FEWEST):
        raise PartError(
            f"{costs.bad} of the first {costs.parts} parts of this run cannot be decoded, more than "
            f"Multimodal(max_bad_share={max_bad_share:g}) allows of {max(costs.parts, _FEWEST)}; "
            f"{where}: {bad.why}; repair the data, or allow more"
        )
    if at.name not in decoder.has_bad:
        decoder.has_bad.add(at.name)
        _log.warning(
            "%s cannot be decoded: %s; it becomes zeros, as all further ones of this source do, which "
            "step.stats['parts_bad'] counts",
            where,
            bad.why,
        )


def text_values(
    pack: PartsOfPack, columns: Columns | None, names: Sequence[str], dropped: Longs, portion: Portion | None
) -> Values:
    """The named fields that have a value for each token.

    dropped: sequences of the pack that bear no loss. portion: where ranks share the encoders' work.
    """
    made: Values = {}
    whole, tokens = pack.among.whole, None
    # without such a field, columns may be without tokens
    if columns is not None and {"tokens", "labels", "loss_mask"} & set(names):
        tokens = np.asarray(columns["tokens"])
    if {"labels", "loss_mask"} & set(names):
        bears = np.ones(whole.repeats.size, np.bool_)
        bears[whole.placeholders] = False
        if dropped.size:
            bears &= ~np.isin(np.arange(whole.text.size), dropped).repeat(whole.text)
        bears = bears.repeat(whole.repeats)
        made["loss_mask"] = bears, 1
        if tokens is not None:
            made["labels"] = np.where(bears, tokens.repeat(whole.repeats), 0), 1
    if tokens is not None and "tokens" in names:
        made["tokens"] = tokens.repeat(whole.repeats), 0
    for kind in pack.among.processors:
        if f"{kind}_index" in names:
            index = whole.outputs(pack.template, pack.inside, KINDS.index(kind))
            made[f"{kind}_index"] = index if portion is None else _received(index, whole, portion), 0
    return made


def with_ids(pack: PartsOfPack, tokens: Array) -> Array:
    """The tokens with the ids that the pack's parts have of their templates; [sum(lengths)]."""
    if pack.inside.size and pack.template.names.size:
        tokens = tokens.astype(np.int64)  # which may be stored as uint16
        pack.among.whole.put_ids(tokens, pack.template, pack.inside)
    return tokens


def _received(index: Ints, whole: Expansion, portion: Portion) -> Ints:
    """The same where ranks receive the outputs of their own tokens alone: 0, 1, ... in the order of these."""
    own, _ = portion.own_tokens
    first = np.cumsum(whole.lengths) - whole.lengths
    mine = numbers_in(first[own.sequence] + own.start, own.sizes)
    mine = mine[index[mine] >= 0]
    found = np.full_like(index, -1)
    found[mine] = np.arange(mine.size)
    return found


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


def decoded_names(processors: Mapping[Kind, Processor]) -> set[str]:
    """The fields that are made of decoded parts."""
    return {"bad_parts", *(each.name for processor in processors.values() for each in processor.fields)}


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
    if columns is not None and IS_BAD in columns and not decoded_names(processors).isdisjoint(names):
        bad = np.flatnonzero((np.asarray(columns[IS_BAD]) > 0) & chosen.is_own)
    blanks = blanks_of(chosen, bad)
    for kind, processor in processors.items():
        of_kind = chosen.parts.of_kind(kind)
        is_own = chosen.is_own[of_kind]
        own = of_kind[is_own]
        if f"{kind}_cu_seqlens" in names:
            places = chosen.places[own]
            sequences, patches = chosen.among.ask(patches_of, processor.rule, places)
            sizes, some = patches.repeat(sequences), sequences > 0
            last = chosen.among.ask(last_patches_of, processor.rule, places)
            sizes[np.cumsum(sequences)[some] - 1] = last[some]
            arrays[f"{kind}_cu_seqlens"] = np.append(0, np.cumsum(sizes)).astype(np.int32)
        for each in processor.fields:
            if each.name in names and columns is not None:
                values = compress(cast(Sequence[Array], columns.get(each.name, ())), is_own)
                both = zip(own.tolist(), values)
                made = [blanks[i][each.name] if i in blanks else value for i, value in both]
                arrays[each.name] = each.joined(made, allocate)
    if "bad_parts" in names and columns is not None:
        arrays["bad_parts"] = np.stack((chosen.sequence[bad], chosen.number[bad]), axis=1)
    return arrays


def route_fields(shared: Shared, microbatch: int, names: Sequence[str]) -> Arrays:
    """The named fields of the exchange of encoder outputs."""
    return {
        f"{kind}_{name}": array.copy()
        for kind, routes in shared.routes.items()
        for name, array in routes[microbatch].arrays.items()
        if f"{kind}_{name}" in names
    }
