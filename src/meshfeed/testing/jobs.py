"""Whether a recipe's stream is the same under every layout and after every kill, and who reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch

from meshfeed.feed import Feed
from meshfeed.feed.batch import Microbatch
from meshfeed.layout import Layout
from meshfeed.order import Draws
from meshfeed.plan import CpSplit, Packing
from meshfeed.recipe import Recipe
from meshfeed.roles import DeliveryName, Field, StageMap, assign_roles
from meshfeed.sequence import SequenceRule, TakesParts, Windows, contents_of
from meshfeed.sequence.table import PLAN_FIELDS, TOKEN_FIELDS
from meshfeed.simulation import SimulatedStep, simulate
from meshfeed.testing.difference import difference

Draw = tuple[int, int, int]
"""(source, epoch, index) of a sequence."""

_OF_TEXT = {field.name for field in (*TOKEN_FIELDS, *PLAN_FIELDS)}


def assert_elastic(
    recipe: Recipe,
    layouts: Iterable[Layout | str],
    *,
    steps: int = 3,
    micro_batch_size: int = 1,
    packing: Packing | None = None,
    cp_split: CpSplit = "zigzag",
) -> None:
    """Every global batch is the same under every layout, put together from what all ranks get.

    steps: how many from 0. The other arguments are those of `Feed`; packing may not split sequences. Of a
    `Multimodal`, the text is compared: its other fields are of a pack.
    Raises AssertionError naming step, layout, rank, sequence and the first value that differs from what one
    process would get.
    """
    options: dict[str, Any] = {"packing": packing, "cp_split": cp_split, "micro_batch_size": micro_batch_size}
    options["no_loss"] = "allow"  # a mean of losses is nothing to this test
    if packing is not None and packing.oversize == "split":
        raise ValueError("assert_elastic puts whole sequences together; use another oversize than 'split'")
    given = [Layout.parse(each) if isinstance(each, str) else each for each in layouts]
    for step in range(steps):
        alone = list(simulate(recipe, Layout(), [step], **options))
        wanted = _sequences(recipe, alone, cp_split)
        for layout in given:
            made = list(simulate(recipe, layout, [step], **options))
            for tp, pp in np.ndindex(layout.tp, layout.pp):
                own = [each for each in made if (each.coord.tp, each.coord.pp) == (tp, pp)]
                if found := _first_difference(wanted, _sequences(recipe, own, cp_split)):
                    ranks = [each.rank for each in own]
                    raise AssertionError(f"step {step} under {layout}, ranks {ranks}: {found}")


def _first_difference(
    wanted: Mapping[Draw, Mapping[str, Any]], got: Mapping[Draw, Mapping[str, Any]]
) -> str | None:
    for draw in {**wanted, **got}:
        told = "source {}, epoch {}, index {}".format(*draw)
        if draw not in got or draw not in wanted:
            return f"{told} is {'missing' if draw in wanted else 'not in the global batch'}"
        shared = {name: value for name, value in wanted[draw].items() if name in got[draw]}
        if found := difference(shared, got[draw]):
            return f"{told}: {found} (one process, these ranks)"
    return None


def _sequences(
    recipe: Recipe, made: Sequence[SimulatedStep], cp_split: CpSplit
) -> dict[Draw, dict[str, Any]]:
    """Every sequence's fields, whole, from the ranks of one tensor-parallel and pipeline place."""
    of_packs = {"sequence_ids"}  # what tells of a pack, not of a sequence
    if isinstance(recipe.sequence, TakesParts):
        of_packs |= {field.name for field in cast(SequenceRule, recipe.sequence).fields} - _OF_TEXT
    fields = {
        field.name: field
        for field in contents_of(recipe).fields
        if field.name not in of_packs and (field.split or field.stored)
    }
    pieces: dict[Draw, dict[str, dict[int, Any]]] = {}
    lengths: dict[Draw, int] = {}
    for step in made:
        lengths |= dict(zip(_names(step.batch.draws), step.batch.plan.lengths.tolist()))
        for microbatch in step.microbatches:
            names = _names(microbatch.draws)
            for name, value in microbatch.items():
                if name not in fields:
                    continue
                for draw, part in zip(names, _by_sequence(microbatch, value, fields[name], cp_split)):
                    pieces.setdefault(draw, {}).setdefault(name, {})[microbatch.cp_rank] = part
    return {
        draw: {name: _joined(fields[name], held, lengths[draw], cp_split) for name, held in of_draw.items()}
        for draw, of_draw in pieces.items()
    }


def _names(draws: Draws) -> list[Draw]:
    return list(zip(draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist()))


def _by_sequence(microbatch: Microbatch, value: Any, field: Field, cp_split: CpSplit) -> Iterator[Any]:
    """A field's part of each sequence of a microbatch, on one rank."""
    if not field.split or "cu_seqlens_padded" not in microbatch:
        return iter(value[: len(microbatch.draws)])
    edges, run = microbatch["cu_seqlens_padded"], microbatch.cp_rank * value.shape[1]
    own = (edges - run).clip(0) if cp_split == "pack_contiguous" else edges // microbatch.cp_size
    return (value[0, start:stop] for start, stop in pairwise(own.tolist()))


def _joined(field: Field, held: Mapping[int, Any], length: int, cp_split: CpSplit) -> Any:
    """A sequence's field out of its parts by cp rank."""
    if not field.split:
        return held[min(held)]
    parts = [held[rank] for rank in sorted(held)]
    if len(parts) > 1 and cp_split == "zigzag":
        halves = [part.chunk(2) for part in parts]
        parts = [half[0] for half in halves] + [half[1] for half in reversed(halves)]
    return torch.cat(parts)[:length]


def assert_resumable(
    recipe: Recipe, *, steps: int = 5, micro_batch_size: int = 1, packing: Packing | None = None
) -> None:
    """A job killed before any step continues in a fresh Feed, from a saved state, as if nothing had happened.

    Also reads the state twice, iterates before the state is loaded, and saves again after the resume.
    Raises AssertionError naming the step and the first value that differs.
    """

    def feed() -> Feed:
        if packing is not None:
            return Feed(recipe, rank=0, packing=packing, no_loss="allow")
        return Feed(recipe, rank=0, micro_batch_size=micro_batch_size, pad_rows=True, no_loss="allow")

    whole, states = _run(feed(), steps)
    for at in range(len(whole)):
        for iterated in (False, True):
            fresh = feed()
            if iterated:
                next(iter(fresh), None)
            fresh.load_state_dict(json.loads(json.dumps(states[at])))
            again, saved = _run(fresh, len(whole) - at)
            if found := difference(whole[at:], again) or difference(states[at:], saved):
                how = ", where it had iterated before" if iterated else ""
                raise AssertionError(f"resumed at step {at}{how}, counted from there: {found}")


def _run(feed: Feed, steps: int) -> tuple[list[Any], list[dict[str, Any]]]:
    """What the next steps hold, and the state before each of them and after the last."""
    seen: list[Any] = []
    states = [feed.state_dict()]
    with feed:
        for step in feed:
            held = [{"draws": [m.draws.source, m.draws.epoch, m.draws.index], **m} for m in step.microbatches]
            seen.append({"step": step.index, "tokens": step.tokens, "microbatches": held})
            states.append(feed.state_dict())
            if feed.state_dict() != states[-1]:
                raise AssertionError(f"step {step.index}: reading the state twice gives two states")
            if len(seen) == steps:
                break
    return seen, states


def assert_roles(
    layout: Layout | str,
    *,
    fields: Sequence[Field] | None = None,
    stage_map: StageMap | None = None,
    delivery: DeliveryName = "share",
    may_read: Iterable[int] | None = None,
    readers: Iterable[int] | None = None,
    receives: Mapping[int, Iterable[str]] | None = None,
) -> None:
    """The roles of a layout are what you take them for.

    fields: of the sequence rule; those of `Windows` by default. may_read: `readers` of a `Feed`. readers: the
    ranks that you expect to open storage. receives: rank -> names of the fields that you expect it to get.
    Raises AssertionError naming the first rank that is other than expected; RoleError where nobody can feed
    a rank.
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    stages = stage_map or StageMap(pp=layout.pp)
    declared = Windows(1).fields if fields is None else tuple(fields)
    roles = assign_roles(layout, stages, declared, delivery, may_read)
    reading = {role.rank for role in roles if role.reads}
    if readers is not None and (wrong := reading ^ {*readers}):
        rank = min(wrong)
        raise AssertionError(
            f"rank {rank} {'opens' if rank in reading else 'does not open'} storage under {delivery!r}; "
            f"readers are {sorted(reading)[:16]}"
        )
    for rank, names in (receives or {}).items():
        if set(names) != set(roles[rank].fields):
            raise AssertionError(f"rank {rank} receives {sorted(roles[rank].fields)}, not {sorted(names)}")
