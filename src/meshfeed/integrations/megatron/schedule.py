"""Megatron-core's `wrap_data_iterator`: a trainer's own sequences, packed by meshfeed's planner each step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from meshfeed.errors import RecipeError, RoleError
from meshfeed.exchange import Exchange, Keys
from meshfeed.integrations.megatron.batches import OWN_FIELDS, StageIterator, begin, data_iterators
from meshfeed.integrations.megatron.core import core
from meshfeed.integrations.megatron.stages import (
    Loading,
    delivery_of,
    device_of,
    layout_of,
    quantum_of,
    readers,
    stages_of,
)
from meshfeed.layout import Layout
from meshfeed.plan import Align, Packing
from meshfeed.roles import Role, StageMap

SCHEDULERS = {
    "dp_balanced": "in_order",
    "default_dynamic_cp": "dynamic_cp",
    "default_hybrid_cp": "dynamic_cp",
    "in_order": "in_order",
    "balanced": "balanced",
    "dynamic_cp": "dynamic_cp",
}
"""sequence_packing_scheduler -> policy of a `Packing`: Megatron's names, and our own."""

# what packs have anyway
_OVERWRITTEN = ("padding_mask", "local_cp_size")
# what tells how a sample was padded or packed before
_LENGTHS = (
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "original_seq_len",
    "padded_seq_len",
    "batch_idx",
)
_PER_TOKEN = frozenset({"tokens", "labels", "loss_mask", "position_ids", "padding_mask"})

Wrapped = tuple[Any, int, int, int]
"""(iterator or one per virtual stage, number of microbatches, tokens, sum of squared lengths)."""


def packing_of(
    config: Any, layout: Layout, scheduler: str | None = None, *, align: Align | None = None
) -> Packing:
    """The packing that a Megatron config asks for.

    Read are sequence_packing_scheduler (or `scheduler`), max_seqlen_per_dp_cp_rank, sequence_parallel,
    min_dynamic_context_parallel_size and, with virtual stages, microbatch_group_size_per_vp_stage. Changing
    cp groups have the sizes for which Megatron makes process groups: powers of 2 that divide dp * cp, and
    dp * cp. align: multiples that padding must reach, beside those that tp and cp need. Raises RecipeError
    for a scheduler that is none of SCHEDULERS, or without a capacity.
    """
    given = scheduler or getattr(config, "sequence_packing_scheduler", None)
    name = str(getattr(given, "value", given))
    if name not in SCHEDULERS:
        raise RecipeError(f"sequence_packing_scheduler={name!r}: choose one of {', '.join(SCHEDULERS)}")
    capacity = getattr(config, "max_seqlen_per_dp_cp_rank", None)
    if capacity is None:
        raise RecipeError("the config has no max_seqlen_per_dp_cp_rank; set the tokens that a rank can hold")
    align = align or Align()
    if getattr(config, "sequence_parallel", False):
        align = replace(align, pack=math.lcm(align.pack, layout.tp))
    quantum = quantum_of(config)
    if SCHEDULERS[name] != "dynamic_cp":
        policy: Any = SCHEDULERS[name]
        return Packing(capacity=int(capacity), policy=policy, align=align, quantum=quantum)
    least, ranks = int(getattr(config, "min_dynamic_context_parallel_size", None) or 1), layout.dp * layout.cp
    sizes = [size for size in (1 << i for i in range(ranks.bit_length())) if ranks % size == 0]
    sizes = tuple(sorted({size for size in sizes if size >= least} | {ranks}))
    return Packing(capacity=int(capacity), policy="dynamic_cp", align=align, cp_sizes=sizes, quantum=quantum)


def per_token_of(keys: Keys) -> frozenset[str]:
    """The keys with one entry per token: Megatron's own, and what `keys` splits; no shape is asked."""
    return _PER_TOKEN - {f.name for f in keys.declared} | {f.name for f in keys.declared if f.split}


def sequences_of(element: Any, keys: Keys | None = None) -> list[dict[str, Any]]:
    """The sequences in what a trainer's iterator gave: a sample, a list of them, or samples packed before.

    Tokens of shape [b, T] are b sequences; any other key then has one entry for each. A sample that says its
    original_seq_len is cut to it, and one with cu_seqlens is taken apart. An attention_mask of the shape of
    the tokens has one entry per token; another one, such as [1, T, T], has no meaning in a pack, and is left
    out. keys: says what else is per token.
    Raises RecipeError for anything else.
    """
    samples = [element] if isinstance(element, Mapping) else element
    if not isinstance(samples, Sequence) or not all(isinstance(each, Mapping) for each in samples):
        raise RecipeError(f"the data iterator gave {type(element).__name__}; give dicts, or lists of dicts")
    keys = keys or Keys()
    return [sequence for sample in samples for sequence in _apart(sample, keys.length, per_token_of(keys))]


def _apart(sample: Mapping[str, Any], length: str, per_token: Set[str]) -> Iterator[dict[str, Any]]:
    values = {name: value for name, value in sample.items() if name not in _LENGTHS and value is not None}
    if "attention_mask" in values and "attention_mask" not in per_token:
        if np.shape(values["attention_mask"]) == np.shape(values.get(length, ())):
            per_token = per_token | {"attention_mask"}
        else:
            del values["attention_mask"]
    rows = _rows(values, length, per_token)
    if sample.get("cu_seqlens") is not None:
        if len(rows) != 1:
            raise RecipeError(
                f"a sample with cu_seqlens has {len(rows)} rows of {length!r}; give a dict for each"
            )
        starts = torch.as_tensor(sample["cu_seqlens"]).reshape(-1).tolist()
        padded = torch.as_tensor(sample.get("cu_seqlens_padded", sample["cu_seqlens"])).reshape(-1).tolist()
        sizes = [stop - start for start, stop in pairwise(starts)]
        yield from (_cut(rows[0], per_token, start, size) for start, size in zip(padded, sizes) if size > 0)
    elif sample.get("original_seq_len") is not None:
        sizes = torch.as_tensor(sample["original_seq_len"]).reshape(-1).tolist()
        if len(sizes) != len(rows):
            raise RecipeError(
                f"original_seq_len has {len(sizes)} entries, {length!r} {len(rows)} rows; one each"
            )
        yield from (_cut(row, per_token, 0, size) for row, size in zip(rows, sizes) if size > 0)
    else:
        yield from rows


def _rows(values: Mapping[str, Any], length: str, per_token: Set[str]) -> list[dict[str, Any]]:
    """One dict per row of tokens; those of shape [T] are one row."""
    shape = tuple(np.shape(values[length])) if length in values else ()
    if not shape:
        return [dict(values)]  # refused by name when it is encoded
    rows, size = shape if length in _PER_TOKEN and len(shape) == 2 else (1, shape[0])
    beside = values.keys() - per_token - {*_OVERWRITTEN} if rows > 1 else set[str]()
    if unlike := sorted(name for name in beside if _num_entries(values[name]) != rows):
        raise RecipeError(
            f"{unlike} beside {rows} rows of {length!r}: which row has what is not known; give one entry per "
            f"row, as collating does, a dict for each sequence, or declare what has one entry per token in "
            f"Keys, split"
        )
    made: list[dict[str, Any]] = [{} for _ in range(rows)]
    for name, value in values.items():
        own = tuple(np.shape(value)) if name in per_token else ()
        # [1, 1] of one token [1] is a row for Megatron's keys, and an entry of a key with further dimensions
        entries = own[:1] == (size,) and (len(own) == 1 or (len(shape) == 1 and name not in _PER_TOKEN))
        by_row = own[:2] == (rows, size) and not entries
        if name in per_token and not by_row and not (rows == 1 and own[:1] == (size,)):
            raise RecipeError(
                f"key {name!r} has shape {own}, {length!r} {shape}; give one entry per token, or declare it "
                f"in Keys, not split"
            )
        for at, row in enumerate(made):
            row[name] = value[at] if by_row or name in beside else value
    return made


def _num_entries(value: Any) -> int:
    """Entries of a collated value; 0 for text and plain numbers."""
    shape = (len(value),) if isinstance(value, list | tuple) else np.shape(value)
    return shape[0] if shape else 0


def _cut(values: Mapping[str, Any], per_token: Set[str], start: int, size: int) -> dict[str, Any]:
    """Some tokens of a sequence; what has no entry per token stays as it is."""
    return {n: value[start : start + size] if n in per_token else value for n, value in values.items()}


def _with_own(keys: Keys) -> Keys:
    """The keys, and what samples may bring in place of what packs have."""
    names = {f"({field.name})" for field in keys.declared}
    more = (field for field in OWN_FIELDS if field.name not in names)
    return Keys(*keys.declared, *more, length=keys.length, valid=keys.valid)


class _Turn:
    """The iterator of the call that is under way, as one source without an end: data sets take turns.

    Its element is all that a call pulls, however much that is, so a batch size that grows needs no other
    Exchange. An iterator that has come to its end gives nothing. That one data set has ended on this rank
    must not end the others: what ends it is a step without a sequence from any rank. One that ends in the
    middle of a call has not what was asked for, and would make a short step.
    """

    def __init__(self, keys: Keys) -> None:
        self.source: Iterator[Any] | None = None
        self._keys, self._num_elements = keys, 0
        self._own = {field.name for field in keys.declared} & {field.name for field in OWN_FIELDS}

    def take(self, source: Iterator[Any] | None, num_elements: int) -> None:
        """Go on with this one, and with so many elements of it."""
        self.source, self._num_elements = source, num_elements

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[dict[str, Any]]:
        if self.source is None:
            raise RecipeError("this rank had a data iterator before and has none now; give it in every call")
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
            made += sequences_of(element, self._keys)
        self._num_elements = 0
        return [{self._sent_as(k): v for k, v in each.items() if k not in _OVERWRITTEN} for each in made]

    def _sent_as(self, name: str) -> str:
        """Packs have keys of some names themselves."""
        return f"({name})" if f"({name})" in self._own else name


class SequencePacking:
    """Megatron's `wrap_data_iterator`, to be called once a step on every rank, and left with the job.

    Of a trainer's own iterator it pulls num_microbatches elements on each rank that has one, learns all
    lengths, plans by `config.sequence_packing_scheduler`, reroutes, and brings every rank its packs. Of the
    iterators of a Feed it begins the next step; nothing is sent then. Every rank gets an iterator, for
    `get_batch`; the ranks' iterators of one call are those of one step, whichever data set it is of.

    Args:
        loading: as `is_reader` was told, when the datasets were built.
        keys: what samples hold; None for tokens, labels and loss_mask, and whatever else as it comes.
            Declare here, split, what has one entry per token beside Megatron's own keys.
        device: where the packs go; None is this process's GPU, if there is any.
        align: multiples that padding must reach: Align(pack=16) for fp8, or Align(sequence=n) to keep the
            padding of a dataset that pads its samples to multiples of n.
        timeout_s: how long to wait for other ranks.
    """

    def __init__(
        self,
        *,
        loading: Loading = "broadcast",
        keys: Keys | None = None,
        device: str | torch.device | None = None,
        align: Align | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self._loading: Loading = loading
        self._align = align
        self._keys, self._device, self._timeout_s = _with_own(keys or Keys()), device, timeout_s
        self._turn = _Turn(self._keys)
        self._open: dict[tuple[Any, ...], Exchange] = {}
        self._bare: set[tuple[Any, ...]] = set()  # of those, who were opened without an iterator here
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
            self._bare.discard(key)
            exchange.close()

    def __call__(
        self, data_iterator: Any, config: Any, num_microbatches: int, pg_collection: Any = None
    ) -> Wrapped:
        """The next step.

        Raises StopIteration where no rank's iterator gives a sequence, RecipeError where one ends within
        num_microbatches, or where this rank had none at first and has one now, and what an Exchange raises.
        """
        given = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        inner = [getattr(each, "iterable", each) for each in given]  # as in a RerunDataIterator
        stages = [each for each in inner if isinstance(each, StageIterator)]
        if stages and len(stages) == len(inner):
            return _wrapped(stages)
        if num_microbatches < 1:
            raise RecipeError(f"num_microbatches={num_microbatches}: a step pulls from 1 on")
        self._turn.take(next((each for each in given if each is not None), None), num_microbatches)
        layout = layout_of(pg_collection)
        plan = packing_of(config, layout, align=self._align)
        key = (layout, stages_of(config, layout), plan)
        if key not in self._open:
            self._open[key] = self._new_exchange(config, key, pg_collection)
            if self._turn.source is None:
                self._bare.add(key)
            made = data_iterators(self._open[key])
            self._stages[key] = made if isinstance(made, list) else [made]
        if key in self._bare and self._turn.source is not None:
            raise RecipeError("this rank had no data iterator before and has one now; give it in every call")
        wrapped = _wrapped(self._stages[key])
        step = self._stages[key][0].step
        if step is not None and not step.plan.lengths.size:  # all ranks know it
            raise StopIteration
        return wrapped

    def _new_exchange(self, config: Any, key: tuple[Any, ...], groups: Any) -> Exchange:
        layout: Layout = key[0]
        stages: StageMap = key[1]
        return _Scheduled(
            self._turn if self._turn.source is not None else None,
            layout,
            packing=key[2],
            keys=self._keys,
            owners=readers(config, loading=self._loading, groups=groups),
            delivery=delivery_of(self._loading),
            stage_map=stages,
            device=device_of(self._device),
            timeout_s=self._timeout_s,
        )


class _Scheduled(Exchange):
    """The exchange of a SequencePacking, whose owners are Megatron's readers."""

    @cached_property
    def role(self) -> Role:
        readers = sorted(self._readers or ())
        if self._puller.owns and self.rank not in readers:
            raise RoleError(
                f"rank {self.rank} has a data iterator, but is_reader() is True on ranks {readers} alone; "
                f"build datasets where it is (is_dataset_built_on_rank=megatron.is_reader, with the loading= "
                f"of this SequencePacking), and give None elsewhere"
            )
        return super().role


def _wrapped(stages: Sequence[StageIterator]) -> Wrapped:
    """The next step of all virtual stages, as Megatron's training loop takes it."""
    step = begin(stages)
    replayed = core("rerun_state_machine").RerunDataIterator
    made = [replayed(stage.rest()) for stage in stages]
    return made if len(made) > 1 else made[0], step.num_microbatches, step.tokens, step.sum_sq
