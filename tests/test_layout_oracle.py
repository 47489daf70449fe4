"""Layout groups are Megatron-core's own, for every order it accepts."""

from __future__ import annotations

import itertools

import pytest
from megatron.core.parallel_state import RankGenerator

import meshfeed as mf

TOKENS = ("tp", "cp", "dp", "pp", "tp-cp", "dp-cp", "tp-pp", "tp-dp", "tp-dp-cp", "tp-cp-dp-pp")
SIZES = ((2, 1, 1, 1), (2, 2, 2, 2), (1, 3, 2, 2), (4, 1, 3, 2), (2, 3, 1, 4), (1, 1, 5, 1), (3, 2, 2, 1))


@pytest.mark.parametrize(
    "order", ["-".join(p) for p in itertools.permutations(("tp", "cp", "ep", "dp", "pp"))]
)
def test_groups_equal_megatrons(order: str) -> None:
    for tp, cp, dp, pp in SIZES:
        theirs = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
        ours = mf.Layout(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
        for token in TOKENS:
            assert ours.groups(token).tolist() == theirs.get_ranks(token), (order, (tp, cp, dp, pp), token)


@pytest.mark.parametrize("order", ["tp-dp", "dp-tp", "tp-dp-pp", "pp-dp-tp", "tp-pp-dp", "cp-dp-tp"])
def test_orders_that_leave_dimensions_out(order: str) -> None:
    sizes = {dim: size for dim, size in (("tp", 2), ("cp", 3), ("dp", 2), ("pp", 4)) if dim in order}
    whole = {"tp": 1, "cp": 1, "dp": 1, "pp": 1} | sizes
    theirs = RankGenerator(ep=1, order=order, **whole)
    ours = mf.Layout(**sizes, order=order)
    for token in TOKENS:
        assert ours.groups(token).tolist() == theirs.get_ranks(token)


def test_experts_do_not_move_anyones_data() -> None:
    plain = mf.Layout(tp=2, cp=2, dp=4, pp=2)
    experts = mf.Layout(tp=2, cp=2, dp=4, pp=2, ep=8)
    assert plain.groups("tp-dp-cp").tolist() == experts.groups("tp-dp-cp").tolist()
