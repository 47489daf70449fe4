"""Costs against brute-force counting and against measured times."""

from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshfeed.errors import PlanError
from meshfeed.plan import Align, CostModel, ModelShape, Packing, account_of, flops, plan_step
from meshfeed.plan.packing import attended_pairs
from meshfeed.plan.types import PackShape, exact_sum
from soak import cases

LLAMA_8B = ModelShape(num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_size=14_336)


def pairs_by_hand(length, window):
    return sum(1 for q in range(length) for k in range(q + 1) if window is None or q - k < window)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 13, 40])
def test_pairs_equal_counting(window):
    lengths = np.arange(40)
    assert attended_pairs(lengths, window).tolist() == [pairs_by_hand(s, window) for s in range(40)]


@pytest.mark.parametrize("window", [None, 1, 7, 30])
def test_work_is_twice_the_pairs_less_the_diagonal(window):
    lengths = np.arange(100)
    diagonal = lengths if window is None else np.minimum(lengths, window)
    expected = 10 * lengths + 2 * attended_pairs(lengths, window) - diagonal
    np.testing.assert_allclose(CostModel(alpha=10, window=window).work(lengths), expected)


@pytest.mark.parametrize("window", [None, 50])
def test_flops_equal_brute_force_exactly(window):
    shape = ModelShape(
        num_layers=3, hidden_size=8, num_heads=2, num_kv_heads=1, ffn_size=12, vocab_size=11, window=window
    )
    lengths = np.random.default_rng(0).integers(0, 120, 40)
    # q, k, v, output: 8*8, 8*4, 8*4, 8*8; three matrices of 8*12
    matmul = 64 + 32 + 32 + 64 + 3 * 96
    by_hand = 0
    for length in lengths.tolist():
        layer = 2 * matmul * length + 2 * 2 * 8 * pairs_by_hand(length, window)
        by_hand += 3 * (3 * layer + 2 * 8 * 11 * length)
    for capacity in (128, 256):  # the packs differ, the work does not
        plan = plan_step(lengths, Packing(capacity=capacity, policy="dynamic_cp"), dp=4)
        assert flops(plan, shape) == by_hand
    assert flops(plan, shape, backward=False) * 3 == by_hand


def test_sums_are_exact_where_float32_and_int64_are_not():
    lengths = np.random.default_rng(1).integers(1, 131_072, 4096)
    assert exact_sum(lengths, lengths) == sum(s * s for s in lengths.tolist())
    assert float(np.sum(lengths.astype(np.float32) ** 2)) != exact_sum(lengths, lengths)
    huge = np.full(64, 2**31 - 1)
    assert exact_sum(huge, huge) == 64 * (2**31 - 1) ** 2 > 2**63


def test_account_of_a_plan_equals_adding_up():
    lengths = np.random.default_rng(2).integers(0, 900, 60)
    packing = Packing(capacity=2048, policy="dynamic_cp", cost=CostModel(alpha=500.0, window=300))
    plan = plan_step(lengths, packing, dp=6)
    account = account_of(plan, packing)
    assert account.tokens == int(lengths.sum())
    assert account.sum_sq == sum(s * s for s in lengths.tolist())
    assert account.pairs == sum(pairs_by_hand(s, 300) for s in lengths.tolist())
    np.testing.assert_allclose(account.loads.sum(), packing.cost.work(lengths).sum())
    assert account.padded_tokens == account.rank_tokens.sum()
    assert account.objective / account.bound >= 1 - 1e-12


def test_alpha_of_llama():
    assert LLAMA_8B.layer_matmul_params == 218_103_808
    assert CostModel.of_shape(LLAMA_8B).alpha == 53_248


def test_fit_recovers_what_made_the_times():
    rng = np.random.default_rng(0)
    tokens = rng.integers(8_000, 64_000, 40).astype(float)
    sum_sq = tokens * rng.uniform(500, 30_000, 40)
    ms = (2.2e-3 * tokens + 8.77e-8 * sum_sq + 0.43) * rng.normal(1, 0.005, 40)
    model = CostModel.fit(tokens, sum_sq, ms)
    assert model.alpha == pytest.approx(25_085, rel=0.02)
    assert model.overhead == pytest.approx(0.43 / 8.77e-8, rel=0.5)


@pytest.mark.parametrize("window", [None, 300, 5000])
@pytest.mark.parametrize("ring", [0.0, 670.0])
def test_reach_inverts_load(window, ring):
    cost = CostModel(alpha=25_100, window=window, ring_tokens=ring)
    lengths = np.array([1, 2, 299, 300, 301, 5000, 131_072])
    for size in (1, 2, 64):
        np.testing.assert_allclose(cost.reach(cost.load(lengths, size) * size, size), lengths, rtol=1e-9)
    assert cost.reach(-1.0, 1) == 0


def test_short_sequences_are_dear_to_split_over_a_slow_ring():
    cost = CostModel(alpha=25_100, ring_tokens=6000)
    assert cost.load(4096, 8) > cost.load(4096, 1) / 8
    assert cost.load(131_072, 8) == cost.work(131_072) / 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CostModel(alpha=0), "alpha=0"),
        (lambda: CostModel(alpha=float("nan")), "alpha=nan"),
        (lambda: CostModel(alpha=1, window=0), "window=0"),
        (lambda: CostModel(alpha=1, overhead=-1), "overhead=-1"),
        (lambda: CostModel.fit([1, 2], [1, 4], [1, 2]), "at least 3"),
        (lambda: CostModel.fit([1, 2, 3], [1, 2, 3], [1, 2, 3]), "vary tokens"),
        (lambda: CostModel.fit([1, 2, 3], [1, 4, 9], [1, 2, 0]), "above 0"),
        # times that fall as work grows: both terms below 0, so that their ratio alone looks sound
        (lambda: CostModel.fit([10, 20, 30, 40], [100, 300, 200, 900], [88, 75, 68, 51]), "vary tokens"),
        (lambda: ModelShape(num_layers=0, hidden_size=1, num_heads=1, ffn_size=1), "num_layers=0"),
        (lambda: ModelShape(num_layers=1, hidden_size=1, num_heads=1, ffn_size=1, window=0), "window=0"),
    ],
)
def test_wrong_input_is_refused_in_words(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_times_in_a_table_become_a_cost() -> None:
    table = "total_tokens,sum_sq,ms_layer\n" + "".join(
        f"{t},{q},{2e-3 * t + 1e-7 * q + 0.5}\n"
        for t, q in [(1000, 10**6), (8000, 10**6), (9000, 81 * 10**6)]
    )
    assert CostModel.from_csv(table.splitlines()).alpha == pytest.approx(20_000)
    for wrong in (table.replace("ms_layer", "ms"), table.replace("1000,", "many,"), table + "9000"):
        with pytest.raises(PlanError, match="not a table of layer times"):
            CostModel.from_csv(wrong.splitlines())


@settings(max_examples=cases(30), deadline=None)
@given(
    st.floats(10, 1e5),
    st.floats(1e-12, 1e-6),
    st.floats(0, 1e-2),
    st.lists(st.integers(16, 40_000), min_size=4, max_size=40, unique=True),
)
def test_an_encoders_alpha_is_found_again(
    alpha: float, scale: float, fixed: float, patches: list[int]
) -> None:
    """Times by the model of PartRule.work, and a fixed time for each image."""
    assume(max(patches) > 4 * min(patches))
    times = np.array([scale * p * (p + alpha) + fixed for p in patches])
    # where a term does not show in the times, nobody can tell it
    terms = np.array([[alpha * p, p**2, fixed / scale] for p in patches], float) * scale / times[:, None]
    assume(terms[:, :2].max(axis=0).min() > 0.02)
    cost = CostModel.fit(patches, np.square(patches), times)
    assert cost.alpha == pytest.approx(alpha, rel=1e-4)


def test_an_encoders_price_is_the_share_of_its_parameters() -> None:
    """Layers times matmul parameters, of the encoder over the language model; 0.1 if nobody says."""
    model = ModelShape(num_layers=4, hidden_size=64, num_heads=4, ffn_size=256)
    for layers in (1, 4, 6):
        encoder = replace(model, num_layers=layers)
        cost = CostModel.of_shape(model, encoder=encoder, overhead=3, ring_tokens=5)
        assert cost.patch_tokens == pytest.approx(layers / 4)
        assert cost == replace(CostModel.of_shape(model, overhead=3, ring_tokens=5), patch_tokens=layers / 4)
    assert CostModel.of_shape(model).patch_tokens == CostModel(alpha=2).patch_tokens == 0.1


def test_what_a_plan_is_made_of_cannot_change() -> None:
    """Options, costs and shapes are values: they have the attributes that they were made with, and no others."""
    shape = ModelShape(num_layers=1, hidden_size=8, num_heads=1, ffn_size=8)
    for each in (
        shape,
        CostModel(alpha=2),
        Packing(capacity=8),
        Align(),
        PackShape(capacity=8, max_sequences=1),
    ):
        assert not hasattr(each, "__dict__")
        for name in [one.name for one in fields(each)]:
            with pytest.raises(FrozenInstanceError):
                setattr(each, name, 1)


def test_nothing_is_padded_where_there_is_nothing() -> None:
    packing = Packing(capacity=64)
    assert account_of(plan_step([], packing, dp=2), packing).padding == 0
    account = account_of(plan_step([5, 6], packing, dp=3), packing)
    assert account.padding == 1 - account.tokens / account.padded_tokens
