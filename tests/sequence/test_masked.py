"""Masked: what is hidden, where, how much; equal on all ranks and layouts, other in each epoch."""

from __future__ import annotations

from pathlib import Path
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
from meshfeed.order import draws_of_step
from meshfeed.plan import Align, plan_fixed
from meshfeed.sequence import portions_of
from meshfeed.store import IndexedWriter
from observe import simulated, take
from soak import cases

MASK, CLS, SEP, PAD, VOCAB = 900, 901, 902, 903, 100
SIZES = [5, 0, 1, 33, 12, 7, 200, 2, 16, 29, 3, 64, 31, 30, 8, 15]


def rule_of(length: int = 32, **options: Any) -> mf.Masked:
    special = {"first_token": CLS, "last_token": SEP, "pad_token": PAD}
    return mf.Masked(length, vocab_size=VOCAB, mask_token=MASK, **(special | options))


def documents(seed: int = 4) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, size).astype(np.uint16) for size in SIZES]


def write(path: Path, seed: int = 4) -> str:
    with IndexedWriter(path, np.uint16) as writer:
        for document in documents(seed):
            writer.add_document(document)
    return str(path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("masked") / "c")


def recipe_of(path: str, rule: mf.Masked | None = None, **options: Any) -> mf.Recipe:
    given = {"batch": mf.Batch(sequences=6), "seed": 7, "epochs": 2} | options
    return mf.Recipe(data=mf.open(path), sequence=rule or rule_of(), **given)


def chunks_of(cp: int, rank: int, size: int, split: str) -> list[int]:
    if cp == 1:
        return list(range(size))
    if split == "contiguous":
        return list(range(rank * size // cp, (rank + 1) * size // cp))
    part = size // (2 * cp)
    return [c * part + i for c in (rank, 2 * cp - 1 - rank) for i in range(part)]


def row_of(rule: mf.Masked, document: np.ndarray, width: int, *key: int) -> dict[str, list[Any]]:
    """One whole row in plain loops, from the masks that the rule tells."""
    lead, trail = rule.first_token is not None, rule.last_token is not None
    shown = [int(token) for token in document[: rule.length - lead - trail]]
    masks = rule.masks(len(shown), *key)
    tokens, labels = list(shown), [-100] * len(shown)
    for place, token in zip(masks.places.tolist(), masks.tokens.tolist()):
        labels[place] = shown[place]
        tokens[place] = shown[place] if token < 0 else token
    tokens = [rule.first_token] * lead + tokens + [rule.last_token] * trail
    labels = [-100] * lead + labels + [-100] * trail
    rest = width - len(tokens)
    return {
        "tokens": tokens + [rule.pad_token] * rest,
        "labels": labels + [-100] * rest,
        "loss_mask": [float(label != -100) for label in labels] + [0.0] * rest,
        "padding_mask": [False] * len(tokens) + [True] * rest,
        "position_ids": [*range(len(tokens))] + [0] * rest,
    }


@settings(max_examples=cases(30, 600), deadline=None)
@given(
    cp=st.integers(1, 3),
    dp=st.integers(1, 3),
    split=st.sampled_from(["zigzag", "contiguous"]),
    length=st.sampled_from([3, 16, 31, 32]),
    special=st.sampled_from([{}, {"first_token": None}, {"first_token": None, "last_token": None}]),
    micro_batch_size=st.integers(1, 4),
    step=st.integers(0, 5),
)
def test_every_field_of_every_rank(
    corpus: str,
    cp: int,
    dp: int,
    split: Any,
    length: int,
    special: dict[str, None],
    micro_batch_size: int,
    step: int,
) -> None:
    rule, given_documents = rule_of(length, **special), documents()
    recipe, layout = recipe_of(corpus, rule), mf.Layout(dp=dp, cp=cp)
    width = int(Align().padded(np.array(length), cp))
    hidden = real = 0
    drawn = []
    for got in mf.simulate(
        recipe, layout, [step], micro_batch_size=micro_batch_size, cp_split=split, no_loss="allow"
    ):
        places = chunks_of(cp, got.coord.cp, width, split)
        for m in got.microbatches:
            keys = list(zip(m.draws.source.tolist(), m.draws.epoch.tolist(), m.draws.index.tolist()))
            rows = [row_of(rule, given_documents[key[2]], width, 7, *key) for key in keys]
            for name in rule.fields:
                value = m[name.name]
                assert value.shape == (micro_batch_size, width // cp)
                for r, row in enumerate(rows):
                    assert value[r].tolist() == [row[name.name][p] for p in places], (name.name, keys[r])
                pads = {
                    "tokens": PAD,
                    "labels": -100,
                    "loss_mask": 0,
                    "padding_mask": True,
                    "position_ids": 0,
                }
                assert (value[len(rows) :] == pads[name.name]).all()
            hidden += int(m["loss_mask"].sum())
            real += int((~m["padding_mask"]).sum())
            drawn += keys if got.coord.cp == 0 else []
    assert hidden == got.batch.valid_tokens
    assert real == got.batch.tokens
    assert len(drawn) == len(set(drawn)) == len(got.batch.draws)


def whole_rows(path: str, text: str, **options: Any) -> dict[tuple[int, int], Any]:
    """Every row that a job sees in two epochs, put together from its ranks: (epoch, index) -> tokens, labels."""
    layout, rows = mf.Layout.parse(text), {}
    for got in mf.simulate(recipe_of(path), layout, 10**6, **options):
        places = chunks_of(layout.cp, got.coord.cp, 32, options.get("cp_split", "zigzag"))
        for m in got.microbatches:
            for r, key in enumerate(zip(m.draws.epoch.tolist(), m.draws.index.tolist())):
                row = rows.setdefault(key, {"tokens": np.full(32, -1), "labels": np.full(32, -1)})
                for name in row.keys() & m.fields.keys():
                    row[name][places] = m[name][r]
    return rows


def test_masks_are_one_function_of_recipe_and_place(corpus: str) -> None:
    reference = whole_rows(corpus, "tp1")
    assert len(reference) == 2 * len(SIZES)
    for text, options in (
        ("dp4", {"micro_batch_size": 2}),
        ("cp2-dp2", {}),
        ("cp4", {"cp_split": "contiguous"}),
        ("tp2-cp2-pp2", {"micro_batch_size": 3}),
    ):
        rows = whole_rows(corpus, text, **options)
        assert rows.keys() == reference.keys()
        for key, row in rows.items():
            assert all(np.array_equal(row[name], reference[key][name]) for name in row), (text, key)
    for index, size in enumerate(SIZES):
        first, second = (reference[epoch, index]["labels"] != -100 for epoch in (0, 1))
        if size > 15:
            assert not np.array_equal(first, second), "each epoch hides others"


def test_what_is_hidden_and_by_what() -> None:
    rule = rule_of(2002)
    seen = [
        rule.masks(2000, seed, source, epoch, 5) for seed in (0, 1) for source in (0, 1) for epoch in (0, 1)
    ]
    assert len({masks.places.tobytes() for masks in seen}) == len(seen)
    where = np.concatenate([masks.places for masks in seen])
    tokens = np.concatenate([masks.tokens for masks in seen])
    assert all(masks.places.size == 300 == np.unique(masks.places).size for masks in seen)
    assert abs(where.mean() - 1000) < 60 and where.min() < 20 and where.max() > 1980
    shares = [(tokens == MASK).mean(), ((tokens >= 0) & (tokens < VOCAB)).mean(), (tokens == -1).mean()]
    assert np.allclose(shares, [0.8, 0.1, 0.1], atol=0.03)
    assert sum(shares) == pytest.approx(1)
    assert np.unique(tokens[(tokens >= 0) & (tokens < VOCAB)]).size > 60
    golden = rule_of(mask_fraction=0.5, replace=0.3, random=0.4).masks(12, 1, 2, 3, 4)
    assert golden.places.tolist() == [1, 2, 8, 9, 10, 11]  # a resume elsewhere must find the same
    assert golden.tokens.tolist() == [900, 900, -1, 91, 900, 4]


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.15, 0.5, 1.0])
def test_how_many_are_hidden_is_known_from_lengths(fraction: float) -> None:
    rule = rule_of(mask_fraction=fraction)
    sizes = np.arange(200)
    counts = rule.num_hidden(sizes)
    assert counts[0] == 0
    assert (counts[1:] >= (fraction > 0)).all() and (counts <= sizes).all()
    assert (np.abs(counts - sizes * fraction) <= np.maximum(0.5 + 1e-9, 1 - sizes * fraction)).all()
    assert [rule.masks(size, 1, 0, 0, size).places.size for size in sizes.tolist()] == counts.tolist()


def test_documents_of_several_sources(tmp_path: Path) -> None:
    stores = [mf.open(write(tmp_path / name, seed)) for name, seed in (("a", 1), ("b", 2))]
    recipe: Any = SimpleNamespace(sources=tuple(stores), seed=3, source_keys=range(len(stores)))
    draws = mf.order.Draws(
        np.array([1, 0, 0, 1, 1], np.int32), np.array([0, 0, 2, 1, 0]), np.array([3, 3, 9, 1, 11])
    )
    rule, host = rule_of(), OnHost()
    with stores[0], stores[1]:
        lengths = rule.lengths(recipe, draws)
        plan = plan_fixed(lengths, dp=1, cp=2, micro_batch_size=5, align=Align(sequence=32))
        rows = [
            row_of(rule, documents(1 + s)[i], 32, 3, s, e, i)
            for s, e, i in zip(draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist())
        ]
        for rank, group in ((0, [0]), (1, [0, 1])):
            (portion,) = portions_of(
                plan,
                draws,
                plan.lengths,
                rank,
                group=group,
                rows=5,
                split="zigzag",
                together=1,
                rank_of_dp_cp=np.arange(2),
            )
            rule.announce(recipe, [portion])
            columns = rule.load(recipe, portion, host.allocate)
            assert sum(column.nbytes for column in columns.values()) == rule.num_bytes(recipe, portion)
            (built,) = rule.build(recipe, portion, columns, [f.name for f in rule.fields], host.allocate)
            places = chunks_of(2, rank, 32, "zigzag")
            for name, value in built.items():
                assert value.tolist() == [[row[name][p] for p in places] for row in rows], name


SPECIAL = (3, 7, *range(40, 60))
CROPPED: list[dict[str, Any]] = [
    {"crop": "random", "special_tokens": SPECIAL, "random_tokens": (10, 20)},
    {},
]
CASES = [
    ("tp2-pp2", {"micro_batch_size": 2}),
    ("cp2-tp2", {"micro_batch_size": 4}),
    ("cp4", {"cp_split": "contiguous"}),
    ("pp2-cp2", {"stage_map": mf.StageMap(pp=2, vpp=2, mtp=(3,))}),
]


def every_delivery(rank: int, path: str) -> list[str]:
    wrong: list[str] = []
    for k, (text, options) in enumerate(CASES):
        layout, recipe = (
            mf.Layout.parse(text, ranks_per_node=4),
            recipe_of(path, rule_of(30, **CROPPED[k % 2])),
        )
        expected = simulated(recipe, layout, 10**6, rank, **options)
        for delivery in ("direct", "broadcast", "share"):
            with mf.Feed(
                recipe,
                layout,
                transport=mf.Transport(delivery=delivery, timeout_s=600),
                verify=True,
                pad_rows=True,
                **options,
            ) as feed:
                got = take(feed)
            if got != expected:
                wrong.append(f"{text} {delivery}: {got}\n{expected}")
    return wrong


def test_every_delivery_gives_the_bytes_of_simulate(corpus: str) -> None:
    assert world.run(every_delivery, 4, corpus) == [[]] * 4


def test_stages_get_what_they_need(corpus: str) -> None:
    everywhere = {"padding_mask", "position_ids"}
    for got in mf.simulate(recipe_of(corpus), mf.Layout.parse("pp3"), 1):
        extra = [{"tokens"}, set(), {"labels", "loss_mask"}][got.coord.pp]
        assert all(set(m) == everywhere | extra for m in got.microbatches)
    first = next(mf.simulate(recipe_of(corpus), mf.Layout(), 1)).microbatches[0]
    assert {name: value.dtype for name, value in first.items()} == {
        "tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32, "padding_mask": torch.bool,
        "position_ids": torch.int64,
    }  # fmt: skip


def cropped_rows(path: str, rule: mf.Masked, text: str = "tp1", **options: Any) -> dict[tuple[int, int], Any]:
    """Every row of two epochs, put together from its ranks: (epoch, index) -> shown, wanted, without specials."""
    layout, rows = mf.Layout.parse(text), {}
    names = ("tokens", "labels", "loss_mask", "padding_mask")
    for got in mf.simulate(recipe_of(path, rule, epochs=3), layout, 10**6, no_loss="allow", **options):
        places = chunks_of(layout.cp, got.coord.cp, rule.length, options.get("cp_split", "zigzag"))
        hidden = 0
        for m in got.microbatches:
            hidden += int(m["loss_mask"].sum())
            for r, key in enumerate(zip(m.draws.epoch.tolist(), m.draws.index.tolist())):
                row = rows.setdefault(key, {name: np.zeros(rule.length, np.int64) for name in names})
                for name in names:
                    row[name][places] = m[name][r]
        if layout.cp == layout.dp == 1:
            assert hidden == got.batch.valid_tokens, "exact, from lengths and marks alone"
    return rows


@pytest.mark.parametrize("special", [(), SPECIAL, tuple(range(VOCAB))])
@pytest.mark.parametrize("crop", ["start", "random"])
def test_crops_and_tokens_that_are_never_hidden(corpus: str, crop: Any, special: tuple[int, ...]) -> None:
    rule = rule_of(16, crop=crop, special_tokens=special, random_tokens=(10, 20), replace=0.3, random=0.6)
    starts: dict[int, set[int]] = {}
    for (_, index), row in cropped_rows(corpus, rule).items():
        document = documents()[index].tolist()
        size = min(len(document), 14)
        assert (row["padding_mask"] == 0).sum() == size + 2
        shown, labels = row["tokens"][1 : 1 + size], row["labels"][1 : 1 + size]
        own = np.where(labels == -100, shown, labels).tolist()
        at = [k for k in range(len(document) - size + 1) if document[k : k + size] == own]
        assert at and (crop == "random" or 0 in at)
        if len(at) == 1 and len(document) > 30:
            starts.setdefault(index, set()).add(at[0])
        hidden = labels != -100
        assert not np.isin(labels[hidden], special).any()
        candidates = size - int(np.isin(own, special).sum())
        assert hidden.sum() == int(rule.num_hidden(np.array(candidates)))
        changed = shown[hidden & (shown != labels) & (shown != MASK)]
        assert ((changed >= 10) & (changed < 20)).all()
    assert starts and all(len(seen) > (crop == "random") for seen in starts.values()), "other crops by epoch"


def test_tokens_are_read_where_the_crop_is_without_a_look_up_before(corpus: str) -> None:
    rule = rule_of(16, crop="random")
    recipe = recipe_of(corpus, rule, shuffle="none")
    draws, read = draws_of_step(recipe, 0), []
    with recipe.sources[0]:
        lengths = rule.lengths(recipe, draws)
        plan = plan_fixed(lengths, dp=1, cp=1, micro_batch_size=6, align=Align())
        for each in (draws, rule.look_up(recipe, draws)):
            (portion,) = portions_of(
                plan,
                each,
                lengths,
                0,
                group=[0],
                rows=6,
                split="zigzag",
                together=1,
                rank_of_dp_cp=np.zeros(1, np.int64),
            )
            read.append(rule.load(recipe, portion, np.empty)["tokens"])
    np.testing.assert_array_equal(*read)


def test_crops_are_one_function_of_recipe_and_place(corpus: str) -> None:
    rule = rule_of(32, **CROPPED[0])
    wanted = cropped_rows(corpus, rule)
    for text, options in (
        ("dp4", {"micro_batch_size": 2}),
        ("cp2-dp2", {"micro_batch_size": 3}),
        ("cp4", {"cp_split": "contiguous"}),
    ):
        rows = cropped_rows(corpus, rule, text, **options)
        assert rows.keys() == wanted.keys()
        for key, row in rows.items():
            assert all(np.array_equal(row[name], wanted[key][name]) for name in row), (text, key)


def test_a_crop_may_begin_anywhere(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "one", np.uint16) as writer:
        writer.add_document(np.arange(12))
    rule = mf.Masked(4, vocab_size=50, mask_token=49, crop="random", mask_fraction=0)
    recipe = recipe_of(str(tmp_path / "one"), rule, batch=mf.Batch(sequences=100), epochs=1800)
    starts: list[int] = []
    for made in mf.simulate(recipe, mf.Layout(), 18, micro_batch_size=100, no_loss="allow"):
        starts += made.microbatches[0]["tokens"][:, 0].tolist()
    counts = np.bincount(starts, minlength=9)
    assert (
        counts.size == 9 and ((counts - 200) ** 2 / 200).sum() < 26
    )  # 8 degrees: 0.1 % of fair crops exceed


def test_every_option_is_in_the_fingerprint(corpus: str) -> None:
    rules = [
        rule_of(),
        rule_of(crop="random"),
        rule_of(special_tokens=(1,)),
        rule_of(special_tokens=(1, 2)),
        rule_of(random_tokens=(0, 50)),
    ]
    assert len({rule.summary() for rule in rules}) == len(rules)
    assert rule_of(special_tokens=(2, 1, 2)).summary() == rule_of(special_tokens=(1, 2)).summary()
    golden = rule_of(mask_fraction=0.5, replace=0.3, random=0.4, random_tokens=(50, 60)).masks(
        12, 1, 2, 3, 4, np.array([1, 8])
    )
    assert (golden.places.tolist(), golden.tokens.tolist()) == GOLDEN_SPECIAL


@pytest.mark.parametrize(
    "options",
    [
        {"crop": "end"},
        {"special_tokens": (-1,)},
        {"special_tokens": ("x",)},
        {"special_tokens": 5},
        {"random_tokens": (5, 5)},
        {"random_tokens": (0, 10)},
        {"random_tokens": (-1, 4)},
        {"random_tokens": (0.0, 4)},
        {"length": 0},
        {"length": 2},
        {"length": 8.0},
        {"vocab_size": 0},
        {"mask_token": -1},
        {"mask_token": None},
        {"pad_token": None},
        {"first_token": "x"},
        {"mask_fraction": 1.5},
        {"mask_fraction": True},
        {"replace": 0.9, "random": 0.2},
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(mf.errors.RecipeError, match="Masked"):
        mf.Masked(
            **({"length": 8, "vocab_size": 9, "mask_token": 1, "first_token": 2, "last_token": 3} | options)
        )


def test_what_it_does_not_fit_is_refused(corpus: str) -> None:
    mapped = mf.Recipe(data=mf.Mapped([1]), sequence=rule_of(), batch=mf.Batch(sequences=1))  # type: ignore
    with pytest.raises(mf.errors.RecipeError, match="Masked reads a token store"):
        next(mf.simulate(mapped, mf.Layout(), 1))
    with pytest.raises(mf.errors.OptionError, match="for rows choose 'contiguous'"):
        next(
            mf.simulate(recipe_of(corpus), mf.Layout(cp=2), 1, micro_batch_size=2, cp_split="pack_contiguous")
        )
    assert rule_of(replace=1, random=0).summary() == rule_of(replace=1.0, random=0.0).summary()
    assert rule_of().summary() != rule_of(mask_fraction=0.2).summary()


GOLDEN_SPECIAL = ([2, 7, 9, 10, 11], [900, 900, -1, 58, 900])


def test_special_tokens_are_marked_in_the_cache_of_their_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHFEED_CACHE", str(tmp_path / "other"))
    with mf.IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document(np.arange(9))
    store = mf.open(tmp_path / "a", cache=tmp_path / "given")
    rule = mf.Masked(8, vocab_size=99, mask_token=98, special_tokens=(1, 2))
    next(mf.simulate(mf.Recipe(store, rule, mf.Batch(sequences=1)), mf.Layout(), 1))
    assert not (tmp_path / "other").exists()
