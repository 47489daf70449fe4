"""The planner is total, and its plans keep every law, on any ranks and any lengths."""

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from meshfeed.errors import PlanError
from meshfeed.feed.stepping import cp_groups_of
from meshfeed.layout import Layout
from meshfeed.plan import Align, CostModel, Packing, account_of, cp_groups, packs_of, plan_step
from meshfeed.plan.packing import cp_sizes
from planning import check_packs, check_plan, least_objective
from soak import cases, some

CALM = settings(
    max_examples=cases(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
POLICIES = ("in_order", "balanced", "dynamic_cp")


def batch(seed: int, n: int, longest: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    drawn = {
        "lognormal": lambda: rng.lognormal(np.log(longest) - 3, 1.3, n),
        "uniform": lambda: rng.integers(0, longest + 1, n),
        "equal": lambda: np.full(n, rng.integers(1, longest + 1)),
        "one giant": lambda: np.where(np.arange(n) == n // 2, longest, rng.integers(0, 12, n)),
        "two": lambda: np.where(rng.random(n) < 0.5, longest // 2 + 1, longest // 20),
    }[kind]()
    return np.clip(drawn, 0, longest).astype(np.int64)


kinds = st.sampled_from(("lognormal", "uniform", "equal", "one giant", "two"))
ranks_small = st.integers(1, 50)


@CALM
@given(
    ranks=ranks_small,
    n=st.one_of(st.integers(0, 12), st.integers(0, 400)),
    kind=kinds,
    policy=st.sampled_from(POLICIES),
    quantum=st.integers(1, 5),
    align=st.builds(Align, sequence=st.sampled_from((1, 2, 3, 8)), pack=st.sampled_from((1, 16, 32))),
    window=st.sampled_from((None, 64, 1024)),
    ring=st.sampled_from((0.0, 700.0)),
    most=st.sampled_from((None, None, 1, 2, 5, 32)),
    powers=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_batch_on_any_ranks(ranks, n, kind, policy, quantum, align, window, ring, most, powers, seed):
    cp = next(d for d in (4, 3, 2, 1) if ranks % d == 0) if policy != "dynamic_cp" else 1
    widest = ranks if policy == "dynamic_cp" else cp
    cost = CostModel(alpha=25_100, window=window, ring_tokens=ring, overhead=1e6)
    sizes = cp_sizes(ranks, powers=True) if powers and policy == "dynamic_cp" else None
    packing = Packing(
        capacity=4096,
        policy=policy,
        cost=cost,
        align=align,
        max_sequences=most,
        cp_sizes=sizes,
    )
    longest = 4096 * widest // align.pack_multiple(widest) * align.pack_multiple(widest)
    lengths = batch(seed, n, min(longest, 100_000), kind)
    plan = plan_step(lengths, packing, dp=ranks // cp, cp=cp, pp=2, vpp=2, quantum=quantum)
    check_plan(plan, lengths, packing, dp=ranks // cp, cp=cp, quantum=quantum)
    again = plan_step(lengths.copy(), packing, dp=ranks // cp, cp=cp, pp=2, vpp=2, quantum=quantum)
    for name in ("microbatch", "first_rank", "cp_size"):
        np.testing.assert_array_equal(getattr(plan, name), getattr(again, name))
    if n * ranks <= 1000:
        check_packs(plan)


@settings(CALM, max_examples=cases(15))
@given(
    ranks=st.integers(64, 1024),
    n=st.integers(0, 4096),
    kind=kinds,
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 99),
)
@example(ranks=1024, n=4096, kind="lognormal", policy="dynamic_cp", seed=0)
@example(ranks=997, n=300, kind="one giant", policy="dynamic_cp", seed=0)
def test_many_ranks(ranks, n, kind, policy, seed):
    packing = Packing(capacity=16_384, policy=policy)
    lengths = batch(seed, n, 16_384 if policy != "dynamic_cp" else 131_072, kind)
    check_plan(plan_step(lengths, packing, dp=ranks), lengths, packing, dp=ranks, cp=1)


@some(40)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ranks", range(1, 51))
def test_every_small_rank_count(ranks, policy):
    packing = Packing(capacity=1024, policy=policy)
    for n in (0, 1, ranks - 1, ranks + 1, 3 * ranks):
        lengths = np.random.default_rng(n).integers(1, 1025, n)
        check_plan(plan_step(lengths, packing, dp=ranks), lengths, packing, dp=ranks, cp=1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("lengths", "capacity", "dp", "cp", "quantum"),
    [
        ([10] * 4, 1024, 4, 1, 1),  # "Not enough samples to move"
        ([24_576], 8192, 1, 3, 1),
        ([40], 8, 1, 6, 1),
        ([40_960, *[1024] * 4], 8192, 1, 12, 1),  # asks for 8 of 12 ranks
        ([10] * 9, 4096, 8, 1, 1),
        ([500] * 1024, 4096, 1024, 1, 1),
        ([4000] * 7, 4096, 8, 1, 1),
        ([4000] * 8, 4096, 2, 1, 8),  # a tail that cannot be split
        ([0, 5, 0, 0, 7], 1024, 2, 1, 1),
        ([0, 0], 1024, 2, 1, 1),
        ([], 1024, 6, 1, 3),
        ([1000, *[3] * 1023], 1024, 16, 1, 1),
        ([7] * 3, 1024, 10, 1, 1),
    ],
)
def test_inputs_that_break_other_schedulers(lengths, capacity, dp, cp, quantum, policy):
    packing = Packing(capacity=capacity, policy=policy)
    plan = plan_step(lengths, packing, dp=dp, cp=cp, quantum=quantum)
    check_plan(plan, lengths, packing, dp=dp, cp=cp, quantum=quantum)
    assert plan.empty.tolist() == [i for i, length in enumerate(lengths) if length == 0]


@pytest.mark.parametrize(("policy", "mean", "worst"), [("balanced", 1.01, 4 / 3), ("dynamic_cp", 1.005, 1.1)])
def test_a_handful_is_planned_near_the_optimum(policy, mean, worst):
    """Up to eight sequences on up to four ranks, beside all ways to place them."""
    over, too_many = [], 0
    for seed in range(80):
        rng = np.random.default_rng(seed)
        n, ranks = int(rng.integers(1, 9)), int(rng.integers(1, 5))
        lengths = np.clip(rng.lognormal(7, 1.3, n), 1, 4000).astype(np.int64)
        free = CostModel(alpha=25_100, overhead=0)  # the optimum counts no overhead
        packing = Packing(capacity=4096, policy=policy, microbatches="fewest", cost=free)
        plan = plan_step(lengths, packing, dp=ranks)
        count, sizes = plan.num_microbatches, (1,) if policy == "balanced" else cp_sizes(ranks)
        optimum = least_objective(lengths, packing, ranks=ranks, sizes=sizes, num_microbatches=count)
        over.append(account_of(plan, packing).objective / optimum)
        if count > 1:
            fewer = least_objective(lengths, packing, ranks=ranks, sizes=sizes, num_microbatches=count - 1)
            too_many += int(fewer < np.inf)
    assert np.mean(over) <= mean and max(over) <= worst
    assert too_many <= 2


def test_more_microbatches_on_request_and_never_fewer_than_needed():
    lengths = [4000] * 8
    assert plan_step(lengths, Packing(capacity=4096), dp=2).num_microbatches == 4
    assert plan_step(lengths, Packing(capacity=4096, microbatches=7), dp=2, quantum=2).num_microbatches == 8
    assert plan_step(lengths, Packing(capacity=4096, microbatches=1), dp=2).num_microbatches == 4
    assert plan_step([], Packing(capacity=4096, microbatches=3), dp=2, quantum=2).num_microbatches == 4


@pytest.mark.parametrize("policy", ["balanced", "dynamic_cp"])
def test_packs_of_few_sequences_stay_equal(policy):
    """The many short ones take the places that long ones leave free."""
    lengths = np.concatenate((np.full(64, 3500), batch(5, 960, 200, "uniform") + 1))
    packing = Packing(capacity=4096, policy=policy, max_sequences=16, microbatches=1)
    plan = plan_step(lengths, packing, dp=16)
    check_plan(plan, lengths, packing, dp=16, cp=1)
    assert plan.num_microbatches <= 7  # no plan has fewer than 5
    assert account_of(plan, packing).efficiency > 0.95


def test_virtual_stages_make_the_quantum():
    fewest = Packing(capacity=128, microbatches=1)
    assert plan_step([100] * 3, fewest, dp=1, pp=4, vpp=2).num_microbatches == 4
    assert plan_step([100] * 3, fewest, dp=1, pp=4).num_microbatches == 3


def test_narrow_groups_on_request():
    lengths = batch(1, 500, 60_000, "lognormal")
    packing = Packing(capacity=16_384, policy="dynamic_cp", cp_sizes=(1, 2, 4))
    plan = plan_step(lengths, packing, dp=8)
    check_plan(plan, lengths, packing, dp=8, cp=1)
    assert plan.cp_size.max() <= 4


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (1, (1,)),
        (12, (1, 2, 4, 12)),
        (10, (1, 2, 10)),
        (49, (1, 7, 49)),
        (1024, tuple(2**k for k in range(11))),
    ],
)
def test_cp_groups_nest(ranks, sizes):
    groups = cp_groups(ranks)
    assert tuple(groups) == sizes
    for size, blocks in groups.items():
        np.testing.assert_array_equal(blocks, np.arange(ranks).reshape(-1, size))


def test_all_ranks_are_a_size_that_others_need_not_divide():
    groups = cp_groups(7, (1, 2, 4, 7))
    assert {size: blocks.tolist() for size, blocks in groups.items() if size > 1} == {
        2: [[0, 1], [2, 3], [4, 5]],
        4: [[0, 1, 2, 3]],
        7: [[0, 1, 2, 3, 4, 5, 6]],
    }
    layout, packing = Layout.parse("dp7"), Packing(capacity=64, policy="dynamic_cp", cp_sizes=(1, 2, 4, 7))
    of_last = cp_groups_of(layout, packing, layout.coord(6))
    priced = Packing(capacity=64, policy="dynamic_cp", cost=CostModel(alpha=300, ring_tokens=670))
    assert cp_groups_of(layout, priced, layout.coord(6)) == of_last, (
        "by default, where ring_tokens has a price"
    )
    assert of_last == {1: (6,), 7: (0, 1, 2, 3, 4, 5, 6)}, "no block of 2 or 4 has rank 6"


class TestOversize:
    LENGTHS = (100, 5000, 0, 2050, 7)

    def plan(self, oversize):
        return plan_step(self.LENGTHS, Packing(capacity=1024, oversize=oversize), dp=2, cp=2)

    def test_error_names_the_sequence(self):
        with pytest.raises(PlanError, match=r"sequence 1 .*5000 tokens > 2048.*2 such.*oversize='split'"):
            self.plan("error")

    def test_truncate(self):
        plan = self.plan("truncate")
        assert plan.lengths.tolist() == [100, 2048, 0, 2048, 7]
        assert plan.oversize.tolist() == [1, 3]

    def test_drop(self):
        plan = self.plan("drop")
        assert plan.lengths.tolist() == list(self.LENGTHS)
        assert (plan.microbatch < 0).tolist() == [False, True, True, True, False]
        assert plan.oversize.tolist() == [1, 3]

    def test_split_covers_every_token_once(self):
        plan = self.plan("split")
        assert plan.sequence.tolist() == [0, 1, 1, 1, 2, 3, 3, 4]
        assert plan.lengths.tolist() == [100, 1667, 1667, 1666, 0, 1025, 1025, 7]
        assert plan.start.tolist() == [0, 0, 1667, 3334, 0, 0, 1025, 0]
        assert account_of(plan, Packing(capacity=1024)).tokens == sum(self.LENGTHS)

    @pytest.mark.parametrize("oversize", ["truncate", "split", "drop"])
    def test_an_empty_pack_is_never_followed_by_an_oversize_one(self, oversize):
        packing = Packing(capacity=1024, policy="in_order", oversize=oversize)
        account = account_of(plan_step([5000, 100, 100, 100], packing, dp=1), packing)
        assert account.rank_tokens.max() <= 1024


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Packing(capacity=0), "capacity=0"),
        (lambda: Packing(capacity=1.5), "capacity=1.5: a whole number"),
        (lambda: Packing(capacity=8, cost=1), "cost=1: give a CostModel"),
        (lambda: Packing(capacity=8, align=128), "align=128: give an Align"),
        (lambda: Align(pack=1.5), "Align(pack=1.5.*a multiple is a whole number"),
        (lambda: Packing(capacity=8, fixed_shapes="yes"), "fixed_shapes='yes': give True or False"),
        (lambda: Packing(capacity=8, quantum=True), "quantum=True: a whole number"),
        (lambda: Packing(capacity=8, policy="dynamic_cp", cp_sizes=4), "cp_sizes=4: give whole numbers"),
        (
            lambda: Packing(capacity=8, policy="best"),
            "policy='best': choose one of in_order, balanced, dynamic_cp",
        ),
        (lambda: Packing(capacity=8, microbatches=0), "microbatches=0"),
        (lambda: Packing(capacity=8, max_sequences=0), "max_sequences=0"),
        (
            lambda: Packing(capacity=8, microbatches="most"),
            "microbatches='most': a whole number, at least 1; or",
        ),
        (lambda: Packing(capacity=8, microbatches=True), "microbatches=True: a whole number"),
        (lambda: Packing(capacity=8, max_sequences=8.0), "max_sequences=8.0: a whole number"),
        (lambda: Packing(capacity=8, max_sequences=True), "max_sequences=True: a whole number"),
        (lambda: Packing(capacity=8, cp_sizes=(2,)), "only dynamic_cp"),
        (
            lambda: plan_step([1], Packing(capacity=8, policy="dynamic_cp", cp_sizes=(1, 3)), dp=8),
            "3 does not divide 8",
        ),
        (lambda: cp_groups(6, (1, 2, 4)), "4 does not divide 6; give .* or 6 itself after them"),
        (lambda: cp_groups(7, (2, 4, 7)), "2 does not divide 7"),
        (lambda: cp_groups(12, (1, 4, 6, 12)), "4 does not divide 6"),
        (lambda: plan_step([1], Packing(capacity=31, align=Align(pack=32)), dp=2), "raise capacity to 32"),
        (lambda: plan_step([1], Packing(capacity=8), dp=0), "dp=0"),
        (lambda: plan_step([1], Packing(capacity=8), dp=2.0), "dp=2.0: give a whole number, 1 or more"),
        (lambda: plan_step([1], Packing(capacity=8), dp=1, quantum=0), "quantum=0"),
        (lambda: plan_step([3, -1], Packing(capacity=8), dp=1), "sequence 1: -1 tokens"),
        (lambda: plan_step([0.5], Packing(capacity=8), dp=1), "float64"),
        (lambda: plan_step([1], Packing(capacity=8), dp=1, cp_split="zigzig"), "cp split 'zigzig': choose"),
        (lambda: packs_of(plan_step([1], Packing(capacity=8), dp=2), 2), "dp_cp_rank=2: .* ranks 0 to 1"),
        (lambda: packs_of(plan_step([1], Packing(capacity=8), dp=2), -1), "dp_cp_rank=-1"),
        (lambda: cp_groups(0), "num_ranks=0"),
    ],
)
def test_wrong_input_is_refused_in_words(make, message):
    with pytest.raises(PlanError, match=message.replace("(", r"\(")):
        make()


def test_numbers_of_numpy_are_whole_numbers():
    packing = Packing(capacity=64, microbatches=np.int64(2), max_sequences=np.int32(3))
    plan = plan_step([8] * 8, packing, dp=2)
    assert plan.num_microbatches == 2 and type(plan.num_microbatches) is int
    check_plan(plan, [8] * 8, packing, dp=2, cp=1)


def test_sizes_of_groups_multiply_by_the_prime_factors_the_smallest_first() -> None:
    """Of every number of ranks up to 400: found by trying all."""
    for ranks in range(1, 401):
        wanted, left = [1], ranks
        while left > 1:
            prime = next(p for p in range(2, left + 1) if left % p == 0)
            wanted.append(wanted[-1] * prime)
            left //= prime
        assert list(cp_sizes(ranks)) == wanted
