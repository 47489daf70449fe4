"""Layouts from process groups: Megatron-core's own for every order, and groups that are none."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

import meshfeed as mf
from meshfeed.integrations import megatron
from meshfeed.layout import DIMS
from soak import cases, some

GROUPS = ("tp", "cp", "dp", "pp", "dp-cp", "tp-cp", "tp-pp")


def groups_of(layout: mf.Layout, rank: int, dims: tuple[str, ...] = GROUPS) -> dict[str, list[int]]:
    return {d: layout.group_of(rank, d).tolist() for d in dims}


@some(8)
@pytest.mark.parametrize("order", ["-".join(order) for order in itertools.permutations(DIMS)])
def test_one_ranks_groups_tell_every_order(order: str) -> None:
    for sizes in ((2, 3, 2, 2), (2, 1, 4, 1), (1, 3, 2, 2), (1, 1, 1, 1), (1, 1, 5, 1), (4, 1, 1, 2)):
        layout = mf.Layout(**dict(zip(DIMS, sizes)), order=order)
        for rank in layout.ranks().tolist():
            found = mf.Layout.from_groups(groups_of(layout, rank), ranks_per_node=4)
            assert found.table is None
            assert found.ranks_per_node == 4
            for dims in GROUPS:
                assert found.groups(dims).tolist() == layout.groups(dims).tolist()


@settings(max_examples=cases(100), deadline=None)
@given(
    st.permutations(DIMS),
    st.tuples(*[st.integers(1, 3)] * 4),
    st.integers(0, 9),
    st.integers(1, 3),
    st.data(),
)
def test_part_of_a_jobs_ranks_becomes_a_table(order, sizes, first, apart, data) -> None:
    """Evenly spaced ranks that are not 0, 1, 2, ..., such as every second one from 8 on."""
    plain = mf.Layout(**dict(zip(DIMS, sizes)), order="-".join(order))
    rank = data.draw(st.integers(0, plain.world_size - 1))
    groups = {d: [first + apart * r for r in ranks] for d, ranks in groups_of(plain, rank).items()}
    found = mf.Layout.from_groups(groups)
    assert np.array_equal(found.ranks(), first + apart * plain.ranks())
    assert np.array_equal(found.coords(), plain.coords())


@pytest.mark.parametrize("gtp", [2, 3])
def test_ranks_that_share_weights_by_gtp_are_data_parallel(monkeypatch, gtp: int) -> None:
    """Newer Megatron-core has a further dimension between tp and cp; its dp group then leaves it out."""
    shape = (2, 2, 2, gtp, 2)  # pp, dp, cp, gtp, tp, as its order has it
    grid = np.arange(np.prod(shape)).reshape(shape)
    axes = {"pp": 0, "dp": 1, "cp": 2, "gtp_remat": 3, "tp": 4}
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: group)
    for rank in range(grid.size):
        place = np.unravel_index(rank, shape)
        lines = {
            name: grid[tuple(slice(None) if a == axis else place[a] for a in range(5))].tolist()
            for name, axis in axes.items()
        }
        found = megatron.layout(SimpleNamespace(**lines))
        assert (found.tp, found.cp, found.dp, found.pp) == (2, 2, 2 * gtp, 2)
        wanted = grid[place[0], :, place[2], :, place[4]].ravel()
        assert found.group_of(rank, "dp").tolist() == wanted.tolist()
        assert found.group_of(rank, "cp").tolist() == lines["cp"]
        whole = {"tp": lines["tp"], "cp": lines["cp"], "dp": wanted.tolist(), "pp": lines["pp"]}
        assert mf.Layout.from_groups(whole) == found


def test_the_usual_order_is_the_usual_layout() -> None:
    layout = mf.Layout(tp=2, cp=2, dp=4, pp=2)
    assert mf.Layout.from_groups(groups_of(layout, 21)) == layout
    assert mf.Layout.from_groups(groups_of(layout, 21), ep=4) == mf.Layout(tp=2, cp=2, dp=4, pp=2, ep=4)


ONE = {"tp": [0], "cp": [0], "dp": [0], "pp": [0]}


@pytest.mark.parametrize(
    "groups, told",
    [
        ({"tp": [0, 1]}, "no 'cp' group"),
        (ONE | {"dp": []}, "no 'dp' group"),
        (ONE | {"tp": [0, 1], "dp": [0, 1]}, "share 1 ranks|two cells"),
        (ONE | {"tp": [1, 2]}, "share 0 ranks"),
        ({"tp": [0, 1], "cp": [0, 1], "dp": [0, 1], "pp": [0, 1]}, "share 2 ranks"),
        (ONE | {"dp": [0, 2, 3]}, "not evenly spaced"),
        (ONE | {"tp": [0, 2], "dp": [0, 2, 4][:1], "cp": [0, 2]}, "two cells|share"),
        (ONE | {"tp": [0, 2], "dp": [0, 4], "cp": [0, 6]}, None),
        (ONE | {"tp": [0, 1, 2], "cp": [0, 2]}, "two cells|share"),
        (ONE | {"tp": [0, 1], "dp": [0, 2], "dp-cp": [0, 3]}, r"dp-cp group \[0, 3\], but .* \[0, 2\]"),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups: dict[str, list[int]], told: str | None) -> None:
    if told is None:  # the eight sums of 0 or 2, 4 and 6 hold 6 twice
        told = "two cells"
    with pytest.raises(mf.errors.LayoutError, match=told):
        mf.Layout.from_groups(groups)


def test_without_process_groups_it_says_what_to_call() -> None:
    with pytest.raises(mf.errors.LayoutError, match="initialize_model_parallel"):
        megatron.layout()
    with pytest.raises(mf.errors.LayoutError, match="no 'tp'"):
        megatron.layout(SimpleNamespace())
    with pytest.raises(mf.errors.LayoutError, match="not in a 'tp' group"):
        megatron.layout(SimpleNamespace(tp=-100, cp=-100, dp=-100, pp=-100))


def config_of(**options: object) -> SimpleNamespace:
    return SimpleNamespace(**options)


STAGES = ["Et|t|m|L", "Et*2|t|t|mL", "E|t|t|t|t|t|m|L", "Et|(t,t|)*1m|L"]


@pytest.mark.parametrize("text", STAGES)
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_stages_are_read_from_every_form_of_megatrons_layout(text: str, pp: int) -> None:
    theirs = PipelineParallelLayerLayout(text, pp)
    stages = PipelineParallelLayerLayout.parse_str_to_list(text)
    expected = mf.StageMap(
        pp=pp,
        vpp=theirs.virtual_pipeline_model_parallel_size,
        mtp=tuple(
            v * pp + p
            for v in range(theirs.virtual_pipeline_model_parallel_size)
            for p in range(pp)
            if LayerType.mtp in theirs.layout[p][v]
        ),
    )
    assert expected.mtp
    for form in (theirs, stages, text):
        found = megatron.stage_map(
            config_of(pipeline_model_parallel_size=pp, pipeline_model_parallel_layout=form)
        )
        assert (found.pp, found.vpp, found.mtp) == (expected.pp, expected.vpp, expected.mtp)


def test_without_a_layout_mtp_is_on_the_last_stage() -> None:
    config = config_of(
        pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2, mtp_num_layers=1
    )
    assert megatron.stage_map(config) == mf.StageMap(pp=4, vpp=2, mtp=(7,))
    assert megatron.stage_map(config_of(pipeline_model_parallel_size=2)) == mf.StageMap(pp=2)
