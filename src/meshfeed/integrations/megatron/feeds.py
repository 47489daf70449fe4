"""The Feed of a rank of a Megatron job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from meshfeed.feed import Feed
from meshfeed.integrations.loader import check_encoder
from meshfeed.integrations.megatron.batches import check_documents
from meshfeed.integrations.megatron.config import options_of
from meshfeed.integrations.megatron.stages import Readers, delivery_of, device_of, layout_of, stages_of
from meshfeed.plan import CpSplit, Packing
from meshfeed.recipe import Recipe
from meshfeed.sequence.columns import rule_of


def feed(
    recipe: Recipe,
    config: Any = None,
    *,
    readers: Readers | Iterable[int] = "shared",
    groups: Any = None,
    device: str | torch.device | None = None,
    packing: Packing | None = None,
    cp_split: CpSplit | None = None,
    **options: Any,
) -> Feed:
    """The Feed of this rank of a Megatron job.

    config: Megatron's TransformerConfig or arguments; its data options are honoured or refused, see
    `config.CONFIG_FIELDS`. None for a plain pipeline. readers: who reads, see `Readers`, or the ranks that
    may. groups: a ProcessGroupCollection; None takes those of parallel_state. device: None takes this
    process's GPU if there is one. packing: as for a Feed, completed by the config; None takes that of a
    config with a sequence_packing_scheduler. cp_split: None takes the config's. options: all others of a
    Feed, such as micro_batch_size.
    Raises RecipeError if config and arguments contradict each other, for documents that are kept apart in
    rows that cp splits, and if encoders run on other ranks, which Megatron's models do not expect.
    """
    layout = layout_of(groups)
    if config is not None:
        packing, cp_split = options_of(config, rule_of(recipe), layout, packing, cp_split)
    by_name = isinstance(readers, str)
    made = Feed(
        recipe,
        layout,
        delivery=delivery_of(readers) if by_name else "auto",
        readers=None if by_name else readers,
        stage_map=stages_of(config, layout),
        device=device_of(device),
        packing=packing,
        cp_split=cp_split or "zigzag",
        **options,
    )
    check_encoder(made.recipe)
    check_documents(made)
    return made
