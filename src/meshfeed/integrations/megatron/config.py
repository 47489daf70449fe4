"""The data options of Megatron's config: packs, their alignment, and how context parallelism splits them.

Only this module reads them, for both `feed` and `SequencePacking`; `stages.stage_map` reads the stages.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from meshfeed.errors import LayoutError, OptionError, RecipeError
from meshfeed.integrations.megatron.stages import name_in, scheduler_of, stage_map
from meshfeed.layout import Layout
from meshfeed.plan import Align, CpSplit, Packing
from meshfeed.recipe import Rule

CONFIG_FIELDS: dict[str, str] = {
    "tensor_model_parallel_size": "honoured: read from the process groups, as are the sizes of cp, ep and dp",
    "context_parallel_size": "honoured: read from the process groups",
    "expert_model_parallel_size": "honoured: read from the process groups",
    "expert_tensor_parallel_size": "honoured: read from the process groups",
    "pipeline_model_parallel_size": "honoured: it must be that of the process groups",
    "virtual_pipeline_model_parallel_size": "honoured: one iterator for each virtual stage",
    "pipeline_model_parallel_layout": "honoured: which stages embed, compute loss, predict further tokens",
    "mtp_num_layers": "honoured: stages with MTP layers get tokens and position ids",
    "mtp_standalone": "honoured: by pipeline_model_parallel_layout, which it is made of",
    "microbatch_group_size_per_vp_stage": "honoured: the number of packs is a multiple of it",
    "sequence_parallel": "honoured: packs are multiples of tp on each rank; rows must be",
    "fp8": "honoured: packs are multiples of 16 on each rank, of 32 for fp8_recipe mxfp8",
    "fp4": "honoured: packs are multiples of 32 on each rank",
    "fp8_recipe": "honoured: see fp8",
    "variable_seq_lengths": "honoured: False is refused for packs of different lengths in a pipeline; "
    'with True Megatron wants moe_token_dispatcher_type="alltoall", even of a dense model',
    "max_seqlen_per_dp_cp_rank": "honoured: the capacity of a pack on each rank",
    "sequence_packing_scheduler": "honoured: by `SequencePacking`; see its names below",
    "hybrid_context_parallel": "honoured: by `SequencePacking` and `HybridCPDataLoaderWrapper`",
    "dynamic_context_parallel": "honoured: by `SequencePacking`",
    "min_dynamic_context_parallel_size": "honoured: by `SequencePacking`, as the smallest cp group",
    "pad_packed_seq_alignment": "honoured: an integer is `Align(pack=)`; `max`, or the capacity, fills packs",
    "thd_max_packed_sequences": "honoured: sequences of a pack, with the dummy at its end",
    "thd_tail_padding_policy": "honoured: a dummy at the end where cu_seqlens have one size, else a longer "
    "last sequence; the other of the two is refused",
    "cuda_graph_impl": "honoured: with pad_packed_seq_alignment `max` all packs have one shape; packs of "
    "different shapes are refused by `feed`",
    "cp_partition_mode": "honoured: `contiguous` cuts packs into one run for each rank",
    "gtp_weight_remat_size": "refused: more than 1",
    "tensor_parallel_num_weight_shards": "refused: more than tp, which is gtp_weight_remat_size more than 1",
    "cuda_graph_dynamic_microbatches": "no effect on data: without it, give `Packing(microbatches=)`",
    "hierarchical_context_parallel_sizes": "no effect on data: the ranks of cp are the same",
    "cp_comm_type": "no effect on data: the ranks of cp are the same",
    "linear_cp_mode": "no effect on data: the model exchanges what it needs",
    "create_attention_mask_in_dataloader": "no effect on data: models get no mask, since rows are causal",
    "calculate_per_token_loss": "no effect on data: set it for packs, or microbatches and cp ranks count "
    "alike, however many of their tokens bear loss",
    "mrope_section": "no effect on data: positions are those of the recipe's rule",
    "mrope_interleaved": "no effect on data: positions are those of the recipe's rule",
    "moe_n_hash_layers": "no effect on data: Megatron keeps these layers beside the embedding",
}
"""How each field of a TransformerConfig that concerns data is treated."""

SCHEDULERS = {
    "dp_balanced": "in_order",
    "default_dynamic_cp": "dynamic_cp",
    "default_hybrid_cp": "dynamic_cp",
    "in_order": "in_order",
    "balanced": "balanced",
    "dynamic_cp": "dynamic_cp",
    "empty": "in_order",
    "default": "in_order",
    "empty_scheduler_with_packing": "in_order",
    "empty_scheduler_no_packing": "in_order",
}
"""sequence_packing_scheduler -> policy of a `Packing`: Megatron's names, and meshfeed's."""

KEEPING = frozenset({"empty", "default", "empty_scheduler_with_packing", "empty_scheduler_no_packing"})
"""SCHEDULERS that keep the trainer's packs: each element is a pack and stays on its rank."""


def packing_of(
    config: Any, layout: Layout, scheduler: str | None = None, *, align: Align | None = None
) -> Packing:
    """The packing that a Megatron config requests.

    scheduler: instead of the config's sequence_packing_scheduler. align: further multiples that padding must
    reach. See CONFIG_FIELDS for what it reads. thd_max_packed_sequences=n are n - 1 sequences, as Megatron
    counts the dummy at a pack's end, where there is one; without CUDA graphs, a pack that the trainer made
    may have more. Under dynamic_cp, groups have the sizes for which Megatron makes process groups: powers of
    2 that divide dp * cp, and dp * cp. Raises RecipeError for a scheduler that is not in SCHEDULERS, without
    a capacity, and for options of padding that meshfeed has not.
    """
    name = scheduler or scheduler_of(config)
    if name not in SCHEDULERS:
        raise RecipeError(f"sequence_packing_scheduler={name!r}: choose one of {', '.join(SCHEDULERS)}")
    capacity = getattr(config, "max_seqlen_per_dp_cp_rank", None)
    if capacity is None:
        raise RecipeError("the config has no max_seqlen_per_dp_cp_rank; set the tokens that a rank can hold")
    policy: Any = SCHEDULERS[name]
    made = Packing(capacity=int(capacity), policy=policy, align=align or Align())
    if policy == "dynamic_cp":
        made = replace(made, cp_sizes=_cp_sizes(config, layout.dp * layout.cp))
    return completed(made, config, layout, keeps=name in KEEPING)


def completed(packing: Packing, config: Any, layout: Layout, *, keeps: bool = False) -> Packing:
    """A packing, completed by the config: alignment, quantum, and the shape of packs.

    keeps: whether packs are the trainer's. Raises RecipeError if packing and config contradict each other.
    """
    capacity = getattr(config, "max_seqlen_per_dp_cp_rank", None)
    if capacity is not None and packing.capacity > capacity:
        raise RecipeError(
            f"Packing(capacity={packing.capacity}), and max_seqlen_per_dp_cp_rank={capacity}; make them equal"
        )
    quantum, size = packing.quantum, getattr(config, "microbatch_group_size_per_vp_stage", None)
    if quantum is None and size and stage_map(config, pp=layout.pp).vpp > 1:
        quantum = int(size)
    packing = replace(packing, align=_aligned(packing.align, config, layout), quantum=quantum)
    return _shaped(packing, config, keeps=keeps)


def cp_split_of(config: Any, *, packed: bool, apart: bool = False) -> CpSplit:
    """How the config splits packs, or rows, among cp ranks. apart: whether documents of a row are kept apart.

    Rows of one document are split by halves under any config, as Megatron does.
    """
    if getattr(config, "cp_partition_mode", None) != "contiguous":
        return "zigzag"
    return "pack_contiguous" if packed else "contiguous" if apart else "zigzag"


def options_of(
    config: Any, rule: Rule, layout: Layout, packing: Packing | None, cp_split: CpSplit | None
) -> tuple[Packing | None, CpSplit]:
    """The packing and the split of a Feed: as given, completed by the config.

    Raises RecipeError, LayoutError and OptionError if they contradict each other.
    """
    check_layout(config)
    apart = bool(getattr(rule, "reset_attention_mask", False))
    wanted = cp_split_of(config, packed=rule.packed, apart=apart)
    told = getattr(config, "cp_partition_mode", None) is not None
    if told and cp_split not in (None, wanted) and layout.cp > 1:
        raise OptionError(
            f"cp_split={cp_split!r}, and cp_partition_mode={config.cp_partition_mode!r} makes it {wanted!r}; "
            f"leave cp_split out"
        )
    if packing is None and rule.packed and scheduler_of(config) is not None:
        packing = packing_of(config, layout)
    if packing is not None:
        packing = completed(packing, config, layout)
        _check_shapes(packing, config, layout)
    elif not rule.packed:
        _check_rows(rule, config, layout)
    return packing, cp_split or wanted


def check_layout(config: Any) -> None:
    """Raises LayoutError for ranks whose data no layout of meshfeed describes."""
    if (size := getattr(config, "gtp_weight_remat_size", 1) or 1) > 1:
        raise LayoutError(
            f"gtp_weight_remat_size={size}: meshfeed does not know these ranks, which train on different "
            f"microbatches; leave tensor_parallel_num_weight_shards out"
        )


def _aligned(align: Align, config: Any, layout: Layout) -> Align:
    multiples = [align.pack]
    if getattr(config, "sequence_parallel", False):
        multiples.append(layout.tp)
    fp8 = getattr(config, "fp8", None)
    if getattr(config, "fp4", None) or (fp8 and name_in(config, "fp8_recipe") == "mxfp8"):
        multiples.append(32)
    elif fp8:
        multiples.append(16)
    return replace(align, pack=math.lcm(*multiples))


def _shaped(packing: Packing, config: Any, *, keeps: bool) -> Packing:
    """The packing with the options of thd: padding of packs, and the most sequences of one."""
    pad: Any = getattr(config, "pad_packed_seq_alignment", None)
    most: int | None = getattr(config, "thd_max_packed_sequences", None)
    tail = getattr(config, "thd_tail_padding_policy", None)
    capacity = getattr(config, "max_seqlen_per_dp_cp_rank", None)
    if pad is not None and pad != "max" and (type(pad) is not int or pad < 1):
        raise RecipeError(f"pad_packed_seq_alignment={pad!r}: give 'max' or a whole number from 1")
    fills = pad is not None and pad in ("max", capacity)
    if fills and packing.capacity != capacity:
        raise RecipeError(
            f"Packing(capacity={packing.capacity}), and Megatron fills packs to "
            f"max_seqlen_per_dp_cp_rank={capacity}; make them equal"
        )
    alike = fills and most is not None and (_graphs(config) or not keeps)
    if tail is not None and pad is not None and (tail == "append_dummy_seq") != alike:
        raise RecipeError(
            f"thd_tail_padding_policy={tail!r} with pad_packed_seq_alignment={pad!r} and "
            f"thd_max_packed_sequences={most}: a pack ends with a dummy where both are set, the first to "
            f"'max', and with a longer last sequence elsewhere; leave the policy out"
        )
    if alike and most is not None:
        if most < 2:
            raise RecipeError(f"thd_max_packed_sequences={most}: at least 2, a sequence and a dummy")
        return replace(packing, fixed_shapes=True, max_sequences=_least(packing.max_sequences, most - 1))
    if pad is not None:
        multiple = packing.capacity if fills else int(pad)
        packing = replace(packing, align=replace(packing.align, pack=math.lcm(packing.align.pack, multiple)))
    if most is not None and not keeps:
        packing = replace(packing, max_sequences=_least(packing.max_sequences, most))
    return packing


def _least(given: int | None, most: int) -> int:
    return most if given is None else min(given, most)


def _check_shapes(packing: Packing, config: Any, layout: Layout) -> None:
    """Refuse packs of different lengths if Megatron expects one length."""
    if packing.fixed_shapes:
        return
    if _graphs(config):
        raise RecipeError(
            f"cuda_graph_impl={name_in(config, 'cuda_graph_impl')!r} needs packs of one shape; set "
            f"Packing(fixed_shapes=True, max_sequences=...), or pad_packed_seq_alignment='max' and "
            f"thd_max_packed_sequences"
        )
    one_length = packing.align.pack % packing.capacity == 0
    if layout.pp > 1 and getattr(config, "variable_seq_lengths", None) is False and not one_length:
        raise RecipeError(
            "packs differ in length, and pipeline stages expect one length; set variable_seq_lengths=True, "
            "with which Megatron wants moe_token_dispatcher_type='alltoall' even of a dense model, or "
            "Packing(fixed_shapes=True, max_sequences=...)"
        )


def _check_rows(rule: Rule, config: Any, layout: Layout) -> None:
    length = getattr(rule, "length", None)
    multiple = layout.tp * layout.cp
    if length is not None and getattr(config, "sequence_parallel", False) and length % multiple:
        raise RecipeError(
            f"rows of {length} tokens with sequence_parallel, where tp={layout.tp} and cp={layout.cp} share "
            f"each; make the length a multiple of {multiple}"
        )


def _graphs(config: Any) -> bool:
    return name_in(config, "cuda_graph_impl") not in (None, "none")


def _cp_sizes(config: Any, ranks: int) -> tuple[int, ...]:
    least = int(getattr(config, "min_dynamic_context_parallel_size", None) or 1)
    sizes = [size for size in (1 << i for i in range(ranks.bit_length())) if ranks % size == 0]
    return tuple(sorted({size for size in sizes if size >= least} | {ranks}))
