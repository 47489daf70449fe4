"""The number of microbatches that a plan chooses, beside all numbers near the fewest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshfeed.plan import Account, Align, CostModel, Packing, StepPlan, account_of, plan_step, step
from soak import SOAK, cases

TRACES = Path(__file__).parents[2] / "benchmarks" / "data"


@dataclass(frozen=True)
class Draw:
    """A batch, and the job that plans it."""

    lengths: np.ndarray
    packing: Packing
    layout: dict[str, int]

    def plan(self, microbatches: Any = None) -> tuple[StepPlan, Account]:
        packing = replace(self.packing, microbatches=microbatches)
        plan = plan_step(self.lengths, packing, **self.layout)
        stages = {name: self.layout[name] for name in ("pp", "vpp")}
        return plan, account_of(plan, packing, **stages)


def drawn(seed: int) -> Draw:
    """Five traces and three distributions in turn, on 4 to 1,024 ranks."""
    rng = np.random.default_rng(seed)
    ranks = int(2 ** rng.uniform(2, 10.001))
    n = max(8, int(ranks * 2 ** rng.uniform(1, 12 - np.log2(ranks))))
    kinds = ("equal", "longtail", "mixed", "short", "source_files", "pareto", "bimodal", "lognormal")
    kind = kinds[seed % len(kinds)]
    if kind == "pareto":
        lengths = rng.pareto(1.1, n) * 500 + 10
    elif kind == "bimodal":
        lengths = np.where(rng.random(n) < 0.1, rng.uniform(5e4, 1e5, n), rng.uniform(100, 900, n))
    elif kind == "lognormal":
        lengths = rng.lognormal(8, 1.3, n)
    else:
        trace = np.loadtxt(TRACES / f"{kind}.txt")
        lengths = trace[(rng.integers(0, trace.size) + np.arange(n)) % trace.size]
    capacity = int(rng.choice([4096, 8192, 16_384, 32_768]))
    cp, policy = 1, "dynamic_cp" if rng.random() < 0.7 else "balanced"
    while policy == "balanced" and cp * capacity < lengths.max() and ranks >= 2 * cp:
        cp *= 2
    ranks = ranks // cp * cp
    longest = capacity * (ranks if policy == "dynamic_cp" else cp)
    pp, vpp = ((1, 1), (1, 1), (4, 1), (4, 2))[(seed + seed // 8) % 4]
    return Draw(
        np.clip(lengths, 1, longest // (2 * ranks) * 2 * ranks or 1).astype(np.int64),
        Packing(capacity=capacity, policy=policy),
        {"dp": ranks // cp, "cp": cp, "pp": pp, "vpp": vpp},
    )


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of microbatches that were filled, as plans are made."""
    counts: list[int] = []
    fill_step = step.fill_step

    def counted(sequences: Any, count: int) -> Any:
        counts.append(count)
        return fill_step(sequences, count)

    monkeypatch.setattr(step, "fill_step", counted)
    return counts


def test_no_number_near_the_fewest_is_shorter_by_more_than_a_hundredth(filled: list[int]) -> None:
    efficient: list[float] = []
    fills = np.zeros(2, int)  # of the chosen numbers and of the fewest, without a pipeline
    for seed in range(cases(8, 200)):
        draw = drawn(seed)
        filled.clear()
        _, chosen = draw.plan()
        tried = len(filled)
        filled.clear()
        least, fewest = draw.plan("fewest")
        if draw.layout["pp"] == 1:
            assert tried <= len(filled) + 3, seed
            fills += tried, len(filled)
        quantum = draw.layout["pp"] if draw.layout["vpp"] > 1 else 1
        others = [fewest]
        for more in range(1, 9):
            plan, account = draw.plan(least.num_microbatches + more * quantum)
            if plan.num_microbatches == least.num_microbatches + more * quantum:
                others.append(account)
        assert chosen.objective <= min(other.objective for other in others) * 1.01, seed
        if max(other.efficiency for other in others) >= 0.99:
            efficient.append(chosen.efficiency)
    assert np.mean(efficient) >= 0.99
    assert fills[0] <= fills[1] * 1.15, "mostly one number is filled, as for the fewest"


def test_a_number_that_is_hard_to_fill_is_not_tried(filled: list[int]) -> None:
    """In two microbatches 97 % of the places for tokens are taken, and ranks wait for each other."""
    lengths = np.random.default_rng(2).pareto(1.1, 4096) * 500 + 10
    packing = Packing(capacity=16_384, policy="dynamic_cp")
    draw = Draw(np.clip(lengths, 1, 131_072).astype(np.int64), packing, {"dp": 256, "pp": 1, "vpp": 1})
    chosen, account = draw.plan()
    assert filled == [chosen.num_microbatches] == [3]
    least, fewest = draw.plan("fewest")
    assert least.num_microbatches == 2
    assert fewest.efficiency < 0.95 and account.efficiency > 0.999
    assert account.objective < fewest.objective * 0.95


@pytest.mark.parametrize("ranks", [12, 32])
def test_equal_sequences_on_full_ranks_take_the_fewest(ranks: int, filled: list[int]) -> None:
    """Four fill a rank, and all ranks are even without any context parallelism."""
    draw = Draw(np.full(ranks * 32, 4096), Packing(capacity=16_384, policy="dynamic_cp"), {"dp": ranks})
    plan = plan_step(draw.lengths, draw.packing, **draw.layout)
    assert filled == [plan.num_microbatches] == [8]
    assert set(plan.cp_size) == {1}
    assert account_of(plan, draw.packing).efficiency == 1.0


def test_each_part_of_the_cost_moves_the_number_as_it_should() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(7, 1, 600), 1, 8192).astype(np.int64)

    def count(pp: int = 1, **cost: float) -> int:
        packing = Packing(capacity=8192, policy="dynamic_cp", cost=CostModel(alpha=25_100, **cost))
        return plan_step(lengths, packing, dp=32, pp=pp).num_microbatches

    assert count() < count(pp=4) < count(pp=16), "a bubble is as long as the largest microbatch"
    assert count(pp=16, overhead=25_100 * 2000) < count(pp=16) < count(pp=16, overhead=25_100 * 20)
    # a bubble that asks for many more than the fewest gets them
    assert count(pp=16) > count() + 8


def _shortest(draw: Draw) -> float:
    return min(draw.plan(count)[1].objective for count in range(1, 10))


def test_a_sequence_that_exceeds_its_share_does_not_hide_a_shorter_step() -> None:
    """The other ranks take as much beside it, and the rest is a small microbatch."""
    lengths = np.array([8192] + [4096] * 14 + [512] * 64)
    draw = Draw(lengths, Packing(capacity=16_384), {"dp": 8, "pp": 2, "vpp": 1})
    _, account = draw.plan()
    assert account.objective <= _shortest(draw) * 1.01


def test_the_wait_for_keys_on_the_widest_group_does_not_hide_fewer_microbatches() -> None:
    """Groups are as narrow as they can be, so what the widest would wait is no bound."""
    lengths = np.full(143, int(np.loadtxt(TRACES / "equal.txt")[0]))
    cost = CostModel(alpha=25_100, ring_tokens=670)
    packing = Packing(capacity=16_384, policy="dynamic_cp", cost=cost)
    draw = Draw(lengths, packing, {"dp": 32, "pp": 4, "vpp": 1})
    _, account = draw.plan()
    assert account.objective <= _shortest(draw) * 1.01


def test_sequences_that_share_no_group_are_counted_not_tried(filled: list[int]) -> None:
    """Each of the long ones fills more than half of the widest group, and no other holds it."""
    lengths = np.where(np.random.default_rng(0).random(440) < 0.7, 9000, 700)
    plan = plan_step(lengths, Packing(capacity=1024, policy="dynamic_cp"), dp=12)
    assert plan.num_microbatches >= np.count_nonzero(lengths == 9000)
    assert len(filled) <= 2


def test_a_cap_on_sequences_does_not_multiply_the_microbatches(filled: list[int]) -> None:
    """Wide groups are few packs; where packs hold few sequences, groups are as narrow as they can be."""
    lengths = np.random.default_rng(0).integers(100, 4096, 64)
    for most in (1, 2, 3):
        filled.clear()
        plan = plan_step(lengths, Packing(capacity=4096, policy="dynamic_cp", max_sequences=most), dp=8)
        fewest = max(-(-64 // (8 * most)), -(-int(lengths.sum()) // (8 * 4096)))
        assert plan.num_microbatches <= fewest + 3
        assert max(filled) <= fewest + 8


def test_long_sequences_and_a_cap_take_the_fewest_microbatches(filled: list[int]) -> None:
    """Only a group of all ranks holds the long ones: as many to a pack as the cap allows, and nothing beside."""
    lengths = np.concatenate((np.full(4, 4000), np.random.default_rng(0).integers(100, 500, 96)))
    for most, fewest in ((1, 4 + 9), (2, 2 + 5)):
        filled.clear()
        packing = Packing(capacity=1024, policy="dynamic_cp", max_sequences=most, microbatches="fewest")
        assert plan_step(lengths, packing, dp=11).num_microbatches == fewest
        assert filled == [fewest]


@pytest.mark.parametrize("seed", range(200) if SOAK else (0, 5, 10, 15))  # every spread, every window
def test_padding_and_windows_of_attention_cost_no_further_microbatches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spread = [(1, 40), (1, 300), (1, 2_000), (2_000, 8_193)][seed % 4]
    lengths = rng.integers(*spread, 400)
    if seed % 3 == 0:
        lengths[:40] = rng.integers(2_000, 8_193, 40)
    align = Align(sequence=int(rng.choice([1, 16, 128])))
    window = [None, 16, 512, 4096][seed // 4 % 4]
    packing = Packing(
        capacity=8192, align=align, cost=CostModel(alpha=25_100, window=window), microbatches="fewest"
    )
    dp = int(rng.choice([1, 4]))
    plan = plan_step(lengths, packing, dp=dp)
    floor = -(-int(align.padded(lengths, 1).sum()) // (8192 * dp))
    assert plan.num_microbatches <= 1.15 * floor + 1
    chosen = plan_step(lengths, replace(packing, microbatches=None), dp=dp)
    assert chosen.num_microbatches <= 1.15 * floor + 9


@pytest.mark.parametrize("seed", range(24) if SOAK else (10, 21))
def test_long_pipelines_take_about_as_many_microbatches_as_are_best(seed: int) -> None:
    """Tried beside every third number up to 90 more than the fewest."""
    rng = np.random.default_rng(seed)
    ranks, pp = int(rng.choice([2, 4, 8])), int(rng.choice([8, 16, 32]))
    lengths = np.exp(rng.normal(6.5, 0.6, ranks * int(rng.integers(60, 200)))).astype(np.int64).clip(1, 4096)
    draw = Draw(lengths, Packing(capacity=4096), {"dp": ranks, "cp": 1, "pp": pp, "vpp": 1})
    fewest = draw.plan("fewest")[0].num_microbatches
    best = min(draw.plan(count)[1].objective for count in range(fewest, fewest + 90, 3))
    assert draw.plan()[1].objective < 1.02 * best
