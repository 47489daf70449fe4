"""A plan in numbers: tokens, padding, FLOPs, balance. The same on every rank, without communication."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshfeed.arrays import Floats, Longs
from meshfeed.errors import PlanError
from meshfeed.intervals import numbers_in
from meshfeed.plan.packing import ModelShape, Packing, attended_pairs, step_time
from meshfeed.plan.types import StepPlan, exact_sum
from meshfeed.whole import of_kind, whole_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A step's plan in numbers.

    Attributes:
        tokens: real tokens in the step's packs.
        padded_tokens: the same with all padding, including that of packs without a sequence.
        sum_sq: sum of squared real lengths of the step's rows.
        pairs: attended (query, key) pairs, under the cost model's window.
        loads: work of each rank in each microbatch; float64 [num_microbatches, num_ranks].
        rank_tokens: padded tokens of each rank in each microbatch; int64, the same shape.
        objective: what the plan minimises: the step time, in units of load; see `step_time`.
        bound: a lower bound on the objective of any plan.
        efficiency: (work / ranks) / sum over microbatches of the largest load; 1 for a step without work.
    """

    tokens: int
    padded_tokens: int
    sum_sq: int
    pairs: int
    loads: Floats
    rank_tokens: Longs
    objective: float
    bound: float
    efficiency: float

    @property
    def max_over_mean(self) -> float:
        """Largest over mean work of a rank in the whole step; 1 for a step without work."""
        per_rank = self.loads.sum(axis=0)
        return float(per_rank.max() / per_rank.mean()) if per_rank.any() else 1.0

    @property
    def over_bound(self) -> float:
        """Objective over its lower bound; 1 for a step without work."""
        return self.objective / self.bound if self.bound else 1.0

    @property
    def padding(self) -> float:
        """Fraction of all padded tokens that is padding."""
        return 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0


def account_of(plan: StepPlan, packing: Packing, *, pp: int = 1, vpp: int = 1) -> Account:
    """Add up a plan. pp, vpp: pipeline stages and virtual stages per rank, for the bubble."""
    of_kind(PlanError, StepPlan, plan=plan)
    of_kind(PlanError, Packing, packing=packing)
    pp, vpp = whole_numbers(PlanError, 1, pp=pp, vpp=vpp)
    placed, cost = plan.kept, packing.cost
    lengths = plan.lengths[placed]
    sizes = plan.cp_size[placed]
    padded = plan.align.padded(lengths, sizes)
    # a pack is a (microbatch, first rank); its ranks share its size and its sequences
    pack = plan.microbatch[placed].astype(np.int64) * plan.num_ranks + plan.first_rank[placed]
    packs, first_row, pack_of_row = np.unique(pack, return_index=True, return_inverse=True)
    size = sizes[first_row].astype(np.int64)
    load = np.bincount(pack_of_row, weights=cost.load(lengths, sizes), minlength=packs.size)
    tokens = np.zeros(packs.size, np.int64)
    np.add.at(tokens, pack_of_row, padded)
    idle = plan.idle_tokens
    if plan.shape is not None:
        tokens = plan.align.limit(plan.shape.capacity, size)
        idle = int(plan.align.limit(plan.shape.capacity, plan.idle_cp_size)) // plan.idle_cp_size
    else:
        multiple = plan.align.pack_multiple(size)
        tokens = -(-tokens // multiple) * multiple
    shape = (plan.num_microbatches, plan.num_ranks)
    # pack p covers size[p] ranks from its first one on
    ranks = numbers_in(packs, size)
    loads, rank_tokens = np.zeros(shape), np.full(shape, idle, np.int64)
    loads.ravel()[ranks] = np.repeat(load, size)
    rank_tokens.ravel()[ranks] = np.repeat(tokens // size, size)
    share = (pp - 1) / vpp
    tops = loads.max(axis=1, initial=0.0)
    even = float(cost.work(lengths).sum()) / plan.num_ranks
    return Account(
        tokens=plan.tokens,
        padded_tokens=exact_sum(rank_tokens.ravel()),
        sum_sq=plan.sum_sq,
        pairs=exact_sum(attended_pairs(lengths, cost.window)),
        loads=loads,
        rank_tokens=rank_tokens,
        objective=step_time(loads, packing, share),
        bound=_bound(plan, packing, share),
        efficiency=even / float(tops.sum()) if tops.any() else 1.0,
    )


def widest_group(plan: StepPlan, packing: Packing) -> int:
    """Ranks of the widest cp group that the packing allows."""
    if packing.policy == "dynamic_cp":
        return max(packing.cp_sizes) if packing.cp_sizes else plan.num_ranks
    return plan.idle_cp_size


def flops(plan: StepPlan, shape: ModelShape, *, backward: bool = True) -> int:
    """FLOPs of the model on a step's real tokens, all ranks together; exact.

    Forward: `2 P s` in the matrices of a layer and `4 h` for each attended pair, and the output layer; three
    times as much with the backward pass. Padding, recomputation and the embedding look-up are not counted.
    """
    pairs = exact_sum(attended_pairs(plan.lengths[plan.kept], shape.window))
    layer = 2 * shape.layer_matmul_params * plan.tokens + 4 * shape.attention_width * pairs
    forward = shape.num_layers * layer + 2 * shape.hidden_size * shape.vocab_size * plan.tokens
    return forward * (3 if backward else 1)


def _bound(plan: StepPlan, packing: Packing, bubble_share: float) -> float:
    """The least objective of any plan of these rows and as many microbatches.

    In units of load. The bubble costs bubble_share times the largest microbatch.
    The largest of three bounds. *Work*: all of it, shared evenly. *Longest*: the longest sequence on the
    widest group.
    *Count*, which matters if sequences are few or alike: the largest of ranks / widest piles, since the
    microbatches of a block of ranks follow each other.
    """
    lengths, cost, count = plan.lengths[plan.kept], packing.cost, plan.num_microbatches
    if not lengths.size:
        return count * cost.microbatch_overhead
    widest = widest_group(plan, packing)
    loads = np.sort(cost.load(lengths, widest) if not cost.ring_tokens else cost.work(lengths) / widest)[::-1]
    even = float(cost.work(lengths).sum()) / plan.num_ranks
    blocks = plan.num_ranks // widest
    total_load = max(even, least_pile(loads, blocks))
    top = max(total_load / count, least_pile(loads, blocks * count))
    return total_load + bubble_share * top + count * cost.microbatch_overhead


def least_pile(loads: Floats, piles: int) -> float:
    """A lower bound on the largest of `piles` piles, however the loads are distributed.

    loads: descending; float64 [n], n >= 1. Of the j * piles + 1 largest loads, some pile holds j + 1: at
    least the j + 1 smallest of them.
    """
    last = np.arange(0, loads.size, piles)
    total = np.concatenate(([0.0], np.cumsum(loads)))
    return float((total[last + 1] - total[last - np.arange(last.size)]).max())
