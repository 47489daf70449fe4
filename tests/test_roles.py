"""Roles: laws that hold for every layout, stage map, delivery and policy."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

import meshfeed as mf
from meshfeed.roles import assign_roles, choose_delivery
from soak import cases, only_soak

FIELDS = (
    mf.Field(name="tokens", dtype="int64", stages=("first", "mtp"), split=True),
    mf.Field(name="labels", dtype="int64", stages=("last",), split=True),
    mf.Field(name="position_ids", dtype="int64", stored=False),
)

DELIVERIES = st.sampled_from(["direct", "broadcast", "share", "tree"])
STAGE_LAYOUTS = (
    "Et*3|t*4|m|L", "E|(tt|)*2t|mL", "Ettt|(tt|)*4tm|L", "E|t|t|t|t|t|m|L", "EtmL", "E|L", "Et|m|tL",
    "Et*3|(tt|)*5t,m|L", "E,t|t|t|mL", "E|m|m|L",
)  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn) -> mf.Layout:
    layout = mf.Layout(
        tp=draw(st.integers(1, 3)),
        cp=draw(st.integers(1, 3)),
        dp=draw(st.integers(1, 3)),
        pp=draw(st.integers(1, 4)),
        order=draw(st.permutations(["tp", "cp", "dp", "pp"]).map("-".join)),
        ranks_per_node=draw(st.sampled_from([None, 1, 2, 3, 4, 8])),
    )
    if draw(st.integers(0, 3)):
        return layout
    step, first = draw(st.sampled_from([1, 2])), draw(st.integers(0, 3))
    table = draw(st.permutations(range(first, first + layout.world_size * step, step)))
    return replace(layout, table=tuple(table))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[mf.Layout, mf.StageMap]:
    layout = draw(layouts())
    texts = [text for text in STAGE_LAYOUTS if stages_in(text) % layout.pp == 0]
    if texts and draw(st.booleans()):
        return layout, mf.StageMap(pp=layout.pp, layout=draw(st.sampled_from(texts)))
    vpp = draw(st.integers(1, 3))
    mtp = draw(st.sets(st.integers(0, layout.pp * vpp - 1), max_size=2))
    return layout, mf.StageMap(pp=layout.pp, vpp=vpp, mtp=tuple(mtp))


def stages_in(text: str) -> int:
    return len(PipelineParallelLayerLayout.parse_str_to_list(text))


def needs_stored(layout: mf.Layout, stages: mf.StageMap, rank: int) -> bool:
    """Brute force: does any virtual stage of this rank want a stored field?"""
    held = {v * layout.pp + layout.coord(rank).pp for v in range(stages.vpp)}
    return bool(held & {0, stages.num_stages - 1, *stages.mtp})


def check_levels(role: mf.roles.Role, by_rank: dict[int, mf.roles.Role]) -> None:
    """Down a tree from the source, every rank has one giver, who has the bytes before it."""
    assert sorted(rank for node in role.nodes for rank in node) == (list(role.peers) if role.nodes else [])
    assert role.giver == role.source or (by_rank[role.giver].giver == role.source and role.nodes)
    across, within = role.levels
    assert (across is None and within is None) == (not role.nodes)
    for level in filter(None, (across, within)):
        assert role.rank in level.peers and level.source in level.peers and len(level.peers) > 1
        assert level.reads == (level.source == role.rank)
        others = [by_rank[peer].levels[level is within] for peer in level.peers]
        assert all(other and (other.peers, other.source) == (level.peers, level.source) for other in others)
    if across is not None:
        assert across.source == role.source and across.peers == tuple(node[0] for node in role.nodes)
    if role.nodes and role.giver != role.rank:
        assert role.giver in (across or within).peers


def check_laws(layout: mf.Layout, stages: mf.StageMap, roles: list[mf.roles.Role]) -> None:
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
        check_levels(role, by_rank)
        for peer in role.peers:
            assert by_rank[peer].peers == role.peers
            assert by_rank[peer].source == role.source
        assert role.peers == () or role.rank in role.peers


@settings(max_examples=cases(150), deadline=None)
@given(jobs(), DELIVERIES)
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


@settings(max_examples=cases(150), deadline=None)
@given(jobs(), DELIVERIES, st.data())
def test_a_trainers_own_policy_is_kept_or_refused(
    case: tuple[mf.Layout, mf.StageMap], delivery: str, data: st.DataObject
) -> None:
    layout, stages = case
    policy = data.draw(st.sets(st.sampled_from(layout.ranks().tolist()), min_size=1))
    try:
        roles = list(assign_roles(layout, stages, FIELDS, delivery, policy))  # type: ignore[arg-type]
    except mf.errors.RoleError as refused:
        named = re.match(r"rank (\d+) \(", str(refused))
        assert named is not None
        hungry = [r for r in layout.ranks().tolist() if needs_stored(layout, stages, r)]

        def could_be_fed(rank: int) -> bool:
            def near(reader: int) -> bool:
                if delivery == "direct":
                    return reader == rank
                same_dp = layout.coord(reader).dp == layout.coord(rank).dp
                return same_dp and (
                    delivery in ("broadcast", "tree") or layout.node(reader) == layout.node(rank)
                )

            return any(near(reader) for reader in policy)

        assert int(named[1]) in hungry
        assert not could_be_fed(int(named[1]))
        return
    check_laws(layout, stages, roles)
    assert {role.rank for role in roles if role.reads} <= policy
    if delivery == "share":
        nodes = dict(zip(layout.ranks().tolist(), layout.node(layout.ranks()).tolist()))
        hungry = [r for r in nodes if needs_stored(layout, stages, r)]
        wanted = {(nodes[r], layout.coord(r).dp) for r in hungry}
        assert sum(role.reads for role in roles) == len(wanted)


def expected_roles(
    layout: mf.Layout, stages: mf.StageMap, delivery: str, policy: set[int] | None
) -> dict[int, tuple[bool, int | None, tuple[int, ...]]] | None:
    """rank -> (reads, source, peers) by the text of `assign_roles`, in plain loops; None where refused."""
    ranks = layout.ranks().tolist()
    at = {rank: layout.coord(rank) for rank in ranks}
    node = dict(zip(ranks, layout.node(ranks).tolist()))
    hungry = {rank for rank in ranks if needs_stored(layout, stages, rank)}
    if delivery == "direct":
        keys = [lambda r: r]
    elif delivery == "share":
        keys = [lambda r: (node[r], at[r].dp)]
    elif delivery == "tree":
        keys = [lambda r: at[r].dp]
    else:
        keys = [lambda r: (at[r].dp, at[r].pp, at[r].cp)]
        if policy is not None:
            keys += [
                lambda r: (at[r].dp, at[r].pp),
                lambda r: (at[r].dp, at[r].cp),
                lambda r: at[r].dp,
            ]
    for key in keys:
        groups: dict[object, list[int]] = {}
        for rank in ranks:
            groups.setdefault(key(rank), []).append(rank)
        roles: dict[int, tuple[bool, int | None, tuple[int, ...]]] = dict.fromkeys(ranks, (False, None, ()))
        for group in groups.values():
            eaters = [rank for rank in group if rank in hungry]
            if not eaters:
                continue
            able = [rank for rank in group if policy is None or rank in policy]
            own = [rank for rank in able if rank in hungry]
            if not (own or able):
                break
            reader = min(own or able)
            peers = tuple(sorted({*eaters, reader}))
            for rank in peers:
                roles[rank] = (rank == reader, reader, peers if len(peers) > 1 else ())
        else:
            return roles
    return None


@settings(max_examples=cases(100), deadline=None)
@given(jobs(), DELIVERIES, st.data())
def test_roles_are_what_plain_loops_make_them(
    case: tuple[mf.Layout, mf.StageMap], delivery: str, data: st.DataObject
) -> None:
    layout, stages = case
    policy = data.draw(st.none() | st.sets(st.sampled_from(layout.ranks().tolist())))
    expected = expected_roles(layout, stages, delivery, policy)
    try:
        roles = assign_roles(layout, stages, FIELDS, delivery, policy)  # type: ignore[arg-type]
    except mf.errors.RoleError:
        assert expected is None
        return
    assert {role.rank: (role.reads, role.source, role.peers) for role in roles} == expected
    for role in roles:
        assert role.nodes == (nodes_of(layout, role) if delivery == "tree" else ())
    assert [role.rank for role in roles] == layout.ranks().tolist()
    for role in roles:
        pp = layout.coord(role.rank).pp
        assert role.fields == tuple(f.name for f in stages.fields_of_rank(FIELDS, pp))
        assert roles[role.rank] == role


def nodes_of(layout: mf.Layout, role: mf.roles.Role) -> tuple[tuple[int, ...], ...]:
    """The peers by node, the source first on its own."""
    by_node: dict[int, list[int]] = {}
    for peer in role.peers:
        by_node.setdefault(int(layout.node(peer)), []).append(peer)
    return tuple(
        tuple(sorted(node, key=lambda peer: (peer != role.source, peer))) for node in by_node.values()
    )


@settings(max_examples=cases(60), deadline=None)
@given(layouts())
def test_where_nothing_is_stored_nobody_reads(layout: mf.Layout) -> None:
    stages = mf.StageMap(pp=layout.pp)
    for delivery in ("direct", "broadcast", "share", "tree"):
        for fields in ((), FIELDS[2:]):
            for role in assign_roles(layout, stages, fields, delivery, readers=()):  # type: ignore[arg-type]
                assert (role.reads, role.source, role.peers) == (False, None, ())


@pytest.mark.parametrize("shape", ["tp1-dp4", "tp4-dp4", "tp2-cp2-dp4", "tp2-cp2-dp4-pp4", "cp4-dp4-pp2"])
def test_readers_under_share_do_not_grow_with_tp_cp_or_pp(shape: str) -> None:
    layout = mf.Layout.parse(shape, ranks_per_node=64)
    roles = assign_roles(layout, mf.StageMap(pp=layout.pp), FIELDS, "share")
    assert int(roles.reads.sum()) == 4, "one per node and replica"


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("pp", [1, 2])
def test_readers_under_share_are_nodes_times_replicas(nodes: int, tp: int, cp: int, pp: int) -> None:
    """Replicas that lie across the nodes, as with dp slow: each node reads each of its replicas once."""
    for order in ("tp-cp-dp-pp", "pp-tp-cp-dp"):
        layout = mf.Layout(tp=tp, cp=cp, dp=4, pp=pp, order=order)
        layout = replace(layout, ranks_per_node=max(1, layout.world_size // nodes))
        roles = assign_roles(layout, mf.StageMap(pp=pp), FIELDS, "share")
        ranks = layout.ranks()
        pairs = set(zip(layout.node(ranks).tolist(), layout.coords(ranks)[:, 2].tolist()))
        assert int(roles.reads.sum()) == len(pairs)


@pytest.mark.parametrize("text", [*STAGE_LAYOUTS, "Et|*3L", "E(t*2|)*2m*2|L", "Et*0|L", "(E)*1t|L"])
def test_stage_layouts_are_read_as_megatron_reads_them(text: str) -> None:
    for pp in range(1, stages_in(text) + 1):
        if stages_in(text) % pp:
            continue
        theirs = PipelineParallelLayerLayout(text, pp)
        ours = mf.StageMap(pp=pp, layout=text)
        assert ours.vpp == theirs.virtual_pipeline_model_parallel_size
        for p in range(pp):
            for v in range(ours.vpp):
                held, kinds = theirs.layout[p][v], ours.kinds(p, v)
                assert ("first" in kinds) == (LayerType.embedding in held)
                assert ("last" in kinds) == (LayerType.loss in held)
                assert ("mtp" in kinds) == (LayerType.mtp in held)
                assert "all" in kinds


def names_at(stages: mf.StageMap, pp_rank: int, fields: tuple[mf.Field, ...]) -> set[str]:
    return {field.name for field in stages.fields_of_rank(fields, pp_rank)}


def test_windows_bring_each_stage_what_it_computes_with() -> None:
    fields = mf.Windows(8).fields
    stages = mf.StageMap(pp=4, layout="Et*3|t*4|m|L")
    assert names_at(stages, 0, fields) == {"tokens", "position_ids"}
    assert names_at(stages, 1, fields) == {"position_ids"}
    assert names_at(stages, 2, fields) == {"tokens", "position_ids"}, "MTP embeds further tokens"
    assert names_at(stages, 3, fields) == {"labels", "loss_mask", "position_ids"}, "loss alone: no tokens"
    roles = assign_roles(mf.Layout(tp=2, pp=4), stages, fields, "share")
    assert [role.source for role in roles] == [0, 0, None, None, 0, 0, 0, 0]
    assert [roles[rank].peers for rank in (2, 3)] == [(), ()]
    together = mf.StageMap(pp=2, layout="Et|mL")
    assert names_at(together, 1, fields) == {"tokens", "labels", "loss_mask", "position_ids"}


def test_virtual_stages_go_round_the_pipeline_ranks() -> None:
    stages = mf.StageMap(pp=2, vpp=3, mtp=(4,))
    assert {s for s in range(6) if "mtp" in stages.kinds(s % 2, s // 2)} == {4}
    assert [stages.kinds(s % 2, s // 2) & {"first", "last"} for s in range(6)] == [
        {"first"}, set(), set(), set(), set(), {"last"},
    ]  # fmt: skip
    assert [f.name for f in stages.fields_of_rank(FIELDS, 1)] == ["labels", "position_ids"]
    assert [f.name for f in stages.fields_of(FIELDS, 0, 1)] == ["position_ids"]
    assert mf.StageMap().kinds(0, 0) == {"all", "first", "last"}


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


@pytest.mark.parametrize(
    "text",
    [
        "tt|L",
        "Et|Lt|L",
        "Et|t",
        "t|E|L",
        "Et|x|L",
        "tE|L",
        "E|Lt",
        "",
        "|E|L",
        "E|(t|L",
        "Et*|L",
        "Et**2|L",
        "E|E|L",
        "L|E",
    ],
)
def test_stage_layouts_that_make_no_model_are_refused(text: str) -> None:
    with pytest.raises(mf.errors.LayoutError):
        mf.StageMap(pp=1, layout=text)


def test_stage_maps_that_do_not_fit_are_refused() -> None:
    for make in (
        lambda: mf.StageMap(pp=3, layout="Et|L"),
        lambda: mf.StageMap(pp=2, mtp=(2,)),
        lambda: mf.StageMap(pp=2, mtp=(-1,)),
        lambda: mf.StageMap(pp=0),
        lambda: mf.StageMap(pp=0, layout="Et|L"),
        lambda: mf.StageMap(pp=-1, layout="Et|L"),
        lambda: mf.StageMap(vpp=0),
        lambda: mf.StageMap(pp=2, mtp=(1,), layout="Et|L"),
        lambda: mf.StageMap(pp=2, vpp=2, layout="Et|L"),
    ):
        with pytest.raises(mf.errors.LayoutError):
            make()
    with pytest.raises(mf.errors.RoleError, match="pp=2"):
        assign_roles(mf.Layout(pp=4), mf.StageMap(pp=2), FIELDS, "direct")
    with pytest.raises(mf.errors.RoleError, match="choose"):
        assign_roles(mf.Layout(), mf.StageMap(), FIELDS, "telepathy")  # type: ignore[arg-type]


def test_readers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(mf.errors.LayoutError, match="rank 8 is not in"):
        assign_roles(mf.Layout(dp=8), mf.StageMap(), FIELDS, "direct", {0, 8})


@pytest.mark.parametrize("stages", [(), ("middle",), ("first", "loss"), "first"])
def test_fields_for_no_stage_are_refused(stages: tuple[str, ...]) -> None:
    with pytest.raises(mf.errors.RoleError, match="'tokens'"):
        mf.Field(name="tokens", dtype="int64", stages=stages)  # type: ignore[arg-type]


def test_a_role_is_plain_json() -> None:
    roles = assign_roles(mf.Layout(tp=2), mf.StageMap(), FIELDS, "share")
    assert json.loads(json.dumps([asdict(role) for role in roles])) == [
        {
            "rank": r,
            "reads": r == 0,
            "source": 0,
            "peers": [0, 1],
            "fields": [f.name for f in FIELDS],
            "nodes": [],
        }
        for r in range(2)
    ]


def test_a_trainers_policy_widens_the_groups_no_more_than_it_must() -> None:
    layout = mf.Layout.parse("tp2-cp2-pp2")
    stages = mf.StageMap(pp=2)

    def peers(reads: set[int]) -> set[tuple[int, ...]]:
        return {role.peers for role in assign_roles(layout, stages, FIELDS, "broadcast", reads)}

    assert peers({0, 2, 4, 6}) == {(0, 1), (2, 3), (4, 5), (6, 7)}  # tp
    assert peers({0, 4}) == {(0, 1, 2, 3), (4, 5, 6, 7)}  # tp-cp
    assert peers({0, 2}) == {(0, 1, 4, 5), (2, 3, 6, 7)}  # tp-pp
    assert peers({5}) == {tuple(range(8))}  # tp-cp-pp


def chosen(text: str, ranks_per_node: int | None, can_share: bool, reads: set[int] | None = None) -> str:
    layout = mf.Layout.parse(text, ranks_per_node=ranks_per_node)
    return choose_delivery(layout, mf.StageMap(pp=layout.pp), FIELDS, reads, can_share=can_share)


def test_auto_lets_each_node_read_what_is_larger_when_decoded() -> None:
    def chosen(text: str, ranks_per_node: int, **options: Any) -> str:
        layout = mf.Layout.parse(text, ranks_per_node=ranks_per_node)
        options = {"can_share": True, "decoded_is_larger": True} | options
        return choose_delivery(layout, mf.StageMap(pp=layout.pp), FIELDS, **options)

    assert chosen("tp8", 4) == "share", "one rank of each of two nodes reads and decodes"
    assert chosen("tp2-cp4-pp2", 4) == "share"
    assert chosen("tp8", 1) == "direct", "every rank its own node"
    assert chosen("tp8", 4, can_share=False) == "broadcast"
    assert chosen("tp8", 4, decoded_is_larger=False) == "tree"


def test_auto_chooses_by_what_crosses_nodes() -> None:
    assert chosen("dp8", 8, True) == "direct"
    assert chosen("tp4-dp2", 8, True) == "share"
    assert chosen("tp4-dp2", 8, False) == "broadcast"
    assert chosen("tp8", 4, True) == "tree", "a tp group over two nodes: one of them reads"
    assert chosen("tp2-cp4", 4, True) == "tree", "and a cp group"
    assert chosen("tp8", 4, False) == "broadcast"
    assert chosen("tp8", 1, True) == "broadcast", "every rank its own node: nobody to share with"
    assert chosen("tp4-pp2", 4, True) == "share", "stages are on different nodes: each node reads for its own"
    assert chosen("tp4-pp2", 4, True, {0}) == "tree", "the only reader is not on every node"
    assert chosen("tp4-pp2", 4, False, {0}) == "broadcast"


@only_soak
@settings(max_examples=cases(200), deadline=None)
@given(jobs(), st.booleans(), st.data())
def test_auto_is_its_rules(case: tuple[mf.Layout, mf.StageMap], can_share: bool, data: st.DataObject) -> None:
    layout, stages = case
    policy = data.draw(st.none() | st.sets(st.sampled_from(layout.ranks().tolist()), min_size=1))
    spans = any(len(set(layout.node(group).tolist())) > 1 for group in layout.groups("tp-cp"))
    share = expected_roles(layout, stages, "share", policy) if can_share and not spans else None
    tree = expected_roles(layout, stages, "tree", policy) if can_share and not share else None
    groups = {frozenset(peers) for _, _, peers in tree.values()} if tree else ()
    if not any(len(set(layout.node(list(group)).tolist())) < len(group) for group in groups):
        tree = None
    roles = share or tree or expected_roles(layout, stages, "broadcast", policy)
    if roles is None:
        with pytest.raises(mf.errors.RoleError, match=r"^rank \d+ "):
            choose_delivery(layout, stages, FIELDS, policy, can_share=can_share)
        return
    alone = all(source in (None, rank) for rank, (_, source, _) in roles.items())
    expected = "direct" if alone else "share" if share else "tree" if tree else "broadcast"
    delivery = choose_delivery(layout, stages, FIELDS, policy, can_share=can_share)
    assert delivery == expected
    check_laws(layout, stages, list(assign_roles(layout, stages, FIELDS, delivery, policy)))


def test_auto_takes_readers_that_can_be_run_through_once() -> None:
    layout = mf.Layout.parse("tp4-dp2", ranks_per_node=8)
    readers = iter([0, 4])
    assert choose_delivery(layout, mf.StageMap(), FIELDS, readers, can_share=False) == "broadcast"


def test_sixteen_thousand_ranks() -> None:
    layout = mf.Layout.parse("tp8-cp4-dp32-pp16", ranks_per_node=8)
    roles = assign_roles(layout, mf.StageMap(pp=16), FIELDS, "share")
    assert len(list(roles)) == 16_384
    middle = layout.rank_of(mf.layout.Coord(3, 1, 7, 5))
    assert roles[middle].source is None
    with pytest.raises(mf.errors.RoleError, match="not in the layout"):
        roles[16_384]
    tree = list(assign_roles(layout, mf.StageMap(pp=16), FIELDS, "tree"))
    assert sum(role.reads for role in tree) == 32
    assert sum(role.levels[0] is not None for role in tree) == 32 * 8, "tp-cp is four nodes, of two stages"
