"""Megatron-core's `wrap_data_iterator`: a trainer's own sequences, packed by meshfeed's planner each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

import torch

from meshfeed.errors import RecipeError
from meshfeed.exchange import Exchange, Keys
from meshfeed.integrations.megatron.batches import StageIterator, begin, data_iterators
from meshfeed.integrations.megatron.core import core
from meshfeed.integrations.megatron.stages import (
    Loading,
    delivery_of,
    device_of,
    layout_of,
    readers,
    stages_of,
)
from meshfeed.layout import Layout
from meshfeed.plan import Align, Packing
from meshfeed.roles import StageMap

SCHEDULERS = {
    "dp_balanced": "in_order",
    "default_dynamic_cp": "dynamic_cp",
    "default_hybrid_cp": "dynamic_cp",
    "in_order": "in_order",
    "balanced": "balanced",
    "dynamic_cp": "dynamic_cp",
}
"""sequence_packing_scheduler -> policy of a `Packing`: Megatron's names, and our own."""

# what packs have anyway, or what tells how a sample was padded or packed before
_OVERWRITTEN = ("position_ids", "attention_mask", "padding_mask", "local_cp_size")
_LENGTHS = (
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "original_seq_len",
    "padded_seq_len",
    "batch_idx",
)
_TOKENS = ("tokens", "labels", "loss_mask", "position_ids")

Wrapped = tuple[Any, int, int, int]
"""(iterator or one per virtual stage, number of microbatches, tokens, sum of squared lengths)."""


def packing_of(config: Any, layout: Layout, scheduler: str | None = None) -> Packing:
    """The packing that a Megatron config asks for.

    Read are sequence_packing_scheduler (or `scheduler`), max_seqlen_per_dp_cp_rank, sequence_parallel and
    min_dynamic_context_parallel_size. Changing cp groups have the sizes for which Megatron makes process
    groups: powers of 2 that divide dp * cp, and dp * cp. Raises RecipeError for a scheduler that is none of
    SCHEDULERS, or without a capacity.
    """
    given = scheduler or getattr(config, "sequence_packing_scheduler", None)
    name = str(getattr(given, "value", given))
    if name not in SCHEDULERS:
        raise RecipeError(f"sequence_packing_scheduler={name!r}: choose one of {', '.join(SCHEDULERS)}")
    capacity = getattr(config, "max_seqlen_per_dp_cp_rank", None)
    if capacity is None:
        raise RecipeError("the config has no max_seqlen_per_dp_cp_rank; set the tokens that a rank can hold")
    align = Align(pack=layout.tp) if getattr(config, "sequence_parallel", False) else Align()
    if SCHEDULERS[name] != "dynamic_cp":
        return Packing(capacity=int(capacity), policy=SCHEDULERS[name], align=align)  # type: ignore[arg-type]
    least, ranks = int(getattr(config, "min_dynamic_context_parallel_size", None) or 1), layout.dp * layout.cp
    sizes = [size for size in (1 << i for i in range(ranks.bit_length())) if ranks % size == 0]
    sizes = tuple(sorted({size for size in sizes if size >= least} | {ranks}))
    return Packing(capacity=int(capacity), policy="dynamic_cp", align=align, cp_sizes=sizes)


def sequences_of(element: Any) -> list[dict[str, Any]]:
    """The sequences in what a trainer's iterator gave: a sample, a list of them, or samples packed before.

    A sample that says its original_seq_len is cut to it, one with cu_seqlens is taken apart, and what packs
    bring themselves is left out. Raises RecipeError for anything else.
    """
    samples = [element] if isinstance(element, Mapping) else element
    if not isinstance(samples, Sequence) or not all(isinstance(each, Mapping) for each in samples):
        raise RecipeError(f"the data iterator gave {type(element).__name__}; give dicts, or lists of dicts")
    return [sequence for sample in samples for sequence in _apart(sample)]


def _apart(sample: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    values = {
        name: value[0] if name in _TOKENS and getattr(value, "ndim", 1) == 2 else value
        for name, value in sample.items()
        if name not in _LENGTHS and value is not None
    }
    if "cu_seqlens" in sample:
        starts = torch.as_tensor(sample["cu_seqlens"]).reshape(-1).tolist()
        padded = torch.as_tensor(sample.get("cu_seqlens_padded", sample["cu_seqlens"])).reshape(-1).tolist()
        lengths = [stop - start for start, stop in pairwise(starts)]
        yield from (_cut(values, start, length) for start, length in zip(padded, lengths) if length)
    elif "original_seq_len" not in sample:
        yield values
    elif (length := int(sample["original_seq_len"])) > 0:
        yield _cut(values, 0, length)


def _cut(values: Mapping[str, Any], start: int, length: int) -> dict[str, Any]:
    """Some tokens of a sample; what has no entry per token stays as it is."""
    size = len(values["tokens"])
    per_token = {name for name, value in values.items() if getattr(value, "ndim", 0) and len(value) == size}
    return {n: value[start : start + length] if n in per_token else value for n, value in values.items()}


class _Turn:
    """The iterator of the call that is under way, as one source: train and validation sets take turns."""

    def __init__(self) -> None:
        self.source: Iterator[Any] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[dict[str, Any]]:
        if self.source is None:
            raise RecipeError("this rank had a data iterator before and has none now; give it in every call")
        made = sequences_of(next(self.source))
        return [{k: v for k, v in each.items() if k not in _OVERWRITTEN} for each in made]


class SequencePacking:
    """Megatron's `wrap_data_iterator`, to be called once a step on every rank, and left with the job.

    Of a trainer's own iterator it pulls num_microbatches elements on each rank that has one, learns all
    lengths, plans by `config.sequence_packing_scheduler`, reroutes, and brings every rank its packs. Of the
    iterators of a Feed it begins the next step; nothing is sent then. Every rank gets an iterator, for
    `get_batch`; the ranks' iterators of one call are those of one step, whichever data set it is of.

    Args:
        loading: as `is_reader` was told, when the datasets were built.
        keys: what samples hold; None for tokens, labels and loss_mask, and whatever else as it comes.
        device: where the packs go; None is this process's GPU, if there is any.
        timeout_s: how long to wait for other ranks.
    """

    def __init__(
        self,
        *,
        loading: Loading = "broadcast",
        keys: Keys | None = None,
        device: str | torch.device | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self._loading: Loading = loading
        self._keys, self._device, self._timeout_s = keys, device, timeout_s
        self._turn = _Turn()
        self._open: dict[tuple[Any, ...], Exchange] = {}
        self._stages: dict[tuple[Any, ...], list[StageIterator]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the peers go. May be called again."""
        while self._open:
            key, exchange = self._open.popitem()
            self._stages.pop(key, None)
            exchange.close()

    def __call__(
        self, data_iterator: Any, config: Any, num_microbatches: int, pg_collection: Any = None
    ) -> Wrapped:
        """The next step. Raises StopIteration at the end of the data, and what an Exchange raises."""
        given = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        inner = [getattr(each, "iterable", each) for each in given]  # as in a RerunDataIterator
        stages = [each for each in inner if isinstance(each, StageIterator)]
        if stages and len(stages) == len(inner):
            return _wrapped(stages)
        self._turn.source = next((each for each in given if each is not None), None)
        layout = layout_of(pg_collection)
        plan = packing_of(config, layout)
        key = (layout, stages_of(config, layout), plan, num_microbatches)
        if key not in self._open:
            self._open[key] = self._new_exchange(config, key, pg_collection)
        try:
            return self._begin(key)
        except StopIteration:  # that was known in the last step, which may have been of another data set
            self._stages.pop(key)
            return self._begin(key)

    def _begin(self, key: tuple[Any, ...]) -> Wrapped:
        if key not in self._stages:
            made = data_iterators(self._open[key])
            self._stages[key] = made if isinstance(made, list) else [made]
        return _wrapped(self._stages[key])

    def _new_exchange(self, config: Any, key: tuple[Any, ...], groups: Any) -> Exchange:
        layout: Layout = key[0]
        stages: StageMap = key[1]
        return Exchange(
            self._turn if self._turn.source is not None else None,
            layout,
            packing=key[2],
            keys=self._keys,
            pulls=key[3],
            owners=readers(config, loading=self._loading, groups=groups),
            delivery=delivery_of(self._loading),
            stage_map=stages,
            device=device_of(self._device),
            timeout_s=self._timeout_s,
        )


def _wrapped(stages: Sequence[StageIterator]) -> Wrapped:
    """The next step of all virtual stages, as Megatron's training loop takes it."""
    step = begin(stages)
    replayed = core("rerun_state_machine").RerunDataIterator
    made = [replayed(stage.rest()) for stage in stages]
    return made if len(made) > 1 else made[0], step.num_microbatches, step.tokens, step.sum_sq
