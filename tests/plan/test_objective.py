"""What a plan minimises: each part of the objective changes the plan as it should."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed.plan import CostModel, Packing, account_of, plan_step
from soak import cases

CALM = settings(max_examples=cases(60), deadline=None, derandomize=True)


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


def test_fewer_microbatches_where_more_gain_less_than_the_tolerance():
    """A pipeline's bubble always shrinks with more microbatches; by how much counts."""
    lengths = np.full(4096, 64)
    counts = [
        plan_step(lengths, Packing(capacity=4096, tolerance=tolerance), dp=1, pp=8).num_microbatches
        for tolerance in (0.5, 0.0)
    ]
    assert counts[0] == 64 < counts[1]


@CALM
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 120),
    dp=st.integers(1, 12),
    policy=st.sampled_from(("balanced", "dynamic_cp")),
    objective=st.sampled_from(("microbatch", "step")),
    pp=st.integers(1, 8),
    vpp=st.integers(1, 4),
    quantum=st.sampled_from((None, 1, 3)),
    overhead=st.sampled_from((0.0, 1e6, 1e9)),
    tolerance=st.sampled_from((0.0, 0.01)),
)
def test_no_longer_step_than_with_the_fewest_microbatches_beyond_the_tolerance(
    seed, n, dp, policy, objective, pp, vpp, quantum, overhead, tolerance
):
    lengths = np.clip(np.random.default_rng(seed).lognormal(6, 1.4, n), 1, 4096).astype(np.int64)
    cost = CostModel(alpha=25_100, overhead=overhead)
    chosen = Packing(capacity=4096, policy=policy, cost=cost, objective=objective, tolerance=tolerance)
    fewest = replace(chosen, microbatches=1)
    made, least = (plan_step(lengths, p, dp=dp, pp=pp, vpp=vpp, quantum=quantum) for p in (chosen, fewest))
    assert made.num_microbatches >= least.num_microbatches
    times = [account_of(plan, fewest, pp=pp, vpp=vpp).objective for plan in (made, least)]
    assert times[0] <= times[1] * (1 + tolerance + 1e-12)  # sums of loads in another order
    if tolerance == 0.0:  # no number of microbatches near the fewest makes it shorter
        step = quantum or (pp if vpp > 1 else 1)
        for more in range(1, 4):
            asked = replace(chosen, microbatches=least.num_microbatches + more * step)
            other = plan_step(lengths, asked, dp=dp, pp=pp, vpp=vpp, quantum=quantum)
            if other.num_microbatches == asked.microbatches:
                assert times[0] <= account_of(other, fewest, pp=pp, vpp=vpp).objective * (1 + 1e-9)
