"""The balance of a step for the language model and for each encoder, with lower bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshfeed.arrays import Floats
from meshfeed.multimodal.encoders import EncoderPlan
from meshfeed.plan.account import Account, least_pile, widest_group
from meshfeed.plan.packing import Packing
from meshfeed.plan.types import StepPlan

LANGUAGE_MODEL = "language model"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """The work of all ranks for one model in a step. Equal only to itself.

    Attributes:
        by_rank: load of each rank in each microbatch; float64 [num_microbatches, num_ranks].
        max_over_mean: time over the mean work of all ranks. A microbatch takes as long as its busiest rank.
            1 without work.
        bound: no plan of these sequences brings `max_over_mean` below this.
    """

    by_rank: Floats
    max_over_mean: float
    bound: float


def loads_of(
    plan: StepPlan, packing: Packing, account: Account, encoders: Mapping[str, EncoderPlan]
) -> dict[str, Load]:
    """The load of the language model, then that of each encoder, by name.

    account: of the plan. encoders: kind of part -> plan of its encoder in the same step.
    """
    widest = widest_group(plan, packing)
    of_rows = packing.cost.work(plan.lengths) * (plan.microbatch >= 0)
    loads = {LANGUAGE_MODEL: _load(account.loads, of_rows, of_rows, widest, plan, packing)}
    for kind, encoder in encoders.items():
        of_rows = np.bincount(encoder.row, encoder.work, plan.lengths.size).astype(np.float64)
        # a rank that holds a row encodes all parts of it, unless all ranks share the parts
        pieces = of_rows if encoder.encoder == "with sample" else encoder.work
        loads[f"{kind} encoder"] = _load(encoder.handed, of_rows, pieces, 1, plan, packing)
    return loads


def _load(
    by_rank: Floats, of_rows: Floats, pieces: Floats, most: int, plan: StepPlan, packing: Packing
) -> Load:
    """of_rows: work of each row of the plan; float64 [n]. pieces: works that up to `most` ranks can share."""
    mean = float(of_rows.sum()) / plan.num_ranks
    if not mean:
        return Load(by_rank=by_rank, max_over_mean=1.0, bound=1.0)
    # a bound for the busiest rank of any plan
    least = max(mean, least_pile(-np.sort(-pieces) / most, plan.num_ranks // most))
    busiest = by_rank.max(axis=1).sum()
    # the microbatch with the largest piece takes this long, even if little else fits into it
    beside = _most_in_a_microbatch(of_rows, plan, packing) / plan.num_ranks
    least = max(least, mean + float(pieces.max()) / most - beside)
    return Load(by_rank=by_rank, max_over_mean=float(busiest) / mean, bound=least / mean)


def _most_in_a_microbatch(of_rows: Floats, plan: StepPlan, packing: Packing) -> float:
    """The most work of all ranks in one microbatch: from rows with most work per token on, cut at the end."""
    order = np.argsort(-of_rows / np.maximum(plan.lengths, 1))
    tokens, work = (np.append(0, np.cumsum(each[order])) for each in (plan.lengths, of_rows))
    return float(np.interp(packing.capacity * plan.num_ranks, tokens, work))
