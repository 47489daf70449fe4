"""Where this process stands in the job, as torch.distributed or the launcher says, and what it asks for."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any, get_args

import torch
import torch.distributed as dist

from meshfeed.errors import LayoutError, OptionError, RoleError
from meshfeed.layout import Layout
from meshfeed.roles import DeliveryName

# (processes of the job, this one's rank), as torchrun, Open MPI, MPICH and srun set them in each process
_LAUNCHERS = (
    ("WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def this_rank(given: int | None, layout: Layout) -> int:
    """The global rank: the one given, or that of torch.distributed, then of the launcher ($RANK).

    Raises LayoutError where none of them says it, though the layout has several ranks.
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
            f"torch.distributed nor a launcher ($RANK) says; call torch.distributed.init_process_group "
            f"first, start the job with torchrun, or pass rank="
        )
    return 0


def this_layout(given: Layout | None, rank: int | None = None) -> Layout:
    """The layout, its node size taken from the launcher where it was not given; None for one process.

    rank: as the user gave it; who does so may simulate ranks of a job that was never launched.
    Raises LayoutError where the job cannot hold it, or is more than one process without it.
    """
    layout, size = given or Layout(), num_processes()
    if given is None and size > 1:
        raise LayoutError(f"a job of {size} processes needs a layout; pass one, such as mf.Layout(dp={size})")
    is_launched = any(size in os.environ and rank in os.environ for size, rank in _LAUNCHERS)
    if (dist.is_available() and dist.is_initialized()) or (is_launched and rank is None):
        layout.check_world(size)
    if layout.ranks_per_node is None and "LOCAL_WORLD_SIZE" in os.environ:
        layout = replace(layout, ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]))
    return layout


def check_arguments(layout: Any, delivery: Any, device: Any, timeout_s: Any, name: Any) -> None:
    """What a constructor can refuse at once. Raises LayoutError, RoleError or OptionError."""
    if layout is not None and not isinstance(layout, Layout):
        hint = f"mf.Layout.parse({layout!r})" if isinstance(layout, str) else "a mf.Layout"
        raise LayoutError(f"layout={layout!r} is a {type(layout).__name__}; give {hint}")
    if not isinstance(name, str):
        raise OptionError(f"name={name!r}: give a text, such as name='validation'")
    known = ("auto", *get_args(DeliveryName))
    if delivery not in known:
        raise RoleError(f"delivery={delivery!r}: choose one of {', '.join(known)}")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"device={device!r} is no device; give 'cpu', 'cuda' or 'cuda:0'") from error
    if place.type not in ("cpu", "cuda"):
        raise OptionError(f"device={device!r}: tensors are put on 'cpu' or 'cuda'; move them on from there")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < math.inf:
        raise OptionError(f"timeout_s={timeout_s!r}: give seconds, more than 0")


def check_counts(least: int, **given: Any) -> None:
    """Raises OptionError for what is not a whole number from `least` on."""
    for name, value in given.items():
        if type(value) is not int or value < least:
            raise OptionError(f"{name}={value!r}: give a whole number, {least} or more")


def check_flags(**given: Any) -> None:
    """Raises OptionError for what is neither True nor False: the text "no" would count as True."""
    for name, value in given.items():
        if type(value) is not bool:
            raise OptionError(f"{name}={value!r}: give True or False")


def check_rank(given: int | None) -> None:
    """Raises LayoutError for another rank than torch.distributed has for this process."""
    if given is not None and dist.is_available() and dist.is_initialized() and given != dist.get_rank():
        raise LayoutError(
            f"rank {dist.get_rank()} of torch.distributed was told rank={given}; leave rank out, or pass the "
            f"rendezvous in which it is {given}"
        )


def num_processes() -> int:
    """Processes of the job, as torch.distributed or the launcher says; 1 where neither does."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return next((int(os.environ[size]) for size, _ in _LAUNCHERS if size in os.environ), 1)
