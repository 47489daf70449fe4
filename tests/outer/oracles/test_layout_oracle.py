"""Layout groups are Megatron-core's own, for every order it accepts.

An import that fails is a failure here, not a skip: without Megatron nothing below is proven.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator

import meshfeed as mf
from soak import cases, some

DIMS = ("tp", "cp", "ep", "dp", "pp")
TOKENS = ("tp", "cp", "dp", "pp", "tp-cp", "dp-cp", "tp-pp", "tp-dp", "tp-dp-cp", "cp-pp", "tp-cp-dp-pp")
SIZES = (
    (1, 1, 1, 1), (2, 1, 1, 1), (1, 4, 1, 1), (1, 1, 5, 1), (1, 1, 1, 3), (2, 3, 1, 1), (2, 1, 3, 1),
    (1, 2, 1, 3), (1, 1, 3, 2), (2, 2, 2, 2), (1, 3, 2, 2), (4, 1, 3, 2), (2, 3, 1, 4), (3, 2, 2, 1),
)  # fmt: skip
EVERY_ORDER = ["-".join(order) for n in range(1, 6) for order in itertools.permutations(DIMS, n)]


def megatrons(order: str, tp: int, cp: int, dp: int, pp: int) -> RankGenerator:
    return RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)


def check(order: str, tp: int, cp: int, dp: int, pp: int, tokens: tuple[str, ...] = TOKENS) -> None:
    theirs = megatrons(order, tp, cp, dp, pp)
    ours = mf.Layout(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
    for token in tokens:
        assert ours.groups(token).tolist() == theirs.get_ranks(token), (order, (tp, cp, dp, pp), token)


def test_every_order_is_there() -> None:
    assert len(EVERY_ORDER) == 5 + 20 + 60 + 120 + 120
    assert sum(order.count("-") == 4 for order in EVERY_ORDER) == 120


@some(5)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_groups_equal_megatrons(sizes: tuple[int, int, int, int]) -> None:
    """All permutations of all five dimensions, and of any that leave out dimensions of size 1."""
    split = {dim for dim, size in zip(("tp", "cp", "dp", "pp"), sizes) if size > 1}
    orders = [order for order in EVERY_ORDER if split <= set(order.split("-"))]
    assert len(orders) >= 120
    for order in orders:
        check(order, *sizes)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_the_same_orders_are_refused(sizes: tuple[int, int, int, int]) -> None:
    split = {dim for dim, size in zip(("tp", "cp", "dp", "pp"), sizes) if size > 1}
    for order in EVERY_ORDER:
        if split <= set(order.split("-")):
            continue
        with pytest.raises(RuntimeError, match="specified the order"):
            megatrons(order, *sizes)
        with pytest.raises(mf.errors.LayoutError, match="leaves out"):
            mf.Layout(**dict(zip(("tp", "cp", "dp", "pp"), sizes)), order=order)


@settings(max_examples=cases(40), deadline=None)
@given(
    st.permutations(DIMS).map("-".join),
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers(1, 5)),
    st.sampled_from(TOKENS),
)
def test_groups_of_any_size_equal_megatrons(order: str, sizes: tuple[int, ...], token: str) -> None:
    check(order, *sizes, tokens=(token,))


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "TP-CP-EP-DP-PP", "pp-dp-ep-cp-tp"])
def test_groups_of_a_job_of_real_size_equal_megatrons(order: str) -> None:
    check(order, 8, 2, 16, 4, tokens=("tp", "cp", "dp", "pp", "dp-cp", "tp-dp-cp"))


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "ep-pp-tp-dp-cp", "dp-ep-cp-tp-pp"])
def test_one_ranks_group_is_the_one_of_megatrons_that_holds_it(order: str) -> None:
    theirs = megatrons(order, 2, 3, 2, 2)
    ours = mf.Layout(tp=2, cp=3, dp=2, pp=2, order=order)
    for token in TOKENS:
        for group in theirs.get_ranks(token):
            for rank in group:
                assert ours.group_of(rank, token).tolist() == group


def test_experts_do_not_move_anyones_data() -> None:
    plain = mf.Layout(tp=2, cp=2, dp=4, pp=2)
    for ep in (2, 4, 8, 16):
        experts = mf.Layout(tp=2, cp=2, dp=4, pp=2, ep=ep)
        for token in TOKENS:
            assert plain.groups(token).tolist() == experts.groups(token).tolist()
