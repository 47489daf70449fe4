"""The steps of an exchange as separate calls: gather lengths, plan, reroute, pack.

A framework with its own loop calls them one by one; `Exchange` calls them in sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch

from meshfeed.columns import Allocate, Array, Arrays
from meshfeed.deliver import Digester, EndOfStream, ErrorRecord
from meshfeed.errors import PlanError
from meshfeed.exchange.dtypes import BYTES, CARRIED, carrier, item_bytes
from meshfeed.exchange.group import Group
from meshfeed.exchange.items import Given, bits_of, tensor_of, viewed_as
from meshfeed.exchange.keys import ANY, Keys
from meshfeed.exchange.lengths import END, ERROR, Bytes, GatheredLengths, Report
from meshfeed.exchange.membership import Membership
from meshfeed.exchange.routing import Longs, Shipment, read_rest, write_pieces
from meshfeed.feed.batch import Microbatch, Value
from meshfeed.feed.device import OnHost, Placer, microbatches_of
from meshfeed.feed.stepping import GlobalBatch, ranks_beside
from meshfeed.layout import Layout
from meshfeed.plan import CpSplit, Packing, StepPlan, account_of, plan_step
from meshfeed.plan.policy import room_of
from meshfeed.plan.types import exact_sum
from meshfeed.sequence import Portion, portions_of
from meshfeed.sequence.packed import PLAN_FIELDS, fields_of_plan
from meshfeed.sequence.runs import Runs

_OTHERS = "(keys that are not declared)"


def gather_reports(given: Given, group: Group) -> list[Report]:
    """Every member's report; one collective. given: this member's items.

    Raises the error that a member reports, or EndOfStream with the members that have ended.
    """
    reports = [Report.decode(message)[0] for message in group.all_gather(given.report.encode())]
    for each in reports:
        if each.status == ERROR:
            raise ErrorRecord.decode(each.cause).exception() from given.error
    if left := [member for member, each in enumerate(reports) if each.status == END]:
        raise EndOfStream(*left)
    return reports


def gather_lengths(given: Given, membership: Membership, group: Group) -> GatheredLengths:
    """Which member has which items, and their lengths: one collective, exact integers.

    given: this rank's items, from `encode`. Raises MeshfeedErrors; see `GatheredLengths.of`.
    """
    return GatheredLengths.of(gather_reports(given, group), membership)


def plan(
    gathered: GatheredLengths,
    packing: Packing,
    membership: Membership,
    *,
    layout: Layout,
    vpp: int = 1,
    step: int = 0,
    length: str = "tokens",
    made: StepPlan | None = None,
) -> GlobalBatch:
    """Plan which item goes where: a pure function, equal on every rank and to a Feed's for the same lengths.

    made: a finished plan; None calls the planner. length: the key that gave the lengths, for error messages.
    Raises PlanError naming rank, item and key.
    """
    most, longest = room_of(packing, dp=layout.dp, cp=layout.cp).longest, int(gathered.lengths.max(initial=0))
    if packing.oversize == "error" and longest > most:
        item = gathered.item(int(gathered.lengths.argmax()), membership)
        raise PlanError(
            f"{item}: key {length!r} has {longest} tokens, at step {step}; the widest cp group holds {most} "
            f"({(gathered.lengths > most).sum()} such); cut them in the iterator, raise capacity or "
            f"cp, or set oversize='split', 'truncate' or 'drop'"
        )
    try:
        made = made or plan_step(gathered.lengths, packing, dp=layout.dp, cp=layout.cp, pp=layout.pp, vpp=vpp)
    except PlanError as error:
        raise PlanError(f"step {step}: {error}") from error
    kept = np.flatnonzero(made.microbatch >= 0)
    lengths = made.lengths[kept]
    if packing.oversize == "truncate" and made.oversize.size and (gathered.valid != gathered.lengths).any():
        raise PlanError(
            f"{gathered.item(int(made.oversize[0]), membership)} is cut to {lengths.max()} tokens, and "
            f"only its total of loss-bearing tokens is known; cut it in the iterator, or set "
            f"oversize='split' or 'drop'"
        )
    valid = gathered.valid if (gathered.valid != gathered.lengths).any() else None
    return GlobalBatch(
        step=step,
        draws=gathered.draws,
        lengths=gathered.lengths,
        plan=made,
        tokens=int(lengths.sum()),
        valid_tokens=int(lengths.sum() if valid is None else valid[np.unique(made.sequence[kept])].sum()),
        sum_sq=exact_sum(lengths, lengths),
        account=account_of(made, packing, pp=layout.pp, vpp=vpp),
    )


@dataclass(frozen=True, slots=True)
class Received:
    """The part of a step that one member has received.

    Attributes:
        gathered, shipment: what the data are.
        data: the bytes, ordered by source; uint8 [n].
        offsets: byte offset of each piece of the shipment in `data`; int64 [n].
    """

    gathered: GatheredLengths
    shipment: Shipment
    data: Bytes
    offsets: Longs = field(init=False)
    _begins: dict[str, tuple[Longs, int]] = field(init=False, default_factory=dict[str, tuple[Longs, int]])

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", self.shipment.offsets())

    def rows(self, microbatch: int) -> Longs:
        """Indices into the shipment of a microbatch's pieces, in the order of its pack; int64 [k]."""
        return np.flatnonzero(self.shipment.microbatch == microbatch)

    def begins(self, name: str) -> tuple[Longs, int]:
        """Offset in `data` of a split key in each piece, -1 if absent; and the bytes of one entry."""
        if name not in self._begins:
            self._begins[name] = self._begins_of(name)
        return self._begins[name]

    def _begins_of(self, name: str) -> tuple[Longs, int]:
        its, gathered = self.shipment, self.gathered
        before, entry = np.full(len(gathered.schemas), -1), 0
        for at, schema in enumerate(gathered.schemas):
            names = [each for each, _, _ in schema.split]
            if name in names:
                key = names.index(name)
                before[at], entry = sum(schema.entry_bytes[:key]), schema.entry_bytes[key]
        prefix = before[gathered.schema[its.item]]
        begin = self.offsets + gathered.rest_bytes[its.item] + its.num_tokens * prefix
        return np.where(prefix < 0, -1, begin), entry

    def rest(self, piece: int) -> list[tuple[str, str, Array | bytes]]:
        """(name, type, value) of every unsplit key of a piece; copies."""
        its, gathered = self.shipment, self.gathered
        schema = gathered.schemas[int(gathered.schema[its.item[piece]])]
        if not schema.rest:
            return []
        ndims, sizes = zip(*((ndim, item_bytes(dtype)) for _, dtype, ndim in schema.rest))
        found = read_rest(self.data[int(self.offsets[piece]) :], ndims, sizes)
        return [
            (
                name,
                dtype,
                data.tobytes() if dtype == BYTES else data.copy().view(carrier(dtype)).reshape(shape),
            )
            for (name, dtype, _), (shape, data) in zip(schema.rest, found)
        ]

    def items(self, microbatch: int) -> list[tuple[int, dict[str, torch.Tensor | bytes]]]:
        """(index in the gathered lengths, item) of a microbatch, with the tokens that were rerouted here."""
        rows, its = self.rows(microbatch), self.shipment
        found = [(int(its.item[row]), dict[str, torch.Tensor | bytes]()) for row in rows]
        types = {
            name: (dtype, shape) for schema in self.gathered.schemas for name, dtype, shape in schema.split
        }
        tokens = its.num_tokens[rows].tolist()
        for name, (dtype, shape) in types.items():
            begins, entry = self.begins(name)
            for (_, item), begin, size in zip(found, begins[rows].tolist(), tokens):
                if begin >= 0:
                    flat = self.data[begin : begin + size * entry].copy()
                    item[name] = tensor_of(flat.view(carrier(dtype)).reshape(size, *shape), dtype)
        for (_, item), row in zip(found, rows.tolist()):
            for name, dtype, value in self.rest(row):
                item[name] = value if isinstance(value, bytes) else tensor_of(value, dtype)
        return found


def reroute(
    given: Given,
    gathered: GatheredLengths,
    step_plan: StepPlan,
    membership: Membership,
    group: Group,
    *,
    split: CpSplit | None = "zigzag",
) -> Received:
    """Send every item, or its slices, to the ranks of the plan: one collective and one buffer for all keys.

    split: how context parallelism splits rows; None sends whole rows to each rank of a cp group.
    """
    member = group.member
    coming = Shipment.to(gathered, step_plan, membership, member, split)
    if not gathered.rest_bytes.any() and not (gathered.token_bytes * gathered.lengths).any():
        return Received(gathered, coming, np.zeros(0, np.uint8))  # no member needs a byte, and all know it
    going = Shipment.by(gathered, step_plan, membership, member, split)
    out_sizes = going.sizes(going.member, group.size)
    mine = np.array([member in held for held in gathered.holders])[gathered.draws.source]
    outgoing = group.buffer("out", sum(out_sizes))
    write_pieces(outgoing, going, dict(zip(np.flatnonzero(mine).tolist(), given.encoded)))
    in_sizes = coming.sizes(coming.source, group.size)
    return Received(gathered, coming, group.all_to_all(outgoing, out_sizes, in_sizes))


def pack(
    received: Received,
    batch: GlobalBatch,
    layout: Layout,
    rank: int,
    keys: Keys,
    *,
    split: CpSplit = "zigzag",
    names: Sequence[str] | None = None,
    placer: Placer | None = None,
) -> list[Microbatch]:
    """The microbatches of one rank, from what its member has received.

    split: as in `reroute`. names: the fields to make; None for all. placer: the target device; None for host
    memory.
    """
    placer = placer or OnHost()
    made: list[Microbatch] = []
    for portion in portions(batch, layout, rank, split):
        made += packed(received, portion, keys, names, placer)[0]
    return made


def portions(batch: GlobalBatch, layout: Layout, rank: int, split: CpSplit) -> list[Portion]:
    """One rank's portion of each microbatch."""
    coord = layout.coord(rank)
    at = coord.dp * layout.cp + coord.cp
    return portions_of(
        batch.plan,
        batch.draws,
        batch.lengths,
        at,
        group=[at],
        rows=0,
        split=split,
        together=1,
        rank_of_dp_cp=ranks_beside(layout, coord),
    )


def packed(
    received: Received,
    portion: Portion,
    keys: Keys,
    names: Sequence[str] | None,
    placer: Placer,
    digester: Digester | None = None,
) -> tuple[list[Microbatch], Any]:
    """The one microbatch of a portion on its device, and the placer's ticket for it.

    digester: receives the fields, under the names of `compared`.
    """
    types: dict[str, str] = {}
    arrays = fields_of_pack(received, portion, keys, names, placer.allocate, types)
    if digester is not None:
        digester.add([_comparable(arrays, keys)])
    made, ticket = microbatches_of(portion, [arrays], placer)
    carried = {name: dtype for name, dtype in types.items() if dtype in CARRIED}
    return [replace(each, fields=_retyped(each.fields, carried)) for each in made], ticket


def fields_of_pack(
    received: Received,
    portion: Portion,
    keys: Keys,
    names: Sequence[str] | None,
    allocate: Allocate,
    types: dict[str, str],
) -> Arrays:
    """The fields of a portion's one pack; see `Keys`. types: receives the type of each key."""
    gathered = received.gathered
    rows = received.rows(portion.microbatches.start)
    split_keys = {name: (dtype, shape) for schema in gathered.schemas for name, dtype, shape in schema.split}
    types |= {name: dtype for name, (dtype, _) in split_keys.items()}
    types |= {name: dtype for schema in gathered.schemas for name, dtype, _ in schema.rest}
    own, at = portion.own_tokens
    piece = rows[own.sequence]
    runs = Runs(at, received.shipment.tokens_at(piece, own.start), own.sizes)
    arrays: Arrays = {}
    for key in keys.declared:
        if not key.split or (names is not None and key.name not in names):
            continue
        dtype, shape = split_keys.get(key.name, (key.dtype, ()))
        if dtype != ANY:  # otherwise no item of the step has it and its type is unknown
            out = allocate((1, portion.num_tokens, *shape), carrier(dtype))
            out[:] = bits_of(key.pad, dtype)
            begins, entry = received.begins(key.name)
            has = begins[piece] >= 0  # a sequence without the key is padding
            at, start, size = (each[has] * entry for each in (runs.at, runs.start, runs.size))
            Runs(at, begins[piece][has] + start, size).copy(received.data, out.reshape(-1).view(np.uint8))
            arrays[key.name] = out
    arrays |= _rest(received, rows, keys, names)
    every = [each.name for each in PLAN_FIELDS]
    return arrays | fields_of_plan(portion, every if names is None else names, allocate)


def _rest(received: Received, rows: Longs, keys: Keys, names: Sequence[str] | None) -> dict[str, Any]:
    """One value per sequence of every unsplit key."""
    declared = keys.by_name()
    values: dict[str, list[Any]] = {
        key.name: [None] * rows.size
        for key in keys.declared
        if not key.split and (names is None or key.name in names)
    }
    has_any = any(schema.rest for schema in received.gathered.schemas)
    for sequence, row in enumerate(rows.tolist() if has_any else ()):
        for name, _, value in received.rest(row):
            if name in values or name not in declared:
                values.setdefault(name, [None] * rows.size)[sequence] = value
    return values


def compared(keys: Keys) -> list[str]:
    """Names for digests: the declared fields, all others together, and the fields computed from lengths."""
    return [*(field.name for field in keys.declared), _OTHERS, *(field.name for field in PLAN_FIELDS)]


def _comparable(arrays: Arrays, keys: Keys) -> Arrays:
    names = set(compared(keys))
    made: dict[str, list[Any]] = {}
    for name, value in sorted(arrays.items()):
        listed: list[Any] = [value] if isinstance(value, np.ndarray) else list(value)
        pieces = [b"" if each is None else each for each in listed]
        if name in names:
            made[name] = pieces
        else:
            made.setdefault(_OTHERS, []).extend([name.encode(), *pieces])
    return cast(Arrays, made)


def _retyped(fields: Any, types: dict[str, str]) -> dict[str, Value]:
    return {
        name: value
        if name not in types
        else viewed_as(value, types[name])
        if isinstance(value, torch.Tensor)
        else [viewed_as(each, types[name]) if isinstance(each, torch.Tensor) else each for each in value]
        for name, value in fields.items()
    }
