"""What a plan minimises: each part of the objective changes the plan as it should."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed.plan import CostModel, Packing, account_of, plan_step
from meshfeed.plan.packing import TOLERANCE
from soak import cases

CALM = settings(max_examples=cases(60), deadline=None, derandomize=True)


@pytest.mark.parametrize("pp", [1, 2, 8])
@pytest.mark.parametrize("vpp", [1, 2, 5])
def test_the_account_adds_the_bubble_and_the_overhead(pp, vpp):
    """A pipeline idles for (pp - 1) / vpp of its largest microbatch."""
    lengths = np.random.default_rng(pp).integers(1, 4000, 40)
    packing = Packing(capacity=4096, cost=CostModel(alpha=500, overhead=1e5))
    plan = plan_step(lengths, packing, dp=4, pp=pp, vpp=vpp)
    account = account_of(plan, packing, pp=pp, vpp=vpp)
    tops = account.loads.max(axis=1)
    wanted = tops.sum() + (pp - 1) / vpp * tops.max() + plan.num_microbatches * 1e5
    assert account.objective == pytest.approx(wanted)
    assert account.bound <= account.objective


def test_a_plan_weighs_the_bubble_by_virtual_stages():
    """Five stages of four virtual ones idle as long as two of one: equal plans. A larger bubble pays for more
    microbatches, each of which costs something."""
    packing = Packing(capacity=4096, cost=CostModel(alpha=25_100, overhead=2e7))
    for seed in SEEDS:
        lengths = np.random.default_rng(seed).integers(1, 400, 200)
        plans = {
            (pp, vpp): plan_step(lengths, packing, dp=4, pp=pp, vpp=vpp, quantum=1)
            for pp, vpp in ((2, 1), (5, 4), (9, 1))
        }
        np.testing.assert_array_equal(plans[2, 1].microbatch, plans[5, 4].microbatch)
        assert plans[9, 1].num_microbatches > plans[2, 1].num_microbatches


SEEDS = range(12)


def test_a_batch_that_just_fits_one_microbatch_takes_two_where_that_is_shorter():
    """Ranks full of tokens cannot be even: a token costs more in a long sequence. Two microbatches have room."""
    drawn = np.random.default_rng(1).lognormal(6, 1.2, 1024)
    lengths = np.clip(drawn / drawn.sum() * 0.99 * 64 * 16_384, 1, 131_072).astype(np.int64)
    fewest = Packing(capacity=16_384, policy="dynamic_cp", microbatches=1)
    chosen = replace(fewest, microbatches=None)
    one, two = (account_of(plan_step(lengths, packing, dp=64), packing) for packing in (fewest, chosen))
    assert [len(one.loads), len(two.loads)] == [1, 2]
    assert one.efficiency < 0.9 and two.efficiency > 0.99
    assert two.objective < one.objective * 0.9


@CALM
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 120),
    dp=st.integers(1, 12),
    policy=st.sampled_from(("balanced", "dynamic_cp")),
    pp=st.integers(1, 8),
    vpp=st.integers(1, 4),
    quantum=st.sampled_from((None, 1, 3)),
    overhead=st.sampled_from((0.0, 1e6, 1e9)),
)
def test_no_longer_step_than_with_the_fewest_microbatches_beyond_the_tolerance(
    seed, n, dp, policy, pp, vpp, quantum, overhead
):
    lengths = np.clip(np.random.default_rng(seed).lognormal(6, 1.4, n), 1, 4096).astype(np.int64)
    cost = CostModel(alpha=25_100, overhead=overhead)
    chosen = Packing(capacity=4096, policy=policy, cost=cost)
    fewest = replace(chosen, microbatches=1)
    made, least = (plan_step(lengths, p, dp=dp, pp=pp, vpp=vpp, quantum=quantum) for p in (chosen, fewest))
    assert made.num_microbatches >= least.num_microbatches
    times = [account_of(plan, fewest, pp=pp, vpp=vpp).objective for plan in (made, least)]
    assert times[0] <= times[1] * (1 + TOLERANCE + 1e-12)  # sums of loads in another order
