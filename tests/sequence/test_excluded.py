"""What an excluded document leaves under each rule: every other token, row and part is where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
import world
from meshfeed.store import DatasetWriter
from observe import simulated, take
from pictures import LookFirst, multimodal, write_pictures
from soak import some
from user_datasets import Rich

GONE = (1, 4, 5, 11, 19)
HALF = tuple(range(0, 40, 2))
LAYOUTS = ("dp1", "cp2-dp2", "tp2-cp3-pp2")


def merged(recipe: mf.Recipe, layout: str, steps: int, **options: Any) -> dict[tuple[int, ...], Any]:
    """(step, dp, cp, microbatch) -> the fields of all stages, and the totals of each step."""
    found: dict[tuple[int, ...], Any] = {}
    for made in mf.simulate(recipe, mf.Layout.parse(layout), steps, **options):
        found[made.batch.step,] = made.batch
        for each in made.microbatches:
            of = found.setdefault((made.batch.step, made.coord.dp, made.coord.cp, each.index), {})
            of.update(each)
            of["draws"] = each.draws
    return found


# -- windows with columns -------------------------------------------------------------------------------


def write_columns(folder: Path, columns: tuple[str, ...]) -> np.ndarray:
    """Tokens that tell their place, and random columns; returns the document of each."""
    rng, document_of = np.random.default_rng(0), list[int]()
    dtypes = {"tokens": "i4", "loss_mask": "u1", "labels": "i8"}
    with DatasetWriter(folder, {name: dtypes[name] for name in ("tokens", *columns)}) as writer:
        for number, size in enumerate([*rng.integers(0, 30, 25).tolist(), 1]):
            values = {
                "tokens": np.arange(len(document_of), len(document_of) + size, dtype="i4"),
                "loss_mask": (rng.random(size) < 0.8).astype("u1"),
                "labels": np.where(rng.random(size) < 0.2, -100, rng.integers(0, 9_999, size)),
            }
            writer.add_document(**{name: values[name] for name in ("tokens", *columns)})
            document_of += [number] * size
    return np.array(document_of)


@some(7)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("columns", [("loss_mask",), ("labels",), ("labels", "loss_mask")])
@pytest.mark.parametrize("labels", ["shifted", "unshifted"])
def test_windows_with_columns_keep_excluded_tokens_without_loss(
    tmp_path: Path, columns: tuple[str, ...], labels: Any, layout: str
) -> None:
    document_of = write_columns(tmp_path / "store", columns)
    store = mf.open(tmp_path / "store", labels=labels if "labels" in columns else None)
    recipe = mf.Recipe(data=store, sequence=mf.Windows(13), batch=mf.Batch(6), seed=5, epochs=3)
    amended = recipe.amended([(2, mf.amendments.Exclude([*GONE, 25]))])
    is_gone = np.isin(document_of, [*GONE, 25])
    loses = is_gone | np.roll(is_gone, -1)  # a token of one, or the token before it
    plain, made = (merged(each, layout, 8, micro_batch_size=2) for each in (recipe, amended))
    lost, valid = 0, dict[int, int]()
    assert made.keys() == plain.keys()
    for at, fields in made.items():
        if len(at) == 1:
            continue
        other, step = plain[at], at[0]
        assert all(torch.equal(fields[n], other[n]) for n in other if n not in ("draws", "loss_mask"))
        wanted = other["loss_mask"].numpy().copy()
        wanted[(step >= 2) & loses[fields["tokens"].numpy()]] = 0
        assert np.array_equal(fields["loss_mask"].numpy(), wanted)
        lost += int((other["loss_mask"] > fields["loss_mask"]).sum())
        valid[step] = valid.get(step, 0) + int((fields["loss_mask"] != 0).sum())
    assert lost > 50
    assert all(made[step,].valid_tokens == count for step, count in valid.items())


# -- samples ----------------------------------------------------------------------------------------------

IDS = mf.Field(name="ids", dtype="int32", stages=("first",), split=True, pad=-7)


class Counting(Rich):
    """Items that must not be read any more."""

    gone: frozenset[int] = frozenset()

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        assert at.index not in self.gone, "an excluded item is not read"
        return super().__getitem__(at)


def items(lengths: Any = None) -> mf.Mapped:
    return mf.Mapped(Counting(), lengths=lengths)


@some(3)
@pytest.mark.parametrize("layout", ["dp1", "dp3", "tp2-cp2-dp2-pp2"])
@pytest.mark.parametrize("has_lengths", [False, True])
def test_rows_of_excluded_items_are_left_out(layout: str, has_lengths: bool) -> None:
    """A microbatch has fewer rows, or none; all others are where they were."""
    store = items(Rich().lengths() if has_lengths else None)
    data = mf.Mixture({"a": (store, 1), "b": (items(), 1)}) if not has_lengths else store
    recipe = mf.Recipe(
        data=data, sequence=mf.Samples("class", "score"), batch=mf.Batch(12), seed=5, epochs=None
    )
    gone = {"a": HALF} if not has_lengths else HALF
    amended = recipe.amended([(1, mf.amendments.Exclude(gone))])
    plain, made = (merged(each, layout, 9, micro_batch_size=2) for each in (recipe, amended))
    assert made.keys() == plain.keys()
    seen_fewer, tokens = set[int](), dict[int, int]()
    for at, fields in made.items():
        if len(at) == 1:
            continue
        draws, other = fields["draws"], plain[at]
        is_gone = np.isin(other["draws"].index, HALF) & (other["draws"].source == 0) & (at[0] >= 1)
        for name in ("source", "index", "epoch"):
            assert getattr(draws, name).tolist() == getattr(other["draws"], name)[~is_gone].tolist()
        for name in ("class", "score"):
            assert [*fields[name]] == [value for value, out in zip(other[name], is_gone) if not out]
        seen_fewer.add(len(draws))
        if at[2] == 0:
            lengths = Rich().lengths()[draws.index] if has_lengths else np.ones(len(draws), int)
            tokens[at[0]] = tokens.get(at[0], 0) + int(lengths.sum())
    assert seen_fewer >= ({0, 1, 2} if has_lengths else {1, 2})
    assert all(made[step,].tokens == made[step,].valid_tokens == count for step, count in tokens.items())


def samples(excluded: tuple[int, ...] = ()) -> mf.Recipe:
    """Items to pack; some of them have no token."""
    lengths = Rich().lengths()
    lengths[[*excluded]] = 0
    return mf.Recipe(
        data=items(lengths), sequence=mf.Samples(IDS, "image", packed=True), batch=mf.Batch(12), seed=5
    )


PACKED = {"packing": mf.Packing(capacity=32, policy="dynamic_cp")}


@some(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_excluded_items_are_in_no_pack(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like items that have no token, which no pack holds; with fields that are not split, they are refused."""
    monkeypatch.setattr(mf.Mapped, "first_empty", None)
    shape = mf.Layout.parse(layout)
    amended, empty = samples().amended([(0, mf.amendments.Exclude(GONE))]), samples(GONE)
    monkeypatch.setattr(Counting, "gone", frozenset(GONE))
    for rank in range(shape.world_size):
        assert simulated(amended, shape, 7, rank, **PACKED) == simulated(empty, shape, 7, rank, **PACKED)


# -- parts ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with parts; and one where the excluded documents are empty."""
    path = tmp_path_factory.mktemp("pictures")
    write_pictures(path / "all")
    write_pictures(path / "rest", empty=GONE)
    return path


@some(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"on_bad": "blank"}])
def test_documents_with_parts_leave_neither_text_nor_part(
    folder: Path, layout: str, options: dict[str, Any]
) -> None:
    shape, packing = mf.Layout.parse(layout), mf.Packing(capacity=64, oversize="truncate")
    plain, rest = (multimodal(folder / name, **options) for name in ("all", "rest"))
    amended = plain.amended([(2, mf.amendments.Exclude(GONE))])
    for rank in range(shape.world_size):
        made = simulated(amended, shape, 8, rank, packing=packing)
        assert made[:2] == simulated(plain, shape, 2, rank, packing=packing)
        assert made[2:] == simulated(rest, shape, range(2, 8), rank, packing=packing)


def _rank(rank: int, layout: mf.Layout, recipe: mf.Recipe, options: dict[str, Any]) -> Any:
    with mf.Feed(recipe, layout, **options) as feed:
        return take(feed, 6)


def test_real_ranks_get_what_is_left(folder: Path) -> None:
    """Of parts, shared with encoders elsewhere; and of items, by every rank of cp and pp."""
    cases = [
        (mf.Layout.parse("cp2-pp2"), samples().amended([(1, mf.amendments.Exclude(GONE))]), PACKED),
        (
            mf.Layout.parse("dp2-cp2"),
            multimodal(folder / "all", image=LookFirst()).amended([(1, mf.amendments.Exclude(GONE))]),
            {"packing": mf.Packing(capacity=64, oversize="truncate"), "encoder": "balanced"},
        ),
    ]
    for layout, recipe, options in cases:
        for rank, got in enumerate(world.run(_rank, 4, layout, recipe, options)):
            assert got == simulated(recipe, layout, 6, rank, **options)
