"""Layouts: a grid of ranks, held against brute force."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshfeed as mf
from meshfeed.layout import DIMS
from soak import cases

ROWS = mf.Recipe(data=mf.Lengths([64]), sequence=mf.Windows(4), batch=8)

sizes = st.integers(1, 4)
orders = st.permutations(["tp", "cp", "ep", "dp", "pp"]).map("-".join)
exact = settings(max_examples=cases(60), deadline=None)


@exact
@given(sizes, sizes, sizes, sizes, orders)
def test_ranks_and_coordinates_are_inverse(tp: int, cp: int, dp: int, pp: int, order: str) -> None:
    layout = mf.Layout(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
    coords = layout.coords()
    assert len({tuple(row) for row in coords.tolist()}) == layout.world_size
    for rank, row in enumerate(coords.tolist()):
        assert layout.rank_of(mf.layout.Coord(*row)) == rank
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


@exact
@given(sizes, sizes, sizes, sizes, orders)
def test_a_rank_is_its_coordinate_in_mixed_radix(tp: int, cp: int, dp: int, pp: int, order: str) -> None:
    size = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    dims = [dim for dim in order.split("-") if dim != "ep"]
    places = itertools.product(*(range(size[dim]) for dim in reversed(dims)))
    layout = mf.Layout(**size, order=order)
    for rank, slowest_first in enumerate(places):
        place = dict(zip(reversed(dims), slowest_first))
        assert layout.coord(rank) == tuple(place[dim] for dim in DIMS)


@st.composite
def tables(draw: st.DrawFn) -> tuple[mf.Layout, mf.Layout]:
    """A layout over ranks that are neither contiguous nor sorted, and the same over 0, 1, 2, ..."""
    shape = {dim: draw(st.integers(1, 3)) for dim in DIMS}
    order = draw(orders)
    plain = mf.Layout(**shape, order=order)
    table = draw(
        st.lists(st.integers(0, 500), unique=True, min_size=plain.world_size, max_size=plain.world_size)
    )
    return mf.Layout(**shape, order=order, table=tuple(table)), plain


@exact
@given(tables(), st.sampled_from(["tp", "dp-cp", "tp-pp", "tp-cp-dp-pp"]))
def test_a_table_renames_the_ranks_and_nothing_else(both: tuple[mf.Layout, mf.Layout], dims: str) -> None:
    named, plain = both
    table = np.array(named.table)
    assert named.ranks().tolist() == sorted(table.tolist())
    assert (named.coords(table) == plain.coords()).all()
    assert (named.groups(dims) == table[plain.groups(dims)]).all()
    for slot, rank in enumerate(table.tolist()):
        assert named.rank_of(named.coord(rank)) == rank
        assert named.coord(rank) == plain.coord(slot)
        assert named.group_of(rank, dims).tolist() == table[plain.group_of(slot, dims)].tolist()
    for rank in sorted(set(range(-2, 503)) - set(table.tolist()))[::37]:
        for ask in (named.coord, lambda r: named.group_of(r, dims), lambda r: named.coords([table[0], r])):
            with pytest.raises(mf.errors.LayoutError, match=f"rank {rank} is not in"):
                ask(rank)


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
    with pytest.raises(mf.errors.LayoutError, match="rank 4 is not in"):
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


MEANING = {"dp_replicate": "dp", "dp_shard": "dp"}


@exact
@given(st.permutations(["tp", "cp", "pp", "dp_replicate", "dp_shard"]), st.integers(1, 5), st.data())
def test_any_device_mesh_by_brute_force(dims: list[str], count: int, data: st.DataObject) -> None:
    names = tuple(dims[:count])
    shape = tuple(data.draw(st.integers(1, 3)) for _ in names)
    world = int(np.prod(shape))
    ranks = np.array(data.draw(st.permutations(range(world)))).reshape(shape)
    layout = mf.Layout.from_device_mesh(SimpleNamespace(mesh=torch.tensor(ranks), mesh_dim_names=names))
    assert layout.world_size == world
    for place, rank in np.ndenumerate(ranks):
        expected = dict.fromkeys(DIMS, 0)
        for at, size, name in zip(place, shape, names):  # dp folds, the mesh's slower dimension first
            dim = MEANING.get(name, name)
            expected[dim] = expected[dim] * size + at
        assert layout.coord(int(rank)) == tuple(expected[dim] for dim in DIMS)
        assert layout.rank_of(layout.coord(int(rank))) == rank


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((2, 2, 2), ("pp", "dp_shard", "tp")),
        ((2, 2, 2), ("dp_replicate", "dp_shard", "tp")),
        ((2, 2, 2), ("dp_replicate", "cp", "dp_shard")),
        ((2, 4), ("tp", "dp")),
        ((2, 1, 2, 1, 2), ("pp", "dp_replicate", "dp_shard", "cp", "tp")),
        ((8,), ("fsdp",)),
    ],
)
def test_a_real_device_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """What each process of a job sees as its own coordinate, torch tells; the layout knows it for all."""
    for permuted in (False, True):
        ranks = torch.arange(8).reshape(shape)
        if permuted:
            ranks = (ranks * 3 + 1) % 8
        for rank in range(8):
            dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
            try:
                real = DeviceMesh("cpu", ranks, mesh_dim_names=names)
                layout = mf.Layout.from_device_mesh(real, ranks_per_node=4)
                feed, exchange = mf.Feed(ROWS, real), mf.Exchange([], real, packing=mf.Packing(capacity=8))
                for source in (feed, exchange):
                    assert (source.layout, source.rank) == (mf.Layout.from_device_mesh(real), rank)
                    assert source.stage_map.pp == layout.pp
                place = dict(zip(names, real.get_coordinate()))
                tp_ranks = dist.get_process_group_ranks(real.get_group("tp")) if "tp" in names else [rank]
            finally:
                dist.destroy_process_group()
            coord = layout.coord(rank)
            for dim in ("tp", "cp", "pp"):
                assert getattr(coord, dim) == place.get(dim, 0)
            fold = 0
            for name in names:
                if name.startswith(("dp", "fsdp")):
                    fold = fold * shape[names.index(name)] + place[name]
            assert coord.dp == fold
            assert sorted(layout.group_of(rank, "tp").tolist()) == sorted(tp_ranks)  # torch sorts
            assert layout.node(np.arange(8)).tolist() == [0] * 4 + [1] * 4
            layout.check_world(8)


def test_a_slice_of_a_device_mesh_has_all_data_dimensions() -> None:
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    try:
        real = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        whole, flat = real["dp_replicate", "dp_shard"], real["dp_replicate", "dp_shard"]._flatten("dp")
        assert [mf.Layout.from_device_mesh(each).table for each in (whole, flat)] == [(1, 3, 5, 7)] * 2
        slices = {"tp": "dp_replicate", ("dp_shard", "tp"): "dp_replicate", "dp_replicate": "dp_shard"}
        for dims, lacking in slices.items():
            with pytest.raises(mf.errors.LayoutError, match=f"a slice along '{lacking}', whose 2 slices"):
                mf.Feed(ROWS, real[dims])
        meant = mf.Layout.from_device_mesh(real["dp_shard", "tp"], names={"dp_replicate": "tp"})
        assert meant.table == (4, 5, 6, 7)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: mf.Layout.parse("tp2-xx3"), "cannot read 'xx3'"),
        (lambda: mf.Layout.parse("tp2-tp3"), "cannot read 'tp3'"),
        (lambda: mf.Layout.parse(""), "cannot read ''"),
        (lambda: mf.Layout.parse("tp"), "cannot read 'tp'"),
        (lambda: mf.Layout.parse("tp2-"), "cannot read ''"),
        (lambda: mf.Layout.parse("tp-2"), "cannot read 'tp'"),
        (lambda: mf.Layout.parse("tp2,dp2"), "cannot read 'tp2,dp2'"),
        (lambda: mf.Layout.parse("tp2 -dp2"), "cannot read 'tp2 '"),
        (lambda: mf.Layout.parse("2tp"), "cannot read '2tp'"),
        (lambda: mf.Layout.parse("tp2.0"), "cannot read 'tp2.0'"),
        (lambda: mf.Layout.parse("tp0"), "tp=0"),
        (lambda: mf.Layout.parse("tp2-ep4"), "ep=4 does not divide"),
        (lambda: mf.Layout(dp=2.0), "dp=2.0"),
        (lambda: mf.Layout(dp=-2), "dp=-2"),
        (lambda: mf.Layout(ep=0), "ep=0"),
        (lambda: mf.Layout(order=""), "at most once"),
        (lambda: mf.Layout(order="tp_dp"), "at most once"),
        (lambda: mf.Layout(dp=2, ep=2, order="tp-dp"), "leaves out ep"),
        (lambda: mf.Layout(tp=2, table=(0, 1, 2)), "table has 3 ranks"),
        (lambda: mf.Layout(tp=2, table=(0, 1, 1)), "table has 3 ranks"),
        (lambda: mf.Layout(tp=2, table=()), "table has 0 ranks"),
        (lambda: mf.Layout(dp=4).coord(4), "rank 4 is not in"),
        (lambda: mf.Layout(dp=4).coord(-1), "rank -1 is not in"),
        (lambda: mf.Layout(dp=4).group_of(9, "dp"), "rank 9 is not in"),
        (lambda: mf.Layout(dp=4).group_of(0, "ep"), "dimensions are"),
        (lambda: mf.Layout(dp=4).groups(""), "dimensions are"),
        (lambda: mf.Layout(dp=4).rank_of(mf.layout.Coord(0, 0, -1, 0)), "dp must be in 0..3"),
        (lambda: mf.Layout(tp=0), "tp=0"),
        (lambda: mf.Layout(tp=2, order="dp-pp"), "leaves out tp"),
        (lambda: mf.Layout(order="tp-tp"), "at most once"),
        (lambda: mf.Layout(tp=2, dp=2, ep=3), "ep=3 does not divide"),
        (lambda: mf.Layout(tp=2, table=(1, 1)), "distinct ranks"),
        (lambda: mf.Layout(tp=2, table=(-1, 1)), "rank -1"),
        (lambda: mf.Layout(ranks_per_node=0), "ranks_per_node=0"),
        (lambda: mf.Layout(ranks_per_node=2.5), "ranks_per_node=2.5"),
        (lambda: mf.Layout(ranks_per_node="8"), "ranks_per_node='8'"),
        (lambda: mf.Layout(dp=2, table=(0, 0.5)), "whole numbers"),
        (lambda: mf.Layout(dp=2, table=("0", "1")), "whole numbers"),
        (lambda: mf.Layout().groups("xp"), "dimensions are"),
        (lambda: mf.Layout(dp=4).rank_of(mf.layout.Coord(0, 0, 4, 0)), "dp must be in 0..3"),
        (lambda: mf.Layout(dp=4).check_world(8), "needs 4 ranks, the job has 8"),
        (lambda: mf.Layout(dp=2, table=(1, 8)).check_world(8), "names rank 8, the job has 8"),
        (lambda: mf.Layout.from_device_mesh(mesh((2,), None)), "no mesh_dim_names"),
        (lambda: mf.Layout.from_device_mesh(mesh((2,), ("stage",))), "'stage' is unknown"),
    ],
)
def test_what_does_not_fit_is_refused(make: object, says: str) -> None:
    with pytest.raises(mf.errors.LayoutError, match=says):
        make()  # type: ignore[operator]


def test_names_of_ones_own_mesh_dimensions() -> None:
    assert mf.Layout.from_device_mesh(mesh((2, 2), ("stage", "tp")), names={"stage": "pp"}).pp == 2
    with pytest.raises(mf.errors.LayoutError, match="'stage' is unknown"):
        mf.Layout.from_device_mesh(mesh((2,), ("stage",)), names={"stage": "ep"})


def test_a_job_holds_its_layout() -> None:
    mf.Layout.parse("tp2-dp4").check_world(8)
    mf.Layout(dp=2, table=(1, 7)).check_world(8)  # others of the job may do other work
    for world in (1, 7, 9, 16):
        with pytest.raises(mf.errors.LayoutError, match=f"the job has {world}"):
            mf.Layout.parse("tp2-dp4").check_world(world)


def test_layouts_of_one_text_are_one() -> None:
    assert mf.Layout.parse("TP2-Dp2") == mf.Layout.parse("tp2-dp2")
    assert str(mf.Layout()) == "dp1"
    for text in ("tp2-cp2-dp3-pp2", "pp2-tp3", "dp4", "cp2-ep2-dp2"):
        layout = mf.Layout.parse(text, ranks_per_node=4)
        assert layout.ranks_per_node == 4
        assert mf.Layout.parse(str(layout)).coords().tolist() == layout.coords().tolist()


def test_nodes_are_consecutive_ranks() -> None:
    table = mf.Layout(dp=4, table=(9, 0, 4, 3), ranks_per_node=4)
    assert table.node(table.ranks()).tolist() == [0, 0, 1, 2]
    assert table.node(table.groups("dp")).tolist() == [[2, 0, 1, 0]]
    assert mf.Layout(dp=4).node(np.arange(4)).tolist() == [0] * 4


def test_a_hundred_thousand_ranks() -> None:
    layout = mf.Layout.parse("tp8-cp4-dp256-pp16", ranks_per_node=8)
    assert layout.world_size == 131_072
    coords = layout.coords()
    assert coords.shape == (131_072, 4)
    rank = np.arange(131_072)
    assert (coords == np.stack([rank % 8, rank // 8 % 4, rank // 32 % 256, rank // 8192], axis=1)).all()
    picked = np.array([0, 77_777, 131_071])
    assert (layout.coords(picked) == coords[picked]).all()
    groups = layout.groups("dp-cp")
    assert groups.shape == (128, 1024)
    assert (groups[9] == 1 + 8192 + 8 * np.arange(1024)).all()
    assert layout.rank_of(layout.coord(77_777)) == 77_777
    table = mf.Layout(tp=8, cp=4, dp=256, pp=16, table=tuple(range(131_071, -1, -1)))
    assert (table.coords() == coords[::-1]).all()
    assert (table.groups("tp")[0] == np.arange(131_071, 131_063, -1)).all()


def test_orders_may_leave_out_what_has_size_one() -> None:
    for kept in itertools.combinations(DIMS, 2):
        layout = mf.Layout(**dict.fromkeys(kept, 2), order="-".join(kept))
        assert layout.groups(kept[0]).tolist() == [[0, 1], [2, 3]]
