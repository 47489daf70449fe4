"""How even each load of a plan is, beside what all plans that there are reach."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from evened import plan_step
from meshfeed.arrays import Floats
from meshfeed.multimodal.encoders import plan_encoder
from meshfeed.plan import Packing, StepPlan, account_of
from meshfeed.plan.types import Encoder
from meshfeed.report.loads import loads_of
from meshfeed.report.plan import page
from soak import cases

CALM = settings(max_examples=cases(30), deadline=None, derandomize=True)

PLACES = np.array(list(product(range(4), repeat=6))) == np.arange(4)[:, None, None]


def every_time(cost: Floats) -> Floats:
    """What each plan of some costs on two ranks and two microbatches takes, over the mean; [plans]."""
    loads = (PLACES @ cost).T.reshape(-1, 2, 2)
    busiest = loads.max(axis=2).sum(axis=1)
    return busiest / (cost.sum() / 2)


@CALM
@given(st.integers(0, 2**32 - 1))
def test_no_plan_is_below_the_bound_and_ours_is_one_of_them(seed: int) -> None:
    """Sequences on one rank each: all places that each can have are tried, and what is told is one of them."""
    rng = np.random.default_rng(seed)
    lengths, images = rng.integers(1, 2000, 6), rng.integers(0, 3, 6)
    capacity = int(rng.choice([20_000, 4000, 2500]))
    of, work = np.arange(6).repeat(images), rng.pareto(1, images.sum())
    per_sequence = np.bincount(of, work, 6).astype(np.float64)
    packing = Packing(capacity=capacity, microbatches=2)
    plan = plan_step(lengths, packing, dp=2, encoder_work=per_sequence)
    assume(plan.num_microbatches == 2)
    fits = (PLACES @ lengths).max(axis=0) <= capacity
    loads = loads_of(plan, packing, account_of(plan, packing), {"image": plan_encoder(plan, of, work)})
    assert list(loads) == ["language model", "image encoder"]
    for load, cost in zip(loads.values(), (packing.cost.work(lengths), per_sequence)):
        if not cost.any():
            assert (load.max_over_mean, load.bound) == (1, 1)
            continue
        times = every_time(cost)[fits]
        assert load.bound <= times.min() + 1e-9
        assert np.abs(times - load.max_over_mean).min() < 1e-9
    ours = loads["language model"]
    assert ours.max_over_mean == pytest.approx(time_of(plan, packing.cost.work(lengths)))


def time_of(plan: StepPlan, cost: Floats) -> float:
    loads = np.zeros((plan.num_microbatches, plan.num_ranks))
    np.add.at(loads, (plan.microbatch, plan.first_rank), cost)
    busiest = loads.max(axis=1).sum()
    return float(busiest / loads.sum() * plan.num_ranks)


@CALM
@given(st.integers(0, 2**32 - 1), st.sampled_from(["with sample", "balanced"]))
def test_groups_that_share_sequences_stay_above_the_bound(seed: int, encoder: Encoder) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(7, 1.5, 30)).astype(np.int64).clip(1, 30_000)
    of = np.sort(rng.integers(0, 30, 40))
    work = rng.pareto(0.7, 40)
    packing = Packing(capacity=8192, policy="dynamic_cp")
    plan = plan_step(lengths, packing, dp=6, encoder_work=np.bincount(of, work, 30))
    account = account_of(plan, packing)
    loads = loads_of(plan, packing, account, {"image": plan_encoder(plan, of, work, encoder=encoder)})
    for load in loads.values():
        assert 1 <= load.bound <= load.max_over_mean + 1e-9
    assert loads["language model"].max_over_mean == pytest.approx(1 / account.efficiency)


def test_one_image_that_is_all_work_is_the_bound() -> None:
    packing = Packing(capacity=100)
    plan = plan_step([50] * 8, packing, dp=4)
    shared = plan_encoder(plan, [3], [7.0], encoder="balanced")
    for encoder in (plan_encoder(plan, [3], [7.0]), shared):
        load = loads_of(plan, packing, account_of(plan, packing), {"image": encoder})["image encoder"]
        assert (load.max_over_mean, load.bound) == (4, 4)


def test_what_does_not_fit_beside_the_largest_image_comes_after_it() -> None:
    """One of 30 and seven of 1, two to a rank: three are beside it at most, so the other four take 2 more."""
    packing = Packing(capacity=100)
    plan = plan_step([50] * 8, packing, dp=2)
    encoder = plan_encoder(plan, np.arange(8), [30, *[1] * 7])
    load = loads_of(plan, packing, account_of(plan, packing), {"image": encoder})["image encoder"]
    assert load.bound == (30 + 2) / (37 / 2)


@pytest.mark.parametrize("ranks", [8, 32])
def test_a_language_model_that_is_far_from_even_becomes_more_even(ranks: int) -> None:
    """Documents of 1 to 4 pages, all alike, on one rank each: by tokens alone, packs have a page more or less."""
    rng = np.random.default_rng(0)
    pages = np.clip(rng.geometric(1 / 2.1, ranks * 18), 1, 4)
    lengths = pages * (2740 + 4 * rng.lognormal(np.log(45), 0.5, pages.size)).astype(np.int64)
    packing = Packing(capacity=32_768)
    text, plan = (plan_step(lengths, packing, dp=ranks, encoder_work=work) for work in (None, pages))
    cost = packing.cost.work(lengths)
    assert time_of(plan, cost) <= 1.02 < 1.025 < time_of(text, cost)


def test_a_step_without_sequences_is_even() -> None:
    packing = Packing(capacity=100)
    plan = plan_step([], packing, dp=4)
    loads = loads_of(plan, packing, account_of(plan, packing), {"audio": plan_encoder(plan, [], [])})
    assert [(load.max_over_mean, load.bound) for load in loads.values()] == [(1, 1), (1, 1)]


def test_parts_without_work_are_no_share_of_any() -> None:
    packing = Packing(capacity=1000)
    plan = plan_step([400, 300, 200], packing, dp=2)
    account, encoders = account_of(plan, packing), {"image": plan_encoder(plan, [0, 1], [0.0, 0.0])}
    made = page("dp2", 0, plan, account, encoders, loads_of(plan, packing, account, encoders))
    assert "image of sequence 0: 0.0% of a rank's share" in made
