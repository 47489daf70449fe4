"""Packs that are even for encoders as well as for the language model."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from evened import plan_step
from meshfeed.errors import PlanError
from meshfeed.multimodal.encoders import even_out, plan_encoder
from meshfeed.multimodal.encoders.balance import Contents, even_time, shortest, swap
from meshfeed.plan import Packing, StepPlan, account_of
from meshfeed.plan.fill import Sequences
from meshfeed.plan.packing import CostModel, room_of
from planning import check_packs, check_plan
from soak import SEED, cases

CALM = settings(max_examples=cases(60), deadline=None, derandomize=True)
TWO = Packing(capacity=10_000, microbatches=1)


def unevenness(plan: StepPlan, cost: np.ndarray, is_shared: bool = True) -> float:
    """How much longer a cost takes than if it were even, as a part; sequence by sequence and rank by rank.

    cost: of each row on all of its ranks together; [n]. is_shared: or each rank has all of it.
    """
    loads = np.zeros((plan.num_microbatches, plan.num_ranks))
    for m, first, size, each in zip(plan.microbatch, plan.first_rank, plan.cp_size, cost):
        if m >= 0:
            loads[m, first : first + size] += each / size if is_shared else each
    together, once = loads.max(axis=1).sum(), cost[plan.microbatch >= 0].sum()
    return float(together / once * plan.num_ranks - 1) if loads.any() else 0.0


def step_time(
    plan: StepPlan, packing: Packing, encoder_work: np.ndarray, encoder: Any, bubble_share: float = 0
) -> float:
    """What a step takes: the largest work of any rank, of each cost, in each microbatch."""
    of = np.arange(plan.lengths.size)
    tops = account_of(plan, packing).loads.max(axis=1, initial=0)
    for work in encoder_work:
        tops = tops + plan_encoder(plan, of, work, encoder=encoder).handed.max(axis=1, initial=0)
    overhead = plan.num_microbatches * packing.cost.microbatch_overhead
    return float(tops.sum() + bubble_share * tops.max(initial=0) + overhead)


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, Packing, int]:
    """Lengths and encoder work of all kinds: one giant, equal ones, none at all, fewer than ranks."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(1, 70))
    lengths = np.exp(rng.normal(rng.uniform(3, 7), rng.uniform(0, 1.5), n)).astype(np.int64).clip(0, 4000)
    lengths[rng.random(n) < rng.choice([0, 0.5, 1])] = lengths[0]
    work = rng.choice([0, 0, 1, 2.5], (draw(st.integers(1, 3)), n)) * rng.pareto(rng.choice([0.5, 2]), n)
    packing = Packing(
        capacity=4096,
        policy=draw(st.sampled_from(["balanced", "dynamic_cp"])),
        align=mf.Align(sequence=draw(st.sampled_from([1, 16]))),
        max_sequences=draw(st.sampled_from([None, 1, 5])),
        microbatches=draw(st.sampled_from([None, 5])),
    )
    return lengths, work, packing, draw(st.sampled_from([1, 2, 6, 16]))


@CALM
@given(
    steps(),
    st.floats(1e-6, 1e12),
    st.sampled_from(["with sample", "group"]),
    st.sampled_from([(1, 1), (4, 1), (4, 2)]),
)
def test_plans_stay_plans_and_steps_become_no_longer(drawn, unit, encoder, pipeline):
    (lengths, work, packing, ranks), (pp, vpp) = drawn, pipeline
    work = work * unit
    text = plan_step(lengths, packing, dp=ranks, pp=pp, vpp=vpp)
    plan = plan_step(lengths, packing, dp=ranks, pp=pp, vpp=vpp, encoder_work=work, encoder=encoder)
    check_plan(plan, lengths, packing, dp=ranks, cp=1, quantum=pp if vpp > 1 else 1)
    check_packs(plan, packing)
    if pp == 1 or packing.microbatches:
        assert plan.num_microbatches == text.num_microbatches
    before, after = (step_time(each, packing, work, encoder, (pp - 1) / vpp) for each in (text, plan))
    assert after <= before * (1 + 1e-9)


@CALM
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 6, 16]), st.sampled_from([1, 8]))
def test_ranks_of_wide_groups_share_part_by_part(seed: int, ranks: int, pp: int) -> None:
    """Beside the plan by tokens, whose wide groups share well what one rank would have to do alone."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9_000, int(rng.integers(1, 60))) * rng.choice([0, 1, 1], 1)
    packing = Packing(capacity=int(rng.choice([4096, 9000])), policy="dynamic_cp", oversize="drop")
    of = np.sort(rng.integers(0, lengths.size, int(rng.integers(1, 200))))
    work = rng.pareto(1.5, of.size) * 10 ** rng.uniform(6, 9) * (lengths[of] > 0)
    text = plan_step(lengths, packing, dp=ranks, pp=pp)
    plan = even_out(
        text, lengths, np.bincount(of, work, lengths.size), packing, dp=ranks, pp=pp, parts=[(of, work)]
    )

    def taken(made: StepPlan) -> float:
        tops = account_of(made, packing).loads.max(axis=1, initial=0)
        tops = tops + plan_encoder(made, of, work, encoder="group").loads.max(axis=1, initial=0)
        overhead = made.num_microbatches * packing.cost.microbatch_overhead
        return float(tops.sum() + (pp - 1) * tops.max(initial=0) + overhead)

    if not text.oversize.size:
        check_plan(plan, lengths, packing, dp=ranks, cp=1)
        assert taken(plan) <= taken(text) * (1 + 1e-9)


def test_packs_that_are_nearly_full_stay_within_their_limits():
    """Few sequences find room in another pack, though encoders are far from even."""
    packs_full = 0
    for seed in range(cases(100)):
        rng = np.random.default_rng((SEED, seed))
        ranks, n, align = int(rng.choice([2, 4, 8])), int(rng.integers(40, 120)), int(rng.choice([1, 1, 16]))
        lengths = rng.integers(50, 1000, n)
        work = rng.pareto(4, n) / lengths * (rng.random(n) < rng.choice([0.3, 1]))
        packs = ranks * max(round(lengths.sum() / ranks / 4000), 1)
        packing = Packing(
            capacity=int(max(1016, (lengths + align - 1).sum() * rng.uniform(1, 1.06) / packs)),
            policy=str(rng.choice(["balanced", "dynamic_cp"])),
            align=mf.Align(sequence=align),
            max_sequences=int(rng.choice([0, 1])) * (n // packs + 2) or None,
        )
        plan = plan_step(lengths, packing, dp=ranks, encoder_work=work)
        check_plan(plan, lengths, packing, dp=ranks, cp=1)
        check_packs(plan, packing)
        packs_full += int((account_of(plan, packing).rank_tokens > 0.95 * packing.capacity).sum())
    assert packs_full > 100


@pytest.mark.parametrize("policy", ["balanced", "dynamic_cp"])
def test_encoders_without_work_change_nothing(policy):
    lengths = np.random.default_rng(0).integers(1, 4000, 90)
    packing = Packing(capacity=8192, policy=policy)
    text = plan_step(lengths, packing, dp=4)
    for work in (np.zeros(90), np.zeros((2, 90)), np.zeros((0, 90), np.int64)):
        plan = plan_step(lengths, packing, dp=4, encoder_work=work)
        for name in ("microbatch", "first_rank", "cp_size"):
            assert np.array_equal(getattr(plan, name), getattr(text, name))
    assert plan_step([], packing, dp=4, encoder_work=[]).num_microbatches == 0


@pytest.mark.parametrize("encoder", ["group", "with sample"])
def test_groups_become_as_narrow_as_they_can_be(encoder):
    """But for the group of the one sequence that needs two ranks, which is cut in two; microbatches stay."""
    rng = np.random.default_rng(4)
    lengths = np.append(rng.integers(100, 4_000, 150), 9_000)
    work = rng.uniform(1, 2, lengths.size) * rng.choice([0, 1], lengths.size) * 3e7
    packing = Packing(capacity=8_192, policy="dynamic_cp")
    text = plan_step(lengths, packing, dp=16)
    plan = plan_step(lengths, packing, dp=16, encoder_work=work, encoder=encoder)
    assert np.bincount(text.cp_size)[2:].sum() > 10
    wide = plan.cp_size > 1
    assert set(plan.microbatch[wide].tolist()) == {plan.microbatch[150]} and plan.cp_size.max() == 2
    check_plan(plan, lengths, packing, dp=16, cp=1)
    assert unevenness(plan, work, is_shared=False) < 0.5 < 1 < unevenness(text, work, is_shared=False)
    assert account_of(plan, packing).efficiency > 0.9


def test_every_encoder_becomes_even():
    """One or two encoders; one that is given twice does twice the work."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(100, 2000, 300)
    packing = Packing(capacity=16_384)
    images, audio = rng.pareto(2, 300) * 1e7, rng.choice([0.0, 1e7], 300)
    text, plan = (plan_step(lengths, packing, dp=4, encoder_work=w) for w in (None, [images, audio]))
    assert account_of(plan, packing).efficiency > 0.98
    for cost in (images, audio):
        assert unevenness(plan, cost) <= 0.06 < 0.1 < unevenness(text, cost)


def test_small_steps_come_near_the_optimum_of_all_assignments():
    """Seven sequences on two ranks: mostly the shortest step, and hardly longer in the mean."""
    longer = []
    for seed in range(cases(40)):
        rng = np.random.default_rng(seed)
        lengths, work = rng.integers(10, 1000, 7), rng.pareto(2, 7) * rng.choice([0, 1], 7) * 1e7
        costs = np.stack((TWO.cost.work(lengths), work))
        sides = np.array(list(product([False, True], repeat=7)))
        least = np.maximum(sides @ costs.T, ~sides @ costs.T).sum(axis=1).min()
        plan = plan_step(lengths, TWO, dp=2, encoder_work=work)
        ours = step_time(plan, TWO, work[None], "group") - TWO.cost.microbatch_overhead
        longer.append(ours / least - 1)
    assert min(longer) > -1e-9 and max(longer) < 0.2
    assert np.mean(longer) < 0.005 and np.median(longer) < 1e-9


def test_steps_become_shorter_and_then_longer_with_more_microbatches():
    """So that a few numbers of microbatches are tried, not all."""
    inside = 0
    for seed in range(cases(200)):
        rng = np.random.default_rng((SEED, seed))
        ranks, n, quantum = (
            int(rng.choice([1, 2, 8, 32])),
            int(rng.integers(1, 400)),
            int(rng.choice([1, 1, 4])),
        )
        lengths = np.exp(rng.normal(rng.uniform(4, 8), rng.uniform(0, 1.5), n)).astype(np.int64).clip(1, 8192)
        packing = Packing(capacity=8192, cost=CostModel(alpha=float(rng.choice([300, 25_100]))))
        room = room_of(packing, dp=ranks, cp=1)
        sequences = Sequences.of(-np.sort(-lengths), packing.cost, room)
        work = rng.choice([0, 0, 1, 2.5], (int(rng.integers(1, 3)), n)) * rng.pareto(
            rng.choice([0.5, 1, 2]), n
        )
        work *= sequences.work.sum() / max(work.sum(), 1e-9) * 10 ** rng.uniform(-2, 1)
        time_of = even_time(sequences, work, float(rng.choice([0.5, 3, 7, 31])))
        counts = range(int(rng.integers(1, 5)) * quantum, int(rng.integers(5, 100)) * quantum, quantum)
        best = shortest(time_of, counts)
        assert time_of(best) <= min(map(time_of, counts)) * (1 + 1e-12)
        inside += counts[0] < best < counts[-1]
    assert inside > 20


def contents_of(loads: list[list[tuple[float, float]]], free: int) -> Contents:
    """Two packs of sequences of (language model, encoder) each; a sequence has a token for each 0.01."""
    flat = np.array([each for pack in loads for each in pack])
    cost = np.zeros((2, 1, len(flat) + 1))
    cost[:, 0, :-1] = flat.T
    sums = np.array([np.sum(pack, axis=0) for pack in loads])
    counts = np.array([len(pack) for pack in loads])
    members = np.zeros((2, 20), np.int64)
    members[np.arange(20) < counts[:, None]] = np.arange(len(flat))
    return Contents(
        cost=cost,
        padded=np.rint(cost[0] * 100).astype(np.int64),
        size_at=np.zeros(2, np.int64),
        free=np.array([free, free]),
        slots=20 - counts,
        excess=np.ascontiguousarray((sums - sums.mean(axis=0)).T),
        members=members,
        counts=counts,
    )


@CALM
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 10, 1000]))
def test_two_packs_swap_until_no_swap_helps(seed, free):
    """Tried by brute force: no one or two of either pack for none, one or two of the other."""
    rng = np.random.default_rng(seed)
    packs = [rng.integers(0, 100, (rng.integers(1, 7), 2)) / 100 for _ in range(2)]
    contents = contents_of([[tuple(each) for each in pack] for pack in packs], free)
    total = contents.excess.sum(axis=1)
    swap(contents, 0.01)
    held = [contents.members[p, : contents.counts[p]].tolist() for p in range(2)]
    assert sorted(held[0] + held[1]) == list(range(sum(map(len, packs))))
    assert (np.diff(held[0]) > 0).all() and (np.diff(held[1]) > 0).all()
    cost, padded = contents.cost[:, 0], contents.padded[0]
    assert contents.excess.sum(axis=1) == pytest.approx(total)
    assert (contents.free >= 0).all()
    assert contents.free[0] - free == -(contents.free[1] - free)
    top = contents.excess.max()
    if top <= 0.01:
        return
    some = [[s for k in range(3) for s in combinations(each, k)] for each in held]
    for gives, takes in product(*some):
        moved = cost[:, list(gives)].sum(axis=1) - cost[:, list(takes)].sum(axis=1)
        tokens = padded[list(gives)].sum() - padded[list(takes)].sum()
        if contents.free[0] + tokens >= 0 and contents.free[1] - tokens >= 0:
            after = max((contents.excess[:, 0] - moved).max(), (contents.excess[:, 1] + moved).max())
            assert after >= top - 0.001 - 1e-9, (gives, takes)


@pytest.mark.parametrize("tolerance", [0.0, 0.05, 0.3])
def test_swaps_of_the_compiled_loop_are_those_of_numpy(
    tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of packs that are above the tolerance by less than a swap is worth."""
    rng, num_swaps = np.random.default_rng(SEED), 0
    for _ in range(cases(100)):
        packs = [rng.integers(0, 30, (rng.integers(1, 7), 2)) / 100 for _ in range(2)]
        loads, free = [[tuple(each) for each in pack] for pack in packs], int(rng.choice([0, 10, 1000]))
        one, other = contents_of(loads, free), contents_of(loads, free)
        made = swap(one, tolerance)
        with monkeypatch.context() as patch:
            patch.setattr("meshfeed.multimodal.encoders.balance._swap", None)
            assert swap(other, tolerance) == made
        num_swaps += made
        held = np.arange(one.members.shape[1]) < one.counts[:, None]
        assert np.array_equal(one.counts, other.counts)
        assert np.array_equal(one.members[held], other.members[held])
    assert num_swaps > 0


def test_the_parts_of_a_split_sequence_are_split_with_it():
    packing = Packing(capacity=1000, oversize="split")
    work = np.array([3.0, 0, 0, 0, 0, 0, 1, 1])
    plan = plan_step([3000] + [500] * 7, packing, dp=2, encoder_work=work)
    shared = work[plan.sequence] * plan.lengths / np.array([3000] + [500] * 7)[plan.sequence]
    assert shared.sum() == 5
    assert unevenness(plan, shared) <= 0.21  # five in three microbatches of two ranks: 2 + 2 + 2


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ([1.0, 2], r"encoder_work: float64 \[2\]; give the work on each of 3 sequences"),
        ([[[1.0, 2, 3]]], r"float64 \[1, 1, 3\]"),
        (["a", "b", "c"], "give the work"),
        ([1, -1, 1], "encoder_work: -1 to 1; work is finite, and 0 or more"),
        ([1, np.nan, 1], "finite"),
        (np.ones((4, 3)), "encoder_work of 4 encoders: at most 3"),
    ],
)
def test_other_work_is_refused(work, message):
    with pytest.raises(PlanError, match=message):
        plan_step([5, 6, 7], Packing(capacity=64), dp=2, encoder_work=work)


def test_a_rank_alone_keeps_its_packs():
    """Its steps are as long, whatever its packs hold: no rounding makes one look shorter."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths, work = rng.integers(1, 200, 40), rng.integers(0, 2000, 40)
        text, plan = (plan_step(lengths, Packing(capacity=400), dp=1, encoder_work=w) for w in (None, work))
        assert np.array_equal(text.microbatch, plan.microbatch)


def test_a_plan_in_order_stays_in_order():
    packing = Packing(capacity=64, policy="in_order")
    text, plan = (plan_step([30] * 9, packing, dp=2, encoder_work=w) for w in (None, np.arange(9)))
    assert np.array_equal(text.first_rank, plan.first_rank)
