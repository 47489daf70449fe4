"""Megatron-core's `wrap_data_iterator`: packs a trainer's own sequences with meshfeed's planner each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from meshfeed.errors import PlanError, RecipeError, RoleError
from meshfeed.exchange import Exchange, Keys
from meshfeed.exchange.lengths import GatheredLengths
from meshfeed.exchange.place import ExchangePlace
from meshfeed.integrations.megatron.batches import OWN_FIELDS, StageIterator
from meshfeed.integrations.megatron.config import KEEPING, check_layout, cp_split_of, packing_of
from meshfeed.integrations.megatron.iterations import begin, iterators_of_stages
from meshfeed.integrations.megatron.samples import AXES_FIRST, OVERWRITTEN, sequences_of
from meshfeed.integrations.megatron.stages import (
    Readers,
    core,
    delivery_of,
    device_of,
    layout_of,
    readers,
    scheduler_of,
    stages_of,
)
from meshfeed.plan import Align, StepPlan
from meshfeed.plan.packing import room_of, shape_of
from meshfeed.roles import Role
from meshfeed.transport import Transport

_BEGINS = "(begins)"  # marks the first sample of a pack to keep

Wrapped = tuple[Any, int, int, int]
"""(iterator or one per virtual stage, number of microbatches, tokens, sum of squared lengths)."""


def _with_own(keys: Keys) -> Keys:
    """The keys, and the fields of a sample that replace those of packs."""
    names = {f"({field.name})" for field in keys.declared}
    if "(position_ids)" in names:
        names.add(AXES_FIRST)
    more = (field for field in OWN_FIELDS if field.name not in names)
    return Keys(*keys.declared, *more, length=keys.length, valid=keys.valid)


class _Turn:
    """The iterator of the current call as one endless source, so that several datasets can take turns.

    Each element is everything that one call pulls, so a growing batch size needs no new Exchange. An
    exhausted iterator gives an empty element: a dataset that ends on this rank must not end the others, and
    a step without a sequence from any rank ends it. An iterator that ends within a call is an error, since
    the step would be short.
    """

    def __init__(self, keys: Keys) -> None:
        self.source: Iterator[Any] | None = None
        self._keys, self._num_elements, self._keep = keys, 0, False
        self._own = {field.name for field in keys.declared} & {field.name for field in OWN_FIELDS}

    def take(self, source: Iterator[Any] | None, num_elements: int, *, keep: bool) -> None:
        """Use this iterator, and `num_elements` of it, for the next step. keep: mark where each begins."""
        self.source, self._num_elements, self._keep = source, num_elements, keep

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[dict[str, Any]]:
        if self.source is None:
            raise RecipeError("this rank had a data iterator before but has none now; pass it in every call")
        made: list[dict[str, Any]] = []
        for taken in range(self._num_elements):
            try:
                element = next(self.source)
            except StopIteration:
                if taken == 0:
                    break
                raise RecipeError(
                    f"the data iterator ended after {taken} of num_microbatches={self._num_elements}; "
                    f"drop what does not fill a step (drop_last in its sampler), or ask for fewer"
                ) from None
            first, made = len(made), made + sequences_of(element, self._keys)
            if self._keep:
                if len(made) == first:
                    raise RecipeError(f"element {taken} is an empty pack; give each pack a sequence")
                made[first] = {**made[first], _BEGINS: b""}
        self._num_elements = 0
        return [
            {f"({k})" if f"({k})" in self._own else k: v for k, v in each.items() if k not in OVERWRITTEN}
            for each in made
        ]


class SequencePacking:
    """Megatron's `wrap_data_iterator`; call it once a step on every rank, and use it in `with`.

    From a trainer's own iterator it pulls num_microbatches elements on each rank that has one, gathers all
    lengths, plans by `config.sequence_packing_scheduler`, reroutes, and gives every rank its packs. For the
    iterators of a Feed it begins the next step and sends nothing. Every rank gets an iterator for
    `get_batch`; the iterators of one call are of the same step and dataset on all ranks.

    Iterators are pulled where `is_reader` is True. One on tp rank 0 of another stage is ignored; one on any
    other rank raises RoleError. The config needs only what Megatron's `wrap_data_iterator` reads.

    Args:
        readers: the value that `is_reader` got when the datasets were built.
        keys: what samples hold; None for tokens, labels and loss_mask, all else unsplit. Declare other keys
            with one entry per token here, split.
        device: of the packs; None takes this process's GPU if there is one.
        align: multiples that padding must reach: Align(pack=16) for fp8, or Align(sequence=n) to keep the
            padding of a dataset that pads its samples to multiples of n.
        timeout_s: how long to wait for other ranks.
    """

    def __init__(
        self,
        *,
        readers: Readers = "broadcast",
        keys: Keys | None = None,
        device: str | torch.device | None = None,
        align: Align | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self._readers: Readers = readers
        self._align = align
        self._keys, self._device, self._timeout_s = _with_own(keys or Keys()), device, timeout_s
        self._turn = _Turn(self._keys)
        self._open: dict[tuple[Any, ...], _Scheduled] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to other ranks. May be called again."""
        while self._open:
            self._open.popitem()[1].close()

    def __call__(
        self, data_iterator: Any, config: Any, num_microbatches: int, pg_collection: Any = None
    ) -> Wrapped:
        """The next step.

        Raises StopIteration if no rank's iterator gives a sequence; RecipeError if an iterator ends within
        num_microbatches, or if this rank has an iterator in some calls only; and the errors of an Exchange.
        """
        given = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        inner = [getattr(each, "iterable", each) for each in given]  # as in a RerunDataIterator
        stages = [each for each in inner if isinstance(each, StageIterator)]
        if stages and len(stages) == len(inner):
            return _wrapped(stages)
        if num_microbatches < 1:
            raise RecipeError(f"num_microbatches={num_microbatches}: give at least 1")
        keep = scheduler_of(config) in KEEPING
        source, layout = next((each for each in given if each is not None), None), layout_of(pg_collection)
        check_layout(config)
        plan = packing_of(config, layout, align=self._align)
        key = (layout, stages_of(config, layout), plan, keep)
        if key not in self._open:
            self._open[key] = self._new_exchange(config, key, pg_collection, source is not None)
        made = self._open[key]
        if source is not None and not made.pulls and not made.ignores:
            raise RecipeError("this rank had no data iterator before but has one now; pass it in every call")
        self._turn.take(source if made.pulls else None, num_microbatches, keep=keep)
        stages = made.stages
        wrapped, step = _wrapped(stages), stages[0].step
        if step is not None and not step.plan.lengths.size:  # on all ranks
            raise StopIteration
        return wrapped

    def _new_exchange(self, config: Any, key: tuple[Any, ...], groups: Any, has_one: bool) -> _Scheduled:
        layout, stages, packing, keeps = key
        reading, rank = readers(config, readers=self._readers, groups=groups), dist.get_rank()
        ignores = rank not in reading and layout.coord(rank).tp == 0
        pulls = has_one and not ignores
        made = _Scheduled(
            self._turn if pulls else None,
            layout,
            packing=packing,
            keys=self._keys,
            transport=Transport(
                readers=reading,
                delivery=delivery_of(self._readers),
                timeout_s=self._timeout_s,
                name="keeps packs" if keeps else "",
            ),
            stage_map=stages,
            cp_split=cp_split_of(config, packed=True),
            device=device_of(self._device),
        )
        made.keeps, made.pulls, made.ignores = keeps, pulls, ignores
        return made


class _ScheduledPlace(ExchangePlace):
    @cached_property
    def role(self) -> Role:
        readers = sorted(self.readers or ())
        if self.owns and self.rank not in readers:
            raise RoleError(
                f"rank {self.rank} has a data iterator, but is_reader() is True on ranks {readers} alone; "
                f"build datasets where it is (is_dataset_built_on_rank=megatron.is_reader, with the readers= "
                f"of this SequencePacking), and give None elsewhere"
            )
        return super().role


class _Scheduled(Exchange):
    """The exchange of a SequencePacking; its readers are Megatron's.

    keeps: see KEEPING. pulls: whether this rank had an iterator when the exchange was made. ignores: whether
    this rank is tp rank 0 of a stage whose data another rank reads, so that its iterator is not needed.
    """

    _kind_of_place = _ScheduledPlace
    keeps = pulls = ignores = False

    @cached_property
    def stages(self) -> list[StageIterator]:
        """The iterator of each virtual stage; the first call waits for the other ranks."""
        return iterators_of_stages(self)

    def _made_plan(self, gathered: GatheredLengths) -> StepPlan | None:
        if not self.keeps or not len(gathered):
            return None
        layout, source = self.layout, gathered.draws.source
        begins = np.array([_BEGINS in {name for name, _, _ in schema.rest} for schema in gathered.schemas])
        count = np.cumsum(begins[gathered.schema])
        pack = count - count[np.searchsorted(source, source)]
        room = room_of(self._packing, dp=layout.dp, cp=layout.cp, split=self._options.cp_split)
        size = np.zeros((int(pack.max()) + 1, layout.dp), np.int64)
        np.add.at(size, (pack, source), room.align.padded(gathered.lengths, layout.cp))
        if (over := np.argwhere(size > room.limits[0])).size:
            at, dp_rank = over[0].tolist()
            raise PlanError(
                f"pack {at} of data-parallel rank {dp_rank} has {size[at, dp_rank]} tokens, padded; a cp "
                f"group holds {room.limits[0]}: raise max_seqlen_per_dp_cp_rank, or let a scheduler pack"
            )
        held = np.zeros_like(size)
        np.add.at(held, (pack, source), gathered.lengths > 0)
        if (over := np.argwhere(held > room.max_sequences)).size:
            at, dp_rank = over[0].tolist()
            raise PlanError(
                f"pack {at} of data-parallel rank {dp_rank} has {held[at, dp_rank]} sequences, and "
                f"max_sequences={room.max_sequences}; raise thd_max_packed_sequences, or let a scheduler pack"
            )
        return StepPlan(
            lengths=gathered.lengths,
            microbatch=np.where(gathered.lengths > 0, pack, -1).astype(np.int32),
            first_rank=(source * layout.cp).astype(np.int32),
            cp_size=np.full(len(gathered), layout.cp, np.int32),
            num_microbatches=len(size),
            num_ranks=layout.dp * layout.cp,
            idle_cp_size=layout.cp,
            align=room.align,
            shape=shape_of(self._packing),
        )


def _wrapped(stages: Sequence[StageIterator]) -> Wrapped:
    """Begin the next step of all virtual stages, for Megatron's training loop."""
    step = begin(stages)
    replayed = core("rerun_state_machine").RerunDataIterator
    made = [replayed(stage.rest()) for stage in stages]
    return made if len(made) > 1 else made[0], step.num_microbatches, step.tokens, step.sum_sq
