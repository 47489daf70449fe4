"""Sequences -> (microbatch, cp group)."""

import numpy as np
import numpy.typing as npt

from meshfeed.errors import PlanError
from meshfeed.plan.types import Align, StepPlan


def plan_fixed(
    lengths: npt.NDArray[np.int64], *, dp: int, cp: int, micro_batch_size: int, align: Align | None = None
) -> StepPlan:
    """Deal the sequences out as they come: `micro_batch_size` to each dp rank, microbatch by microbatch.

    lengths: real tokens of each sequence, int64 [n], n >= 0. This is the order in which Megatron's
    samplers deal a global batch. Where n does not fill the last microbatch, some ranks get fewer
    sequences there or none (a dummy); every rank still gets the same number of microbatches.
    Raises PlanError for a size below 1.
    """
    if min(dp, cp, micro_batch_size) < 1:
        raise PlanError(f"dp={dp}, cp={cp}, micro_batch_size={micro_batch_size}: each is at least 1")
    place = np.arange(lengths.size)
    dp_rank = place // micro_batch_size % dp
    return StepPlan(
        lengths=np.array(lengths, np.int64),
        microbatch=(place // (micro_batch_size * dp)).astype(np.int32),
        first_rank=(dp_rank * cp).astype(np.int32),
        cp_size=np.full(lengths.size, cp, np.int32),
        num_microbatches=-(-lengths.size // (micro_batch_size * dp)),
        num_ranks=dp * cp,
        idle_cp_size=cp,
        align=align or Align(),
    )
