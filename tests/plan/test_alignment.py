"""Capacity is in padded tokens, under every alignment that trainers use."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshfeed.errors import PlanError
from meshfeed.plan import Align, CostModel, Packing, plan_step
from meshfeed.plan.packing import room_of
from planning import check_packs, check_plan
from soak import cases

CALM = settings(
    max_examples=cases(15, 300), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)

SEQUENCE, PACK = (1, 2, 8, 16, 32, 64, 128), (1, 2, 8, 16, 32, 64, 128, 256)


def lengths_of(rng: np.random.Generator, kind: str, n: int, longest: int) -> np.ndarray:
    drawn = {
        "short": lambda: rng.lognormal(4.5, 1, n),  # most of a batch is padding
        "long tail": lambda: rng.lognormal(np.log(longest) - 3, 1.4, n),
        "uniform": lambda: rng.uniform(1, longest, n),
        "one over a multiple": lambda: rng.integers(0, longest // 128 + 1, n) * 128 + 1,
    }[kind]()
    return np.clip(drawn, 1, longest).astype(np.int64)


def check(packing: Packing, dp: int, cp: int, kind: str, n: int, seed: int) -> None:
    room = room_of(packing, dp=dp, cp=cp)
    lengths = lengths_of(np.random.default_rng(seed), kind, n, min(room.longest, 200_000))
    plan = plan_step(lengths, packing, dp=dp, cp=cp)
    check_plan(plan, lengths, packing, dp=dp, cp=cp)
    check_packs(plan, packing)


@pytest.mark.parametrize("policy", ["in_order", "balanced", "dynamic_cp"])
@CALM
@given(
    align=st.builds(Align, sequence=st.sampled_from(SEQUENCE), pack=st.sampled_from(PACK)),
    capacity=st.sampled_from((1024, 1536, 4096, 5000, 8192, 16_384, 65_536)),
    dp=st.integers(1, 8),
    cp=st.integers(1, 16),
    kind=st.sampled_from(("short", "long tail", "uniform", "one over a multiple")),
    n=st.integers(1, 160),
    seed=st.integers(0, 999),
)
def test_no_rank_holds_more_padded_tokens_than_its_capacity(policy, align, capacity, dp, cp, kind, n, seed):
    check(Packing(capacity=capacity, policy=policy, align=align), dp, cp, kind, n, seed)


@pytest.mark.parametrize("policy", ["in_order", "balanced", "dynamic_cp"])
@pytest.mark.parametrize("kind", ["short", "one over a multiple"])
def test_where_padding_is_most_of_a_batch(policy, kind):
    """Tensor parallel 8 with fp8: multiples of 128, sequences far shorter than that."""
    for seed in range(8):
        packing = Packing(capacity=4096, policy=policy, align=Align(sequence=128, pack=128))
        check(packing, 4, 2, kind, 80, seed)


@pytest.mark.parametrize("policy", ["balanced", "dynamic_cp"])
def test_what_is_laid_over_the_rest_keeps_to_the_capacity(policy):
    """Short sequences that fill a microbatch to the brim: seeds 4, 41, 150 and 165 overflow where the last
    ones are counted without their padding."""
    for seed in (*range(20), 41, 150, 165):
        rng = np.random.default_rng(seed)
        dp, capacity, n = (
            int(rng.integers(1, 5)),
            int(rng.choice([1024, 2048, 4096])),
            int(rng.integers(8, 60)),
        )
        center = np.log(capacity / 8) if rng.random() < 0.5 else 4
        lengths = np.clip(rng.lognormal(center, 1, n), 1, capacity).astype(int)
        packing = Packing(capacity=capacity, policy=policy, align=Align(sequence=128))
        check_plan(plan_step(lengths, packing, dp=dp), lengths, packing, dp=dp, cp=1)


def test_the_optimum_for_a_handful_keeps_to_the_capacity():
    packing = Packing(capacity=1024, align=Align(sequence=128))
    for seed in range(30):
        rng = np.random.default_rng(seed)
        dp, n = int(rng.integers(1, 4)), int(rng.integers(3, 10))
        lengths = rng.integers(1, 700, n)
        check_plan(plan_step(lengths, packing, dp=dp), lengths, packing, dp=dp, cp=1)


def test_where_all_ranks_together_hold_less_than_some_of_them():
    """9 ranks hold 1,152 tokens, a multiple of lcm(128, 18), and 8 of them 1,664, one of 128."""
    cost, align = CostModel(alpha=1000, ring_tokens=5000), Align(sequence=128)
    packing = Packing(capacity=218, policy="dynamic_cp", align=align, cost=cost, oversize="drop")
    for seed in range(10):
        lengths = np.random.default_rng(seed).integers(1, 1_700, 20)
        check_packs(plan_step(lengths, packing, dp=9), packing)


@CALM
@given(st.integers(1, 40), st.integers(1, 200), st.sampled_from([1, 2, 3, 8]), st.integers(1, 400))
def test_a_capacity_below_the_alignment_is_told_the_least_that_is_not(
    sequence: int, pack: int, cp: int, capacity: int
) -> None:
    def plan(tokens: int) -> None:
        plan_step([1], Packing(capacity=tokens, align=Align(sequence=sequence, pack=pack)), dp=2, cp=cp)

    try:
        plan(capacity)
    except PlanError as error:
        (told,) = re.findall("raise capacity to ([0-9]+)", str(error))
        plan(int(told))
        with pytest.raises(PlanError, match="raise capacity"):
            plan(int(told) - 1)
