"""Samples: rows and packs of a user's items, on every rank, by every delivery; and what is refused."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
import world
from meshfeed.feed.device import OnHost
from meshfeed.plan import plan_fixed, plan_step
from meshfeed.sequence import portions_of
from observe import simulated, take
from soak import SOAK, cases, some
from user_datasets import Plain, Rich, samples_recipe

IDS = mf.Field(name="ids", dtype="int32", stages=("first",), split=True, pad=-7)
WEIGHT = mf.Field(name="weight", dtype="float32", stages=("last",), split=True)
CAPTION = mf.Field(name="caption", dtype="bytes", stages=("last",))
ROWS = (mf.Field(name="image", dtype="uint8", stages=("first",)), "score", "class", CAPTION, "raw", "pixels")
PACK = (IDS, WEIGHT, CAPTION, "score", "image")
LENGTHS = Rich().lengths()


def parse(text: str, **options: Any) -> mf.Layout:
    return mf.Layout.parse(text, **options)


# -- rows ------------------------------------------------------------------------------------------


def expected_row_value(name: str, values: list[Any]) -> Any:
    if name == "caption":
        return [value.encode() for value in values]
    if name == "raw":
        return values
    arrays = [np.asarray(value) for value in values]
    return np.stack(arrays) if arrays and len({a.shape for a in arrays}) == 1 else arrays


def same(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, np.ndarray):
        return (
            isinstance(value, torch.Tensor)
            and value.numpy().dtype == wanted.dtype
            and np.array_equal(value, wanted)
        )
    pairs = zip(value, wanted)
    return len(value) == len(wanted) and all(a == b if isinstance(b, bytes) else same(a, b) for a, b in pairs)


@some(5)
@pytest.mark.parametrize("layout", ["tp1", "dp3", "cp2-dp2", "tp2-pp2"])
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_rows_are_stacked_where_shapes_agree(layout: str, micro_batch_size: int) -> None:
    recipe, dataset = samples_recipe(Rich(), *ROWS, sequences=9), Rich()
    kinds, drawn = set(), []
    for made in mf.simulate(recipe, parse(layout), 10**6, micro_batch_size=micro_batch_size):
        names = {"score", "class", "raw", "pixels"}
        names |= {"image"} if made.coord.pp == 0 else set()
        names |= {"caption"} if made.coord.pp == parse(layout).pp - 1 else set()
        for m in made.microbatches:
            assert set(m) == names
            at = [mf.order.EpochIndex(e, i) for e, i in zip(m.draws.epoch.tolist(), m.draws.index.tolist())]
            items = [dataset[each] for each in at]
            for name, value in m.items():
                wanted = expected_row_value(name, [item[name] for item in items])
                assert same(value, wanted), (name, value, wanted)
                kinds.add((name, type(value).__name__))
            drawn += at if made.coord.tp == made.coord.cp == made.coord.pp == 0 else []
    assert sorted((at.epoch, at.index) for at in drawn) == [(e, i) for e in (0, 1) for i in range(40)]
    if micro_batch_size == 3:
        assert {("image", "Tensor"), ("image", "list")} <= kinds


def test_tokens_are_counted_by_what_is_known() -> None:
    def totals(**mapped: Any) -> tuple[int, int]:
        recipe = samples_recipe(Rich(), "ids", sequences=40, **mapped)
        (made,) = mf.simulate(recipe, mf.Layout(), 1)
        return made.batch.tokens, made.batch.valid_tokens

    some = np.arange(40)
    assert totals() == (40, 40)
    assert totals(valid=some) == (40, some.sum())
    assert totals(lengths=LENGTHS) == (LENGTHS.sum(), LENGTHS.sum())
    assert totals(lengths=LENGTHS, valid=LENGTHS // 2) == (LENGTHS.sum(), (LENGTHS // 2).sum())
    textless = np.where(np.arange(len(LENGTHS)) % 2, LENGTHS, 0)
    assert totals(lengths=textless, valid=some) == (textless.sum(), some.sum())


def test_what_is_handed_out_is_not_the_datasets_own() -> None:
    table = np.arange(12).reshape(4, 3)
    ragged = [np.arange(i + 1) for i in range(4)]
    dataset = Plain(4, lambda at: {"row": table[at.index], "ragged": ragged[at.index]})
    with mf.Feed(samples_recipe(dataset, "row", "ragged", sequences=4), micro_batch_size=2) as feed:
        for step in feed:
            for m in step.microbatches:
                m["row"].zero_()
                for each in m["ragged"]:
                    each.zero_()
    assert np.array_equal(table.ravel(), np.arange(12))
    assert [each.sum() for each in ragged] == [0, 1, 3, 6]


# -- packs -----------------------------------------------------------------------------------------


def chunks_of(cp: int, rank: int, size: int, split: str) -> list[int]:
    if cp == 1:
        return list(range(size))
    if split == "contiguous":
        return list(range(rank * size // cp, (rank + 1) * size // cp))
    part = size // (2 * cp)
    return [c * part + i for c in (rank, 2 * cp - 1 - rank) for i in range(part)]


def places_of(padded: list[int], cp: int, rank: int, split: str) -> list[tuple[int, int]]:
    """(sequence, token) of every place that one rank holds of a pack, padding included."""
    return [(s, t) for s, n in enumerate(padded) for t in chunks_of(cp, rank, n, split)]


@settings(max_examples=cases(30, 500), deadline=None)
@given(
    policy=st.sampled_from(["in_order", "balanced", "dynamic_cp"]),
    oversize=st.sampled_from(["split", "truncate", "drop"]),
    capacity=st.sampled_from([12, 24, 40]),
    cp=st.integers(1, 3),
    dp=st.integers(1, 2),
    split=st.sampled_from(["zigzag", "contiguous"]),
    step=st.integers(0, 9),
)
def test_packed_fields_against_plain_loops(
    policy: Any, oversize: Any, capacity: int, cp: int, dp: int, split: Any, step: int
) -> None:
    dataset = Rich()
    recipe = samples_recipe(dataset, *PACK, packed=True, lengths=LENGTHS)
    packing = mf.Packing(capacity=capacity, policy=policy, oversize=oversize, align=mf.Align(pack=4))
    seen: set[tuple[int, int]] = set()
    for got in mf.simulate(
        recipe, mf.Layout(dp=dp, cp=cp), [step], packing=packing, cp_split=split, no_loss="allow"
    ):
        plan, draws = got.batch.plan, got.batch.draws
        for m in got.microbatches:
            rows = rows_of(plan, got.coord.dp * cp + got.coord.cp, m)
            items = [
                dataset[mf.order.EpochIndex(int(draws.epoch[s]), int(draws.index[s]))]
                for s in plan.sequence[rows]
            ]
            assert same(m["caption"], [item["caption"].encode() for item in items])
            assert same(m["image"], [item["image"] for item in items])
            assert same(m["score"], [np.asarray(item["score"]) for item in items])
            places = places_of(np.diff(m["cu_seqlens_padded"]).tolist(), m.cp_size, m.cp_rank, split)
            wanted: dict[str, list[Any]] = {"ids": [], "weight": []}
            for s, t in places:
                real = s < len(rows) and t < plan.lengths[rows[s]]
                at = int(plan.start[rows[s]]) + t if real else 0
                wanted["ids"].append(int(items[s]["ids"][at]) if real else -7)
                wanted["weight"].append(float(items[s]["weight"][at]) if real else 0.0)
                if real:
                    assert (int(plan.sequence[rows[s]]), at) not in seen
                    seen.add((int(plan.sequence[rows[s]]), at))
            for name, values in wanted.items():
                assert m[name].tolist() == [values], name
            assert (m["ids"].dtype, m["weight"].dtype) == (torch.int32, torch.float32)
    assert len(seen) == got.batch.tokens == got.batch.valid_tokens


def rows_of(plan: Any, dp_cp_rank: int, m: mf.Microbatch) -> list[int]:
    last = plan.first_rank + plan.cp_size
    inside = (plan.first_rank <= dp_cp_rank) & (dp_cp_rank < last) & (plan.microbatch == m.index)
    return np.flatnonzero(inside).tolist()


def test_the_fields_of_the_plan_are_those_of_documents() -> None:
    lengths = np.random.default_rng(1).integers(0, 40, 60)
    dataset = Plain(60, lambda at: {"x": np.zeros(lengths[at.index], np.int8)})
    x = mf.Field(name="x", dtype="int8", split=True)
    ours = samples_recipe(dataset, x, packed=True, lengths=lengths, sequences=20)
    theirs = mf.Recipe(
        data=mf.Lengths(lengths), sequence=mf.Documents(), batch=ours.batch, seed=ours.seed, epochs=2
    )
    options = {"packing": mf.Packing(capacity=32, policy="dynamic_cp", oversize="split")}
    layout = parse("cp2-dp2")
    for a, b in itertools.zip_longest(
        mf.simulate(ours, layout, 10**6, **options), mf.simulate(theirs, layout, 10**6, **options)
    ):
        assert (a.batch.tokens, a.batch.sum_sq) == (b.batch.tokens, b.batch.sum_sq)
        for ma, mb in itertools.zip_longest(a.microbatches, b.microbatches):
            shared = set(ma) - {"x"}
            assert shared == set(mb) - {"tokens", "labels", "loss_mask"} and len(shared) == 6
            assert all(
                ma[name].dtype == mb[name].dtype and torch.equal(ma[name], mb[name]) for name in shared
            )


@pytest.mark.parametrize("oversize", ["split", "drop", "truncate"])
def test_valid_tokens_of_pieces_add_up(oversize: Any) -> None:
    valid = LENGTHS // 3
    recipe = samples_recipe(Rich(), *PACK, packed=True, lengths=LENGTHS, valid=valid, sequences=40)
    packing = mf.Packing(capacity=10, oversize=oversize)
    if oversize == "truncate":
        with pytest.raises(mf.errors.PlanError, match=r"item \d+ is cut from \d+ to 10 tokens"):
            next(mf.simulate(recipe, mf.Layout(), 1, packing=packing))
        return
    (made,) = mf.simulate(recipe, mf.Layout(), 1, packing=packing)
    kept = valid if oversize == "split" else valid[LENGTHS <= 10]
    assert made.batch.valid_tokens == kept.sum()


# -- several sources -------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_sequences_of_several_sources(packed: bool) -> None:
    """By the rule itself, with draws of two stores interleaved."""
    sets = [Rich(), Rich(seed=8)]
    recipe: Any = SimpleNamespace(sources=tuple(mf.Mapped(d, lengths=LENGTHS) for d in sets), seed=0)
    draws = mf.order.Draws(
        np.array([1, 0, 0, 1, 1, 0], np.int32), np.zeros(6, np.int64), np.array([3, 3, 9, 1, 0, 7])
    )
    items = [sets[s][mf.order.EpochIndex(0, i)] for s, i in zip(draws.source.tolist(), draws.index.tolist())]
    rule = mf.Samples(IDS, CAPTION, "score", packed=True) if packed else mf.Samples(CAPTION, "score")
    lengths = rule.lengths(recipe, draws)
    assert np.array_equal(lengths, LENGTHS[draws.index])
    assert np.array_equal(rule.valid_tokens(recipe, draws, np.zeros(6, np.int64), lengths), lengths)
    plan = (
        plan_step(lengths, mf.Packing(capacity=1000, policy="in_order"), dp=1)
        if packed
        else plan_fixed(lengths, dp=1, cp=1, micro_batch_size=6)
    )
    (portion,) = portions_of(
        plan,
        draws,
        lengths,
        0,
        group=[0],
        rows=0 if packed else 6,
        split="zigzag",
        together=1,
        rank_of_dp_cp=np.arange(1),
    )
    host = OnHost()
    with recipe.sources[0], recipe.sources[1]:
        rule.announce(recipe, [portion])
        columns = rule.load(recipe, portion, host.allocate)
    (built,) = rule.build(recipe, portion, columns, [f.name for f in rule.fields], host.allocate)
    assert built["caption"] == [item["caption"].encode() for item in items]
    assert [float(score) for score in built["score"]] == [item["score"] for item in items]
    if packed:
        assert np.array_equal(built["ids"][0], np.concatenate([item["ids"] for item in items]))


# -- deliveries ------------------------------------------------------------------------------------

CASES = [
    ("tp2-pp2", {"micro_batch_size": 3}, {}),
    ("cp2-dp2", {"micro_batch_size": 2}, {}),
    ("cp2-tp2", {"packing": mf.Packing(capacity=24, policy="dynamic_cp", oversize="split")}, {"packed": True}),
    ("cp2-pp2", {"packing": mf.Packing(capacity=24, oversize="split"), "cp_split": "contiguous"}, {"packed": True}),
    ("dp2-tp2", {"packing": mf.Packing(capacity=40, policy="in_order")}, {"packed": True}),
]  # fmt: skip


DELIVERIES = (("direct", 0), ("broadcast", 2), ("direct", 1), ("share", 1))  # and workers


def every_delivery(rank: int) -> list[str]:
    """Both epochs of every case by every delivery (two of them in `make test`); tells what differs from simulate, or
    costs too much.
    """
    multiprocessing.current_process().daemon = False  # so that it may have workers
    wrong: list[str] = []
    for at, (text, options, kind) in enumerate(CASES):
        fields = PACK if kind else ROWS
        layout = parse(text, ranks_per_node=4)
        expected = simulated(
            samples_recipe(Rich(), *fields, lengths=LENGTHS, sequences=16, **kind),
            layout,
            10**6,
            rank,
            **options,
        )
        for delivery, workers in DELIVERIES if SOAK else (DELIVERIES[at % 4], DELIVERIES[(at + 2) % 4]):
            recipe = samples_recipe(Rich(), *fields, lengths=LENGTHS, sequences=16, **kind)
            with mf.Feed(
                recipe,
                layout,
                transport=mf.Transport(delivery=delivery, timeout_s=600),
                verify=True,
                pad_rows="packing" not in options,
                machine=mf.Machine(workers=workers),
                **options,
            ) as feed:
                got, spent = [], 0
                for step in feed:
                    got += take([step])
                    if bool(multiprocessing.active_children()) != (workers > 0 and feed.role.reads):
                        wrong.append(f"{text} {delivery}: workers of a rank with reads={feed.role.reads}")
                    spent += step.stats.collectives
            if got != expected:
                wrong.append(f"{text} {delivery} workers={workers}: {got}\n{expected}")
            messages = sum(step["num_microbatches"] for step in got)
            if spent > (messages + 3 if delivery == "broadcast" else 0):  # while it learns how large they get
                wrong.append(f"{text} {delivery}: {spent} collectives for {messages} microbatches")
    return wrong


def test_every_delivery_gives_the_bytes_of_simulate() -> None:
    assert world.run(every_delivery, 4) == [[]] * 4


def peers_of_a_failure(rank: int, delivery: str) -> tuple[str, str]:
    recipe = samples_recipe(Plain(8, lambda at: {"x": at.index / (at.index - 5)}), "x")
    feed = mf.Feed(recipe, parse("tp2"), transport=mf.Transport(delivery=delivery, timeout_s=600))
    with feed, pytest.raises(mf.MeshfeedError) as said:
        take(feed)
    return type(said.value).__name__, str(said.value)


@pytest.mark.parametrize("delivery", ["broadcast", "share"])
def test_peers_hear_what_the_dataset_raised(delivery: str) -> None:
    results = world.run(peers_of_a_failure, 2, delivery)
    assert [kind for kind, _ in results] == ["StoreError", "StoreError"]
    assert all("index=5) failed: ZeroDivisionError" in said for _, said in results)


# -- refusals --------------------------------------------------------------------------------------


def spoiled(value: dict[str, Any], at: mf.order.EpochIndex) -> dict[str, Any]:
    return value | {"y": 0} if at.index == 2 else {"x": np.float32(1)}


@some(13)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({}, r"has no 'x', only \['y'\]"),
        ({"x": np.zeros(3, np.int64)}, "'x' is int64, declared float32"),
        ({"x": b"1"}, "'x' is bytes, declared float32"),
        ({"x": 1.5}, "'x' is float64, declared float32"),
        ({"x": np.array([None])}, "'x' is an array of Python objects"),
        ({"x": np.array(["a"])}, "'x' is an array of <U1; give one of bool"),
        ({"x": np.zeros(2, ">f4")}, "'x' is an array of >f4"),
        ({"x": 2**80}, "array of Python objects"),
        ({"x": torch.zeros(2, dtype=torch.bfloat16)}, "tensor of torch.bfloat16, a type that NumPy lacks"),
        ({"x": torch.zeros(2, device="meta")}, "tensor on meta"),
        ({"x": [1.0]}, r"'x' is a list of numbers; give np.array\(...\)"),
        ({"x": np.ma.masked_less(np.arange(3.0, dtype=np.float32), 1)}, "masked entries; give array.filled"),
        ({"x": None}, "'x' is NoneType"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_values_that_cannot_be_are_refused_by_name(value: dict[str, Any], said: str, workers: int) -> None:
    bad = Plain(4, partial(spoiled, value))  # as it is to travel to a worker that is not forked
    recipe = samples_recipe(bad, mf.Field(name="x", dtype="float32"), sequences=4)
    where = r"source 0, Mapped\(Plain, 4 items\): EpochIndex\(epoch=0, index=2\): "
    with (
        mf.Feed(recipe, micro_batch_size=4, machine=mf.Machine(workers=workers)) as feed,
        pytest.raises(mf.errors.StoreError, match=where + f".*{said}"),
    ):
        take(feed)


FORKED_MEANWHILE = """
import importlib, os, sys, threading
import numpy as np
import meshfeed as mf

class Slow:  # it goes on when a worker was forked
    def find_spec(self, name, path, target=None):
        if name in ("numpy.ma.core", "numpy.random._pickle"):
            imports.set()
            forked.wait(3)

class Items:
    def __len__(self):
        return 4
    def __getitem__(self, at):
        return {"x": mf.order.rng(1, at.epoch, at.index).random(2)}

def import_it():
    importlib.import_module(sys.argv[1])
    imports.set()

def before_a_fork():
    threading.Thread(target=import_it).start()
    imports.wait()

imports, forked = threading.Event(), threading.Event()
os.register_at_fork(before=before_a_fork, after_in_parent=forked.set)
sys.meta_path.insert(0, Slow())
recipe = mf.Recipe(data=mf.Mapped(Items()), sequence=mf.Samples({"x": "float64"}), batch=mf.Batch(2), steps=1)
with mf.Feed(recipe, machine=mf.Machine(workers=1, item_timeout_s=20)) as feed:
    print(sum(len(each["x"]) for step in feed for each in step.microbatches))
"""


@pytest.mark.parametrize("name", ["numpy.ma", "numpy.random"])
def test_a_worker_does_not_wait_for_an_import_of_another_thread(name: str) -> None:
    """It is forked, and has that module's lock, but not the thread that holds it."""
    script = [sys.executable, "-c", FORKED_MEANWHILE, name]
    done = subprocess.run(script, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    assert done.stdout == "2\n"


@pytest.mark.parametrize("got", [7, 9, 0])
def test_a_length_that_is_not_the_declared_one(got: int) -> None:
    dataset = Plain(4, lambda at: {"x": np.zeros(got if at.index == 1 else 8, np.int8)})
    x = mf.Field(name="x", dtype="int8", split=True)
    recipe = samples_recipe(dataset, x, packed=True, lengths=[8] * 4, sequences=4)
    said = rf"source 0, .*EpochIndex\(epoch=0, index=1\): 'x' has {got} tokens, lengths says 8"
    with (
        mf.Feed(recipe, packing=mf.Packing(capacity=64)) as feed,
        pytest.raises(mf.errors.StoreError, match=said),
    ):
        take(feed)
    two = Plain(4, lambda at: {"x": np.zeros((8, 2), np.int8)})
    recipe = replace(recipe, data=mf.Mapped(two, lengths=[8] * 4))
    with (
        mf.Feed(recipe, packing=mf.Packing(capacity=64)) as feed,
        pytest.raises(mf.errors.StoreError, match=r"\[8, 2\]"),
    ):
        take(feed)


def test_types_may_not_change_within_a_microbatch() -> None:
    mixed = Plain(4, lambda at: {"x": np.zeros(2, np.int8 if at.index % 2 else np.int16)})
    with (
        mf.Feed(samples_recipe(mixed, "x", sequences=4), micro_batch_size=4) as feed,
        pytest.raises(mf.errors.StoreError, match=r"'x' is int\d+, int\d+ in EpochIndex\(.*give it one type"),
    ):
        take(feed)
    tuples = Plain(4, lambda at: (1, 2))
    with (
        mf.Feed(samples_recipe(tuples, "x")) as feed,
        pytest.raises(mf.errors.StoreError, match="gave tuple; give a dict"),
    ):
        take(feed)


@pytest.mark.parametrize(
    ("fields", "packed", "said"),
    [
        ((), False, "at least one"),
        (("x", "x"), False, "each name once"),
        (("position_ids",), True, "computed from lengths"),
        (("continues",), True, "computed from lengths"),
        ((mf.Field(name="x", dtype="int33"),), False, "int33"),
        ((mf.Field(name="x", dtype="int32", split=True),), False, "packed=True"),
        ((mf.Field(name="x", dtype="any", split=True),), True, "dtype of its numbers"),
        ((mf.Field(name="x", dtype="uint16", split=True, pad=-100),), True, "uint16 has no -100, its pad"),
        ((mf.Field(name="x", dtype="int64", split=True, pad=math.nan),), True, "int64 has no nan, its pad"),
        ((mf.Field(name="x", dtype="bool", split=True, pad=2**63),), True, "bool has no 9.22"),
        ((mf.Field(name="x", dtype="int32", stored=False),), False, "not stored"),
    ],
)
def test_fields_that_cannot_be_are_refused(fields: Any, packed: bool, said: str) -> None:
    with pytest.raises(mf.errors.RecipeError, match=said):
        mf.Samples(*fields, packed=packed)


def test_rules_and_stores_must_fit() -> None:
    batch = mf.Batch(sequences=1)
    with pytest.raises(mf.errors.RecipeError, match=r"give Mapped\(Rich, 40 items\) its lengths="):
        next(
            mf.simulate(
                samples_recipe(Rich(), "ids", packed=True), mf.Layout(), 1, packing=mf.Packing(capacity=9)
            )
        )
    x = mf.Field(name="x", dtype="int8", split=True)
    empty = samples_recipe(Rich(3), x, "image", packed=True, lengths=[2, 0, 1])
    with pytest.raises(mf.errors.RecipeError, match=r"item 1 of .* no pack would hold its 'image'"):
        next(mf.simulate(empty, mf.Layout(), 1, packing=mf.Packing(capacity=9)))
    with pytest.raises(mf.errors.RecipeError, match=r"Samples reads a mf\.Mapped"):
        next(
            mf.simulate(
                mf.Recipe(data=mf.Lengths([3]), sequence=mf.Samples("x"), batch=batch), mf.Layout(), 1
            )
        )
    for rule in (mf.Windows(4), mf.Documents()):
        options = {"packing": mf.Packing(capacity=9)} if rule.packed else {}
        with pytest.raises(mf.errors.RecipeError):
            next(
                mf.simulate(
                    mf.Recipe(data=mf.Mapped(Rich()), sequence=rule, batch=batch), mf.Layout(), 1, **options
                )
            )
    assert mf.Samples("a").summary() != mf.Samples("b").summary() != mf.Samples("a", packed=True).summary()


def test_a_dict_declares_fields_by_their_dtypes() -> None:
    one = mf.Field(name="c", dtype="bool", stages=("last",))
    declared = mf.Samples({"a": "int64", "b": "any"}, "d", one).declared
    assert [(field.name, field.dtype) for field in declared] == [
        ("a", "int64"),
        ("b", "any"),
        ("d", "any"),
        ("c", "bool"),
    ]
    assert declared[:1] == (mf.Field(name="a", dtype="int64"),)


@pytest.mark.parametrize("given", [{"a": np.int64}, {1: "int64"}, 5, ["a"], None])
def test_what_is_no_field_is_refused(given: Any) -> None:
    with pytest.raises(mf.errors.RecipeError, match=r"Samples\(.*give names, mf\.Field"):
        mf.Samples(given)
