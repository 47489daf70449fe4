"""Items of many kinds between real processes: whole on arrival, by two collectives, from whoever has any."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from giving import ITEM_KEYS, item_of, plain, plain_plan

import meshfeed as mf
import world
from meshfeed.exchange.items import encode

LENGTHS = {  # (lengths, capacity, cp, dp): inputs that known schedulers crash on
    "fewer to move than asked": ([10, 10, 10, 10], 1024, 1, 4),
    "one longer than a rank": ([5000, 100, 100, 100], 2560, 2, 2),
    "giant on three": ([24576], 8192, 1, 3),
    "one on six": ([40], 8, 1, 6),
    "empty ones": ([0, 0, 5, 0], 64, 1, 2),
    "group of five of twelve": ([4096] + 4 * [102], 820, 1, 8),
    "nine on eight": ([10] * 9, 4096, 1, 8),
    "seven on eight": ([4000] * 7, 4096, 1, 8),
    "one giant among many": ([2000] + [1] * 60, 512, 1, 8),
    "nothing at all": ([], 64, 1, 4),
}


def pack_all(rank: int) -> dict[str, Any]:
    """Every crash input; items dealt to two owners as far as there are two."""
    got: dict[str, Any] = {}
    for name, (lengths, capacity, cp, dp) in LENGTHS.items():
        if rank >= dp * cp:
            continue
        owner = rank // cp
        mine = [
            item_of(0, number, length)
            for number, length in enumerate(lengths)
            if number % min(dp, 2) == owner
        ]
        layout = mf.Layout(cp=cp, dp=dp, table=tuple(range(dp * cp)))
        with mf.Exchange(
            [mine] if owner < 2 else None,
            layout,
            packing=mf.Packing(capacity=capacity, policy="dynamic_cp"),
            keys=ITEM_KEYS,
            transport=mf.Transport(timeout_s=600),
        ) as exchange:
            got[name] = [
                (step.tokens, step.num_microbatches, [plain(m) for m in step.microbatches])
                for step in exchange
            ]
    return got


def test_inputs_that_crash_known_schedulers() -> None:
    results = world.run(pack_all, 8)
    for name, (lengths, _, cp, dp) in LENGTHS.items():
        steps = [results[rank][name] for rank in range(dp * cp)]
        assert all(len(each) == len(steps[0]) for each in steps), name
        if not lengths:
            assert steps[0] == [(0, 0, [])]
            continue
        tokens = {(each[0][0], each[0][1]) for each in steps}
        assert len(tokens) == 1 and tokens.pop()[0] == sum(lengths), name
        order = [n for owner in range(2) for n in range(len(lengths)) if n % min(dp, 2) == owner]
        held = sorted({uid for each in steps for m in each[0][2] for uid in m.get("uid", [])})
        assert held == sorted(f"0/{n}".encode() for n in order if lengths[n]), name


def whole(rank: int, layout: mf.Layout, policy: Any) -> list[Any]:
    """The separate calls, sending rows whole: every item as its owner gave it."""
    from meshfeed import exchange as x

    coord = layout.coord(rank)
    membership = x.Membership.all_of(range(layout.world_size), cp=layout.cp)
    group = x.Group(torch.distributed.group.WORLD)
    made = np.random.default_rng(coord.dp)
    items = [item_of(coord.dp, n, int(made.integers(0, 90))) for n in range(5 * coord.dp)]  # dp 0 has none
    batch = x.encode(items, ITEM_KEYS, rank=rank)
    gathered = x.gather_lengths(batch, membership, group)
    planned = x.plan(gathered, mf.Packing(capacity=128, policy=policy), membership, layout=layout)
    received = x.reroute(batch, gathered, planned.plan, membership, group, split=None)
    got = [
        (
            int(gathered.draws.source[place]),
            int(gathered.draws.index[place]),
            {k: _plain(v) for k, v in item.items()},
        )
        for m in range(planned.plan.num_microbatches)
        for place, item in received.items(m)
    ]
    cut = x.reroute(batch, gathered, planned.plan, membership, group, split="contiguous")
    packs = x.pack(cut, planned, layout, rank, ITEM_KEYS)  # as they were cut
    assert tokens_of(packs) == tokens_of(
        x.pack(received, planned, layout, rank, ITEM_KEYS, split="contiguous")
    )
    with pytest.raises(mf.errors.PlanError, match="reroute has cut the rows by 'contiguous'; leave it out"):
        x.pack(cut, planned, layout, rank, ITEM_KEYS, split="zigzag")
    with pytest.raises(mf.errors.PlanError, match=rf"brought what dp_cp ranks \({rank},\) need"):
        x.pack(received, planned, layout, (rank + 1) % layout.world_size, ITEM_KEYS)
    return [got, group.traffic.collectives, len(packs)]


def twice(rank: int, layout: mf.Layout) -> list[tuple[Any, Any]]:
    """Two steps whose results are packed in the end, and the same packed at once."""
    from meshfeed import exchange as x

    membership, keys = x.Membership.all_of(range(layout.world_size)), mf.exchange.Keys()
    group = x.Group(torch.distributed.group.WORLD if layout.world_size > 1 else None)
    waiting: list[tuple[Any, Any]] = []
    at_once: list[Any] = []
    for step in range(3):
        items = [{"tokens": torch.full((length,), 10 * step + rank)} for length in (4, 3)]
        given = x.encode(items, keys, rank=rank)
        gathered = x.gather_lengths(given, membership, group)
        batch = x.plan(gathered, mf.Packing(capacity=8), membership, layout=layout)
        received = x.reroute(given, gathered, batch.plan, membership, group)
        at_once.append(tokens_of(x.pack(received, batch, layout, rank, keys)))
        waiting.append((received, batch))
    late = [tokens_of(x.pack(received, batch, layout, rank, keys)) for received, batch in waiting]
    return list(zip(late, at_once))


def tokens_of(packs: list[mf.Microbatch]) -> list[Any]:
    return [pack["tokens"].tolist() for pack in packs]


@pytest.mark.parametrize("size", [1, 2])
def test_a_result_is_not_changed_by_the_calls_after_it(size: int) -> None:
    layout = mf.Layout(dp=size)
    results = world.run(twice, size, layout) if size > 1 else [twice(0, layout)]
    for pairs in results:
        assert all(late == at_once for late, at_once in pairs)


def gathered_twice(rank: int) -> list[bytes]:
    """What the members send is theirs to keep, too."""
    from meshfeed import exchange as x

    group = x.Group(torch.distributed.group.WORLD)
    first = group.all_gather(b"first of %d" % rank)
    group.all_gather(b"other")
    return [message.tobytes() for message in first]


def test_gathered_messages_are_not_changed_by_the_next_ones() -> None:
    assert world.run(gathered_twice, 2) == [[b"first of 0", b"first of 1"]] * 2


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).tolist()
    return value


@pytest.mark.parametrize("policy", ["in_order", "dynamic_cp"])
def test_items_arrive_as_they_were_given(policy: Any) -> None:
    layout = mf.Layout(cp=2, dp=4)
    results = world.run(whole, 8, layout, policy)
    seen: set[tuple[int, int]] = set()
    for got, collectives, num_packs in results:
        assert collectives == 3  # lengths once, items twice: whole and cut
        assert num_packs > 0
        for owner, number, item in got:
            made = np.random.default_rng(owner)
            lengths = [int(made.integers(0, 90)) for _ in range(5 * owner)]
            given = item_of(owner, number, lengths[number])
            wanted = {
                name: _plain(value.encode() if isinstance(value, str) else torch.as_tensor(value))
                for name, value in given.items()
                if not isinstance(value, float)
            }
            assert {name: value for name, value in item.items() if name != "reward"} == wanted
            assert item["reward"][0] == "torch.float64"
            seen.add((owner, number))
    wanted = {
        (owner, number)
        for owner in range(4)
        for number, length in enumerate(np.random.default_rng(owner).integers(0, 90, 5 * owner))
        if length
    }
    assert seen == wanted


def counted(rank: int, keys: Any, kinds: list[list[str]]) -> list[Any]:
    """Collectives of each step, where items have these keys only."""
    layout = mf.Layout(dp=4)
    full = [item_of(rank, number, 20 + rank) for number in range(4)]
    got: list[Any] = []
    for names in kinds:
        items = [{name: value for name, value in item.items() if name in names} for item in full]
        with mf.Exchange([items, items], layout, packing=mf.Packing(capacity=256), keys=keys) as exchange:
            got.append([])
            for step in exchange:
                fields = {name for m in step.microbatches for name in m}
                got[-1].append((step.stats.collectives, "image" in fields, "uid" in fields))
    return got


def test_further_keys_cost_no_further_collective() -> None:
    kinds = [["tokens"], ["tokens", "uid"], ["tokens", "uid", "image", "scale", "done", "reward", "mrope"]]
    for got in world.run(counted, 4, mf.exchange.Keys("image"), kinds):
        for steps, with_uid in zip(got, (False, True, True)):
            assert len(steps) == 2
            assert all(step == (2, True, with_uid) for step in steps)  # a declared key is always there


def produced(rank: int, producers: list[int]) -> list[Any]:
    """Some ranks only give items, all take them; the rest of the field is as in a step of their own."""
    items = [item_of(3, number, 10 + number) for number in range(12)]
    mine = iter([items[:6], items[6:]]) if rank in producers else None
    with mf.Exchange(mine, mf.Layout(dp=4), packing=mf.Packing(capacity=64), keys=ITEM_KEYS) as exchange:
        return [[plain(m) for m in step.microbatches] for step in exchange]


def test_a_single_producer_feeds_all() -> None:
    """What another rank gives differs in `draws` alone, so any producer makes the same microbatches."""
    first, last = world.run(produced, 4, [0]), world.run(produced, 4, [3])
    assert first == last
    assert len(first[0]) == 2
    held = sorted(uid for rank in first for step in rank for m in step for uid in m.get("uid", []))
    assert held == sorted(f"3/{n}".encode() for n in range(12))


def test_absent_keys_are_padded_or_none() -> None:
    items = [item_of(1, number, 4) for number in range(4)]
    with mf.Exchange([items], packing=mf.Packing(capacity=64), keys=ITEM_KEYS) as exchange:
        (step,) = iter_all(exchange)
    (m,) = step
    assert m["mrope"].shape == (1, 16, 3)
    assert m["weights"].dtype == torch.bfloat16
    assert m["advantages"][0].tolist()[4:12] == [-1.0] * 8
    assert m["advantages"][0, 12:].tolist() == items[3]["advantages"].tolist()
    assert [value is None for value in m["image"]] == [True, False, True, False]
    assert m["scale"][3].dtype == torch.float8_e4m3fn
    assert torch.equal(m["weights"][0, 4:8], items[1]["weights"])


VIEWS = {  # tokens, of 6, as memory seldom has them in a row
    "a slice": torch.arange(12)[::2],
    "a column": torch.arange(12).reshape(6, 2)[:, 1],
    "a transposed table": torch.arange(18).reshape(3, 6).T,
    "every second row": torch.arange(36).reshape(12, 3)[::2],
    "one for all": torch.ones(1).expand(6),
    "bfloat16": torch.arange(12).bfloat16()[::2],
    "float8": torch.arange(12).to(torch.float8_e5m2)[::2],
    "bytes": torch.arange(12, dtype=torch.uint8)[::2],
    "backwards": np.arange(6)[::-1],
    "transposed by NumPy": np.arange(18).reshape(3, 6).T,
}


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", VIEWS)
def test_views_arrive_as_what_they_show(name: str, split: bool) -> None:
    keys = mf.exchange.Keys(
        mf.Field(name="x", dtype="any", split=split),
        mf.Field(name="mask", dtype="any", split=True),
        valid="mask",
    )
    items = [{"tokens": torch.arange(12)[::2], "x": VIEWS[name], "mask": np.arange(6)[::-1]}] * 2
    with mf.Exchange([items], packing=mf.Packing(capacity=12), keys=keys) as exchange:
        ((m, valid),) = [(*step.microbatches, step.valid_tokens) for step in exchange]
    assert valid == 5 + 5, "where the mask is not 0"
    value = VIEWS[name]
    wanted = value if isinstance(value, torch.Tensor) else torch.from_numpy(value.copy())
    got = (m["x"][0, :6], m["x"][0, 6:12]) if split else m["x"]
    assert [_plain(each) for each in got] == [_plain(wanted)] * 2
    assert m["tokens"][0, :12].tolist() == [0, 2, 4, 6, 8, 10] * 2
    assert m["mask"][0, :12].tolist() == [5, 4, 3, 2, 1, 0] * 2


def iter_all(exchange: mf.Exchange) -> list[list[mf.Microbatch]]:
    return [list(step.microbatches) for step in exchange]


def test_a_dummy_has_the_types_of_the_others() -> None:
    got = world.run(dummies, 2)
    shapes = [
        {name: (value[0], value[1][2:]) for name, value in rank.items() if name != "cu"} for rank in got
    ]
    assert shapes[0] == shapes[1]


def dummies(rank: int) -> dict[str, Any]:
    items = [[item_of(0, 0, 9)]] if rank == 0 else None
    with mf.Exchange(items, mf.Layout(dp=2), packing=mf.Packing(capacity=64), keys=ITEM_KEYS) as exchange:
        ((m,),) = iter_all(exchange)
    return {name: _plain(m[name]) for name in ("tokens", "mrope", "weights", "advantages", "position_ids")}


def test_every_stage_gets_only_its_fields() -> None:
    for layout in (mf.Layout(dp=2, pp=4), mf.Layout(tp=2, pp=4)):
        for rank, (everyone, owners) in enumerate(world.run(staged, 8, layout)):
            stage = layout.coord(rank).pp
            assert everyone == owners
            assert {"cu_seqlens", "cu_seqlens_padded", "position_ids", "uid"} <= everyone
            assert ("tokens" in everyone) == (stage in (0, 2))
            assert ("labels" in everyone) == (stage == 3)


def staged(rank: int, layout: mf.Layout) -> list[set[str]]:
    """Stage 2 predicts further tokens; a key that is not declared goes to all stages."""
    stages = mf.StageMap(pp=4, layout="Et|t|tm|L")
    rows = [{"tokens": np.arange(n), "labels": np.arange(n), "uid": f"{n}"} for n in (4, 7, 9)]
    owners = [r for r in range(8) if layout.coord(r).pp in (0, 3) and layout.coord(r).tp == 0]
    names: list[set[str]] = []
    for given in (None, owners):
        mine = [rows] if given is None or rank in owners else None
        with mf.Exchange(
            mine,
            layout,
            packing=mf.Packing(capacity=16),
            transport=mf.Transport(readers=given, timeout_s=600),
            stage_map=stages,
        ) as exchange:
            names.append({name for step in iter_all(exchange) for m in step for name in m})
    return names


@pytest.mark.parametrize("further", [[], ["uid"]])
def test_a_stage_that_needs_no_key_receives_no_byte(further: list[str]) -> None:
    layout = mf.Layout(dp=2, pp=4)
    for rank, steps in enumerate(world.run(broadcast_to_stages, 8, layout, further)):
        takes_part = further or layout.coord(rank).pp in (0, 3)
        assert steps == [(2 if takes_part else 1, bool(further))] * 2


def broadcast_to_stages(rank: int, layout: mf.Layout, further: list[str]) -> list[Any]:
    """Collectives of each step, and whether its packs have a key that is not declared."""
    names = {"tokens", "labels", *further}
    rows = [{"tokens": np.arange(n), "labels": np.arange(n), "uid": f"{n}"} for n in (4, 7, 9)]
    mine = [[{name: value for name, value in row.items() if name in names} for row in rows]] * 2
    readers = [r for r in range(8) if layout.coord(r).pp == 0]
    with mf.Exchange(
        mine if rank in readers else None,
        layout,
        packing=mf.Packing(capacity=16),
        transport=mf.Transport(readers=readers, delivery="broadcast", timeout_s=600),
    ) as exchange:
        got: list[Any] = []
        for step in exchange:
            have_uid = all("uid" in m for m in step.microbatches)
            got.append((step.stats.collectives, have_uid))
    return got


def served_plans(rank: int, delivery: Any) -> list[Any]:
    """The plan of each step; one item is longer than a pack, one is empty."""
    items = [[item_of(0, number, length) for number, length in enumerate((9, 70, 5, 0))]] * 2
    with mf.Exchange(
        items if rank == 0 else None,
        mf.Layout(tp=2),
        packing=mf.Packing(capacity=32, oversize="split", microbatches=5, align=mf.Align(pack=4)),
        keys=ITEM_KEYS,
        transport=mf.Transport(readers=[0], delivery=delivery, timeout_s=600),
    ) as exchange:
        return [(step.plan.oversize.tolist(), plain_plan(step.plan)) for step in exchange]


@pytest.mark.parametrize("delivery", ["share", "broadcast"])
def test_a_served_rank_has_the_plan_of_its_reader(delivery: Any) -> None:
    reader, served = world.run(served_plans, 2, delivery)
    assert reader == served
    assert [oversize for oversize, _ in reader] == [[1], [1]]


@pytest.mark.parametrize(("oversize", "has"), [("split", (4, 50, 3)), ("drop", (4, 3)), ("truncate", None)])
def test_valid_tokens_of_items_that_are_too_long(oversize: Any, has: Any) -> None:
    """Each is counted once, whole or not at all. What a cut leaves of a mask, nobody knows but its rank."""
    lengths, num_valid = (9, 70, 5), (4, 50, 3)
    items = [{"tokens": np.arange(n), "mask": np.arange(n) < k} for n, k in zip(lengths, num_valid)]
    keys = mf.exchange.Keys(mf.Field(name="mask", dtype="bool", split=True), valid="mask")
    packing = mf.Packing(capacity=32, oversize=oversize)
    with mf.Exchange([items], packing=packing, keys=keys) as exchange:
        if has is None:
            with pytest.raises(mf.errors.PlanError, match=r"cut to 32 tokens.*'split' or 'drop'"):
                next(iter(exchange))
            return
        ((step, masks),) = [(step, [m["mask"] for m in step.microbatches]) for step in exchange]
    assert step.valid_tokens == sum(has) == sum(int(mask.sum()) for mask in masks)


def test_virtual_stages_share_one_exchange() -> None:
    stages = mf.StageMap(pp=1, vpp=2)
    rows = [[{"tokens": np.arange(5), "labels": np.arange(5), "uid": "a"}] for _ in range(3)]
    with mf.Exchange(rows, packing=mf.Packing(capacity=8), stage_map=stages) as exchange:
        seen = [[set(m) for step in view for m in step.microbatches] for view in exchange.virtual_stages]
    first, last = seen
    assert len(first) == len(last) == 3
    assert all("tokens" in names and "labels" not in names and "uid" in names for names in first)
    assert all("labels" in names and "tokens" not in names and "uid" in names for names in last)


def test_two_keys_of_one_name_are_refused() -> None:
    for keys in (("a", "a"), ("cu_seqlens",), ("continues",)):
        with pytest.raises(mf.errors.RecipeError):
            mf.exchange.Keys(*keys)
    for pulls, uneven in itertools.product((0, 1), ("drain", "stop")):
        if (pulls, uneven) != (1, "drain"):
            with pytest.raises(mf.errors.RecipeError):
                mf.Exchange(None, packing=mf.Packing(capacity=8), pulls=pulls, uneven=uneven)  # type: ignore


def test_who_gets_a_key_at_all() -> None:
    """A rank with a declared field, and every rank where items have keys that nobody declared."""
    keys = mf.exchange.Keys()
    for names, there, gets in (
        (["tokens"], {"tokens"}, True),
        ([], {"tokens"}, False),
        (["position_ids_of_nobody"], {"tokens"}, False),
        ([], {"tokens", "reward"}, True),
    ):
        assert keys.any_for(names, there) == gets


def test_an_item_without_its_length_names_what_it_has() -> None:
    with pytest.raises(mf.errors.StoreError, match=r"'tokens' is missing, the item has only \['reward'\]"):
        encode([{"reward": 1.0, "uid": None}], ITEM_KEYS)


def test_items_of_two_types_are_both_named() -> None:
    items = [{"tokens": np.arange(2)} for _ in range(3)]
    items[1]["advantages"], items[2]["advantages"] = np.zeros(2), np.zeros((2, 1))
    text = r"item 5: key 'advantages' is \('float64', \[1\]\), but \('float64', \[\]\) in item 4; give it"
    with pytest.raises(mf.errors.StoreError, match=text):
        encode(items, ITEM_KEYS, first=3)
