"""Which rank does what in a Megatron-core job: its layout, its stages, and who opens storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist

from meshfeed.deliver import can_share
from meshfeed.errors import LayoutError, RoleError
from meshfeed.feed.launch import this_layout
from meshfeed.integrations.loader import framework
from meshfeed.layout import DIMS, Layout, common_rank_of
from meshfeed.roles import DeliveryName, Field, Roles, StageMap, assign_roles, choose_delivery

Readers = Literal["replicated", "broadcast", "shared"]
"""Who reads.

replicated: every rank that needs data reads its own.
broadcast: tp rank 0 of each stage that needs data reads for its tp group.
shared: one rank of each node and replica reads for all its ranks there, if they can share memory."""

_DELIVERY: dict[str, DeliveryName | Literal["auto"]] = {
    "replicated": "direct",
    "broadcast": "broadcast",
    "shared": "auto",
}
_STORED = (
    Field(name="tokens", dtype="int64", stages=("first", "mtp"), split=True),
    Field(name="labels", dtype="int64", stages=("last",), split=True),
)
_LENGTHS = Field(name="lengths", dtype="int64")  # of a trainer's own sequences, which have no index


# Our name, the name in a ProcessGroupCollection, and the getter of parallel_state.
_MEGATRON_GROUPS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("tp", "tp", lambda state: state.get_tensor_model_parallel_group()),
    ("cp", "cp", lambda state: state.get_context_parallel_group()),
    ("dp", "dp", lambda state: state.get_data_parallel_group()),
    ("pp", "pp", lambda state: state.get_pipeline_model_parallel_group()),
    ("dp-cp", "dp_cp", lambda state: state.get_data_parallel_group(with_context_parallel=True)),
    ("gtp", "gtp_remat", lambda state: None),  # already part of parallel_state's dp groups
    ("ep", "ep", lambda state: state.get_expert_model_parallel_group(check_initialized=False)),
)


def core(name: str) -> Any:
    """The module megatron.core.NAME. Raises MeshfeedError if Megatron-core lacks it or is not installed."""
    return framework(f"megatron.core.{name}", "megatron")


def delivery_of(readers: Readers) -> DeliveryName | Literal["auto"]:
    """The delivery from these readers. Raises RoleError for another name."""
    if readers not in get_args(Readers):
        raise RoleError(f"readers={readers!r}: choose one of {', '.join(get_args(Readers))}")
    return _DELIVERY[readers]


def layout(groups: Any = None, *, ranks_per_node: int | None = None) -> Layout:
    """The layout of Megatron-core's process groups, from this rank's groups, without communication.

    groups: a ProcessGroupCollection with tp, cp, dp and pp; None takes those of
    `parallel_state.initialize_model_parallel`. ep divides tp x cp x dp; gtp_remat, whose ranks have
    different data, is part of dp.
    Raises MeshfeedError without Megatron-core, LayoutError without such groups; see `Layout.from_groups` too.
    """
    state = core("parallel_state")
    if groups is None and not state.model_parallel_is_initialized():
        raise LayoutError(
            "Megatron-core has no process groups yet; call parallel_state.initialize_model_parallel first"
        )
    found: dict[str, list[int]] = {}
    for dims, name, of_state in _MEGATRON_GROUPS:
        group = getattr(groups, name, None) if groups is not None else of_state(state)
        if group is None and dims in DIMS:
            raise LayoutError(f"the process groups have no {name!r}; set tp, cp, dp and pp of this rank")
        try:
            found |= {} if group is None else {dims: [int(r) for r in dist.get_process_group_ranks(group)]}
        except (KeyError, ValueError, TypeError, AttributeError) as foreign:
            raise LayoutError(
                f"this rank is not in a {name!r} group ({foreign!r}); make it a member"
            ) from None
    ep, gtp = len(found.pop("ep", [0])), found.pop("gtp", [])
    if len(gtp) > 1:  # its ranks share weights but have different data: an inner dp
        rank = common_rank_of(found)
        found["dp"] = [int(other) for other in np.add.outer(found["dp"], np.array(gtp) - rank).ravel()]
        found.pop("dp-cp", None)
    return Layout.from_groups(found, ep=ep, ranks_per_node=ranks_per_node)


def layout_of(groups: Any = None) -> Layout:
    """`layout`, with the launcher's node size. Raises LayoutError."""
    return this_layout(layout(groups))


def device_of(given: str | torch.device | None) -> str | torch.device:
    """The device given, else this process's GPU, else the CPU."""
    if given is not None or not torch.cuda.is_available():
        return given or "cpu"
    return torch.device("cuda", torch.cuda.current_device())


def stage_map(config: Any, *, pp: int = 1) -> StageMap:
    """The job of each pipeline stage, from Megatron's TransformerConfig or any object with its attributes.

    It reads pipeline_model_parallel_size, virtual_pipeline_model_parallel_size, mtp_num_layers and
    pipeline_model_parallel_layout. Without a layout, MTP layers are on the last stage. pp: the pipeline
    ranks of a config that has no pipeline_model_parallel_size.
    """
    pp = int(getattr(config, "pipeline_model_parallel_size", pp))
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if isinstance(layout, str):
        return StageMap(pp=pp, layout=layout)
    if layout is None:
        vpp = int(getattr(config, "virtual_pipeline_model_parallel_size", None) or 1)
        mtp = (pp * vpp - 1,) if getattr(config, "mtp_num_layers", None) else ()
        return StageMap(pp=pp, vpp=vpp, mtp=mtp)
    # a PipelineParallelLayerLayout holds [pp rank][virtual stage], a list all stages in their order
    stages = layout if isinstance(layout, list) else [stage for row in zip(*layout.layout) for stage in row]
    kinds = [[str(getattr(layer, "name", layer)).strip().lower() for layer in stage] for stage in stages]
    return StageMap(
        pp=pp, vpp=len(kinds) // pp, mtp=tuple(i for i, kind in enumerate(kinds) if "mtp" in kind)
    )


def stages_of(config: Any, layout: Layout) -> StageMap:
    """`stage_map`; without a config, a plain pipeline with the virtual stages of parallel_state.

    Raises RoleError if config and process groups differ.
    """
    if config is None:
        vpp = core("parallel_state").get_virtual_pipeline_model_parallel_world_size()
        return StageMap(pp=layout.pp, vpp=vpp or 1)
    stages = stage_map(config, pp=layout.pp)
    stages.check(layout)
    return stages


def name_in(config: Any, option: str) -> str | None:
    """The name that an option of a config has; it is an enum in newer releases."""
    given = getattr(config, option, None)
    return None if given is None else str(getattr(given, "value", given))


def scheduler_of(config: Any) -> str | None:
    """The name of the config's sequence_packing_scheduler."""
    return name_in(config, "sequence_packing_scheduler")


def is_reader(
    vp_stage: Any = None,
    *,
    config: Any = None,
    readers: Readers = "broadcast",
    groups: Any = None,
    is_packed_sequence: bool = False,
) -> bool:
    """Whether this rank opens storage, for Megatron's `is_dataset_built_on_rank`. It asks no other rank.

    vp_stage: a virtual stage; None for any of this rank's. A ProcessGroupCollection in its place is `groups`,
    as Megatron-Bridge calls it. config: of MTP layers and virtual stages; see `stage_map`. groups: a
    ProcessGroupCollection; None takes those of parallel_state. Bind config and readers with
    functools.partial, since Megatron does not pass them. is_packed_sequence: from Megatron-LM; if True, every
    stage reads, for the lengths, as under "replicated" with a sequence_packing_scheduler.
    Raises LayoutError and RoleError if these do not fit together.
    """
    if isinstance(vp_stage, core("process_groups_config").ProcessGroupCollection) and groups is None:
        vp_stage, groups = None, vp_stage
    if vp_stage is not None and type(vp_stage) is not int:
        raise RoleError(
            f"is_reader was given a {type(vp_stage).__name__} as vp_stage, the number of a virtual stage; "
            f"pass a ProcessGroupCollection first or as groups=..., and a model's config as config=..."
        )
    layout = layout_of(groups)
    stages, rank = stages_of(config, layout), dist.get_rank()
    reads = _roles(layout, stages, readers, config, all_stages=is_packed_sequence)[rank].reads
    if vp_stage is None:
        return reads
    if not 0 <= vp_stage < stages.vpp:
        raise RoleError(f"vp_stage={vp_stage}: choose 0 to {stages.vpp - 1}, or pass the model's config")
    needs = is_packed_sequence or stages.fields_of(_STORED, layout.coord(rank).pp, vp_stage)
    return reads and bool(needs)


def readers(config: Any = None, *, readers: Readers = "broadcast", groups: Any = None) -> tuple[int, ...]:
    """All ranks whose `is_reader` is True, ascending: those that have an iterator."""
    layout = layout_of(groups)
    roles = _roles(layout, stages_of(config, layout), readers, config)
    return tuple(roles.ranks[roles.reads].tolist())


def _roles(
    layout: Layout, stages: StageMap, readers: Readers, config: Any, *, all_stages: bool = False
) -> Roles:
    delivery, fields = delivery_of(readers), _STORED
    scheduler = scheduler_of(config)
    if all_stages or (delivery == "direct" and scheduler is not None):
        fields = (*_STORED, _LENGTHS)
    if delivery == "auto":
        delivery = choose_delivery(layout, stages, fields, can_share=can_share() is None)
    # whether cp groups change from microbatch to microbatch
    changes = str(scheduler).endswith(("dynamic_cp", "hybrid_cp"))
    changes = changes or bool(getattr(config, "hybrid_context_parallel", False))
    return assign_roles(layout, stages, fields, delivery, shares_packs=not changes)
