"""From a trainer's config and ranks: a recipe by its name, a layout by replicas or by accelerate's mesh."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
import torch.distributed as dist

from meshfeed.errors import LayoutError, RecipeError
from meshfeed.layout import Layout
from meshfeed.recipe import Recipe

_WANTED = "give 'package.module:name' of a mf.Recipe, or of a function without arguments that makes one"

WHOLE = {"cp": "tp"}
"""Dimensions of accelerate's mesh that split sequences themselves, so that their ranks need whole ones."""


def recipe_at(place: object) -> Recipe:
    """The recipe named by "package.module:name"; a function without arguments is called.

    Raises RecipeError if there is none.
    """
    if isinstance(place, Recipe):
        return place
    if not isinstance(place, str):
        raise RecipeError(f"recipe={place!r} is a {type(place).__name__}; {_WANTED}")
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name or "recipe")
    except (ImportError, AttributeError, ValueError) as missing:
        raise RecipeError(f"recipe={place!r}: {missing}; {_WANTED}") from missing
    if callable(found):
        try:
            inspect.signature(found).bind()
        except (TypeError, ValueError) as wanting:
            raise RecipeError(f"recipe={place!r} cannot be called: {wanting}; {_WANTED}") from wanting
        found = found()
    if not isinstance(found, Recipe):
        raise RecipeError(f"recipe={place!r} is a {type(found).__name__}, not a mf.Recipe; {_WANTED}")
    return found


def layout_of_ranks(dp_rank_of_rank: list[int]) -> Layout:
    """The layout of ranks that need whole sequences, from the replica of each global rank.

    Replicas are dp; to meshfeed all other dimensions are one, tp, whose ranks get the same bytes.

    Raises LayoutError if replicas differ in size.
    """
    world_size, dp = len(dp_rank_of_rank), max(dp_rank_of_rank) + 1
    held = [dp_rank_of_rank.count(replica) for replica in range(dp)]
    if len(set(held)) > 1:
        raise LayoutError(f"dp ranks {dp_rank_of_rank}: replicas have {held} ranks; make all equal")
    table = sorted(range(world_size), key=lambda rank: (dp_rank_of_rank[rank], rank))
    return Layout(tp=world_size // dp, dp=dp, order="tp-dp", table=tuple(table))


def gathered_layout(dp_rank: int, dp_world_size: int) -> Layout:
    """`layout_of_ranks` from this rank's replica. All ranks call it together, and exchange replicas once.

    Raises LayoutError if they do not agree with dp_world_size, or cannot exchange anything.
    """
    if not dist.is_initialized():
        if dp_world_size > 1:
            raise LayoutError(
                f"dp_world_size={dp_world_size}, but no process group can gather every dp_rank; call "
                f"init_process_group first, or pass layout=layout_of(mesh)"
            )
        return Layout()
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    mine = torch.tensor([dp_rank], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    layout = layout_of_ranks([int(rank) for rank in gathered])
    if layout.dp != dp_world_size:
        raise LayoutError(f"dp_world_size={dp_world_size}, and dp ranks are 0 to {layout.dp - 1}")
    return layout


def layout_of_accelerator(accelerator: Any) -> Layout:
    """The layout of an accelerator's ranks: by its `ParallelismConfig`, or else DeepSpeed's autotp_size.

    Raises LayoutError for Megatron-LM within accelerate, and for sequence parallelism, whose ranks exchange
    batches and cut each into several.
    """
    if getattr(accelerator, "distributed_type", None) == "MEGATRON_LM":
        raise LayoutError("MegatronLMPlugin: its layout is not told; use meshfeed.integrations.megatron")
    ranks = getattr(getattr(accelerator, "parallelism_config", None), "sp_size", None) or 1
    if ranks > 1:
        raise LayoutError(
            f"ParallelismConfig(sp_size={ranks}): DeepSpeed would make {ranks} microbatches of each, so that "
            f"an optimizer step would be a part of the recipe's; choose cp_size, whose ranks get whole "
            f"sequences"
        )
    if (mesh := getattr(accelerator, "torch_device_mesh", None)) is None:
        deepspeed: Any = getattr(getattr(accelerator, "deepspeed_plugin", None), "deepspeed_config", {})
        tp = deepspeed.get("tensor_parallel", {}).get("autotp_size") or 1  # consecutive ranks
        return Layout(tp=tp, dp=accelerator.num_processes // tp)
    return Layout.from_device_mesh(mesh, names=WHOLE)
