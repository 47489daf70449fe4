"""This process's rank and layout, from torch.distributed or the launcher."""

from __future__ import annotations

import os
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshfeed.errors import LayoutError
from meshfeed.layout import Layout

# (processes of the job, this one's rank), as torchrun, Open MPI, MPICH and srun set them in each process
_LAUNCHERS = (
    ("WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def this_rank(given: int | None, layout: Layout) -> int:
    """The global rank: the one given, or else from torch.distributed, or else from the launcher ($RANK).

    Raises LayoutError if all of them are missing and the layout has several ranks.
    """
    if given is not None:
        return given
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    for _, rank in _LAUNCHERS:
        if rank in os.environ:
            return int(os.environ[rank])
    if layout.world_size > 1:
        raise LayoutError(
            f"which of the {layout.world_size} ranks of layout {layout} is this process? Neither "
            f"torch.distributed nor a launcher ($RANK) knows; call torch.distributed.init_process_group "
            f"first, start the job with torchrun, or pass rank="
        )
    return 0


def this_layout(given: Layout | None, rank: int | None = None, *, apart: bool = False) -> Layout:
    """The layout; an omitted node size comes from the launcher. given: None for one process.

    rank: the user's argument; with it, a user may simulate ranks of a job that was never launched. apart: the
    layout is of other processes than torch.distributed's default group.
    Raises LayoutError if the job does not fit the layout, or has several processes without one.
    """
    layout, size = given or Layout(), num_processes()
    if given is None and size > 1:
        raise LayoutError(f"a job of {size} processes needs a layout; pass one, such as mf.Layout(dp={size})")
    is_launched = any(os.environ.keys() >= {*names} for names in _LAUNCHERS)
    in_group = dist.is_available() and dist.is_initialized() and not apart
    if in_group or (is_launched and rank is None):
        layout.check_world(size)
    if layout.ranks_per_node is None and "LOCAL_WORLD_SIZE" in os.environ:
        layout = replace(layout, ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]))
    return layout


def given_layout(layout: Layout | DeviceMesh | None) -> Layout | None:
    """The layout that a user gave, as itself or as a DeviceMesh. Raises LayoutError for anything else."""
    if layout is None or isinstance(layout, Layout):
        return layout
    if isinstance(layout, DeviceMesh):
        return Layout.from_device_mesh(layout)
    hint = f"mf.Layout.parse({layout!r})" if isinstance(layout, str) else "a mf.Layout"
    raise LayoutError(f"layout={layout!r} is a {type(layout).__name__}; give {hint}")


def check_rank(given: int | None) -> None:
    """Raises LayoutError if the given rank is not torch.distributed's for this process."""
    if given is not None and dist.is_available() and dist.is_initialized() and given != dist.get_rank():
        raise LayoutError(
            f"rank {dist.get_rank()} of torch.distributed was given rank={given}; leave rank out, or pass "
            f"the rendezvous in which it is {given}"
        )


def num_processes() -> int:
    """Processes of the job, from torch.distributed or the launcher; 1 without both."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return next((int(os.environ[size]) for size, _ in _LAUNCHERS if size in os.environ), 1)
