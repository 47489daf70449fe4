"""Which source every sequence comes from, on every rank, and the loss of each source."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshfeed as mf
import world
from meshfeed.order import draws_of_step
from meshfeed.store import DatasetWriter
from observe import seen_step, simulated
from pictures import Listen, Look, recipe_over, write_pictures
from soak import SEED, cases
from user_datasets import Plain

MEANS = {"short": 12, "middle": 60, "long": 250}
BASE = 16_000
"""The tokens of source s begin at (s + 1) * BASE: each tells where it comes from, and padding is 0."""
Documents = dict[str, list[np.ndarray]]


def write_sources(folder: Path, *, masked: bool = False) -> Documents:
    """A store for each source. masked: with a column loss_mask of weights."""
    folder.mkdir(exist_ok=True)
    rng, made = np.random.default_rng(4), Documents()
    columns: dict[str, Any] = {"tokens": np.uint16} | ({"loss_mask": np.uint8} if masked else {})
    for source, (name, mean) in enumerate(MEANS.items()):
        made[name] = []
        with DatasetWriter(folder / name, columns) as writer:
            for size in rng.integers(1, 2 * mean, 9_000 // mean):
                tokens = (rng.integers(0, BASE, size) + (source + 1) * BASE).astype(np.uint16)
                made[name].append(tokens)
                weights = rng.choice(np.array([0, 1, 1, 3], np.uint8), size)
                writer.add_document(tokens=tokens, **({"loss_mask": weights} if masked else {}))
    return made


def mixture_of(folder: Path) -> mf.Mixture:
    shares = {"short": 0.5, "middle": 0.3, "long": 0.2}
    return mf.Mixture({name: (mf.open(folder / name), share) for name, share in shares.items()})


def recipe_of(folder: Path, rule: Any, sequences: int = 24) -> mf.Recipe:
    return mf.Recipe(data=mixture_of(folder), sequence=rule, batch=mf.Batch(sequences=sequences), seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sources")
    write_sources(made)
    write_sources(made / "masked", masked=True)
    return made


# -- sixteen ranks, against one process that reads the documents themselves ----------------------------

LAYOUT = mf.Layout.parse("tp2-cp2-dp2-pp2", ranks_per_node=4)
STEPS = 3
JOBS = (
    *(("dynamic_cp", delivery) for delivery in ("direct", "broadcast", "share", "tree")),
    ("fixed shapes", "share"),
    ("windows", "tree"),
)


def job_of(folder: Path, how: str) -> tuple[mf.Recipe, dict[str, Any]]:
    if how == "windows":
        return recipe_of(folder, mf.Windows(30)), {"micro_batch_size": 3}
    fixed = {"fixed_shapes": True, "max_sequences": 9} if how == "fixed shapes" else {}
    packing = mf.Packing(capacity=100, policy="dynamic_cp", oversize="split", **fixed)
    return recipe_of(folder, mf.Documents()), {"packing": packing}


def loss_of(token: Any, label: Any) -> Any:
    """Of one token, or of tensors of them."""
    return (token * 31 + label * 17) % 1009 / 1009


def train(rank: int, folder: Path) -> list[Any]:
    """The sums of each step on the ranks of the last stage, and the sources of all microbatches on every rank."""
    me = LAYOUT.coord(rank)
    beside = LAYOUT.rank_of(me._replace(pp=1 - me.pp))
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in LAYOUT.groups("dp-cp").tolist()}
    group = groups[tuple(LAYOUT.group_of(rank, "dp-cp").tolist())]
    seen: list[Any] = []
    for how, delivery in JOBS:
        recipe, options = job_of(folder, how)
        sums, sources = torch.zeros(STEPS, 3, 2, dtype=torch.float64), []
        with mf.Feed(
            recipe, LAYOUT, transport=mf.Transport(delivery=delivery, timeout_s=600), **options
        ) as feed:
            assert feed.sources == ("short", "middle", "long")
            for step in itertools.islice(feed, STEPS):
                assert step.sources == feed.sources
                for microbatch in step.microbatches:
                    sources.append(microbatch.source.tolist())
                    if me.pp == 0:  # what a pipeline computes of the tokens goes to its last stage
                        dist.send(microbatch["tokens"], beside)
                        continue
                    tokens = torch.empty_like(microbatch["labels"])
                    dist.recv(tokens, beside)
                    losses = loss_of(tokens.double(), microbatch["labels"].double())
                    sums[step.index] += mf.loss_by_source(losses, microbatch)
        if me.pp == 1:
            dist.all_reduce(sums, group=group)
        seen.append((sums.numpy() if me.pp == 1 else None, sources))
    return seen


def trained_alone(recipe: mf.Recipe, documents: Documents) -> np.ndarray:
    """The same sums of one process, token by token."""
    sums = np.zeros((STEPS, len(documents), 2))
    for step in range(STEPS):
        draws = draws_of_step(recipe, step)
        assert not draws.epoch.any() and set(draws.source.tolist()) == {0, 1, 2}
        for source, index in zip(draws.source.tolist(), draws.index.tolist()):
            of_source = list(documents.values())[source]
            if isinstance(recipe.sequence, mf.Windows):
                begin = index * recipe.sequence.length
                run = np.concatenate(of_source)[begin : begin + recipe.sequence.length + 1]
            else:
                run = of_source[index]
            for token, label in itertools.pairwise(run.tolist()):
                sums[step, source] += loss_of(token, label), 1
    return sums


def test_the_loss_of_each_source_is_that_of_one_process(tmp_path: Path) -> None:
    documents = write_sources(tmp_path)
    ranks = world.run(train, LAYOUT.world_size, tmp_path)
    for at, (how, delivery) in enumerate(JOBS):
        recipe, _ = job_of(tmp_path, how)
        wanted = trained_alone(recipe, documents)
        assert (wanted[..., 1] > 0).all()
        for rank, seen in enumerate(ranks):
            me, (sums, sources) = LAYOUT.coord(rank), seen[at]
            twin = ranks[LAYOUT.rank_of(me._replace(tp=0, pp=0))][at]
            assert sources == twin[1], f"{how}, {delivery}, {me}: as on its first stage"
            if me.pp == 1:
                assert (sums[..., 1] == wanted[..., 1]).all(), (how, delivery, me)
                np.testing.assert_allclose(sums[..., 0], wanted[..., 0], rtol=1e-12)
                np.testing.assert_allclose(sums[..., 0] / sums[..., 1], wanted[..., 0] / wanted[..., 1], 1e-6)


# -- any rule, any layout: what the tokens themselves say ---------------------------------------------

LAYOUTS = ("dp1", "dp3", "cp2", "cp4", "cp2-dp2", "tp2-dp2", "pp2", "cp2-pp3")


def origin(tokens: torch.Tensor) -> torch.Tensor:
    """The source of each token, -1 for padding."""
    return tokens // BASE - 1


KINDS = ("windows", "masked", "documents", "weights", "fixed shapes")


def drawn_job(rng: np.random.Generator, kind: str, folder: Path) -> tuple[mf.Recipe, dict[str, Any]]:
    """A recipe of a kind, and how it is cut."""
    sequences = int(rng.integers(1, 21))
    if kind in ("windows", "masked"):
        length, rows = int(rng.integers(4, 41)), int(rng.integers(1, 5))
        flags = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        rule: Any = mf.Windows(length, **{flag: bool(rng.integers(2)) for flag in flags})
        if kind == "masked":
            rule = mf.Masked(length, vocab_size=4 * BASE, mask_token=5, random=0.0)
        return recipe_of(folder, rule, sequences), {"micro_batch_size": rows}
    fixed = {"fixed_shapes": True, "max_sequences": int(rng.integers(2, 7))} if kind == "fixed shapes" else {}
    policy: Any = str(rng.choice(["in_order", "balanced", "dynamic_cp"]))
    packing = mf.Packing(
        capacity=int(rng.integers(64, 300)),
        policy=policy,
        oversize="split" if rng.random() < 0.5 else "drop",
        align=mf.Align(sequence=int(rng.choice([1, 3]))),
        **fixed,
    )
    split = str(rng.choice(["zigzag", "contiguous", "pack_contiguous"]))
    recipe = recipe_of(folder / "masked" if kind == "weights" else folder, mf.Documents(), sequences)
    return recipe, {"packing": packing, "cp_split": split}


def check_sources(microbatch: mf.Microbatch, rows: int) -> None:
    """Each sequence of the microbatch is of the source that its tokens say."""
    source, num = microbatch.source, len(microbatch.draws)
    assert source.dtype == torch.int64 and "source" not in set(microbatch)
    assert (source[:num] >= 0).all() and (source[num:] == -1).all()
    if "sequence_ids" in microbatch:
        assert source.shape == microbatch["cu_seqlens"][1:].shape == microbatch["cu_seqlens_padded"][1:].shape
        ids = microbatch["sequence_ids"][0]
        told = torch.where(ids >= 0, source[ids.clamp(min=0)], -1)[None]
    else:
        assert source.shape == (rows,)
        told = source[:, None]
    for name in {"tokens", "labels"} & set(microbatch):
        real = microbatch[name] >= BASE
        assert torch.equal(origin(microbatch[name])[real], told.expand_as(real)[real]), name


@pytest.mark.parametrize("life", range(cases(20, 400)))
def test_sources_and_losses_are_what_the_tokens_say(folder: Path, life: int) -> None:
    rng = np.random.default_rng((SEED, life))
    kind, layout = KINDS[life % len(KINDS)], mf.Layout.parse(str(rng.choice(LAYOUTS)))
    recipe, options = drawn_job(rng, kind, folder)
    rows, shapes = options.get("micro_batch_size", 0), set[torch.Size]()
    made = list(mf.simulate(recipe, layout, 2, **options))
    for step, each in itertools.groupby(made, key=lambda one: one.batch):
        found, wanted = torch.zeros(2, 3, 2, dtype=torch.float64)
        for made_by_rank in each:
            for microbatch in made_by_rank.microbatches:
                check_sources(microbatch, rows)
                shapes.add(microbatch.source.shape)
                if "labels" not in microbatch or made_by_rank.coord.tp:
                    continue
                labels, mask = microbatch["labels"], microbatch["loss_mask"]
                losses = loss_of(microbatch["position_ids"], labels)
                losses[mask == 0] = torch.nan  # of what bears no loss, no loss matters
                found += mf.loss_by_source(losses, microbatch)
                for source in range(3):
                    mine = (mask != 0) & (origin(labels) == source)
                    wanted[source] += torch.stack(((losses * mask)[mine].double().sum(), mine.sum()))
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        assert found[:, 1].sum() == step.valid_tokens
    assert kind not in ("windows", "masked", "fixed shapes") or len(shapes) == 1, "one shape for all"


def test_no_rank_reads_or_waits_for_it(folder: Path) -> None:
    """Tensors without data, as on a device that is not waited for: nothing is asked of their values."""
    for rule, options in ((mf.Windows(8), {"micro_batch_size": 2}), (mf.Documents(), PACKED)):
        (made,) = mf.simulate(recipe_of(folder, rule), mf.Layout(), 1, **options)
        for microbatch in made.microbatches:
            fields = {name: value.to("meta") for name, value in microbatch.items()}
            there = microbatch.with_fields(fields)
            sums = mf.loss_by_source(torch.empty_like(there["labels"], dtype=torch.float32), there)
            assert (sums.shape, sums.dtype, sums.device.type) == ((3, 2), torch.float64, "meta")
            assert there.source.device.type == "meta"


# -- each further way to a microbatch -------------------------------------------------------------------

PACKED: dict[str, Any] = {"packing": mf.Packing(capacity=600, oversize="split")}


def last(microbatch: mf.Microbatch) -> torch.Tensor:
    return mf.loss_by_source(loss_of(microbatch["position_ids"], microbatch["labels"]), microbatch)


def test_virtual_stages_each_know_it(folder: Path) -> None:
    recipe = recipe_of(folder, mf.Documents())
    with mf.Feed(recipe, stage_map=mf.StageMap(pp=1, vpp=2), **PACKED) as feed:
        for steps in itertools.islice(zip(*feed.virtual_stages), 2):
            for first, second in zip(*(step.microbatches for step in steps), strict=True):
                check_sources(first, 0)
                assert torch.equal(first.source, second.source)
                assert last(second)[:, 1].sum() == second["loss_mask"].sum()
                with pytest.raises(mf.errors.OptionError, match=r"'loss_mask'.* only tokens, .*stage"):
                    mf.loss_by_source(torch.zeros(first["tokens"].shape), first)


def test_a_microbatch_that_was_pickled_knows_it(folder: Path) -> None:
    with mf.Feed(recipe_of(folder, mf.Windows(20), 7), micro_batch_size=4, pad_rows=True) as feed:
        for microbatch in list(next(iter(feed)).microbatches):
            again = pickle.loads(pickle.dumps(microbatch))
            assert torch.equal(again.source, microbatch.source)
            assert torch.equal(last(again), last(microbatch))
    assert microbatch.source.tolist()[-1] == -1, "the eighth row is a dummy"
    microbatch.source.fill_(7)
    assert 7 not in microbatch.source, "each is a tensor of its own"


def test_a_store_alone_is_one_source(folder: Path) -> None:
    recipe = mf.Recipe(
        data=mf.open(folder / "long"), sequence=mf.Windows(16), batch=mf.Batch(sequences=4), steps=1
    )
    with mf.Feed(recipe, micro_batch_size=4) as feed:
        (microbatch,) = next(iter(feed)).microbatches
        assert feed.sources == ("",) and microbatch.source.tolist() == [0] * 4
        assert last(microbatch)[:, 1].tolist() == [64]


def test_a_source_that_an_amendment_adds_counts_from_its_step_on(folder: Path, tmp_path: Path) -> None:
    """Though a rank may know of it earlier: sums of one step have one shape on all ranks."""
    data = mf.Mixture({name: (mf.open(folder / name), 1) for name in ("short", "middle")})
    recipe = mf.Recipe(data=data, sequence=mf.Documents(), batch=mf.Batch(sequences=8), seed=3)
    with mf.Feed(recipe, ledger=tmp_path / "ledger.jsonl", **PACKED) as feed:
        at, told = 8, []
        for step in feed:
            if step.index == 0:
                assert feed.amend(mf.amendments.Grow("middle", str(folder / "long")), at=at) == at
            told.append(step.sources)
            for microbatch in step.microbatches:
                check_sources(microbatch, 0)
                assert last(microbatch).shape == (len(step.sources), 2)
            if step.index == at + 1:
                break
        further = f"middle+{mf.open(folder / 'long').fingerprint[:8]}"
        assert told == [("short", "middle")] * at + [("short", "middle", further)] * 2
        assert feed.sources == told[-1]
        again = mf.simulate(recipe.amended(feed.ledger), mf.Layout(), at + 2, **PACKED)
    assert [made.batch.sources for made in again] == told


def test_sources_of_images(tmp_path: Path) -> None:
    flat = [write_pictures(tmp_path / name, count=30, seed=seed) for seed, name in enumerate("ab")]
    data = mf.Mixture({name: (mf.open(tmp_path / name), 1) for name in "ab"})
    recipe = recipe_over(data, mf.Multimodal(image=Look(), audio=Listen()))
    (made,) = mf.simulate(recipe, mf.Layout(), 1, packing=mf.Packing(capacity=60))
    counts = torch.zeros(2)
    for microbatch in made.microbatches:
        ids, starts = microbatch["sequence_ids"][0], microbatch["cu_seqlens"]
        assert microbatch.source.shape == starts[1:].shape
        for at, (source, index) in enumerate(zip(microbatch.source.tolist(), microbatch.draws.index)):
            assert microbatch["tokens"][0][ids == at].tolist() == flat[source][index]
            counts[source] += microbatch["loss_mask"][0][ids == at].sum()
        counts -= last(microbatch)[:, 1]
    assert counts.tolist() == [0, 0]


@pytest.mark.parametrize("workers", [0, 2])
def test_sources_of_images_grow_while_they_are_trained(tmp_path: Path, workers: int) -> None:
    """The second one begins sooner, so the first one gets another number."""
    for seed, name in enumerate("abcd"):
        write_pictures(tmp_path / name, count=20, seed=seed)
    data = mf.Mixture({name: (mf.open(tmp_path / name), 1) for name in "ab"})
    recipe = recipe_over(data, mf.Multimodal(image=Look(), audio=Listen()))
    packing, seen = mf.Packing(capacity=60), list[Any]()
    options: dict[str, Any] = {"machine": mf.Machine(workers=workers), "ledger": tmp_path / "ledger.jsonl"}
    with mf.Feed(recipe, packing=packing, **options) as feed:
        for step in feed:
            seen += [seen_step(step, step.microbatches)]
            if step.index == 0:
                assert feed.amend(mf.amendments.Grow("a", str(tmp_path / "c")), at=12) == 12
            if step.index == 1:
                assert feed.amend(mf.amendments.Grow("b", str(tmp_path / "d"))) < 12
            if step.index == 16:
                break
        amended = recipe.amended(feed.ledger)
    assert seen == simulated(amended, mf.Layout(), 17, 0, packing=packing)
    drawn = {source for step in seen for each in step["microbatches"] for source, *_ in each["draws"]}
    assert drawn == {*range(4)}


def items_of(number: int) -> mf.Mapped:
    lengths = np.arange(1, 31)
    made = {"source": 9, "loss_mask": np.ones(1)}
    return mf.Mapped(
        Plain(30, lambda at: {"ids": np.full(lengths[at.index], number), **made}), lengths=lengths
    )


def samples_of(*fields: Any, packed: bool = False) -> mf.Recipe:
    data = mf.Mixture({name: (items_of(number), 1) for number, name in enumerate("ab")})
    rule = mf.Samples(*fields, packed=packed)
    return mf.Recipe(data=data, sequence=rule, batch=mf.Batch(sequences=6), seed=1)


def test_rows_of_items_have_no_dummies() -> None:
    recipe = samples_of({"ids": "int64", "loss_mask": "float64"})
    for made in mf.simulate(recipe, mf.Layout(dp=3), 1, micro_batch_size=4):
        (microbatch,) = made.microbatches
        source = microbatch.source.tolist()
        assert [int(ids[0]) for ids in microbatch["ids"]] == source and len(source) == (4, 2, 0)[made.rank]
        sums = mf.loss_by_source(torch.ones(len(source), 1), microbatch)
        assert sums.tolist() == [[source.count(s)] * 2 for s in range(2)]


def test_packs_of_items() -> None:
    ids = mf.Field(name="ids", dtype="int64", split=True, pad=-1)
    (made,) = mf.simulate(samples_of(ids, packed=True), mf.Layout(), 1, packing=mf.Packing(capacity=64))
    for microbatch in made.microbatches:
        of_token = microbatch.source[microbatch["sequence_ids"].long()]
        assert torch.equal(of_token, microbatch["ids"])
        with pytest.raises(mf.errors.OptionError, match=r"'loss_mask'"):
            mf.loss_by_source(torch.zeros(of_token.shape), microbatch)


def test_a_field_of_that_name_is_another_thing() -> None:
    where = mf.Field(name="source", dtype="int64", stages=("first",))
    recipe = samples_of({"loss_mask": "float64"}, where)
    for made in mf.simulate(recipe, mf.Layout(pp=2), 1, micro_batch_size=6):
        (microbatch,) = made.microbatches
        counts = mf.loss_by_source(torch.ones(6, 1), microbatch)[:, 1]
        assert counts.tolist() == np.bincount(microbatch.draws.source).tolist()
        assert microbatch.source.tolist() == microbatch.draws.source.tolist()
        assert ("source" in microbatch) == ("source" in dict(microbatch)) == (made.coord.pp == 0)
        if made.coord.pp == 0:
            assert microbatch["source"].tolist() == [9] * 6


def test_an_exchange_names_no_source() -> None:
    items = [{"tokens": np.arange(5), "labels": np.arange(5), "loss_mask": np.ones(5, np.float32)}]
    with mf.Exchange(items, mf.Layout(), packing=mf.Packing(capacity=8)) as exchange:
        (microbatch,) = next(iter(exchange)).microbatches
    with pytest.raises(mf.errors.OptionError, match=r"Exchange"):
        _ = microbatch.source
    with pytest.raises(mf.errors.OptionError, match=r"Exchange"):
        mf.loss_by_source(torch.zeros(1, 5), microbatch)


@pytest.mark.parametrize("shape", [(8, 4), (32,), (4, 8, 1), (1, 8)])
def test_losses_of_another_shape_are_refused(folder: Path, shape: Sequence[int]) -> None:
    (made,) = mf.simulate(recipe_of(folder, mf.Windows(8), 4), mf.Layout(), 1, micro_batch_size=4)
    with pytest.raises(mf.errors.OptionError, match=r"shape .*\[4, 8\]"):
        mf.loss_by_source(torch.zeros(*shape), made.microbatches[0])


def test_sums_keep_no_graph(folder: Path) -> None:
    (made,) = mf.simulate(recipe_of(folder, mf.Windows(8), 4), mf.Layout(), 1, micro_batch_size=4)
    losses = torch.ones(4, 8, requires_grad=True)
    sums = mf.loss_by_source(losses, made.microbatches[0])
    assert not sums.requires_grad and sums[:, 0].sum() == 32
