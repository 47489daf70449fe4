"""Where this process stands in the job, as torch.distributed or the launcher says."""

from __future__ import annotations

import os
from dataclasses import replace

import torch.distributed as dist

from meshfeed.layout import Layout


def this_rank(given: int | None) -> int:
    """The global rank: the one given, or that of torch.distributed, then of $RANK, then 0."""
    if given is not None:
        return given
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def this_layout(given: Layout, rank: int) -> Layout:
    """The layout, its node size taken from the launcher where it was not given.

    Raises LayoutError where the job cannot hold it, or the rank is not in it.
    """
    layout = given
    if dist.is_available() and dist.is_initialized():
        layout.check_world(dist.get_world_size())
    if layout.ranks_per_node is None and "LOCAL_WORLD_SIZE" in os.environ:
        layout = replace(layout, ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]))
    layout.coord(rank)
    return layout
