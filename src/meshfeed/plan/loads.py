"""How even a step is for the language model and for each encoder, and what no plan can beat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshfeed.plan.account import Account, least_pile, widest_group
from meshfeed.plan.encoders import EncoderPlan
from meshfeed.plan.policy import Packing
from meshfeed.plan.types import FloatArray, StepPlan

LANGUAGE_MODEL = "language model"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """What the ranks do for one model in a step. Equal only to itself.

    Attributes:
        by_rank: load of each rank in each microbatch; float64 [num_microbatches, num_ranks].
        max_over_mean: time over the mean work of all ranks. A microbatch takes as long as its busiest rank,
            or, under objective="step", the step as long as its busiest. 1 without work.
        bound: what no plan of these sequences can bring `max_over_mean` below.
    """

    by_rank: FloatArray
    max_over_mean: float
    bound: float


def loads_of(
    plan: StepPlan, packing: Packing, account: Account, encoders: Mapping[str, EncoderPlan]
) -> dict[str, Load]:
    """The load of the language model, then that of each encoder, by name.

    account: of the plan. encoders: kind of part -> plan of its encoder in the same step.
    """
    widest = widest_group(plan, packing)
    work = packing.cost.work(plan.lengths[plan.microbatch >= 0])
    least = _least_of_busiest(work, plan.num_ranks, widest)
    loads = {LANGUAGE_MODEL: _load(account.loads, float(work.sum()), packing, least)}
    for kind, encoder in encoders.items():
        # one rank encodes a part: of those that hold its sequence, unless all share the parts
        least = _least_of_busiest(encoder.work, plan.num_ranks, 1)
        if encoder.encoder == "with sample":
            of_row = np.bincount(encoder.row, encoder.work).astype(np.float64)
            least = max(least, _least_of_busiest(of_row, plan.num_ranks, widest))
        loads[f"{kind} encoder"] = _load(encoder.loads, float(encoder.work.sum()), packing, least)
    return loads


def _load(by_rank: FloatArray, work: float, packing: Packing, least: float) -> Load:
    if not work:
        return Load(by_rank=by_rank, max_over_mean=1.0, bound=1.0)
    meet_often = packing.objective == "microbatch"
    busiest = by_rank.max(axis=1).sum() if meet_often else by_rank.sum(axis=0).max()
    mean = work / by_rank.shape[1]
    return Load(by_rank=by_rank, max_over_mean=float(busiest) / mean, bound=max(least / mean, 1.0))


def _least_of_busiest(work: FloatArray, num_ranks: int, widest: int) -> float:
    """The least load of the busiest rank in any plan in which up to `widest` ranks share each work."""
    descending = -np.sort(-work) / widest
    return least_pile(descending, num_ranks // widest) if work.size else 0.0
