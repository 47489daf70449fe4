"""Microbatches for Megatron-core's training loop: iterators per virtual stage, and `get_batch`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.distributed import get_process_group_ranks

from meshfeed.errors import LayoutError, OptionError, RecipeError
from meshfeed.exchange import Exchange
from meshfeed.feed import Feed
from meshfeed.feed.batch import Microbatch, Step
from meshfeed.integrations.megatron.samples import AXES_FIRST
from meshfeed.integrations.megatron.stages import core
from meshfeed.multimodal import MROPE
from meshfeed.plan import Pack, StepPlan, packs_of
from meshfeed.roles import Field

MODEL_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
"""What Megatron's own `get_batch` returns, in its order."""

OWN_FIELDS = (
    Field(name="(position_ids)", dtype="any", stages=("first", "mtp"), split=True, pad=-1),
    Field(name=AXES_FIRST, dtype="any", stages=("first", "mtp"), split=True, pad=-1),
    Field(name="(attention_mask)", dtype="any", split=True),
)
"""Keys of a sample that replace those of packs, by the names under which they are sent."""

_TOLD = (
    *("max_seqlen", "total_tokens", "pad_between_seqs", "local_cp_size", "cp_ranks"),
    *("tokens_per_sample", "cp_partition_mode"),
)

LEFT_TO_MEGATRON = {
    "seq_idx": "computed from cu_seqlens and total_tokens by the class itself",
    "cp_scatter_cache": "made by Megatron-LM's reinforcement learning",
    "cp_partition_route": "made by the model where its layers split packs differently",
}
"""The fields of a PackedSeqParams that `get_batch` does not set, and why."""


Source = Feed | Exchange
"""What gives steps."""


class StageBatch(dict[str, Any]):
    """A microbatch as a dict of tensors and numbers, which also knows its sequences."""

    def __init__(self, fields: Mapping[str, Any], microbatch: Microbatch | None) -> None:
        super().__init__(fields)
        self._microbatch = microbatch

    @property
    def microbatch(self) -> Microbatch:
        """The microbatch on this stage, as `mf.loss_by_source` takes it.

        Raises OptionError for a batch of an iterator that is None, or not of `data_iterators`, and for rows
        that Megatron-LM throws away.
        """
        if self._microbatch is None:
            raise OptionError(
                "this batch is of no microbatch: give get_batch an iterator of megatron.data_iterators"
            )
        return self._microbatch

    def replaced(self, fields: Mapping[str, Any]) -> StageBatch:
        """Other fields of the same microbatch."""
        return StageBatch(fields, self._microbatch)

    def __reduce__(self) -> tuple[Any, ...]:
        return StageBatch, (dict(self), self._microbatch)


class StageIterator(Iterator[StageBatch]):
    """The microbatches of one virtual stage, through all steps; see `data_iterators`.

    `next` returns a dict of the fields that the stage needs. For packed sequences it has max_seqlen,
    total_tokens (of the pack, with padding) and pad_between_seqs as plain numbers, so that no device is read
    for them; if cp groups change, also local_cp_size and cp_ranks. Rows whose documents are kept apart have
    total_tokens, tokens_per_sample and cp_partition_mode. Megatron's RerunDataIterator may keep and replay
    it. Raises StopIteration at the end of the stream.

    Attributes:
        step: the current step; None before the first.
    """

    def __init__(
        self, source: Source, steps: Iterator[Step], num_microbatches: Callable[[], int] | None = None
    ) -> None:
        self.step: Step | None = None
        self._source, self._steps, self._num_microbatches = source, steps, num_microbatches
        self._left: Iterator[StageBatch] = iter(())

    def __next__(self) -> StageBatch:
        while (made := next(self._left, None)) is None:
            if isinstance(self._source, Exchange) and self._source.layout.pp > 1:
                raise RecipeError(
                    "an Exchange meets all pipeline stages at the start of a step, and inside a schedule "
                    "they wait for each other; call megatron.begin(iterators) before each schedule"
                )
            self.begin()
        return made

    def begin(self) -> Step:
        """Begin the next step; microbatches left of this one are dropped.

        Raises StopIteration at the end, RecipeError for a step with another number of microbatches than
        Megatron's.
        """
        self.step = next(self._steps)
        return self._enter(self.step)

    def rest(self) -> Iterator[StageBatch]:
        """The microbatches left of the current step."""
        return self._left

    def _enter(self, step: Step) -> Step:
        self._check(step)
        self._left = self._batches(step)
        return step

    def _check(self, step: Step) -> None:
        wanted = step.num_microbatches if self._num_microbatches is None else self._num_microbatches()
        if step.num_microbatches == wanted:
            return
        num, dp = len(step.plan.lengths), self._source.layout.dp
        rows = self._source.micro_batch_size if isinstance(self._source, Feed) else 1
        raise RecipeError(
            f"step {step.index} is {num} sequences, {step.num_microbatches} microbatches on each of {dp} "
            f"data-parallel ranks (micro_batch_size={rows}), but num_microbatches is {wanted}; make the "
            f"recipe's Batch what global_batch_size is, {wanted * rows * dp} (a growing batch by "
            f"Batch.then), or give the schedule the num_microbatches that megatron.begin tells"
        )

    def _batches(self, step: Step) -> Iterator[StageBatch]:
        layout, changing = self._source.layout, len(self._source.cp_groups) > 1
        coord = layout.coord(self._source.rank)
        packs: list[Pack] | None = None
        for microbatch in step.microbatches:
            made = _with_own(dict(microbatch))
            if "cu_seqlens_padded" in made:
                packs = packs or packs_of(step.plan, coord.dp * layout.cp + coord.cp)
                made |= _totals(step.plan, packs[microbatch.index])
                if self._source.stage_map.mtp:
                    # for Megatron, cu_seqlens_q are the places where MTP layers shift tokens and labels
                    made |= {"cu_seqlens": made["cu_seqlens_padded"], "pad_between_seqs": False}
                if changing:
                    made |= {"local_cp_size": microbatch.cp_size, "cp_ranks": microbatch.cp_ranks}
            elif "cu_seqlens" in made and isinstance(self._source, Feed):
                made |= _of_rows(self._source)
            yield StageBatch(made, microbatch)


def get_batch(
    iterator: Iterator[Mapping[str, Any]] | None,
    *,
    cp_groups: Mapping[int, Any] | None = None,
    padded_cu_seqlens: bool = False,
) -> StageBatch:
    """The next microbatch of a stage: Megatron's keys, packed_seq_params, then all other fields.

    iterator: of `data_iterators`, or a RerunDataIterator around it; for None, all fields are None. cp_groups:
    size -> ProcessGroup, for changing cp groups; None takes those of parallel_state. padded_cu_seqlens: give
    the padded values in both cu_seqlens fields, as Megatron's main branch does until Transformer Engine takes
    both; sequences then attend to their own padding. With MTP layers they are padded in any case.
    Every tensor is cut for this rank, and nothing is sent. Fields that the stage does not need are None:
    tokens and position_ids are for the first stage and those with MTP layers, labels and loss_mask for the
    last one, attention_mask for none. With mrope_position_ids, these are the position_ids, [3, 1, t], on
    every stage, as Megatron's mrope needs. packed_seq_params is a PackedSeqParams on every stage; None for
    rows of one length. `batch.microbatch.source` tells the source of each sequence.
    Raises LayoutError if Megatron has no group for the cp ranks of a pack.
    """
    taken: Mapping[str, Any] = {} if iterator is None else next(iterator)
    batch = dict(taken)
    made: dict[str, Any] = {name: batch.pop(name, None) for name in MODEL_KEYS}
    made["packed_seq_params"] = None
    if made["tokens"] is None:
        made["position_ids"] = None
    if (axes := batch.pop(MROPE.name, None)) is not None:
        made["position_ids"] = axes.movedim(-1, 0)
    if "cu_seqlens" in batch:
        told = {
            name: batch.pop(name) for name in ("cu_seqlens", "cu_seqlens_padded", *_TOLD) if name in batch
        }
        if "cu_seqlens_padded" not in told:
            told, made = _flat(told, made)
        if padded_cu_seqlens:
            told["cu_seqlens"] = told["cu_seqlens_padded"]
        if "own_cu_seqlens" in batch:
            told["cp_partition_mode"] = "contiguous"
        made["packed_seq_params"] = _params(told, cp_groups)
    made |= batch
    return taken.replaced(made) if isinstance(taken, StageBatch) else StageBatch(made, None)


def _with_own(made: dict[str, Any]) -> dict[str, Any]:
    """A pack with the own keys of its samples; position ids count in samples without any."""
    mask, ids = made.pop("(attention_mask)", None), made.pop("(position_ids)", None)
    made.pop("(begins)", None)  # the begin of a trainer's pack is in the plan
    if mask is not None:
        made["attention_mask"] = mask
    if ids is not None:
        made["position_ids"] = ids.clamp(min=0) if ids.ndim > 2 else ids.where(ids >= 0, made["position_ids"])
    if (ids := made.pop(AXES_FIRST, None)) is not None:
        ids = ids.movedim(-1, 0)  # [axes, 1, T]
        made["position_ids"] = ids.where(ids >= 0, made["position_ids"])
    return made


def _totals(plan: StepPlan, pack: Pack) -> dict[str, int]:
    """Longest sequence of a pack, tokens of all, and whether some are padding; also for a dummy."""
    if pack.max_sequences is not None:  # the same for all packs of one shape
        pads = int(plan.align.sequence_multiple(pack.cp_size)) > 1
        return {"max_seqlen": pack.num_tokens, "total_tokens": pack.num_tokens, "pad_between_seqs": pads}
    if not pack.sequences.size:
        idle = int(plan.align.pack_multiple(pack.cp_size))
        return {"max_seqlen": idle, "total_tokens": idle, "pad_between_seqs": True}
    padded = pack.padded_lengths
    differ = bool((padded != pack.lengths).any())
    return {"max_seqlen": int(padded.max()), "total_tokens": int(padded.sum()), "pad_between_seqs": differ}


def _of_rows(feed: Feed) -> dict[str, Any]:
    """The PackedSeqParams fields for rows of one length whose documents are kept apart."""
    length = int(feed.recipe.sequence.length)  # type: ignore[attr-defined]  # of Rows, which alone have such
    return {
        "total_tokens": feed.micro_batch_size * length,
        "tokens_per_sample": length,
        "pad_between_seqs": False,
        "cp_partition_mode": "zigzag" if feed.layout.cp == 1 else "contiguous",  # see `check_documents`
    }


def _flat(told: dict[str, Any], made: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rows of one length with document starts, joined to one pack."""
    total = told.get("total_tokens") or int(told["cu_seqlens"][-1])
    cut = told.get("cp_partition_mode") == "contiguous"
    for name, value in made.items():
        if value is not None:
            if not cut and value.numel() != total:
                raise RecipeError(
                    f"{name} has {value.numel()} of {total} tokens: rows that cp splits cannot be attended "
                    f"to by document; use Documents with a Packing, or leave reset_attention_mask out"
                )
            made[name] = value.reshape(1, -1)
    told |= {"cu_seqlens_padded": told["cu_seqlens"], "max_seqlen": int(told["max_seqlen"])}
    return told | {"total_tokens": total, "pad_between_seqs": False}, made


def check_documents(feed: Feed) -> None:
    """Refuse rows that cp splits and whose documents are kept apart, if Megatron cannot attend to them.

    Raises RecipeError unless each rank has one run of one row, and PackedSeqParams can express that.
    """
    cp, rule = feed.layout.cp, feed.recipe.sequence
    if cp == 1 or not getattr(rule, "reset_attention_mask", False):
        return
    known = {field.name for field in dataclasses.fields(core("packed_seq_params").PackedSeqParams)}
    length, rows = getattr(rule, "length", 0), feed.micro_batch_size
    if "cp_partition_mode" not in known:
        wanted = "this Megatron-core splits each document among the cp ranks, so that it must be padded"
    elif feed.cp_split != "contiguous" or rows != 1 or length % (2 * cp):
        wanted = (
            f"Megatron splits them so with cp_partition_mode='contiguous', micro_batch_size=1 and rows of a "
            f"multiple of {2 * cp} tokens; here they are cp_split={feed.cp_split!r}, {rows} and {length}"
        )
    else:
        return
    raise RecipeError(
        f"rows that cp={cp} splits cannot be attended to by document: {wanted}; use Documents with a "
        f"Packing, which pads, or leave reset_attention_mask out"
    )


def _params(told: Mapping[str, Any], cp_groups: Mapping[int, Any] | None) -> Any:
    """A PackedSeqParams of this Megatron-core, with those of its fields that it has."""
    params = core("packed_seq_params").PackedSeqParams
    size: int | None = told.get("local_cp_size")
    values: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": told["cu_seqlens"],
        "cu_seqlens_kv": told["cu_seqlens"],
        "cu_seqlens_q_padded": told["cu_seqlens_padded"],
        "cu_seqlens_kv_padded": told["cu_seqlens_padded"],
        "max_seqlen_q": told["max_seqlen"],
        "max_seqlen_kv": told["max_seqlen"],
        "total_tokens": told["total_tokens"],
        "pad_between_seqs": told["pad_between_seqs"],
        "tokens_per_sample": told.get("tokens_per_sample"),
        "cp_partition_mode": told.get("cp_partition_mode", "zigzag"),
        "local_cp_size": size,
        "cp_group": None if size is None else _cp_group(size, told["cp_ranks"], cp_groups),
    }
    known = {field.name for field in dataclasses.fields(params)}
    return params(**{name: value for name, value in values.items() if name in known})


def _cp_group(size: int, ranks: tuple[int, ...], cp_groups: Mapping[int, Any] | None) -> Any:
    """The process group of some cp ranks; None for one rank, for which Megatron makes no group."""
    parallel_state = core("parallel_state")
    group: Any = None
    of_size = getattr(parallel_state, "get_dynamic_data_context_parallel_groups", None)
    try:
        if cp_groups is not None:
            group = cp_groups[size]
        elif of_size is not None:
            group = of_size(group_size=size)
        elif size == 1:
            return None
        else:
            group = parallel_state.get_hybrid_data_context_parallel_groups(group_size=size)
    except (KeyError, AssertionError, TypeError) as none:
        raise LayoutError(
            f"no context-parallel group of {size} ranks for {ranks}: initialize Megatron with groups for "
            f"changing cp, set Packing(cp_sizes=...) to its sizes, or pass cp_groups made of feed.cp_groups"
        ) from none
    if (members := tuple(get_process_group_ranks(group))) != ranks:
        raise LayoutError(
            f"the context-parallel group of {size} ranks has {members}, the pack is split among {ranks}; let "
            f"cp vary faster than dp, or pass cp_groups by new_group(feed.cp_groups[n], sort_ranks=False)"
        )
    return group
