"""What a plan minimises: each part of the objective changes the plan as it should."""

from __future__ import annotations

import numpy as np
import pytest
from planning import least_objective

from meshfeed.plan import CostModel, Packing, account_of, plan_step
from meshfeed.plan.balance import meet
from meshfeed.plan.fill import Ranked
from meshfeed.plan.policy import room_of


def test_a_handful_is_planned_as_well_as_can_be():
    """No tolerance, few sequences, one cp size: the plan is the optimum itself, not near it."""
    for seed in range(25):
        rng = np.random.default_rng(seed)
        dp, lengths = int(rng.integers(1, 4)), rng.integers(1, 4000, int(rng.integers(3, 9)))
        packing = Packing(capacity=4096, tolerance=0.0)
        plan = plan_step(lengths, packing, dp=dp)
        optimum = least_objective(
            lengths, packing, ranks=dp, sizes=(1,), num_microbatches=plan.num_microbatches
        )
        assert account_of(plan, packing).objective == pytest.approx(optimum, rel=1e-6), (seed, lengths)


@pytest.mark.parametrize("pp", [1, 2, 8])
@pytest.mark.parametrize("vpp", [1, 2, 5])
@pytest.mark.parametrize("objective", ["microbatch", "step"])
def test_the_account_adds_the_bubble_and_the_overhead(pp, vpp, objective):
    """A pipeline idles for (pp - 1) / vpp of its largest microbatch."""
    lengths = np.random.default_rng(pp).integers(1, 4000, 40)
    packing = Packing(capacity=4096, cost=CostModel(alpha=500, overhead=1e5), objective=objective)
    plan = plan_step(lengths, packing, dp=4, pp=pp, vpp=vpp)
    account = account_of(plan, packing, pp=pp, vpp=vpp)
    tops = account.loads.max(axis=1)
    work = tops.sum() if objective == "microbatch" else account.loads.sum(axis=0).max()
    wanted = work + (pp - 1) / vpp * tops.max() + plan.num_microbatches * 1e5
    assert account.objective == pytest.approx(wanted)
    assert account.bound <= account.objective


def test_a_plan_weighs_the_bubble_by_virtual_stages():
    """Five stages of four virtual ones idle as long as two of one: equal plans, where other bubbles differ."""
    plans = {(pp, vpp): [] for pp, vpp in ((2, 1), (5, 4), (5, 1))}
    for seed in SEEDS:
        lengths = np.random.default_rng(seed).integers(1, 4000, 24)
        for (pp, vpp), made in plans.items():
            packing = Packing(capacity=4096, microbatches=12, tolerance=0.0)
            plan = plan_step(lengths, packing, dp=4, pp=pp, vpp=vpp, quantum=1)
            made.append((plan.microbatch.tolist(), plan.first_rank.tolist()))
    assert plans[2, 1] == plans[5, 4]
    assert plans[2, 1] != plans[5, 1]


SEEDS = range(12)


def test_where_ranks_meet_at_the_end_of_a_step_the_heaviest_goes_where_least_was_done():
    packing = Packing(capacity=16_384, microbatches=6, objective="step")
    for seed in range(5):
        lengths = np.clip(np.random.default_rng(seed).lognormal(7, 1.5, 90), 1, 16_384).astype(np.int64)
        account = account_of(plan_step(lengths, packing, dp=6), packing)
        done = np.zeros(6)
        for loads in account.loads:
            least_done_first = np.argsort(done, kind="stable")
            assert (np.diff(loads[least_done_first]) <= 1e-6).all(), seed
            done += loads


def test_the_heaviest_blocks_meet_in_one_microbatch():
    """Loads 1..6 on two ranks: 6 with 5, 4 with 3, 2 with 1 is the least sum of largest loads."""
    packing = Packing(capacity=1000)
    lengths = np.array([600, 500, 400, 300, 200, 100])
    ranked = Ranked.of(lengths, packing.cost, room_of(packing, dp=2, cp=1))
    filled = meet(ranked, np.arange(6), np.array([3, 0, 4, 1, 5, 2]), 3)
    assert [sorted(lengths[mb.members].tolist()) for mb in filled] == [[500, 600], [300, 400], [100, 200]]
    assert [mb.top_load for mb in filled] == packing.cost.load([600, 400, 200], 1).tolist()
