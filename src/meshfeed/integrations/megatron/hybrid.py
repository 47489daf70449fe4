"""Megatron-core's HybridCPDataLoaderWrapper: samples per rank and sample-id groups, by meshfeed's planner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from meshfeed.deliver import ErrorRecord, Meeting, default_store
from meshfeed.errors import LayoutError
from meshfeed.exchange import Group, Keys, Membership, encode, gather_lengths, plan, reroute
from meshfeed.exchange.items import Given, failed
from meshfeed.exchange.keys import RESERVED
from meshfeed.exchange.lengths import Schema
from meshfeed.feed.stepping import ranks_beside
from meshfeed.integrations.megatron.samples import per_token_of, sequences_of
from meshfeed.integrations.megatron.schedule import packing_of
from meshfeed.integrations.megatron.stages import core, device_of, layout_of
from meshfeed.layout import Layout
from meshfeed.plan import StepPlan, packs_of
from meshfeed.roles import Field

SampleGroups = list[list[list[int]]]
"""[group][dp_cp rank] -> ids of the samples that the rank works on, in order."""


class HybridCPDataLoaderWrapper:
    """Replaces Megatron's class of this name in its schedule for hybrid context parallelism.

    Every `next` pulls one batch of samples, packed or not, and gives (samples, groups): id -> whole sample on
    its device for those of this rank, and the ids of all ranks (see `SampleGroups`). In each group a rank's
    samples have one cp size, and the ranks that share them have them in the same order. A rank without a
    sample gets a dummy without loss, whose id is above all others. Samples are padded only as far as their
    own cp size needs. Ranks without an iterator get (None, None).

    Args:
        data_iterator: gives lists of samples; the same on all cp ranks of a data-parallel rank.
        config: see `packing_of`; the scheduler is always dynamic_cp.
        pg_collection: with dp_cp, tp, cp, dp and pp; None takes those of parallel_state.
        keys: its split keys have one entry per token, like Megatron's own.
        device: of the samples; None takes this process's GPU if there is one.
        timeout_s: how long to wait for the other ranks to make a gloo group, if Megatron has made none.

    Lengths and samples are sent in two collectives of the dp_cp ranks' gloo group. Raises LayoutError if cp
    does not vary faster than dp; StopIteration when all iterators are exhausted; PlanError for a sample that
    all ranks together cannot hold; and what any rank's iterator raises.
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
        self._iterator, self._config, self._timeout_s = data_iterator, config, timeout_s
        self._groups, self._device = pg_collection, device
        self._given_keys = keys or Keys()
        self._per_token, self._keys = per_token_of(self._given_keys), _sent_keys(self._given_keys)
        self._taken = self._step = 0
        self._joined: tuple[Layout, Membership, Group] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[dict[int, dict[str, Any]], SampleGroups] | tuple[None, None]:
        if self._iterator is None:
            return None, None
        layout, membership, group = self._joined = self._joined or self._join()
        batch = self._pull()
        self._taken, self._step = self._taken + len(batch.report.rows), self._step + 1
        gathered = gather_lengths(batch, membership, group)
        if not len(gathered):
            raise StopIteration
        packing = packing_of(self._config, layout, "dynamic_cp")
        step_plan = plan(
            gathered, packing, membership, layout=layout, step=self._step - 1, length=self._keys.length
        ).plan
        received = reroute(batch, gathered, step_plan, membership, group, split=None)
        groups = groups_of(step_plan)
        mine: dict[int, dict[str, Any]] = {}
        for m, ids_of_rank in enumerate(groups):
            items = dict(received.items(m))
            for sample in ids_of_rank[group.member]:
                item = items.get(sample) or _dummy(gathered.schemas[0])
                width = _width(step_plan, sample)
                given = ((name.strip("()"), value) for name, value in item.items())
                mine[sample] = {name: self._placed(name, value, width) for name, value in given}
        return mine, groups

    def _placed(self, name: str, value: Any, width: int) -> Any:
        """A value of a sample on its device; keys with one entry per token get zeros up to the width."""
        if not isinstance(value, torch.Tensor):
            return value
        if name in self._per_token:
            beside = [0, 0] * (value.ndim - 1)
            value = torch.nn.functional.pad(value, [*beside, 0, max(width - len(value), 0)])
        return value.to(device_of(self._device))

    def _pull(self) -> Given:
        """This rank's items: none at its end, since others may have more; an error is reported to all."""
        try:
            element = next(cast(Iterator[Any], self._iterator), [])
            given = sequences_of(element, self._given_keys)
            samples = [{_sent(name): value for name, value in each.items()} for each in given]
            return encode(samples, self._keys, first=self._taken, rank=dist.get_rank())
        except Exception as error:
            return failed(error, ErrorRecord.of(error))

    def _join(self) -> tuple[Layout, Membership, Group]:
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
        return layout, Membership.all_of(ranks, cp=layout.cp), group


def groups_of(step_plan: StepPlan) -> SampleGroups:
    """The samples of each rank, by microbatch; dummies have ids above all samples."""
    ranks, first_dummy = step_plan.num_ranks, step_plan.lengths.size
    groups: SampleGroups = [[[] for _ in range(ranks)] for _ in range(step_plan.num_microbatches)]
    for rank in range(ranks):
        for m, pack in enumerate(packs_of(step_plan, rank)):
            ids = step_plan.sequence[pack.sequences].tolist()
            groups[m][rank] = ids or [first_dummy + m * ranks + rank - pack.cp_rank]
    return groups


def _width(step_plan: StepPlan, sample: int) -> int:
    """Tokens of a sample or dummy, padded for its cp size."""
    if sample < step_plan.lengths.size:
        length, cp_size = int(step_plan.lengths[sample]), int(step_plan.cp_size[sample])
    else:
        length, cp_size = 1, step_plan.idle_cp_size
    multiple = int(step_plan.align.pack_multiple(cp_size))  # each sample is a pack of its own
    return -(-length // multiple) * multiple


def _sent(name: str) -> str:
    return f"({name})" if name in RESERVED else name


def _sent_keys(keys: Keys) -> Keys:
    """The declared keys, and Megatron's own keys with one entry per token, under the names sent."""
    more = sorted(per_token_of(keys) - {field.name for field in keys.declared})
    fields = (Field(name=_sent(name), dtype="any", split=True) for name in more)
    return Keys(*keys.declared, *fields, length=keys.length)


def _dummy(schema: Schema) -> dict[str, Any]:
    """A sample of one token, 0, without loss."""
    return {
        name: torch.zeros((1, *shape), dtype=getattr(torch, dtype)) for name, dtype, shape in schema.split
    }
