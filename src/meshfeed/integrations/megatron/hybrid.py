"""Megatron-core's HybridCPDataLoaderWrapper: samples per rank and sample-id groups, by meshfeed's planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from meshfeed.arrays import Longs
from meshfeed.deliver import ErrorRecord, Meeting, default_store
from meshfeed.errors import LayoutError, PlanError, RecipeError
from meshfeed.exchange import GatheredLengths, Group, Keys, Membership, encode, gather_lengths, reroute
from meshfeed.exchange.items import Given, failed
from meshfeed.exchange.lengths import LENGTH, VALID, MemberReport, Schema
from meshfeed.feed.device import on_device
from meshfeed.feed.stepping import ranks_beside
from meshfeed.integrations.megatron.config import packing_of
from meshfeed.integrations.megatron.samples import (
    AXES_FIRST,
    per_token_of,
    sequences_of,
    with_axes,
    with_axes_last,
)
from meshfeed.integrations.megatron.stages import core, device_of, layout_of
from meshfeed.layout import Layout
from meshfeed.plan import Align, StepPlan, packs_of, plan_step
from meshfeed.roles import Field
from meshfeed.sequence.table import COMPUTED

SampleGroups = list[list[list[int]]]
"""[group][dp_cp rank] -> ids of the samples that the rank works on, in order."""

Samples = dict[int, dict[str, Any]]
"""id -> sample."""


class _Joined(NamedTuple):
    layout: Layout
    membership: Membership
    group: Group


class HybridCPDataLoaderWrapper:
    """Replaces Megatron's class of this name in its schedule for hybrid context parallelism.

    Every `next` pulls one batch of samples, packed or not, and gives (samples, groups): id -> whole sample on
    its device for those of this rank, and the ids of all ranks (see `SampleGroups`). In each group a rank's
    samples have one cp size, and the ranks that share them have them in the same order. A rank without a
    sample gets a dummy without loss, whose id is larger than all others. Samples are padded only as far as
    their own cp size needs. Ranks without an iterator get (None, None).

    Subclasses can override the methods that Megatron's class has, `_gid_to_src_rank` too. `next` calls them
    on every rank that has an iterator, and each does what its arguments say. Lengths are gathered in one
    collective of the dp_cp ranks' gloo group, samples are rerouted in two.

    Args:
        data_iterator: gives lists of samples; the same on all cp ranks of a data-parallel rank.
        config: see `packing_of`; the scheduler is always dynamic_cp.
        pg_collection: with dp_cp, tp, cp, dp and pp; None takes those of parallel_state.
        keys: its split keys have one entry per token, like Megatron's own.
        device: of the samples; None takes this process's GPU if there is one.
        timeout_s: how long to wait for the other ranks to make a gloo group, if Megatron has made none.

    Raises LayoutError if cp does not vary faster than dp; StopIteration when all iterators are exhausted;
    PlanError for a sample that all ranks together cannot hold; and any error of a rank's iterator or
    `unpack_batch`.
    """

    def __init__(
        self,
        data_iterator: Iterator[Any] | None,
        config: Any,
        pg_collection: Any = None,
        *,
        keys: Keys | None = None,
        device: str | torch.device | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self.data_iterator, self.config = data_iterator, config
        self._groups, self._device, self._timeout_s = pg_collection, device, timeout_s
        self._given_keys = keys or Keys()
        self._keys = _sent_keys(self._given_keys)
        self._pads = {field.name: field.pad for field in self._keys.declared if field.split}
        self._taken = self._step = 0
        self._error: Exception | None = None
        # id -> position ids of this batch's samples, and whether sequences_of found their axes first
        self._unpacked: dict[int, tuple[Any, bool]] = {}

    @cached_property
    def dp_cp_group(self) -> Any:
        """The process group of the data and context parallel ranks beside this one."""
        return self._group("dp_cp", "get_data_parallel_group", with_context_parallel=True)

    @cached_property
    def dp_group(self) -> Any:
        """The process group of the data-parallel ranks beside this one."""
        return self._group("dp", "get_data_parallel_group")

    @cached_property
    def tp_group(self) -> Any:
        """The process group of the tensor-parallel ranks beside this one."""
        return self._group("tp", "get_tensor_model_parallel_group")

    @property
    def total_hdp_gpus(self) -> int:
        """The number of dp_cp ranks."""
        return self.dp_cp_group.size()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Samples, SampleGroups] | tuple[None, None]:
        if self.data_iterator is None:
            return None, None
        batch = self._pull()
        lengths = [len(sample[self._keys.length]) for sample in batch]
        seqlens, offsets = self.get_global_seqlens(torch.tensor(lengths, dtype=torch.int32))
        if not seqlens:
            raise self._error or StopIteration
        id_seqlens, own = self.get_global_id_seqlens(len(batch), offsets, seqlens)
        groups = self._planned(id_seqlens)
        mine = self.reroute_samples_to_hdp_ranks(batch, own, id_seqlens, groups, offsets)
        if self._error is not None:  # not sent: a subclass replaced the methods that send it
            raise self._error
        self._taken, self._step = self._taken + len(batch), self._step + 1
        return mine, groups

    def unpack_batch(self, batch: Any) -> list[dict[str, Any]]:
        """The samples of an element of the iterator, without padding; empty ones are left out.

        position_ids that have several axes are [axes, T]. For those that an override makes, the shape must
        say so: 3 axes of 3 tokens are refused.
        """
        length, made = self._keys.length, sequences_of(batch, self._given_keys)
        if missing := [at for at, sample in enumerate(made) if not np.ndim(sample.get(length, 0))]:
            raise RecipeError(f"sample {missing[0]} has no {length!r} with one entry per token")
        return [self._shown(sample) for sample in made if len(sample[length])]

    def get_global_seqlens(self, subsample_seqlens: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """The lengths of all samples, by data-parallel rank, and the index of the first of each.

        subsample_seqlens: tokens of this rank's samples; int32 [n]. Returns a list, and int32 [dp].
        """
        rows = np.zeros((len(subsample_seqlens), 4), np.int64)
        rows[:, LENGTH] = rows[:, VALID] = np.asarray(subsample_seqlens.cpu(), np.int64)
        gathered = self._gathered(lambda: Given(MemberReport(rows=rows, schemas=(Schema((), ()),))))[1]
        counts = np.bincount(gathered.draws.source, minlength=self._joined.layout.dp)
        return gathered.lengths.tolist(), torch.from_numpy((np.cumsum(counts) - counts).astype(np.int32))

    def get_global_id_seqlens(
        self, num_local_subsamples: int, offsets: torch.Tensor, seqlens_gathered: Sequence[int]
    ) -> tuple[list[tuple[int, int]], torch.Tensor]:
        """(id, length) of every sample, and the ids of this rank's samples; int32 [num_local_subsamples]."""
        first = int(offsets[self._joined.layout.coord(dist.get_rank()).dp])
        return list(enumerate(seqlens_gathered)), torch.arange(
            first, first + num_local_subsamples, dtype=torch.int32
        )

    def _gid_to_src_rank(self, gid: int, offsets: torch.Tensor) -> int:
        """The dp_cp rank that sends a sample to this rank: of its data-parallel rank, with this cp rank."""
        layout = self._joined.layout
        dp_rank = int(np.searchsorted(offsets.numpy(), int(gid), side="right")) - 1
        return dp_rank * layout.cp + layout.coord(dist.get_rank()).cp

    def reroute_samples_to_hdp_ranks(
        self,
        batch: Sequence[Mapping[str, Any]],
        global_ids_this_rank: torch.Tensor,
        global_id_seqlens: Sequence[tuple[int, int]],
        sample_id_groups: SampleGroups,
        offsets: torch.Tensor,
    ) -> Samples:
        """The samples that the groups give to this rank, by id.

        batch: this rank's samples, in the order of global_ids_this_rank. global_id_seqlens: of all samples.
        sample_id_groups: see `SampleGroups`; a sample is on consecutive ranks of one group, and ids without a
        length are dummies. offsets: id of the first sample of each data-parallel rank. Raises RecipeError if
        ids or lengths are not those of the samples, PlanError for groups that cannot be, and LayoutError if
        `_gid_to_src_rank` names another sender.
        """
        layout, membership, group = self._joined
        lengths = np.array([size for _, size in sorted(global_id_seqlens)], np.int64)
        given, gathered = self._gathered(lambda: self._encoded(batch, global_ids_this_rank, offsets))
        if not np.array_equal(lengths, gathered.lengths):
            raise RecipeError(
                f"global_id_seqlens begins with the lengths {lengths[:8].tolist()}, the samples with "
                f"{gathered.lengths[:8].tolist()}; change samples in unpack_batch, before their lengths "
                f"are gathered"
            )
        align = packing_of(self.config, layout, "dynamic_cp").align
        step_plan = plan_of(sample_id_groups, lengths, align)
        received = reroute(given, gathered, step_plan, membership, group, split=None)
        for sample, source in zip(received.shipment.item.tolist(), received.shipment.source.tolist()):
            if (told := int(self._gid_to_src_rank(sample, offsets))) != source:
                raise LayoutError(
                    f"_gid_to_src_rank says dp_cp rank {told} for sample {sample}, but {source} sends it"
                )
        mine: Samples = {}
        for m, of_rank in enumerate(sample_id_groups):
            items = dict(received.items(m))
            cp_sizes = Counter(sample for ids in of_rank for sample in ids)
            for sample in of_rank[group.member]:
                item = items.get(sample) or self._dummy(gathered.schemas[0])
                length = int(lengths[sample]) if sample < lengths.size else 1
                multiple = int(align.pack_multiple(cp_sizes[sample]))  # each sample is a pack of its own
                width = -(-length // multiple) * multiple
                placed = with_axes({name: self._placed(name, value, width) for name, value in item.items()})
                mine[sample] = {name.strip("()"): value for name, value in placed.items()}
        return mine

    def _pull(self) -> list[dict[str, Any]]:
        """This rank's samples: none at its end, since others may have more, and none after an error."""
        self._unpacked = {}
        try:
            batch = next(cast(Iterator[Any], self.data_iterator), None)
            return [] if batch is None else self.unpack_batch(batch)
        except Exception as error:
            self._error = error
            return []

    def _shown(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """A sample of `sequences_of`, as overrides of `unpack_batch` get it."""
        shown = with_axes(sample)
        if (ids := shown.get("position_ids")) is not None:
            self._unpacked[id(ids)] = ids, AXES_FIRST in sample
        return shown

    def _axes_last(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of `_shown`; the shape tells the dimensions of an override's position ids apart."""
        ids = sample.get("position_ids")
        if id(ids) not in self._unpacked:
            return with_axes_last(sample, self._given_keys)
        made = dict(sample)
        if self._unpacked[id(ids)][1]:
            made[AXES_FIRST] = made.pop("position_ids").movedim(0, -1)
        return made

    def _gathered(self, made: Callable[[], Given]) -> tuple[Given, GatheredLengths]:
        """This rank's part and the lengths of all. made: returns this rank's; its error goes to all ranks."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            given = made()
        except Exception as error:
            given = failed(error, ErrorRecord.of(error))
        _, membership, group = self._joined
        return given, gather_lengths(given, membership, group)

    def _encoded(self, batch: Sequence[Mapping[str, Any]], ids: torch.Tensor, offsets: torch.Tensor) -> Given:
        """This rank's samples in the order of their ids, as bytes."""
        first = int(offsets[self._joined.layout.coord(dist.get_rank()).dp])
        order = np.argsort(np.asarray(ids.cpu()))
        if sorted(ids.tolist()) != [*range(first, first + len(batch))]:
            raise RecipeError(
                f"global_ids_this_rank begins with {ids.tolist()[:8]} for {len(batch)} samples; by offsets, "
                f"this rank has the ids {first} to {first + len(batch) - 1}"
            )
        whole = (self._axes_last(batch[at]) for at in order.tolist())
        samples = [{_sent(name): value for name, value in each.items()} for each in whole]
        return encode(samples, self._keys, first=self._taken, rank=dist.get_rank())

    def _planned(self, id_seqlens: Sequence[tuple[int, int]]) -> SampleGroups:
        """The groups of these samples, by meshfeed's planner."""
        layout = self._joined.layout
        lengths = np.array([size for _, size in sorted(id_seqlens)], np.int64)
        packing = packing_of(self.config, layout, "dynamic_cp")
        try:
            return groups_of(plan_step(lengths, packing, dp=layout.dp, cp=layout.cp, pp=layout.pp))
        except PlanError as error:
            raise PlanError(f"batch {self._step}: {error}") from error

    def _group(self, name: str, of_state: str, **options: bool) -> Any:
        """A group of pg_collection, or of parallel_state."""
        given: Any = getattr(self._groups, name, None)
        return getattr(core("parallel_state"), of_state)(**options) if given is None else given

    def _placed(self, name: str, value: Any, width: int) -> Any:
        """A value of a sample on its device; keys with one entry per token get their pad up to the width."""
        if isinstance(value, torch.Tensor) and name in self._pads:
            more = [0, 0] * (value.ndim - 1) + [0, max(width - len(value), 0)]
            value = torch.nn.functional.pad(value, more, value=self._pads[name])
        return on_device(value, device_of(self._device))

    def _dummy(self, schema: Schema) -> dict[str, Any]:
        """A sample of one token, all padding."""
        return {
            name: torch.full((1, *shape), self._pads[name], dtype=getattr(torch, dtype))
            for name, dtype, shape in schema.split
        }

    @cached_property
    def _joined(self) -> _Joined:
        """The group of ranks that exchange; the first use waits for them if they need a gloo group."""
        layout, rank = layout_of(self._groups), dist.get_rank()
        ranks = tuple(ranks_beside(layout, layout.coord(rank)).tolist())
        found: Any = getattr(self._groups, "dp_cp", None)
        if found is None:
            parallel_state = core("parallel_state")
            try:
                found = parallel_state.get_data_parallel_group_gloo(with_context_parallel=True)
            except AssertionError:  # made without gloo groups
                found = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if (members := tuple(dist.get_process_group_ranks(found))) != ranks:
            raise LayoutError(
                f"the dp_cp group is {members}, by dp and then cp it is {ranks}; let cp vary faster than dp"
            )
        if torch.device("cpu") not in found._device_types:
            store = cast(Store, default_store())
            meeting = Meeting(store, rank, self._timeout_s, "hybrid cp", num_ranks=len(ranks))
            group = meeting.group("hybrid", ranks)
        else:
            group = Group(found, ranks=ranks)
        return _Joined(layout, Membership.all_of(ranks, cp=layout.cp), group)


def groups_of(step_plan: StepPlan) -> SampleGroups:
    """The samples of each rank, by microbatch; dummies have ids above all samples."""
    ranks, first_dummy = step_plan.num_ranks, step_plan.lengths.size
    groups: SampleGroups = [[[] for _ in range(ranks)] for _ in range(step_plan.num_microbatches)]
    for rank in range(ranks):
        for m, pack in enumerate(packs_of(step_plan, rank)):
            ids = step_plan.sequence[pack.sequences].tolist()
            groups[m][rank] = ids or [first_dummy + m * ranks + rank - pack.cp_rank]
    return groups


def plan_of(groups: SampleGroups, lengths: Longs, align: Align) -> StepPlan:
    """The plan that gives samples of these lengths to these ranks: the inverse of `groups_of`.

    Raises PlanError for a sample that is not on consecutive ranks of one group.
    """
    microbatch, first_rank = np.full((2, lengths.size), -1, np.int32)
    cp_size = np.zeros(lengths.size, np.int32)
    for m, of_rank in enumerate(groups):
        for rank, ids in enumerate(of_rank):
            for sample in (each for each in ids if each < lengths.size):
                if cp_size[sample] == 0:
                    microbatch[sample], first_rank[sample] = m, rank
                elif (microbatch[sample], first_rank[sample] + cp_size[sample]) != (m, rank):
                    raise PlanError(
                        f"sample {sample} is on rank {rank} of group {m}, and not on the rank before"
                    )
                cp_size[sample] += 1
    if (nowhere := np.flatnonzero(cp_size == 0)).size:
        raise PlanError(f"sample {nowhere[0]} is in no group; give every sample to some rank")
    return StepPlan(
        lengths=lengths,
        microbatch=microbatch,
        first_rank=first_rank,
        cp_size=cp_size,
        num_microbatches=len(groups),
        num_ranks=len(groups[0]),
        idle_cp_size=1,
        align=align,
    )


def _sent(name: str) -> str:
    return f"({name})" if name in COMPUTED else name


def _sent_keys(keys: Keys) -> Keys:
    """The declared keys, and Megatron's own keys with one entry per token, under the names sent."""
    more = sorted((per_token_of(keys) | {AXES_FIRST}) - {field.name for field in keys.declared})
    fields = (Field(name=_sent(name), dtype="any", split=True, pad=name == "padding_mask") for name in more)
    return Keys(*keys.declared, *fields, length=keys.length)
