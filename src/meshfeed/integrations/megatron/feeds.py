"""The Feed of a rank of a Megatron job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from meshfeed.errors import RoleError
from meshfeed.feed import Feed
from meshfeed.integrations.megatron.batches import check_documents
from meshfeed.integrations.megatron.config import options_of
from meshfeed.integrations.megatron.stages import Readers, delivery_of, device_of, layout_of, stages_of
from meshfeed.plan import CpSplit, Packing
from meshfeed.recipe import Recipe
from meshfeed.transport import Transport


def feed(
    recipe: Recipe,
    config: Any = None,
    *,
    readers: Readers | Iterable[int] = "shared",
    groups: Any = None,
    device: str | torch.device | None = None,
    packing: Packing | None = None,
    cp_split: CpSplit | None = None,
    transport: Transport = Transport(),
    **options: Any,
) -> Feed:
    """The Feed of this rank of a Megatron job.

    config: Megatron's TransformerConfig or arguments; its data options are honoured or refused, see
    `config.CONFIG_FIELDS`. None for a plain pipeline. readers: who reads, see `Readers`, or the ranks that
    may. groups: a ProcessGroupCollection; None takes those of parallel_state. device: None takes this
    process's GPU if there is one. packing: as for a Feed, completed by the config; None takes that of a
    config with a sequence_packing_scheduler. cp_split: None takes the config's. transport: without readers
    and a delivery, unless `readers` lists ranks. options: all others of a Feed, such as micro_batch_size.
    Raises RecipeError if config and arguments contradict each other, and for documents that are kept apart in
    rows that cp splits.
    """
    layout = layout_of(groups)
    if config is not None:
        packing, cp_split = options_of(config, recipe.sequence, layout, packing, cp_split)
    if not isinstance(readers, str):
        transport = replace(transport, readers=readers)
    elif transport.delivery == "auto" and transport.readers is None:
        transport = replace(transport, delivery=delivery_of(readers))
    else:
        raise RoleError(
            f"readers={readers!r} says who reads; leave delivery and readers out of the transport"
        )
    made = Feed(
        recipe,
        layout,
        stage_map=stages_of(config, layout),
        device=device_of(device),
        packing=packing,
        cp_split=cp_split or "zigzag",
        transport=transport,
        **options,
    )
    check_documents(made)
    return made
