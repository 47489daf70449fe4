"""Functions of Megatron-core whose arguments differ between its versions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch.distributed
from megatron.core import num_microbatches_calculator, parallel_state, utils


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether this version's function has an argument of this name."""
    return name in inspect.signature(function).parameters


@dataclass(frozen=True)
class Rank:
    """A rank of a cp group, without a process group."""

    cp_size: int
    cp_rank: int

    def size(self) -> int:
        return self.cp_size

    def rank(self) -> int:
        return self.cp_rank


def on_this_cp_rank(batch: dict[str, Any], cp_group: Any = None) -> dict[str, Any]:
    """Its get_batch_on_this_cp_rank, for rows that are cut as a whole.

    cp_group: a process group, or a Rank; None takes that of parallel_state.
    """
    cut: Any = utils.get_batch_on_this_cp_rank
    group = cp_group or parallel_state.get_context_parallel_group()
    named = {"is_hybrid_cp": False} if takes(cut, "is_hybrid_cp") else {}
    asked = {
        "is_initialized": lambda: True,
        "get_world_size": lambda g: g.size(),
        "get_rank": lambda g: g.rank(),
    }
    with patch.multiple(torch.distributed, **asked):
        return cut(batch, cp_group=group, **named)


def growing_batch(sizes: Mapping[int, int], micro_batch_size: int) -> None:
    """Initialize its calculator for global batch sizes that grow evenly; sizes: from so many samples on."""
    init: Any = num_microbatches_calculator.init_num_microbatches_calculator
    (first, second), last = list(sizes.values())[:2], list(sizes.values())[-1]
    if takes(init, "step_batch_size_schedule"):
        schedule = " ".join(f"{samples}:{size}" for samples, size in sizes.items())
        init(0, None, last, micro_batch_size, 1, step_batch_size_schedule=schedule)
    else:
        init(0, [first, second - first, max(sizes)], last, micro_batch_size, 1)
