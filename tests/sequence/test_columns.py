"""Columns beside the tokens: at every token of every rank, what plain indexing of the whole columns gives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
import world
from meshfeed.errors import RecipeError
from meshfeed.store import DatasetWriter, IndexedWriter
from meshfeed.testing import assert_elastic, assert_resumable, assert_rule
from observe import simulated, take
from soak import some

DTYPES = {"tokens": "i4", "loss_mask": "f8", "labels": "i8", "weight": "f8", "turn": "u1"}
SETS = [
    ("loss_mask",),
    ("labels",),
    ("labels", "loss_mask"),
    ("weight",),
    ("labels", "loss_mask", "turn", "weight"),
    ("loss_mask", "turn"),
]
PACKING = mf.Packing(capacity=48, policy="dynamic_cp", oversize="split", align=mf.Align(sequence=2))
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "windows": (mf.Windows(24), {"micro_batch_size": 2}),
    "windows odd": (mf.Windows(13), {"micro_batch_size": 3}),
    "windows of one": (mf.Windows(1), {"micro_batch_size": 3}),
    "windows eod": (
        mf.Windows(24, eod_mask_loss=True, reset_attention_mask=True, reset_position_ids=True),
        {"micro_batch_size": 2},
    ),
    "documents": (mf.Documents(), {"packing": PACKING}),
    "documents cut": (mf.Documents(max_len=20), {"packing": mf.Packing(capacity=64)}),
    "documents truncated": (mf.Documents(), {"packing": mf.Packing(capacity=30, oversize="truncate")}),
}
LAYOUTS = [mf.Layout(), mf.Layout(cp=2, dp=2)]


def write(folder: Path, columns: tuple[str, ...], *, seed: int = 0, first: int = 1) -> dict[str, np.ndarray]:
    """A dataset whose tokens tell their own place, and its columns end to end; "last": ends of documents."""
    rng = np.random.default_rng(seed)
    sizes = [*rng.integers(0, 40, 25).tolist(), 1, 0, 130, 2]
    total = sum(sizes)
    whole: dict[str, np.ndarray] = {
        "tokens": np.arange(first, first + total, dtype="i4"),
        "loss_mask": rng.choice([0, 0, -0.0, 1e-46, 1e-40, 0.5, 1, 3e38], total),  # 1e-46 is 0 in float32
        "labels": np.where(rng.random(total) < 0.4, -100, rng.integers(0, 2**31, total)),
        "weight": rng.random(total),
        "turn": rng.integers(0, 3, total).astype("u1"),
    }
    names = ("tokens", *columns)
    with DatasetWriter(folder, {name: DTYPES[name] for name in names}) as writer:
        at = 0
        for size in sizes:
            writer.add_document(**{name: whole[name][at : at + size] for name in names})
            at += size
    last = np.zeros(total, bool)
    last[np.cumsum([size for size in sizes if size]) - 1] = True
    return {name: whole[name] for name in names} | {"last": last}


def expected_mask(
    whole: dict[str, np.ndarray], place: np.ndarray, ends: np.ndarray, labels: str
) -> np.ndarray:
    """The loss mask at tokens of some places. ends: whether the rule has no label for it, or no loss."""
    mask = whole.get("loss_mask", np.ones(whole["last"].size, "f4"))
    if "labels" in whole:
        mask = mask * (whole["labels"] >= 0)
    if "labels" in whole and labels == "shifted":
        return mask[place].astype("f4")
    return np.where(ends, 0, np.roll(mask, -1)[place]).astype("f4")


def ends_of(rule: Any, whole: dict[str, np.ndarray], place: np.ndarray) -> np.ndarray:
    if isinstance(rule, mf.Windows):
        return whole["last"][place] & rule.eod_mask_loss
    first = np.append(0, np.flatnonzero(whole["last"]) + 1)
    into = place - first[np.searchsorted(first, place, side="right") - 1]
    return whole["last"][place] | (into + 1 == (rule.max_len or 10**9))


@some(13)
@pytest.mark.parametrize("labels", ["shifted", "unshifted"])
@pytest.mark.parametrize("columns", SETS, ids="+".join)
@pytest.mark.parametrize("name", RULES)
def test_every_token_has_what_lies_at_its_place(
    tmp_path: Path, name: str, columns: tuple[str, ...], labels: Any
) -> None:
    rule, options = RULES[name]
    whole = write(tmp_path / "c", columns)
    data = mf.open(tmp_path / "c", labels=labels)
    recipe = mf.Recipe(data=data, sequence=rule, batch=mf.Batch(sequences=7), seed=3)
    if "labels" in columns and "eod" in name and labels == "shifted":
        with pytest.raises(RecipeError, match="eod_mask_loss=True with a column of labels"):
            next(mf.simulate(recipe, LAYOUTS[0], 1, **options))
        return
    everywhere = mf.StageMap(pp=1)
    for layout in LAYOUTS:
        valid: Counter[int] = Counter()
        told: dict[int, int] = {}
        for got in mf.simulate(recipe, layout, range(9), stage_map=everywhere, no_loss="allow", **options):
            told[got.batch.step] = got.batch.valid_tokens
            for m in got.microbatches:
                tokens = m["tokens"].numpy()
                real = tokens != 0
                place = tokens[real] - 1
                mask = m["loss_mask"].numpy()
                assert mask.dtype == np.float32
                ends = ends_of(rule, whole, place)
                wanted = expected_mask(whole, place, ends, labels)
                assert np.array_equal(mask[real], wanted)
                assert not mask[~real].any()
                valid[got.batch.step] += int((mask != 0).sum())
                for column in {"labels", "weight", "turn"} & set(columns):
                    values = m[column].numpy()
                    assert values.dtype == DTYPES[column]
                    held = values[real]
                    if column == "labels" and labels == "unshifted":
                        next_to = np.roll(whole[column], -1)[place]
                        some = slice(None) if "windows" in name else ~ends
                        assert np.array_equal(held[some], next_to[some])
                    else:
                        assert np.array_equal(held, whole[column][place]), column
                    assert not values[~real].any()
        assert dict(valid) == told
        assert sum(told.values())


DTYPES_OF_ALL = {
    "tokens": "u2",
    "loss_mask": "i1",
    "labels": "u2",
    "a": "f4",
    "b": "f8",
    "c": "u1",
    "d": "i1",
    "e": "i2",
}


@some(5)
@pytest.mark.parametrize(
    "columns", [("loss_mask", "a", "b", "c"), ("labels", "d", "e"), ("labels", "loss_mask")]
)
@pytest.mark.parametrize(
    "rule", [mf.Windows(12), mf.Windows(7, eod_mask_loss=True), mf.Documents(9)], ids=repr
)
def test_a_device_widens_every_column(tmp_path: Path, rule: Any, columns: tuple[str, ...]) -> None:
    """Bit by bit what is built on the host, for each rank of a group that shares a reader, and for each alone."""
    if "labels" in columns and getattr(rule, "eod_mask_loss", False):
        rule = mf.Windows(7, reset_position_ids=True)
    rng = np.random.default_rng(0)
    with DatasetWriter(
        tmp_path / "c", {name: DTYPES_OF_ALL[name] for name in ("tokens", *columns)}
    ) as writer:
        for size in rng.integers(0, 30, 40).tolist():
            values = {name: rng.integers(-100, 2**20, size) for name in ("tokens", *columns)}
            writer.add_document(**{name: array.astype(DTYPES_OF_ALL[name]) for name, array in values.items()})
    assert_rule(rule, mf.open(tmp_path / "c"), steps=3)


def test_only_the_stages_that_need_a_column_get_it(tmp_path: Path) -> None:
    write(tmp_path / "c", SETS[4])
    recipe = mf.Recipe(data=mf.open(tmp_path / "c"), sequence=mf.Windows(8), batch=mf.Batch(sequences=4))
    held = {got.coord.pp: set(got.microbatches[0]) for got in mf.simulate(recipe, mf.Layout(pp=3), 1)}
    assert held == {
        0: {"tokens", "position_ids", "turn", "weight"},
        1: {"position_ids", "turn", "weight"},
        2: {"labels", "loss_mask", "position_ids", "turn", "weight"},
    }


# -- through real deliveries ----------------------------------------------------------------------------


def recipe_of(folder: str, name: str) -> mf.Recipe:
    data = mf.Mixture({"a": (mf.open(f"{folder}/a"), 0.6), "b": (mf.open(f"{folder}/b"), 0.4)})
    return mf.Recipe(data=data, sequence=RULES[name][0], batch=mf.Batch(sequences=7), seed=3, steps=6)


def every_delivery(rank: int, folder: str, layouts: list[mf.Layout]) -> list[str]:
    wrong: list[str] = []
    for name in ("windows", "windows eod", "documents"):
        recipe, options = recipe_of(folder, name), RULES[name][1]
        for layout in layouts:
            expected = simulated(recipe, layout, 10**6, rank, **options)
            collectives: dict[str, int] = {}
            for delivery in ("broadcast", "share"):
                with mf.Feed(
                    recipe,
                    layout,
                    transport=mf.Transport(delivery=delivery, timeout_s=600),
                    verify=True,
                    pad_rows=name != "documents",
                    **options,
                ) as feed:
                    got, collectives[delivery] = [], 0
                    for step in feed:
                        got += take([step])
                        collectives[delivery] += step.stats.collectives
                if got != expected:
                    wrong.append(f"{name} {layout} {delivery}")
            if collectives["broadcast"] > sum(len(step) for step in expected):
                wrong.append(f"{name} {layout}: {collectives} collectives, more than one a microbatch")
    return wrong


def test_broadcast_and_share_give_the_bytes_of_simulate(tmp_path: Path) -> None:
    write(tmp_path / "a", ("loss_mask", "turn"))
    write(tmp_path / "b", ("loss_mask", "turn"), seed=1, first=5_000)
    layouts = [mf.Layout.parse("tp2-cp2", ranks_per_node=4), mf.Layout.parse("cp2-pp2", ranks_per_node=4)]
    assert world.run(every_delivery, 4, str(tmp_path), layouts) == [[]] * 4


def test_one_process_and_any_layout_and_any_kill(tmp_path: Path) -> None:
    write(tmp_path / "a", ("loss_mask", "turn"))
    write(tmp_path / "b", ("loss_mask", "turn"), seed=1, first=5_000)
    recipe = recipe_of(str(tmp_path), "documents")
    with mf.Feed(recipe, packing=PACKING) as feed:
        assert take(feed) == simulated(recipe, mf.Layout(), 10**6, 0, packing=PACKING)
    assert_elastic(recipe_of(str(tmp_path), "windows"), ["dp2", "cp2"], micro_batch_size=2)
    assert_resumable(recipe, steps=3, packing=PACKING)


# -- what is wrong --------------------------------------------------------------------------------------


def test_sources_with_other_columns_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a", ("loss_mask",))
    write(tmp_path / "b", ("turn",))
    with IndexedWriter(tmp_path / "plain", "u2") as writer:
        writer.add_document(np.arange(100))
    data = mf.Mixture({name: (mf.open(tmp_path / name), 1) for name in ("a", "b")})
    with pytest.raises(RecipeError, match=r"source 'b' .* has columns turn .* the first source loss_mask"):
        mf.Feed(mf.Recipe(data=data, sequence=mf.Windows(8), batch=mf.Batch(sequences=1)))
    data = mf.Mixture({name: (mf.open(tmp_path / name), 1) for name in ("plain", "a")})
    with pytest.raises(RecipeError, match=r"source 'a' .* has columns loss_mask .* the first source none"):
        mf.Feed(mf.Recipe(data=data, sequence=mf.Windows(8), batch=mf.Batch(sequences=1)))


def test_rules_that_deliver_tokens_alone_refuse_columns(tmp_path: Path) -> None:
    write(tmp_path / "a", ("loss_mask",))
    rule = mf.MegatronGPT(8, samples=4)
    with pytest.raises(RecipeError, match="delivers only tokens"):
        mf.Feed(mf.Recipe(data=mf.open(tmp_path / "a"), sequence=rule, batch=mf.Batch(sequences=1)))


def test_a_column_may_not_be_called_as_a_field_is(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "a", {"tokens": "u2", "position_ids": "u2"}) as writer:
        writer.add_document(tokens=range(50), position_ids=range(50))
    with pytest.raises(RecipeError, match=r"column 'position_ids': .* makes a field of that name"):
        mf.Feed(mf.Recipe(data=mf.open(tmp_path / "a"), sequence=mf.Windows(8), batch=mf.Batch(sequences=1)))
