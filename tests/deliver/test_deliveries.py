"""Every delivery, every layout: the same global batches, and the same bytes as `simulate` makes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshfeed as mf
import world
from corpus import recipe_of, write_corpus
from observe import ledger, seen_step, simulated, take
from soak import SOAK, some

DELIVERIES = ("direct", "broadcast", "share", "tree", "auto")
RESET = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}


@dataclass(frozen=True)
class Case:
    """A layout, and what else a trainer may choose with it."""

    layout: mf.Layout
    options: dict[str, Any] = field(default_factory=dict)
    rule: dict[str, Any] = field(default_factory=dict)
    length: int = 64
    sequences: int = 16


def parse(text: str, **options: Any) -> mf.Layout:
    return mf.Layout.parse(text, **options)


CASES = {
    8: [
        Case(parse("tp8")),
        Case(parse("cp8")),
        Case(parse("cp8"), {"cp_split": "contiguous"}, RESET, length=50),
        Case(parse("dp8"), rule=RESET, sequences=13),
        Case(parse("pp8"), {"micro_batch_size": 2}),
        Case(parse("tp2-cp2-dp2"), {"micro_batch_size": 3}, RESET),
        Case(parse("tp2-cp2-pp2"), rule={"reset_position_ids": True}, length=33),
        Case(parse("pp2-dp2-tp2"), {"micro_batch_size": 2}, RESET),
        Case(parse("cp4-tp2"), {"cp_split": "contiguous"}),
        Case(parse("dp2-cp2-tp2"), rule={"eod_mask_loss": True}),
        Case(parse("tp4-dp2", ranks_per_node=4)),
        Case(parse("cp2-pp2-dp2", ranks_per_node=4), rule=RESET),
        Case(parse("tp2-pp4"), {"stage_map": mf.StageMap(pp=4, vpp=2, mtp=(3, 7))}),
        Case(parse("tp2-pp4"), {"stage_map": mf.StageMap(pp=4, layout="Et|t|m|L")}, RESET),
        Case(mf.Layout(tp=2, dp=4, ep=4, order="tp-ep-dp-pp")),
        Case(mf.Layout(tp=2, cp=2, pp=2, table=(6, 1, 0, 7, 2, 5, 4, 3)), rule=RESET),
        Case(parse("tp8", ranks_per_node=4), {"micro_batch_size": 3}, RESET),
        Case(parse("tp8", ranks_per_node=3)),  # nodes of three, three and two
        Case(parse("cp4-tp2", ranks_per_node=2), rule=RESET),
        Case(parse("tp4-dp2", ranks_per_node=3), sequences=13),  # both replicas on the middle node
        Case(
            parse("tp4-pp2", ranks_per_node=2), {"stage_map": mf.StageMap(pp=2, vpp=2, mtp=(2,))}, length=31
        ),
        Case(parse("tp2-pp4", ranks_per_node=1), {"stage_map": mf.StageMap(pp=4, mtp=(3,))}),
        Case(replace(mf.Layout(tp=4, cp=2, table=(6, 1, 0, 7, 2, 5, 4, 3)), ranks_per_node=2), rule=RESET),
    ],
    4: [
        Case(parse("tp2-pp2"), rule=RESET),
        Case(parse("cp2-tp2"), {"micro_batch_size": 4}),
        Case(parse("pp2-cp2"), {"stage_map": mf.StageMap(pp=2, vpp=2)}, length=31),
    ],
    3: [Case(parse("tp3"), rule=RESET), Case(parse("cp3"), length=60), Case(parse("dp3"))],
    1: [Case(parse("tp1"), RESET and {}, RESET)],
}


def every_delivery(rank: int, path: str, world_size: int) -> list[str]:
    """Runs the whole stream of every case through every delivery (one of them in `make test`); tells what differs
    from simulate.
    """
    wrong: list[str] = []
    for at, case in enumerate(CASES[world_size]):
        recipe = recipe_of(path, length=case.length, sequences=case.sequences, epochs=1, **case.rule)
        expected = simulated(recipe, case.layout, 10**6, rank, **case.options)
        for delivery in DELIVERIES if SOAK else (DELIVERIES[at % 5],):
            with mf.Feed(
                recipe,
                case.layout,
                transport=mf.Transport(delivery=delivery, timeout_s=600),
                verify=True,
                pad_rows=True,
                **case.options,
            ) as feed:
                got = take(feed)
            if got != expected:
                wrong.append(f"case {at} {case.layout} {delivery}: {first_difference(got, expected)}")
    return wrong


def first_difference(got: list[Any], expected: list[Any]) -> str:
    pairs = itertools.zip_longest(got, expected)
    return next(f"step {k}: {a}\n  expected {b}" for k, (a, b) in enumerate(pairs) if a != b)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=2_700, mean=40)
    return str(path)


@pytest.mark.parametrize("world_size", sorted(CASES))
def test_every_layout_and_delivery_gives_the_bytes_of_simulate(corpus: str, world_size: int) -> None:
    wrong = world.run(every_delivery, world_size, corpus, world_size)
    assert wrong == [[] for _ in range(world_size)]


# -- against an oracle that knows nothing of meshfeed's own reading and cutting --------------------


def shards(rank: int, path: str, layout: mf.Layout, options: dict[str, Any]) -> list[list[Any]]:
    """Every microbatch of epoch 0: (indices, tokens, labels), as this rank holds them."""
    recipe = recipe_of(path, length=48, sequences=8, epochs=1)
    rows = {"micro_batch_size": 2, "pad_rows": True}
    with mf.Feed(recipe, layout, transport=mf.Transport(delivery="share"), **rows, **options) as feed:
        return [
            [
                (mb.draws.index.tolist(), mb["tokens"].numpy(), mb["labels"].numpy())
                for mb in step.microbatches
            ]
            for step in feed
        ]


def chunks_of(cp_rank: int, cp: int, split: str) -> list[slice]:
    if split == "contiguous":
        return [slice(48 // cp * cp_rank, 48 // cp * (cp_rank + 1))]
    size = 48 // cp // 2
    return [slice(c * size, (c + 1) * size) for c in (cp_rank, 2 * cp - 1 - cp_rank)]


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
def test_ranks_hold_their_slices_of_the_token_stream(tmp_path: Path, split: str) -> None:
    stream = write_corpus(tmp_path / "text", num_tokens=2_000).astype(np.int64)
    layout = parse("cp2-dp2")
    ranks = world.run(shards, 4, str(tmp_path / "text"), layout, {"cp_split": split})
    drawn: list[int] = []
    for rank, steps in enumerate(ranks):
        coord = layout.coord(rank)
        places = chunks_of(coord.cp, 2, split)
        for indices, tokens, labels in itertools.chain(*steps):
            assert tokens.shape == (2, 24)
            for row, index in enumerate(indices):
                window = stream[index * 48 : index * 48 + 49]
                assert np.array_equal(tokens[row], np.concatenate([window[:-1][p] for p in places]))
                assert np.array_equal(labels[row], np.concatenate([window[1:][p] for p in places]))
            assert not tokens[len(indices) :].any()
            drawn += indices if coord.cp == 0 else []
    assert sorted(drawn) == list(range(2_000 // 48)), "every window of the epoch once"


# -- what else a rule may carry --------------------------------------------------------------------


class WithExtras(mf.Windows):
    """Windows, and what a store of pictures would have beside them; fields are views of the columns."""

    @property
    def fields(self) -> tuple[mf.Field, ...]:
        return (
            *super().fields,
            mf.Field(name="weight", dtype="float32"),
            mf.Field(name="image", dtype="int16", stages=("first",)),
            mf.Field(name="caption", dtype="bytes", stages=("last",)),
        )

    def summary(self) -> str:
        return f"extras {super().summary()}"

    def load(self, recipe: mf.Recipe, portion: Any, allocate: Any) -> Any:
        index = portion.draws.index
        columns = dict(super().load(recipe, portion, allocate))
        columns["weight"] = (index[:, None] * np.array([1, 2, 3])).astype(np.float32)
        columns["image"] = [image_of(i) for i in index.tolist() if has_image(i)]
        if index.size % 2 == 0:  # a column may be missing altogether
            columns["caption"] = [caption_of(i) for i in index.tolist()]
        return columns

    def build(self, recipe: mf.Recipe, portion: Any, columns: Any, names: Any, allocate: Any) -> Any:
        plain = {name for name in names if name not in ("weight", "image", "caption")}
        built = super().build(recipe, portion, columns, plain, allocate)
        images = list(columns["image"]) if columns else []
        captions = list(columns.get("caption", [b"?"] * len(portion.draws))) if columns else []
        for m, (fields, draws) in enumerate(zip(built, map(portion.draws_of, portion.microbatches))):
            start, count = m * portion.rows, len(draws)
            mine = [images.pop(0) for index in draws.index.tolist() if has_image(index)]
            extras = {
                "weight": columns["weight"][start : start + count],
                "image": mine,
                "caption": captions[start : start + count],
            }
            fields.update({name: value for name, value in extras.items() if name in names})
        return built


def has_image(index: int) -> bool:
    return index % 3 == 0


def image_of(index: int) -> np.ndarray:
    return np.full((index % 4, 3_000 + index * index % 997), index, np.int16)


def caption_of(index: int) -> bytes:
    return b"caption \0" * (index % 5)


def extras_recipe(path: str, **options: Any) -> mf.Recipe:
    base = recipe_of(path, **options)
    return replace(base, sequence=WithExtras(base.sequence.length))


def extras(rank: int, path: str) -> list[str]:
    recipe = extras_recipe(path, length=16, sequences=12, epochs=1)
    wrong: list[str] = []
    plain = [parse("tp4"), parse("cp2-tp2"), parse("tp2-pp2"), parse("pp2-dp2"), parse("pp4")]
    nodes = [parse("tp4", ranks_per_node=2), parse("cp2-tp2", ranks_per_node=3)]
    for at, layout in enumerate(plain + nodes):
        options = {"stage_map": mf.StageMap(pp=layout.pp, mtp=(layout.pp - 1,)), "micro_batch_size": 3}
        expected = simulated(recipe, layout, 10**6, rank, **options)
        for delivery in DELIVERIES if SOAK else (DELIVERIES[at % 5], DELIVERIES[(at + 2) % 5]):
            kept: list[mf.Microbatch] = []
            with mf.Feed(
                recipe,
                layout,
                transport=mf.Transport(delivery=delivery, timeout_s=600),
                verify=True,
                pad_rows=True,
                **options,
            ) as feed:
                for step in feed:
                    kept += step.microbatches
            # read only now: a tensor must outlive the buffer that its bytes came in
            steps = [len(step["microbatches"]) for step in expected]
            pieces = iter(kept)
            for count, step in zip(steps, expected):
                got = [seen_microbatch_of(pieces) for _ in range(count)]
                if got != step["microbatches"]:
                    wrong.append(f"{layout} {delivery} step {step['step']}: {got}\n{step['microbatches']}")
    return wrong


def seen_microbatch_of(pieces: Any) -> Any:
    from observe import seen_microbatch

    return seen_microbatch(next(pieces))


def test_extra_columns_travel_whatever_their_shape(corpus: str) -> None:
    assert world.run(extras, 4, corpus) == [[]] * 4


def count_collectives(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every collective that this process calls from now on, whoever calls it."""
    called: list[str] = []
    from meshfeed.deliver.group import Group

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for name in ("broadcast", "all_gather"):
        counted(Group, name)
    for name in ("broadcast", "all_gather", "all_reduce", "scatter", "gather", "send", "recv", "barrier"):
        counted(dist, name)
    for name in ("broadcast_object_list", "all_gather_object", "new_group"):
        counted(dist, name)
    return called


def collectives(rank: int, path: str) -> dict[str, Any]:
    layout, told = parse("tp2-cp2-pp2"), {}
    # so long that each microbatch travels by itself
    plain = recipe_of(path, length=140_000, sequences=4)
    ragged = extras_recipe(path, length=140_000, sequences=4)
    short = recipe_of(path, length=32, sequences=4)
    with pytest.MonkeyPatch.context() as patch:
        called = count_collectives(patch)
        for delivery in ("direct", "share", "broadcast"):
            for name, recipe in (("plain", plain), ("ragged", ragged), ("short", short)):
                steps = 8 if delivery == "broadcast" or name == "short" else 3
                called.clear()
                counts = []
                with mf.Feed(recipe, layout, transport=mf.Transport(delivery=delivery, prefetch=1)) as feed:
                    for step in itertools.islice(feed, steps):
                        microbatches = list(step.microbatches)
                        counts.append((len(microbatches), step.stats.collectives))
                told[delivery, name] = counts, sorted(set(called))
    return told


def test_collectives_per_microbatch(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", num_tokens=600_000)
    for told in world.run(collectives, 8, str(tmp_path / "text")):
        for delivery, name in told:
            counts, called = told[delivery, name]
            if delivery != "broadcast":
                assert all(count == 0 for _, count in counts) and called == []
                continue
            assert called == ["broadcast"]
            if name == "short":
                assert all(count == 1 for _, count in counts), "small microbatches travel together"
                continue
            late = counts if name == "plain" else counts[-4:]
            assert all(made == count == 4 for made, count in late), (name, counts)
            assert sum(count - made for made, count in counts) <= 3  # while it learns how large they are


# -- roles -----------------------------------------------------------------------------------------


def middle_stage(rank: int, path: str, delivery: str) -> dict[str, Any]:
    recipe = recipe_of(path, length=40, sequences=4, reset_attention_mask=True)
    layout = parse("tp2-pp4")
    opened: list[str] = []
    real_open = __import__("os").open

    def watched(name: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(str(name))
        return real_open(name, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.open", watched)
        called = count_collectives(patch)
        with mf.Feed(
            recipe, layout, transport=mf.Transport(delivery=delivery, timeout_s=600), verify=True
        ) as feed:
            steps = [(step, list(step.microbatches)) for step in itertools.islice(feed, 3)]
        return {
            "role": asdict(feed.role),
            "opened": sum(name.endswith(".bin") for name in opened),
            "called": sorted(set(called)),
            "fields": sorted(steps[0][1][0]),
            "stats": [sum(step.stats[name] for step, _ in steps) for name in ("bytes_read", "opens")],
        }


@some(1)
@pytest.mark.parametrize("delivery", ["direct", "broadcast", "share"])
def test_middle_stages_open_nothing_and_meet_nobody(corpus: str, delivery: str) -> None:
    told = world.run(middle_stage, 8, corpus, delivery)
    for rank in range(2, 6):
        assert told[rank]["opened"] == 0 and told[rank]["stats"] == [0, 0]
        assert told[rank]["called"] == [] and not told[rank]["role"]["peers"]
        assert told[rank]["fields"] == ["cu_seqlens", "max_seqlen", "position_ids"]
    readers = [rank for rank in range(8) if told[rank]["opened"]]
    assert readers == {"direct": [0, 1, 6, 7], "broadcast": [0, 6], "share": [0]}[delivery]
    assert all(told[rank]["stats"][1] == 1 for rank in readers)


def costs(rank: int, path: str, texts: Sequence[str]) -> list[tuple[int, int]]:
    """Bytes read and files opened by this rank in an epoch of each layout."""
    recipe = recipe_of(path, length=64, sequences=16, epochs=1)
    spent: list[tuple[int, int]] = []
    for text in texts:
        bytes_read = opens = 0
        with mf.Feed(recipe, parse(text), transport=mf.Transport(delivery="share"), pad_rows=True) as feed:
            for step in feed:
                for _ in step.microbatches:
                    pass
                bytes_read += step.stats.bytes_read
                opens += step.stats.opens
        spent.append((bytes_read, opens))
    return spent


def test_bytes_and_opens_of_a_node_do_not_grow_with_tp_cp_pp(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", num_tokens=6_400 + 1)
    layouts, path = ("tp8", "pp8", "cp8", "tp2-pp4", "cp4-tp2", "tp2-cp2-pp2"), str(tmp_path / "text")
    alone = 100 * 65 * 2  # a window and its last label, uint16
    assert costs(0, path, ["tp1"]) == [(alone, 1)]
    told = np.array(world.run(costs, 8, path, layouts)).sum(axis=0)
    assert told.tolist() == [[alone, 1]] * len(layouts)


# -- a trainer's own readers -----------------------------------------------------------------------

POLICIES = [
    ("tp2-cp2-pp2", "broadcast", {0, 2}),  # Megatron's: tp rank 0 of the first stage, for all stages
    ("tp2-cp2-pp2", "broadcast", {0, 2, 4, 6}),
    ("tp2-cp2-pp2", "broadcast", {5}),
    ("tp2-cp2-pp2", "share", {3}),
    ("tp2-pp4", "share", {4}),  # a reader that needs nothing itself
    ("tp2-pp4", "broadcast", {0}),
    ("tp2-dp2-pp2", "auto", {0, 2}),
    ("tp2-cp2-pp2", "tree", {5}),
    ("tp2-pp4", "tree", {4}),
    ("pp2-tp4", "direct", set(range(8))),
]


def own_readers(rank: int, path: str) -> list[str]:
    recipe, wrong = recipe_of(path, length=32, sequences=8, epochs=1), []
    for text, delivery, readers in POLICIES:
        layout = parse(text, ranks_per_node=2 if delivery == "tree" else None)
        # those that are left out may stay away, so what they begin is known by name
        name = f"{text} {delivery} {sorted(readers)}"
        transport = mf.Transport(delivery=delivery, readers=readers, name=name, timeout_s=600)
        mine = mf.Feed(recipe, layout, rank, verify=True, transport=transport, pad_rows=True)
        left_out = not mine.role.reads and mine.role.source is None
        if left_out and rank % 2:  # some that are left out call, some never do
            continue
        expected = simulated(recipe, layout, 3, rank)
        opens = 0
        with mine as feed:
            got = []
            for step in itertools.islice(feed, 3):
                got.append(seen_step(step, step.microbatches))
                opens += step.stats.opens
        if got != expected:
            wrong.append(f"{text} {delivery} {readers}: {first_difference(got, expected)}")
        if opens and rank not in readers:
            wrong.append(f"{text} {delivery} {readers}: rank {rank} opened the store")
    return wrong


def test_a_trainer_names_the_readers(corpus: str) -> None:
    assert world.run(own_readers, 8, corpus) == [[]] * 8


def without_default_group(rank: int, path: str, where: dict[str, Any]) -> list[str]:
    if rank in (2, 5):
        return []  # middle stages: they never import, call or meet anything
    assert not dist.is_initialized()
    if "file" in where:
        store: Any = dist.FileStore(where["file"], 6)
    else:
        store = dist.TCPStore("127.0.0.1", where["port"], None, False)
    recipe, wrong = recipe_of(path, length=32, sequences=8, epochs=1), []
    layout = mf.Layout(tp=2, pp=3, table=(0, 1, 2, 5, 3, 4))
    for delivery in ("direct", "share", "broadcast"):
        for verify in (False, True):
            feed = mf.Feed(
                recipe,
                layout,
                rank,
                transport=mf.Transport(delivery=delivery, rendezvous=store, timeout_s=600),
                verify=verify,
            )
            if take(feed, 3) != simulated(recipe, layout, 3, rank):
                wrong.append(delivery)
    return wrong


@some(1)
@pytest.mark.parametrize("kind", ["file", "port"])
def test_no_default_group_is_needed(corpus: str, tmp_path: Path, kind: str) -> None:
    served = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    where = {"file": str(tmp_path / "store")} if kind == "file" else {"port": served.port}
    assert world.run(without_default_group, 6, corpus, where, distributed=False) == [[]] * 6


def different_pasts(rank: int, path: str) -> list[Any]:
    """Ranks that are in different numbers of groups, as with Megatron's embedding groups."""
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    recipe = recipe_of(path, length=32, sequences=8)
    seen = []
    for _ in range(3):  # and the same groups again and again
        with mf.Feed(
            recipe, parse("tp2-pp2"), transport=mf.Transport(delivery="broadcast", timeout_s=600), verify=True
        ) as feed:
            seen.append(take(feed, 2))
    return seen


def test_ranks_with_different_pasts_meet(corpus: str) -> None:
    expected = [
        simulated(recipe_of(corpus, length=32, sequences=8), parse("tp2-pp2"), 2, r) for r in range(4)
    ]
    told = world.run(different_pasts, 4, corpus)
    assert told == [[each] * 3 for each in expected]


def two_feeds(rank: int, path: str) -> list[bool]:
    """Training and validation of one job, interleaved."""
    train, valid = recipe_of(path, sequences=8), recipe_of(path, sequences=4, seed=9)
    layout, good = parse("tp2-dp2"), []
    for delivery in ("broadcast", "share"):
        with (
            mf.Feed(train, layout, transport=mf.Transport(delivery=delivery, timeout_s=600)) as one,
            mf.Feed(valid, layout, transport=mf.Transport(delivery=delivery, timeout_s=600)) as two,
        ):
            pairs = [
                (seen_step(a, a.microbatches), seen_step(b, b.microbatches))
                for a, b in itertools.islice(zip(one, two), 4)
            ]
        good.append([a for a, _ in pairs] == simulated(train, layout, 4, rank))
        good.append([b for _, b in pairs] == simulated(valid, layout, 4, rank))
    return good


def test_two_feeds_of_one_job_keep_apart(corpus: str) -> None:
    assert world.run(two_feeds, 4, corpus) == [[True] * 4] * 4


def test_one_process_needs_no_torch_distributed(corpus: str) -> None:
    recipe = recipe_of(corpus, epochs=1)
    assert not dist.is_initialized()
    feed = mf.Feed(recipe)
    seen = take(feed)
    assert feed.delivery == "direct" and seen == simulated(recipe, mf.Layout(), 100, 0)
    assert len(set(ledger(seen))) == 2_700 // 64
    with pytest.raises(mf.errors.StateError, match="the stream has ended"):
        next(iter(feed))


def test_a_deep_prefetch_takes_no_more_descriptors_than_a_message_carries(corpus: str) -> None:
    assert world.run(deep_prefetch, 2, corpus) == [True, True]


def deep_prefetch(rank: int, path: str) -> bool:
    recipe = recipe_of(path, sequences=4, epochs=3)
    feed = mf.Feed(
        recipe, parse("tp2"), transport=mf.Transport(delivery="share", prefetch=400, timeout_s=600)
    )
    return take(feed) == simulated(recipe, parse("tp2"), 10**6, rank)


def broken_column(rank: int, path: str, delivery: str) -> str:
    recipe = extras_recipe(path, length=32, sequences=4)
    layout = parse("tp4", ranks_per_node=2 if delivery == "tree" else None)
    feed = mf.Feed(recipe, layout, transport=mf.Transport(delivery=delivery, timeout_s=600))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_deliveries.image_of", lambda index: np.array([object()]))
        with pytest.raises(mf.MeshfeedError) as raised:
            take(feed, 50)
    return str(raised.value)


@pytest.mark.parametrize("delivery", ["broadcast", "share", "tree"])
def test_a_column_that_cannot_travel_is_named_on_every_rank(corpus: str, delivery: str) -> None:
    assert all("'image'" in told for told in world.run(broken_column, 4, corpus, delivery))


def test_fields_are_torch_tensors_and_the_batch_is_read_only(corpus: str) -> None:
    with mf.Feed(extras_recipe(corpus)) as feed:
        microbatches = list(next(iter(feed)).microbatches)
    for microbatch in microbatches:
        assert microbatch["tokens"].dtype == torch.int64 and microbatch["weight"].dtype == torch.float32
        assert all(isinstance(image, torch.Tensor) for image in microbatch["image"])
        assert all(type(caption) is bytes for caption in microbatch["caption"])
        with pytest.raises(TypeError):
            microbatch["tokens"] = 1
