"""Layouts: a grid of ranks, held against brute force."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.layout import DIMS

sizes = st.integers(1, 4)
orders = st.permutations(["tp", "cp", "ep", "dp", "pp"]).map("-".join)
exact = settings(derandomize=True, max_examples=60, deadline=None)


@exact
@given(sizes, sizes, sizes, sizes, orders)
def test_ranks_and_coordinates_are_inverse(tp: int, cp: int, dp: int, pp: int, order: str) -> None:
    layout = mf.Layout(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
    coords = layout.coords()
    assert len({tuple(row) for row in coords.tolist()}) == layout.world_size
    for rank, row in enumerate(coords.tolist()):
        assert layout.rank_of(mf.Coord(*row)) == rank
        assert layout.coord(rank) == tuple(row)


@exact
@given(
    sizes,
    sizes,
    sizes,
    sizes,
    orders,
    st.sampled_from(["tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp-dp"]),
)
def test_groups_are_ranks_that_differ_in_their_dimensions_alone(
    tp: int, cp: int, dp: int, pp: int, order: str, dims: str
) -> None:
    layout = mf.Layout(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
    groups = layout.groups(dims)
    assert sorted(groups.ravel().tolist()) == list(range(layout.world_size))
    inside = set(dims.split("-"))
    for group in groups.tolist():
        fixed = {tuple(c for d, c in zip(DIMS, layout.coord(rank)) if d not in inside) for rank in group}
        assert len(fixed) == 1
        for rank in group:
            assert layout.group_of(rank, dims).tolist() == group


def test_the_first_dimension_of_a_text_varies_fastest() -> None:
    layout = mf.Layout.parse("cp2-tp2-dp3")
    assert [str(layout.coord(rank))[:7] for rank in range(3)] == ["tp0-cp0", "tp0-cp1", "tp1-cp0"]
    assert str(layout) == "cp2-tp2-dp3"
    assert mf.Layout.parse(str(layout)).coords().tolist() == layout.coords().tolist()


def test_a_table_names_ranks_that_are_not_contiguous() -> None:
    layout = mf.Layout(tp=2, dp=2, table=(10, 3, 7, 20))
    assert layout.ranks().tolist() == [3, 7, 10, 20]
    assert layout.groups("tp").tolist() == [[10, 3], [7, 20]]
    assert layout.coord(20) == (1, 0, 1, 0)
    with pytest.raises(mf.LayoutError, match="rank 4 is not in"):
        layout.coord(4)


def mesh(shape: tuple[int, ...], names: tuple[str, ...] | None) -> SimpleNamespace:
    count = int(np.prod(shape))
    return SimpleNamespace(mesh=torch.arange(count).reshape(shape), mesh_dim_names=names)


def test_a_device_mesh_is_read_by_its_names() -> None:
    layout = mf.Layout.from_device_mesh(mesh((2, 2, 3, 2), ("pp", "dp", "cp", "tp")))
    assert (layout.pp, layout.dp, layout.cp, layout.tp) == (2, 2, 3, 2)
    assert layout.groups("tp").tolist()[0] == [0, 1]
    assert layout.coord(23) == (1, 2, 1, 1)


def test_several_data_dimensions_of_a_mesh_become_one() -> None:
    layout = mf.Layout.from_device_mesh(mesh((2, 3, 2), ("dp_replicate", "dp_shard", "tp")))
    assert (layout.dp, layout.tp) == (6, 2)
    assert [layout.coord(rank).dp for rank in range(0, 12, 2)] == list(range(6))
    apart = mf.Layout.from_device_mesh(mesh((2, 2, 2), ("dp_replicate", "cp", "dp_shard")))
    assert [(apart.coord(r).dp, apart.coord(r).cp) for r in range(8)] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1),
    ]  # fmt: skip


def test_a_real_device_mesh() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        real = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp_shard", "tp"))
        layout = mf.Layout.from_device_mesh(real, ranks_per_node=4)
    finally:
        dist.destroy_process_group()
    assert (layout.pp, layout.dp, layout.tp) == (2, 2, 2)
    assert layout.coord(5) == (1, 0, 0, 1)
    assert layout.node(np.arange(8)).tolist() == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: mf.Layout.parse("tp2-xx3"), "cannot read 'xx3'"),
        (lambda: mf.Layout.parse("tp2-tp3"), "cannot read 'tp3'"),
        (lambda: mf.Layout.parse(""), "cannot read ''"),
        (lambda: mf.Layout(tp=0), "tp=0"),
        (lambda: mf.Layout(tp=2, order="dp-pp"), "leaves out tp"),
        (lambda: mf.Layout(order="tp-tp"), "at most once"),
        (lambda: mf.Layout(tp=2, dp=2, ep=3), "ep=3 does not divide"),
        (lambda: mf.Layout(tp=2, table=(1, 1)), "distinct ranks"),
        (lambda: mf.Layout(tp=2, table=(-1, 1)), "rank -1"),
        (lambda: mf.Layout(ranks_per_node=0), "ranks_per_node=0"),
        (lambda: mf.Layout().groups("xp"), "dimensions are"),
        (lambda: mf.Layout(dp=4).rank_of(mf.Coord(0, 0, 4, 0)), "dp must be in 0..3"),
        (lambda: mf.Layout(dp=4).check_world(8), "needs 4 ranks, the job has 8"),
        (lambda: mf.Layout.from_device_mesh(mesh((2,), None)), "no mesh_dim_names"),
        (lambda: mf.Layout.from_device_mesh(mesh((2,), ("stage",))), "'stage' is not known"),
    ],
)
def test_what_does_not_fit_is_refused(make: object, says: str) -> None:
    with pytest.raises(mf.LayoutError, match=says):
        make()  # type: ignore[operator]


def test_names_of_ones_own_mesh_dimensions() -> None:
    assert mf.Layout.from_device_mesh(mesh((2, 2), ("stage", "tp")), names={"stage": "pp"}).pp == 2


def test_a_hundred_thousand_ranks() -> None:
    layout = mf.Layout.parse("tp8-cp4-dp256-pp16", ranks_per_node=8)
    assert layout.world_size == 131_072
    coords = layout.coords()
    assert coords.shape == (131_072, 4)
    assert layout.groups("dp-cp").shape == (128, 1024)
    picked = np.array([0, 77_777, 131_071])
    assert (layout.coords(picked) == coords[picked]).all()


def test_orders_may_leave_out_what_has_size_one() -> None:
    for kept in itertools.combinations(DIMS, 2):
        layout = mf.Layout(**dict.fromkeys(kept, 2), order="-".join(kept))
        assert layout.groups(kept[0]).tolist() == [[0, 1], [2, 3]]
