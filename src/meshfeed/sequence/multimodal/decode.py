"""The chosen parts of a pack as columns; and what stands for those that cannot be decoded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

import numpy as np

from meshfeed.columns import Array
from meshfeed.errors import PartError, RecipeError
from meshfeed.sequence.decoding import Bad, Decoder, PartPlace, blank_of
from meshfeed.sequence.multimodal.encoders import Chosen
from meshfeed.sequence.processor import PartSize, named, rows_of
from meshfeed.sequence.runs import Longs

OnBad = Literal["error", "blank", "drop"]

IS_BAD = "is_bad"
"""The column that says of each chosen part whether it is bad; uint8 [k]."""

_FEWEST = 1000  # parts that `max_bad_share` is a share of

_log = logging.getLogger("meshfeed")


def part_columns(
    chosen: Chosen, decoder: Decoder, names: frozenset[str] | None, on_bad: OnBad, max_bad_share: float | None
) -> dict[str, list[Array] | Array]:
    """The named columns of the chosen parts, an array for each part; None for all. With on_bad, IS_BAD too.

    Of a bad part, they are zeros. max_bad_share: see `Multimodal`; None outside of a run, which counts and
    logs none. Raises PartError for a bad part, unless it may become zeros.
    """
    columns: dict[str, list[Array] | Array] = {}
    places = chosen.listed
    made = decoder.decode(places)
    for at, part in zip(places, made):
        if isinstance(part, Bad):
            _refuse(decoder, at, part, on_bad, max_bad_share)
    for kind, mine in chosen.by_kind():
        processor = chosen.among.processors[kind]
        rows = chosen.among.ask(rows_of, processor, chosen.places[mine])
        for each in processor.columns:
            if names is None or each.name in names:
                counts = zip(mine.tolist(), rows[each.name].tolist())
                parts = ((made[i], count) for i, count in counts)
                columns[each.name] = [
                    each.blank(count) if isinstance(part, Bad) else part[each.name] for part, count in parts
                ]
    if on_bad != "error":
        columns[IS_BAD] = np.array([isinstance(part, Bad) for part in made], np.uint8)
    return columns


def blanks_of(chosen: Chosen, which: Longs) -> dict[int, Mapping[str, Array]]:
    """The fields of what stands for some of the chosen parts, from the index alone. Raises RecipeError."""
    blanks: dict[int, Mapping[str, Array]] = {}
    for kind, of_kind in chosen.by_kind() if which.size else ():
        processor, mine = chosen.among.processors[kind], np.intersect1d(of_kind, which)
        rows = chosen.among.ask(rows_of, processor, chosen.places[mine])
        for k, i in enumerate(mine.tolist()):
            counts = {name: int(count[k]) for name, count in rows.items()}
            try:
                blanks[i] = blank_of(processor, PartSize.of(chosen.parts, i), counts)
            except Exception as error:
                raise named(error, processor, chosen.listed[i].told(chosen.among.recipe)) from error
    return blanks


def _refuse(decoder: Decoder, at: PartPlace, bad: Bad, on_bad: OnBad, max_bad_share: float | None) -> None:
    """Raise unless it may become zeros; log the first one of each source."""
    where, costs = decoder.told(at), decoder.costs
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
    if at.source not in decoder.has_bad:
        decoder.has_bad.add(at.source)
        _log.warning(
            "%s cannot be decoded: %s; it becomes zeros, as all further ones of this source do, which "
            "step.stats['parts_bad'] counts",
            where,
            bad.why,
        )
