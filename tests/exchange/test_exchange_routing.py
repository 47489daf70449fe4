"""Routing as pure functions: every byte that is sent is expected, and lies where it is looked for."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from giving import ITEM_KEYS, item_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed import exchange as x
from meshfeed.deliver import wire
from meshfeed.errors import PlanError
from meshfeed.exchange import items as items_module
from meshfeed.exchange.items import Given, encode, nothing
from meshfeed.exchange.lengths import GatheredLengths, MemberReport, Schema, columns_of, reports_of
from meshfeed.exchange.membership import Membership
from meshfeed.exchange.routing import Shipment, ranges_of, write_pieces
from meshfeed.exchange.steps import Received, packed, plan, portions
from meshfeed.feed.device import OnHost
from meshfeed.feed.stepping import GlobalBatch
from meshfeed.plan import packs_of, plan_step, slices_of
from meshfeed.roles import assign_roles
from soak import cases

POLICIES = ("in_order", "balanced", "dynamic_cp")
FIELDS = [field.name for field in ITEM_KEYS.fields]
SPLITS = ("zigzag", "contiguous", "pack_contiguous", None)


@st.composite
def exchanges(draw: Any) -> tuple[Membership, mf.Layout, list[Given], mf.Packing, Any]:
    """Members of all kinds, with items or without, some in each other's place."""
    dp, cp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    policy = draw(st.sampled_from(POLICIES))
    membership = Membership.all_of(range(dp * cp), cp=cp)
    if policy != "dynamic_cp" and draw(st.booleans()):  # one member for all cp ranks of a replica
        membership = Membership(
            tuple(range(dp)), tuple(tuple(range(d * cp, (d + 1) * cp)) for d in range(dp)), cp
        )
    owners = draw(st.sets(st.integers(0, dp - 1), min_size=1))
    lengths = {d: draw(st.lists(st.integers(0, 40), max_size=6)) for d in owners}
    batches = [
        encode(
            [
                item_of(membership.dp_rank(m), n, size)
                for n, size in enumerate(lengths[membership.dp_rank(m)])
            ],
            ITEM_KEYS,
        )
        if membership.dp_rank(m) in owners
        and (m % 2 == 0 or draw(st.booleans()) or len(membership.ranks) == dp)
        else nothing()
        for m in range(len(membership.ranks))
    ]
    align = mf.Align(sequence=draw(st.integers(1, 3)), pack=4)
    shapes = draw(st.sampled_from(({}, {"max_sequences": 2}, {"max_sequences": 3, "fixed_shapes": True})))
    oversize = draw(st.sampled_from(("split", "drop")))
    packing = mf.Packing(capacity=24, policy=policy, align=align, oversize=oversize, **shapes)
    return membership, mf.Layout(dp=dp, cp=cp), batches, packing, draw(st.sampled_from(SPLITS))


@settings(max_examples=cases(80), deadline=None)
@given(exchanges())
@np.errstate(all="raise")  # else each step would warn
def test_what_is_sent_is_what_is_expected(case: Any) -> None:
    membership, layout, batches, packing, split = case
    reports = [batch.report for batch in batches]
    if not any(report.owns for report in reports):
        return
    gathered = GatheredLengths.of(through_a_message(reports), membership)
    step = plan(gathered, packing, membership, layout=layout).plan
    size, arrived = len(membership.ranks), [list[np.ndarray]() for _ in membership.ranks]
    pieces = [Shipment.of(gathered, step, membership, split, m) for m in range(size)]
    coming = [each.received_by(m) for m, each in enumerate(pieces)]
    for m, batch in enumerate(batches):
        assert (pieces[m].microbatch >= 0).all(), "nothing that is left out is sent"
        going = pieces[m].sent_by(m)
        mine = np.flatnonzero(np.array([m in held for held in gathered.holders])[gathered.draws.source])
        buffer = np.zeros(int(going.num_bytes.sum()), np.uint8)
        write_pieces(buffer, going, batch.columns, batch.report, np.searchsorted(mine, going.item))
        to = going.sizes(going.member, size)
        assert to == [coming[other].sizes(coming[other].source, size)[m] for other in range(size)]
        for other, part in enumerate(np.split(buffer, np.cumsum(to)[:-1])):
            arrived[other].append(part)
    for m in range(size):
        received = Received(gathered, coming[m], np.concatenate(arrived[m]))
        assert received.data.size == coming[m].num_bytes.sum()
        check_items(received, step, membership.served[m], split)
        if split is not None:
            check_packs(received, step, layout, gathered, membership.served[m], split)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("split", ["zigzag", "contiguous", "pack_contiguous"])
def test_a_member_takes_the_tokens_that_its_packs_hold(policy: Any, split: Any) -> None:
    membership, packing = Membership.all_of(range(6), cp=3), mf.Packing(capacity=40, policy=policy)
    for seed in range(12):
        lengths = np.random.default_rng(seed).integers(1, 60, 20)
        step = plan_step(lengths, packing, dp=2, cp=3, cp_split=split)
        for member in range(6):
            for pack in packs_of(step, member):
                rows, held = pack.sequences, slices_of(pack, [pack.cp_rank], split)
                takes = ranges_of(step, membership, rows, np.full(rows.size, member), split)
                for k, (start, stop) in enumerate(zip(*takes)):
                    got = [token for a, b in zip(start, stop) for token in range(a, b)]
                    mine = held.sequence == k
                    ranges = zip(held.start[mine], held.stop[mine])
                    assert got == [t for a, b in ranges for t in range(a, min(b, step.lengths[rows[k]]))]


@st.composite
def plain_items(draw: Any) -> list[dict[str, Any]]:
    """Tensors of all types that split keys have, views among them, some of them as torch cannot join them."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    dtype, further = draw(st.sampled_from([torch.int64, torch.int32, torch.uint16, torch.bfloat16])), (3,)
    kinds = ["", "", "", "dtype", "shape", "key", "length", "array", "scalar", "sparse", "meta", "complex"]
    odd = draw(st.sampled_from(kinds))
    items: list[dict[str, Any]] = []
    for length in draw(st.lists(st.integers(0, 200), min_size=1, max_size=6)):
        tokens = torch.from_numpy(rng.integers(0, 90, (length, 2))).to(dtype)[:, 0]
        items.append({"tokens": tokens, "mrope": torch.full((length, *further), 1.5, requires_grad=True)})
    last = items[-1]
    if odd == "dtype":
        last["mrope"] = last["mrope"].double()
    elif odd == "shape":
        last["mrope"] = last["mrope"][:, 0]
    elif odd == "key":
        del last["mrope"]
    elif odd == "length":
        last["mrope"] = torch.zeros(len(last["tokens"]) + 1, 3)
    elif odd == "array":
        last["mrope"] = last["mrope"].detach().numpy()
    elif odd == "scalar":
        last["tokens"] = torch.tensor(1)
    for item in items if odd in ("sparse", "meta", "complex") else ():
        mrope = item["mrope"].detach()
        kind = {"sparse": mrope.to_sparse, "meta": mrope.to("meta").clone, "complex": mrope.cfloat}
        item["mrope"] = kind[odd]()
    return items


def some_of_no_length() -> list[dict[str, Any]]:
    tokens = [torch.ones(4, dtype=torch.int64), torch.ones(0, dtype=torch.int64)]
    return [{"tokens": tokens[0], "mrope": torch.ones(4, 3)}, {"tokens": tokens[1], "mrope": torch.ones(0)}]


@settings(max_examples=cases(80), deadline=None)
@example(some_of_no_length(), None)  # torch.cat leaves out what has the shape (0,)
@given(plain_items(), st.sampled_from([None, frozenset({"tokens", "mrope"}), frozenset({"mrope"})]))
def test_items_that_torch_joins_are_what_they_are_one_by_one(items: Any, wanted: Any) -> None:
    keys = mf.exchange.Keys(mf.Field(name="mrope", dtype="any", split=True))

    def outcome() -> Any:
        try:
            given = encode(items, keys, wanted=wanted, first=3)
        except mf.errors.StoreError as error:
            return str(error)
        report = given.report
        columns = [column.tolist() for column in given.columns]
        return report.rows.tolist(), report.schemas, report.digest, report.ended, columns

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items_module, "_joined", lambda *_: None)
        one_by_one = outcome()
    assert outcome() == one_by_one


def test_tensors_of_one_kind_are_joined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items_module._Items, "_one_by_one", None)
    keys = mf.exchange.Keys(mf.Field(name="mrope", dtype="any", split=True))
    sizes = (4, 0, 2, 3)
    items = [{"tokens": torch.arange(size), "mrope": torch.ones(size, 3)} for size in sizes]
    del items[2]["mrope"]
    assert encode(items, keys).report.rows[:, 0].tolist() == [*sizes]


@pytest.mark.parametrize(
    ("lengths", "names", "built"),
    [
        ([1 << 15] * 3, ["position_ids", "tokens"], [1 << 16, 1 << 15]),  # of 8 bytes each
        ([40_000] * 2, ["position_ids", "tokens"], [40_000, 40_000]),
        ([1 << 18] * 3, ["position_ids"], [1 << 19, 1 << 18]),
    ],
)
def test_small_packs_share_a_pass_and_large_ones_do_not(
    lengths: list[int], names: list[str], built: list[int]
) -> None:
    """A pass makes half a MiB of a key at most, so a step takes memory for what the loop gets next."""
    allocated: list[int] = []

    class Counting(OnHost):
        def allocate(self, shape: tuple[int, ...], dtype: str) -> Any:
            allocated.append(shape[0])
            return super().allocate(shape, dtype)

    group, membership, layout = x.Group(), Membership.all_of([0]), mf.Layout()
    given = encode([{"tokens": np.full(size, at)} for at, size in enumerate(lengths)], x.Keys())
    gathered = x.gather_lengths(given, membership, group)
    batch = plan(gathered, mf.Packing(capacity=max(lengths)), membership, layout=layout)
    received = x.reroute(given, gathered, batch.plan, membership, group)
    packs = x.pack(received, batch, layout, 0, x.Keys(), names=names, placer=Counting())
    assert allocated == [size for size in built for _ in names]
    for pack, at in zip(packs, batch.draws.index[batch.plan.sequence].tolist() if "tokens" in names else ()):
        assert (pack["tokens"] == at).all()


def test_reports_are_equal_where_their_items_are() -> None:
    def given(*lengths: int) -> MemberReport:
        return encode([item_of(0, n, size) for n, size in enumerate(lengths)], ITEM_KEYS, first=2).report

    one = given(5, 6, 7)
    (sent,) = through_a_message([one])
    assert one.equals(sent) and sent.equals(one)
    valid, schema = one.rows.copy(), one.schemas[0]
    valid[1, 1] -= 1
    renamed = replace(schema, rest=(("other", *schema.rest[0][1:]), *schema.rest[1:]))
    others = (
        *(given(5, 7, 7), given(5, 6), replace(one, first=3), replace(one, ended=True)),
        *(replace(one, rows=valid), replace(one, schemas=(renamed, *one.schemas[1:]))),
        replace(one, content=(one.content[0] ^ 1, *one.content[1:])),
    )
    for other in others:
        assert not one.equals(other) and not other.equals(one), other


def test_what_ranks_plan_from_cannot_be_changed() -> None:
    with mf.Exchange([[item_of(0, 3, 4)]], packing=mf.Packing(capacity=8), keys=ITEM_KEYS) as exchange:
        list(next(iter(exchange)).microbatches)  # of all classes, as mutate.py runs a test on what it reaches
    for module in pkgutil.iter_modules(x.__path__, f"{x.__name__}."):
        for kind in vars(importlib.import_module(module.name)).values():
            if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.name:
                assert vars(kind)["__dataclass_params__"].frozen, kind


def through_a_message(reports: list[MemberReport]) -> list[MemberReport]:
    message = wire.encode(columns_of(reports))
    buffer = np.zeros(message.num_bytes, np.uint8)
    message.write(buffer)
    return reports_of(wire.decode(buffer))


def check_items(received: Received, step: Any, served: tuple[int, ...], split: Any) -> None:
    """Each piece is what `slices_of` says of its row, cut out of the item itself."""
    gathered = received.gathered
    for m, pack in enumerate(packs_of(step, served[0])):
        got = received.items(m)
        assert [place for place, _ in got] == step.sequence[pack.sequences].tolist()
        first = served[0] - pack.cp_rank
        held = None if split is None else slices_of(pack, [rank - first for rank in served], split)
        for k, (place, item) in enumerate(got):
            row = int(pack.sequences[k])
            length, start = int(step.lengths[row]), int(step.start[row])
            wanted = np.arange(start, start + length)
            if held is not None:
                mine = held.sequence == k
                wanted = np.concatenate(
                    [np.arange(a, b) for a, b in zip(held.start[mine], held.stop[mine])] or [np.zeros(0, int)]
                )
                wanted = start + wanted[wanted < length]
            given_ = item_of(
                int(gathered.draws.source[place]),
                int(gathered.draws.index[place]),
                int(gathered.lengths[place]),
            )
            assert item.keys() == given_.keys()
            for name in ("tokens", "mrope", "weights", "advantages"):
                if name in given_:
                    cut = given_[name][wanted]
                    assert np.array_equal(np.asarray(item[name].float()), np.asarray(as_float(cut))), name
            assert item["uid"] == given_["uid"].encode()
            if "image" in given_:
                assert np.array_equal(np.asarray(item["image"]), given_["image"])


def as_float(value: Any) -> Any:
    return torch.as_tensor(value).float()


def check_packs(
    received: Received,
    step: Any,
    layout: mf.Layout,
    gathered: GatheredLengths,
    served: tuple[int, ...],
    split: Any,
) -> None:
    """Put together from its ranks, a row is the tokens of its item."""
    batch = GlobalBatch(
        step=0, draws=gathered.draws, lengths=gathered.lengths, plan=step, tokens=0, valid_tokens=0, sum_sq=0
    )
    for rank in served:
        mine = portions(batch, layout, layout.coord(rank), split)
        for portion, ((made,), _) in zip(mine, packed(received, mine, ITEM_KEYS, FIELDS, OnHost())):
            ids, at = made["sequence_ids"][0].numpy(), made["position_ids"][0].numpy()
            for k, (source, index) in enumerate(zip(made.draws.source, made.draws.index)):
                mine = ids == k
                length = int(gathered.lengths[step.sequence[portion.pack.sequences[k]]])
                whole = item_of(int(source), int(index), length)
                start = int(portion.starts[k])
                wanted = whole["tokens"].numpy()[start + at[mine]]
                assert np.array_equal(made["tokens"][0].numpy()[mine], wanted)


def test_numbers_stay_exact() -> None:
    rows = np.array([[2**53 + 1, 2**62 - 1, 2**40 + 3, 0]], np.int64)
    schema = Schema((("tokens", "int64", (2, 3)),), (("image", "bfloat16", 4),))
    report = MemberReport(first=2**60 + 7, rows=rows, schemas=(schema,), ended=True)
    (again,) = through_a_message([report])
    assert again.rows.tolist() == rows.tolist()
    assert (again.first, again.schemas, again.ended) == (report.first, (schema,), True)
    assert schema.entry_bytes == (48,)


@pytest.mark.parametrize("text", ["tp2-cp2-dp2-pp2", "dp4-tp2-pp2", "cp2-dp4-pp2", "tp4-pp4", "dp2-cp4-tp2"])
@pytest.mark.parametrize("delivery", ["direct", "broadcast", "share", "tree"])
@pytest.mark.parametrize("per_node", [4, 6, 8, 16])
def test_every_place_is_served_once_in_every_exchange(text: str, delivery: Any, per_node: int) -> None:
    layout = mf.Layout.parse(text, ranks_per_node=per_node)
    roles = assign_roles(layout, mf.StageMap(pp=layout.pp), ITEM_KEYS.fields, delivery)
    membership: dict[tuple[int, ...], Membership] = {}
    for role in (role for role in roles if role.reads):
        try:
            mine = Membership.of(layout, roles, role.rank)
        except mf.errors.RoleError as uneven:
            assert delivery == "share", uneven  # nodes that cut replicas unevenly
            assert f"of {layout.dp * layout.cp}, each by" in str(uneven)
            return
        assert role.rank in mine.ranks
        assert sorted(at for served in mine.served for at in served) == list(range(layout.dp * layout.cp))
        membership[mine.ranks] = mine
    assert sorted(rank for ranks in membership for rank in ranks) == [
        role.rank for role in roles if role.reads
    ]


def test_items_are_digested_where_several_ranks_may_give_the_same() -> None:
    alone = Membership.all_of(range(4))
    assert not alone.has_copies
    assert Membership.all_of(range(4), cp=2).has_copies, "two cp ranks of a data-parallel rank"
    assert replace(alone, speakers=(0, 4)).has_copies, "two stages"


def test_another_layout_or_split_than_the_plans_is_refused() -> None:
    """A rank of a wider layout would get padding alone, and an unknown split would be contiguous."""
    membership, group, keys = Membership.all_of([0]), x.Group(), x.Keys()
    given = encode([{"tokens": torch.arange(8)}], keys)
    gathered = x.gather_lengths(given, membership, group)
    batch = plan(gathered, mf.Packing(capacity=16), membership, layout=mf.Layout())
    with pytest.raises(PlanError, match="cp split 'ring': choose one of"):
        x.reroute(given, gathered, batch.plan, membership, group, split="ring")  # type: ignore[arg-type]
    whole = x.reroute(given, gathered, batch.plan, membership, group, split=None)
    assert x.pack(whole, batch, mf.Layout(tp=2), 1, keys)[0]["tokens"].tolist() == [[*range(8)]]
    with pytest.raises(PlanError, match="cp split 'ring': choose one of"):
        x.pack(whole, batch, mf.Layout(), 0, keys, split="ring")  # type: ignore[arg-type]
    for layout, rank in itertools.product((mf.Layout(dp=2), mf.Layout(cp=2)), (0, 1)):
        with pytest.raises(PlanError, match="has 2 ranks in dp and cp, and the plan 1; give the layout"):
            x.pack(whole, batch, layout, rank, keys)
    with pytest.raises(PlanError, match="item 0: key 'tokens' has 8 tokens, at step 0; "):
        plan(gathered, mf.Packing(capacity=4), membership, layout=mf.Layout())
