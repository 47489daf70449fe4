"""The steps of an exchange as separate calls: gather lengths, plan, reroute, pack.

A framework with its own loop calls them one by one; `Exchange` calls them in sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any, cast

import numpy as np
import torch

from meshfeed.arrays import Allocate, Array, Arrays, Bytes, Longs
from meshfeed.deliver import Digester, EndOfStream, Group, wire
from meshfeed.errors import PlanError
from meshfeed.exchange.dtypes import BYTES, CARRIED, NESTED, carrier, entry_bytes
from meshfeed.exchange.items import Given
from meshfeed.exchange.keys import ANY, Keys
from meshfeed.exchange.lengths import NO_BYTES, GatheredLengths, MemberReport, reports_of
from meshfeed.exchange.membership import Membership
from meshfeed.exchange.routing import NO_PIECES, Shipment, write_pieces
from meshfeed.exchange.values import bits_of, nested_bytes, nested_value, tensor_of, viewed_as
from meshfeed.feed.batch import Microbatch, Value
from meshfeed.feed.device import OnHost, Placer, microbatches_of
from meshfeed.feed.stepping import GlobalBatch, ranks_beside, stats_of_packs
from meshfeed.intervals import distinct
from meshfeed.layout import Coord, Layout
from meshfeed.plan import CpSplit, Packing, StepPlan, plan_step
from meshfeed.plan.packing import room_of, shape_of
from meshfeed.plan.types import check_split
from meshfeed.roles import Field
from meshfeed.sequence import Portion, portions_of
from meshfeed.sequence.runs import Runs
from meshfeed.sequence.table import fields_of_packs, places_of, runs_at

_ROWS = {"lengths": np.int64, "start": np.int64} | dict.fromkeys(
    ("microbatch", "first_rank", "cp_size", "sequence"), np.int32
)
_OTHERS = "(keys that are not declared)"
_TOGETHER = 1 << 19  # bytes of a field that are built in one pass


def gather_reports(given: Given | None, group: Group) -> list[MemberReport]:
    """Every rank's report; one collective. given: this rank's items; None if its loop has ended.

    Raises the error of a rank that could not give its items, or EndOfStream with those that ended, as indices
    into the group.
    """
    own = wire.end_message() if given is None else given.message()
    reports, ended, error = list[MemberReport](), list[int](), given and given.error
    for member, message in enumerate(group.all_gather(own.to_bytes())):
        kind, _ = wire.peek(message)
        if kind == wire.ERROR:
            raise wire.decode_error(message) from error and error.__cause__
        if kind == wire.END:
            ended.append(member)
        else:
            reports += reports_of(wire.decode(message))
    if ended:
        raise EndOfStream(*ended)
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
    split: CpSplit | None = "zigzag",
) -> GlobalBatch:
    """Plan which item goes where: a pure function, equal on every rank and to a Feed's for the same lengths.

    made: a finished plan; None calls the planner. length: the key that gave the lengths, for error messages.
    split: as in `reroute`.
    Raises PlanError naming rank, item and key.
    """
    cp_split = split or "zigzag"
    most = room_of(packing, dp=layout.dp, cp=layout.cp, split=cp_split).longest
    if packing.oversize == "error" and (longer := gathered.lengths > most).any():
        item = gathered.item(int(gathered.lengths.argmax()), membership)
        raise PlanError(
            f"{item}: key {length!r} has {gathered.lengths.max()} tokens, at step {step}; the widest cp "
            f"group holds {most} ({longer.sum()} such sequences); cut them in the iterator, raise capacity "
            f"or cp, or set oversize='split', 'truncate' or 'drop'"
        )
    try:
        made = made or plan_step(
            gathered.lengths, packing, dp=layout.dp, cp=layout.cp, pp=layout.pp, vpp=vpp, cp_split=cp_split
        )
    except PlanError as error:
        raise PlanError(f"step {step}: {error}") from error
    all_valid = np.array_equal(gathered.valid, gathered.lengths)
    if packing.oversize == "truncate" and made.oversize.size and not all_valid:
        raise PlanError(
            f"{gathered.item(int(made.oversize[0]), membership)} is cut to {made.lengths.max()} tokens, and "
            f"only its total of loss-bearing tokens is known; cut it in the iterator, or set "
            f"oversize='split' or 'drop'"
        )
    return GlobalBatch(
        step=step,
        draws=gathered.draws,
        lengths=gathered.lengths,
        plan=made,
        tokens=made.tokens,
        valid_tokens=(
            made.tokens if all_valid else int(gathered.valid[distinct(made.sequence[made.kept])].sum())
        ),
        sum_sq=made.sum_sq,
        stats=partial(stats_of_packs, made, gathered.draws, packing, pp=layout.pp, vpp=vpp),
    )


def columns_of_plan(made: StepPlan) -> dict[str, Any]:
    """A plan as columns, for a message to ranks that then need not plan: few, as each has a fixed cost."""
    rows = np.stack([getattr(made, name) for name in _ROWS], dtype=np.int64)
    return {"plan": rows, "oversize": made.oversize, "num_microbatches": np.array([made.num_microbatches])}


def plan_of(columns: Mapping[str, Any], packing: Packing, layout: Layout, split: CpSplit) -> StepPlan:
    """The plan of a message, in memory of its own."""
    room = room_of(packing, dp=layout.dp, cp=layout.cp, split=split)
    return StepPlan(
        **{name: row.astype(dtype) for (name, dtype), row in zip(_ROWS.items(), columns["plan"])},
        oversize=np.array(columns["oversize"]),
        num_microbatches=int(columns["num_microbatches"][0]),
        num_ranks=room.num_ranks,
        idle_cp_size=room.sizes[0],
        align=room.align,
        shape=shape_of(packing),
    )


@dataclass(frozen=True)
class Received:
    """The part of a step that one member has received.

    Attributes:
        gathered, shipment: what the data are.
        data: the bytes, ordered by source; uint8 [n].
        split: how rows were cut for them; None for whole rows.
        served: the dp_cp ranks that they are for; None for a rank that needs no key.
    """

    gathered: GatheredLengths
    shipment: Shipment
    data: Bytes
    split: CpSplit | None = None
    served: tuple[int, ...] | None = None

    @cached_property
    def offsets(self) -> Longs:
        """Byte offset of each piece of the shipment in `data`; int64 [n]."""
        return self.shipment.offsets()

    def rows(self, microbatch: int) -> Longs:
        """Indices into the shipment of a microbatch's pieces, in the order of its pack; int64 [k]."""
        return np.flatnonzero(self.shipment.microbatch == microbatch)

    @cached_property
    def begins(self) -> dict[str, Longs]:
        """Offset in `data` of each split key in each piece, -1 if absent; int64 [n] each."""
        its, gathered, names = self.shipment, self.gathered, list(self.gathered.split_keys)
        before = np.full((len(names), len(gathered.schemas)), -1)  # bytes of a token of the keys before it
        for at, schema in enumerate(gathered.schemas):
            for key, (name, _, _) in enumerate(schema.split):
                before[names.index(name), at] = sum(schema.entry_bytes[:key])
        before = before[:, gathered.schema[its.item]]
        start = self.offsets + gathered.rest_bytes[its.item]
        return dict(zip(names, np.where(before < 0, -1, start + its.num_tokens * before)))

    def rest(self, piece: int) -> list[tuple[str, str, Any]]:
        """(name, type, value) of every unsplit key of a piece: an array, bytes or a nested value; copies."""
        its, gathered = self.shipment, self.gathered
        schema = gathered.schemas[int(gathered.schema[its.item[piece]])]
        data, at = self.data[int(self.offsets[piece]) :], 8 * sum(ndim for _, _, ndim in schema.rest)
        dims = iter(data[:at].copy().view(np.int64).tolist())
        found: list[tuple[str, str, Any]] = []
        for name, dtype, ndim in schema.rest:
            shape = tuple(islice(dims, ndim))
            flat = data[at : at + entry_bytes(dtype, shape)]
            at += flat.size
            if dtype == BYTES:
                value: Any = flat.tobytes()
            elif dtype == NESTED:
                value = nested_value(name, flat)
            else:
                value = flat.copy().view(carrier(dtype)).reshape(shape)
            found.append((name, dtype, value))
        return found

    def items(self, microbatch: int) -> list[tuple[int, dict[str, Any]]]:
        """(index in the gathered lengths, item) of a microbatch, with the tokens that were rerouted here."""
        rows, its = self.rows(microbatch), self.shipment
        found = [(int(its.item[row]), dict[str, Any]()) for row in rows]
        tokens = its.num_tokens[rows].tolist()
        for name, (dtype, shape) in self.gathered.split_keys.items():
            entry = entry_bytes(dtype, shape)
            for (_, item), begin, size in zip(found, self.begins[name][rows].tolist(), tokens):
                if begin >= 0:
                    flat = self.data[begin : begin + size * entry].copy()
                    item[name] = tensor_of(flat.view(carrier(dtype)).reshape(size, *shape), dtype)
        for (_, item), row in zip(found, rows.tolist()):
            for name, dtype, value in self.rest(row):
                item[name] = tensor_of(value, dtype) if isinstance(value, np.ndarray) else value
        return found


def reroute(
    given: Given,
    gathered: GatheredLengths,
    step_plan: StepPlan,
    membership: Membership,
    group: Group,
    *,
    split: CpSplit | None = "zigzag",
    receivers: Sequence[Sequence[int]] | None = None,
) -> Received:
    """Send every item, or its slices, to the ranks of the plan: one collective and one buffer for all keys.

    split: how context parallelism splits rows; None sends whole rows to each rank of a cp group.
    receivers: for each member, the ranks that get what it gets, as indices into the group; None for all that
    it serves directly. Any other rank receives nothing, and takes no part. Raises PlanError for an unknown
    split.
    """
    check_split(split or "zigzag")
    receivers, num_members = receivers or membership.receivers(), len(membership.ranks)
    member = next((at for at, indices in enumerate(receivers) if group.member in indices), None)
    if member is None:
        return Received(gathered, NO_PIECES, NO_BYTES, split)
    both = Shipment.of(gathered, step_plan, membership, split, member)
    coming = both.received_by(member)
    received = partial(Received, gathered, coming, split=split, served=membership.served[member])
    if not gathered.rest_bytes.any() and not (gathered.token_bytes * gathered.lengths).any():
        return received(NO_BYTES)  # no member needs a byte, and all know it
    in_sizes = coming.sizes(coming.source, num_members)
    if group.member >= num_members:
        return received(group.all_to_many(NO_BYTES, [], in_sizes, []))
    going = both.sent_by(member)
    out_sizes = going.sizes(going.member, num_members)
    outgoing = group.buffer(sum(out_sizes))
    mine = np.flatnonzero(gathered.held_by(member))
    write_pieces(outgoing, going, given.columns, given.report, np.searchsorted(mine, going.item))
    if group.size > num_members:
        return received(group.all_to_many(outgoing, out_sizes, in_sizes, receivers))
    return received(group.all_to_all(outgoing, out_sizes, in_sizes))


def pack(
    received: Received,
    batch: GlobalBatch,
    layout: Layout,
    rank: int,
    keys: Keys,
    *,
    split: CpSplit | None = None,
    names: Sequence[str] | None = None,
    placer: Placer | None = None,
) -> list[Microbatch]:
    """The microbatches of one rank, from what its member has received.

    split: None for that of `reroute`, or zigzag if it sent whole rows. names: the fields to make; None for
    all. placer: the target device; None for host memory. Raises PlanError if rows were cut by another split,
    the plan is of another layout, or the member does not serve the rank.
    """
    check_split(split or "zigzag")
    if batch.plan.num_ranks != layout.dp * layout.cp:
        raise PlanError(
            f"pack(layout={layout}): has {layout.dp * layout.cp} ranks in dp and cp, and the plan "
            f"{batch.plan.num_ranks}; give the layout of `plan`"
        )
    if split is not None and received.split not in (None, split):
        raise PlanError(
            f"pack(split={split!r}): reroute has cut the rows by {received.split!r}; leave it out"
        )
    coord = layout.coord(rank)
    at = coord.dp * layout.cp + coord.cp
    if received.served is not None and at not in received.served:
        raise PlanError(
            f"pack(rank={rank}): is dp_cp rank {at} of {layout}, and reroute has brought what dp_cp ranks "
            f"{received.served} need; give a global rank that this member serves"
        )
    placer, made = placer or OnHost(), list[Microbatch]()
    names = [field.name for field in keys.fields] if names is None else names
    mine = portions(batch, layout, coord, split or received.split or "zigzag")
    for microbatches, _ in packed(received, mine, keys, names, placer):
        made += microbatches
    return made


def portions(batch: GlobalBatch, layout: Layout, coord: Coord, split: CpSplit) -> list[Portion]:
    """The portion of each microbatch for the rank at a coordinate."""
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
    portions: Sequence[Portion],
    keys: Keys,
    names: Sequence[str],
    placer: Placer,
    digester: Digester | None = None,
) -> Iterator[tuple[list[Microbatch], Any]]:
    """The one microbatch of each portion on its device, and the placer's ticket for it.

    digester: receives the fields, under the names of `compared`.
    """
    types = {key.name: key.dtype for key in keys.declared} | received.gathered.dtypes
    carried = {name: dtype for name, dtype in types.items() if dtype in CARRIED}
    entries = (entry_bytes(*kind) for name, kind in received.gathered.split_keys.items() if name in names)
    for some in _together(portions, max(entries, default=1)):
        for portion, arrays in zip(some, fields_of(received, some, keys, names, placer.allocate)):
            if digester is not None:
                digester.add([_comparable(arrays, keys)])
            made, ticket = microbatches_of(portion, [arrays], placer)
            if carried:
                made = [each.with_fields(_retyped(each.fields, carried)) for each in made]
            yield made, ticket


def _together(portions: Sequence[Portion], token_bytes: int) -> Iterator[list[Portion]]:
    """Consecutive portions whose fields are built in one pass: small ones share its fixed costs.

    token_bytes: of the widest field.
    """
    some, num_tokens = list[Portion](), 0
    for portion in portions:
        if some and (num_tokens + portion.num_tokens) * token_bytes > _TOGETHER:
            yield some
            some, num_tokens = [], 0
        some.append(portion)
        num_tokens += portion.num_tokens
    if some:
        yield some


def fields_of(
    received: Received, portions: Sequence[Portion], keys: Keys, names: Sequence[str], allocate: Allocate
) -> list[Arrays]:
    """The fields of each portion's one pack; see `Keys`."""
    rows = [received.rows(portion.microbatches.start) for portion in portions]
    made = fields_of_packs(portions, [f.name for f in keys.computed if f.name in names], allocate)
    wanted = [key for key in keys.declared if key.split and key.name in names]
    split = _split(received, portions, rows, wanted, allocate)
    for arrays, of_split, own in zip(made, split, rows):
        arrays |= of_split | _rest(received, own, keys, names)
    return made


def _split(
    received: Received,
    portions: Sequence[Portion],
    rows: Sequence[Longs],
    wanted: Sequence[Field],
    allocate: Allocate,
) -> list[Arrays]:
    """The wanted keys, all of them split."""
    made: list[Arrays] = [{} for _ in portions]
    if not wanted:  # a stage that needs lengths alone
        return made
    places, num_tokens = places_of(portions)
    own = [portion.own_tokens for portion in portions]
    piece = np.concatenate([held[tokens.sequence] for held, (tokens, _) in zip(rows, own)])
    runs = runs_at(places, [Runs(at, tokens.start, tokens.sizes) for tokens, at in own])
    start = received.shipment.tokens_at(piece, runs.start)
    of_runs, needed = np.stack((runs.at, start, runs.size)), sum(portion.num_tokens for portion in portions)
    for key in wanted:
        dtype, shape = received.gathered.split_keys.get(key.name, (key.dtype, ()))
        if dtype == ANY:  # no item of the step has it and its type is unknown
            continue
        out, entry = allocate((num_tokens, *shape), carrier(dtype)), entry_bytes(dtype, shape)
        begin = received.begins[key.name][piece] if key.name in received.begins else np.full(piece.size, -1)
        has = begin >= 0  # a sequence without the key is padding
        at, first, size = entry * of_runs[:, has]
        if size.sum() < needed * entry:
            out[:] = bits_of(key.pad, dtype)
        Runs(at, begin[has] + first, size).copy(received.data, out.ravel().view(np.uint8))
        for arrays, portion, place in zip(made, portions, places):
            arrays[key.name] = out[place : place + portion.num_tokens].reshape(1, portion.num_tokens, *shape)
    return made


def _rest(received: Received, rows: Longs, keys: Keys, names: Sequence[str]) -> dict[str, Any]:
    """One value per sequence of every unsplit key."""
    declared = keys.by_name()
    values: dict[str, list[Any]] = {
        key.name: [None] * rows.size for key in keys.declared if not key.split and key.name in names
    }
    has_any = any(schema.rest for schema in received.gathered.schemas)
    for sequence, row in enumerate(rows.tolist() if has_any else ()):
        for name, _, value in received.rest(row):
            if name in values or name not in declared:
                values.setdefault(name, [None] * rows.size)[sequence] = value
    return values


def compared(keys: Keys) -> list[str]:
    """Names for digests: the declared fields, all others together, and the fields computed from lengths."""
    return [*(field.name for field in keys.declared), _OTHERS, *(field.name for field in keys.computed)]


def _comparable(arrays: Arrays, keys: Keys) -> Arrays:
    names = set(compared(keys))
    made: dict[str, list[Any]] = {}
    for name, value in sorted(arrays.items()):
        listed: list[Any] = [value] if isinstance(value, np.ndarray) else list(value)
        pieces = [_as_bytes_or_array(name, each) for each in listed]
        if name in names:
            made[name] = pieces
        else:
            made.setdefault(_OTHERS, []).extend([name.encode(), *pieces])
    return cast(Arrays, made)


def _as_bytes_or_array(name: str, value: Any) -> Array | bytes:
    if value is None:
        return b""
    return value if isinstance(value, bytes | np.ndarray) else nested_bytes(name, value).tobytes()


def _retyped(fields: Any, types: Mapping[str, str]) -> dict[str, Value]:
    def retyped(value: Any, dtype: str) -> Any:
        if isinstance(value, torch.Tensor):
            return viewed_as(value, dtype)
        return [retyped(each, dtype) for each in value] if isinstance(value, list) else value

    return {name: retyped(value, types.get(name, "")) for name, value in fields.items()}
