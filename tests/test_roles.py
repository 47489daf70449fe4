"""Roles: laws that hold for every layout, stage map, delivery and policy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.roles import assign_roles, choose_delivery

FIELDS = (
    mf.Field(name="tokens", dtype="int64", stages=("first", "mtp"), split=True),
    mf.Field(name="labels", dtype="int64", stages=("last",), split=True),
    mf.Field(name="position_ids", dtype="int64", stored=False),
)

layouts = st.builds(
    mf.Layout,
    tp=st.integers(1, 3),
    cp=st.integers(1, 3),
    dp=st.integers(1, 3),
    pp=st.integers(1, 4),
    order=st.permutations(["tp", "cp", "dp", "pp"]).map("-".join),
    ranks_per_node=st.sampled_from([None, 2, 4, 8]),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[mf.Layout, mf.StageMap]:
    layout = draw(layouts)
    vpp = draw(st.integers(1, 2))
    mtp = draw(st.sets(st.integers(0, layout.pp * vpp - 1), max_size=2))
    return layout, mf.StageMap(pp=layout.pp, vpp=vpp, mtp=tuple(mtp))


def needs_stored(layout: mf.Layout, stages: mf.StageMap, rank: int) -> bool:
    """Brute force: does any virtual stage of this rank want a stored field?"""
    held = {v * layout.pp + layout.coord(rank).pp for v in range(stages.vpp)}
    return bool(held & {0, stages.num_stages - 1, *stages.mtp})


def check_laws(layout: mf.Layout, stages: mf.StageMap, roles: list[mf.Role]) -> None:
    by_rank = {role.rank: role for role in roles}
    assert sorted(by_rank) == layout.ranks().tolist()
    for role in roles:
        if needs_stored(layout, stages, role.rank):
            assert role.source is not None
            assert by_rank[role.source].reads
            assert role.source == role.rank or role.source in role.peers
        elif not role.reads:
            assert role.source is None
            assert role.peers == ()
        assert not role.reads or role.source == role.rank
        for peer in role.peers:
            assert by_rank[peer].peers == role.peers
            assert by_rank[peer].source == role.source
        assert role.peers == () or role.rank in role.peers


@settings(derandomize=True, max_examples=150, deadline=None)
@given(cases(), st.sampled_from(["direct", "broadcast", "share"]))
def test_whoever_needs_bytes_has_one_source_that_reads(
    case: tuple[mf.Layout, mf.StageMap], delivery: str
) -> None:
    layout, stages = case
    roles = list(assign_roles(layout, stages, FIELDS, delivery))  # type: ignore[arg-type]
    check_laws(layout, stages, roles)
    replicas = {rank: layout.coord(rank).dp for rank in layout.ranks().tolist()}
    nodes = dict(zip(layout.ranks().tolist(), layout.node(layout.ranks()).tolist()))
    for role in roles:
        assert {replicas[peer] for peer in role.peers} <= {replicas[role.rank]}
        if delivery == "share":
            assert {nodes[peer] for peer in role.peers} <= {nodes[role.rank]}
    if delivery == "share":
        hungry = {(nodes[r], replicas[r]) for r in replicas if needs_stored(layout, stages, r)}
        assert sum(role.reads for role in roles) == len(hungry)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(cases(), st.sampled_from(["direct", "broadcast", "share"]), st.data())
def test_a_trainers_own_policy_is_kept_or_refused(
    case: tuple[mf.Layout, mf.StageMap], delivery: str, data: st.DataObject
) -> None:
    layout, stages = case
    policy = data.draw(st.sets(st.sampled_from(layout.ranks().tolist()), min_size=1))
    try:
        roles = list(assign_roles(layout, stages, FIELDS, delivery, policy))  # type: ignore[arg-type]
    except mf.RoleError as refused:
        assert "rank" in str(refused)
        hungry = [r for r in layout.ranks().tolist() if needs_stored(layout, stages, r)]

        def could_be_fed(rank: int) -> bool:
            def near(reader: int) -> bool:
                if delivery == "direct":
                    return reader == rank
                same_dp = layout.coord(reader).dp == layout.coord(rank).dp
                return same_dp and (delivery == "broadcast" or layout.node(reader) == layout.node(rank))

            return any(near(reader) for reader in policy)

        assert not all(could_be_fed(rank) for rank in hungry)
        return
    check_laws(layout, stages, roles)
    assert {role.rank for role in roles if role.reads} <= policy


@pytest.mark.parametrize("shape", ["tp1-dp4", "tp4-dp4", "tp2-cp2-dp4", "tp2-cp2-dp4-pp4", "cp4-dp4-pp2"])
def test_readers_under_share_do_not_grow_with_tp_cp_or_pp(shape: str) -> None:
    layout = mf.Layout.parse(shape, ranks_per_node=64)
    roles = assign_roles(layout, mf.StageMap(pp=layout.pp), FIELDS, "share")
    assert int(roles.reads.sum()) == 4, "one per node and replica"


def test_stages_get_what_they_are_for() -> None:
    stages = mf.StageMap(pp=4, layout="Et*3|t*4|m|L")
    assert stages.vpp == 1
    assert stages.mtp == (2,)
    names = [tuple(f.name for f in stages.fields_of_rank(FIELDS, p)) for p in range(4)]
    assert names == [
        ("tokens", "position_ids"),
        ("position_ids",),
        ("tokens", "position_ids"),
        ("labels", "position_ids"),
    ]
    folded = mf.StageMap(pp=2, layout="E|(tt|)*2mL")
    assert (folded.vpp, folded.mtp) == (2, (3,))
    assert folded.kinds(1, 1) == {"all", "last", "mtp"}


@pytest.mark.parametrize("text", ["tt|L", "Et|Lt|L", "Et|t", "t|E|L", "Et|x|L"])
def test_stage_layouts_that_make_no_model_are_refused(text: str) -> None:
    with pytest.raises(mf.LayoutError):
        mf.StageMap(pp=1, layout=text)


def test_stage_maps_that_do_not_fit_are_refused() -> None:
    for make in (
        lambda: mf.StageMap(pp=3, layout="Et|L"),
        lambda: mf.StageMap(pp=2, mtp=(2,)),
        lambda: mf.StageMap(pp=0),
        lambda: mf.StageMap(pp=2, vpp=2, layout="Et|L"),
    ):
        with pytest.raises(mf.LayoutError):
            make()
    with pytest.raises(mf.RoleError, match="pp=2"):
        assign_roles(mf.Layout(pp=4), mf.StageMap(pp=2), FIELDS, "direct")
    with pytest.raises(mf.RoleError, match="choose"):
        assign_roles(mf.Layout(), mf.StageMap(), FIELDS, "telepathy")  # type: ignore[arg-type]


def chosen(text: str, ranks_per_node: int | None, can_share: bool, reads: set[int] | None = None) -> str:
    layout = mf.Layout.parse(text, ranks_per_node=ranks_per_node)
    return choose_delivery(layout, mf.StageMap(pp=layout.pp), FIELDS, reads, can_share=can_share)


def test_auto_chooses_by_what_crosses_nodes() -> None:
    assert chosen("dp8", 8, True) == "direct"
    assert chosen("tp4-dp2", 8, True) == "share"
    assert chosen("tp4-dp2", 8, False) == "broadcast"
    assert chosen("tp8", 4, True) == "broadcast", "a tp group over two nodes: one of them reads"
    assert chosen("tp2-cp4", 4, True) == "share"
    assert chosen("tp4-pp2", 4, True, {0}) == "broadcast", "the only reader is not on every node"


def test_sixteen_thousand_ranks() -> None:
    layout = mf.Layout.parse("tp8-cp4-dp32-pp16", ranks_per_node=8)
    roles = assign_roles(layout, mf.StageMap(pp=16), FIELDS, "share")
    assert len(list(roles)) == 16_384
    middle = layout.rank_of(mf.Coord(3, 1, 7, 5))
    assert roles[middle].source is None
    with pytest.raises(mf.RoleError, match="not in the layout"):
        roles[16_384]
