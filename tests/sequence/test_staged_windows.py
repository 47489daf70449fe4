"""Windows whose length changes: a source goes on at the token reached, on every rank, from any step."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
import world
from meshfeed.errors import RecipeError
from meshfeed.order import drawn_until, num_positions, num_steps, start_of_step, steps_of
from meshfeed.testing import assert_elastic, assert_resumable
from observe import simulated, take
from soak import cases, some
from staged import LENGTHS, inputs_of, recipe_of, stores, write_stores


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stores(tmp_path_factory.mktemp("staged"))


class Naive:
    """Each source as one line of tokens: its windows of the longest length, in the order of those alone."""

    def __init__(self, recipe: mf.Recipe, longest: int) -> None:
        self.recipe, self.longest = recipe, longest
        self.lines: list[list[int]] = [[] for _ in recipe.sources]
        self.at = [0] * len(recipe.sources)
        self.alone: list[mf.Recipe] = []
        for name in recipe.source_names:
            data: Any = recipe.sources[0]
            if name:  # the others are there, but not drawn
                shares = zip(recipe.source_names, recipe.sources)
                data = mf.Mixture({each: (store, float(each == name)) for each, store in shares})
            self.alone.append(replace(recipe, data=data, sequence=mf.Windows(longest), batch=mf.Batch(1)))

    def next(self, source: int, length: int) -> list[int]:
        """The next window of a source: what is left of a longer one that has begun is left out."""
        start = -(-self.at[source] // length) * length
        line, self.at[source] = self.lines[source], start + length
        while len(line) < self.at[source]:
            ((_, tokens),) = inputs_of(self.alone[source], len(line) // self.longest)
            line += tokens
        return line[start : start + length]


lengths_of_stages = st.lists(st.sampled_from([1, 2, 3, 4, 6, 12, 24]), min_size=2, max_size=4).filter(
    lambda lengths: all(
        most % each == 0 for at, most in enumerate(accumulate(lengths, max)) for each in lengths[: at + 1]
    )
)
"""Each divides the longest so far."""


@settings(max_examples=cases(10), deadline=None)
@given(lengths_of_stages, st.data())
def test_every_source_goes_on_at_the_token_that_it_has_reached(
    folder: Path, lengths: list[int], data: st.DataObject
) -> None:
    """A store alone and a mixture that changes, batches of sequences and of tokens, several epochs."""
    firsts = np.cumsum([0, *(data.draw(st.integers(1, 5)) for _ in lengths[1:])]).tolist()
    shuffle: Any = data.draw(st.sampled_from(["global", "none"]))
    rule: Any = mf.Windows(lengths[0])
    for step, length in zip(firsts[1:], lengths[1:]):
        rule = rule.then(step, length)
    sizes = [data.draw(st.integers(1, 6)) for _ in range(2)]
    batch = mf.Batch(sizes[0]).then(4, sizes[1])
    if data.draw(st.booleans()):
        batch = mf.Batch(tokens=24 * sizes[0]).then(4, tokens=24 * sizes[1])
    if data.draw(st.booleans()):
        shares = {name: (store, share) for (name, store), share in zip(stores(folder).items(), (2, 1))}
        source: Any = mf.Mixture(shares).then(3, {"one": 1, "other": data.draw(st.sampled_from([0, 1, 3]))})
    else:
        source = stores(folder)["one"]
    recipe = mf.Recipe(data=source, sequence=rule, batch=batch, seed=9, shuffle=shuffle)
    naive, begin, drawn = Naive(recipe, max(lengths)), 0, np.zeros(len(recipe.sources), int)
    for step in range(firsts[-1] + 6):
        length = [each for first, each in zip(firsts, lengths) if first <= step][-1]
        made, size = inputs_of(recipe, step), sizes[step >= 4]
        assert len(made) == (size if batch.tokens is None else 24 * size // length)
        for of, window in made:
            assert window == naive.next(of, length)
        counts = np.bincount([of for of, _ in made], minlength=len(recipe.sources))
        found = drawn_until(recipe, step)
        assert start_of_step(recipe, step) == begin and found is not None and (found[0] == drawn).all()
        of_steps, places = steps_of(recipe, np.arange(begin, begin + len(made)))
        assert set(of_steps.tolist()) == {step} and places.tolist() == list(range(len(made)))
        begin, drawn = begin + len(made), drawn + counts


def test_an_epoch_ends_where_shorter_windows_have_begun_longer_ones(folder: Path) -> None:
    """Four windows of 8 tokens: two of 24 have begun."""
    rule, one = mf.Windows(8).then(4, 24), stores(folder)["one"]
    recipe = mf.Recipe(data=one, sequence=rule, batch=mf.Batch(1), epochs=1)
    assert num_positions(recipe) == 4 + LENGTHS["one"] // 24 - 2


def test_an_epoch_has_every_token_once(folder: Path) -> None:
    """But for the rest of one longer window, and what no window holds."""
    store = stores(folder)["one"]
    for rule in (mf.Windows(8).then(3, 24), mf.Windows(24).then(3, 8), mf.Windows(2).then(1, 6).then(4, 24)):
        recipe = mf.Recipe(data=store, sequence=rule, batch=mf.Batch(tokens=48), epochs=1)
        seen = [
            t for step in range(num_steps(recipe) or 0) for _, row in inputs_of(recipe, step) for t in row
        ]
        assert len(seen) == len(set(seen)) and 331 // 24 * 24 - 24 < len(seen) <= 331 // 24 * 24
        more = mf.Recipe(data=store, sequence=rule, batch=mf.Batch(tokens=48), epochs=3)
        further = (num_positions(more) or 0) - (num_positions(recipe) or 0)
        assert further == 2 * (331 // 24) * rule.pieces[-1][1]


def _rank(rank: int, layout: mf.Layout, recipe: mf.Recipe) -> Any:
    with mf.Feed(recipe, layout, micro_batch_size=2) as feed:
        return take(feed, 12)


@some(2)
@pytest.mark.parametrize(
    ("layout", "has_columns"),
    [("tp2-pp2", False), ("cp2-dp2", False), ("cp2-dp2", True), ("tp2-pp2", True)],
)
def test_every_rank_has_the_length_of_the_step(folder: Path, layout: str, has_columns: bool) -> None:
    shape = mf.Layout.parse(layout)
    columns = {name: (store, 1) for name, store in stores(folder, ignore=[]).items()}
    recipe = recipe_of(folder, data=mf.Mixture(columns)) if has_columns else recipe_of(folder)
    amended = recipe.amended(
        [(2, mf.amendments.Exclude({"one": [1, 2, 7]})), (6, mf.amendments.SkipSteps(7, 8))]
    )
    steps = [step for step in range(13) if step != 7]
    for rank, got in enumerate(world.run(_rank, 4, shape, amended)):
        assert got == simulated(amended, shape, steps, rank, micro_batch_size=2)


def test_excluded_documents_bear_no_loss_at_any_length(folder: Path) -> None:
    recipe = recipe_of(folder)
    with (store := recipe.sources[0]):
        gone = np.concatenate([store.read(d, 0, int(store.lengths(np.array([d]))[0])) for d in (1, 2, 7)])
    amended = recipe.amended([(0, mf.amendments.Exclude({"one": [1, 2, 7]}))])
    lost = set[int]()
    for plain, made in zip(*(mf.simulate(each, mf.Layout(), 14) for each in (recipe, amended))):
        bears = 0
        for one, other in zip(plain.microbatches, made.microbatches):
            loses = np.isin(other["tokens"], gone) | np.isin(other["labels"], gone)
            assert torch.equal(one["tokens"], other["tokens"])
            assert (other["loss_mask"].numpy() == np.where(loses, 0, one["loss_mask"])).all()
            bears += int(other["loss_mask"].sum())
            lost |= {other["tokens"].shape[1]} if loses.any() else set()
        assert bears == made.batch.valid_tokens
    assert lost == {8, 12, 24}


def test_resuming_and_other_layouts(folder: Path) -> None:
    recipe = recipe_of(folder)
    assert_resumable(recipe, steps=12, micro_batch_size=1)
    assert_elastic(recipe, ["dp3", "cp2-dp2"], steps=12, micro_batch_size=1)


def test_a_batch_of_tokens_is_amended_in_tokens(folder: Path) -> None:
    rule = mf.Windows(8).then(4, 24).then(9, 12)
    ramp = mf.Batch(tokens=24 * 8).then(6, tokens=24 * 4)
    recipe = recipe_of(folder, sequence=rule, batch=ramp)
    for amended, wanted in (
        ([(2, mf.amendments.BatchSize(tokens=48))], {2: 48, 6: 96}),
        (
            [(3, mf.amendments.BatchSize(tokens=48)), (7, mf.amendments.BatchSize(tokens=240))],
            {3: 48, 6: 96, 7: 240},
        ),
        (
            [(2, mf.amendments.BatchSize(tokens=48)), (4, mf.amendments.BatchSize(tokens=72))],
            {2: 48, 4: 72, 6: 96},
        ),
        ([(3, mf.amendments.BatchSize(6))], {3: 48, 4: 192, 6: 96}),  # sequences, until the length changes
    ):
        steps = [(0, 192), *wanted.items()]
        made = recipe.amended(amended)
        for step in range(12):
            tokens = [tokens for first, tokens in steps if first <= step][-1]
            assert sum(len(row) for _, row in inputs_of(made, step)) == tokens, (amended, step)
    rows = mf.Recipe(data=stores(folder)["one"], sequence=mf.Windows(8), batch=mf.Batch(tokens=64))
    assert rows.amended([(3, mf.amendments.BatchSize(tokens=128))]).batch == mf.Batch(8).then(3, 16)
    with pytest.raises(RecipeError, match="100 tokens are no whole number of rows of 8; give 96 or 104"):
        rows.amended([(3, mf.amendments.BatchSize(tokens=100))])


def test_thresholds_in_tokens_and_the_fingerprint(folder: Path) -> None:
    by_tokens = mf.Windows(8).then(at_tokens=24 * 8 * 4 - 5, length=24).then(at_tokens=24 * 8 * 9, length=12)
    by_steps = mf.Windows(8).then(4, 24).then(9, 12)
    batch = mf.Batch(tokens=24 * 8)
    recipes = [recipe_of(folder, sequence=rule, batch=batch) for rule in (by_tokens, by_steps)]
    assert recipes[0] == recipes[1] and recipes[0].fingerprint == recipes[1].fingerprint
    assert recipes[1].batch.stages == ((0, 24), (4, 8), (9, 16))
    later = recipe_of(folder, sequence=mf.Windows(8).then(5, 24).then(9, 12), batch=batch)
    assert later.summary(4) == recipes[0].summary(4) and later.summary(5) != recipes[0].summary(5)
    assert recipe_of(folder, sequence=mf.Windows(8).then(4, 48), batch=batch).summary(4) != later.summary(4)
    of_sequences = recipe_of(
        folder,
        sequence=mf.Windows(2).then(at_tokens=40, length=6).then(at_tokens=100, length=3),
        batch=mf.Batch(4).then(at_tokens=60, sequences=5),
    )  # 8 tokens a step, from token 40 on 24, from token 64 on 30
    assert of_sequences.sequence.row_lengths == ((0, 2), (5, 6), (8, 3))
    assert of_sequences.batch.stages == ((0, 4), (6, 5))
    assert "then(at_tokens=40, length=6)" in repr(mf.Windows(2).then(at_tokens=40, length=6))


def test_what_has_no_meaning_is_refused(folder: Path) -> None:
    store = stores(folder)["one"]
    windows = mf.Windows(8)
    for wrong, message in (
        (lambda: windows.then(4, 12), "8 tokens is no whole part of one of 12"),
        (lambda: windows.then(4, 0), "at least one token"),
        (lambda: windows.then(4), "at least one token"),
        (lambda: windows.then(4, 16).then(4, 8), "give a step after 4"),
        (lambda: windows.then(4, 16, at_tokens=9), "give one of them"),
        (lambda: windows.then(at_tokens=9, length=16).then(4, 8), "after a change at 9 tokens"),
        (
            lambda: recipe_of(folder, sequence=windows.then(4, 16), shuffle="blocks"),
            "shuffle='blocks': not with",
        ),
        (
            lambda: recipe_of(
                folder, sequence=windows.then(4, 16), data=mf.Mixture({"a": (store, 2)}, by="repeat")
            ),
            "amounts that end",
        ),
        (
            lambda: recipe_of(folder, sequence=windows.then(4, 24), batch=mf.Batch(tokens=16)),
            "no whole number of rows of 24",
        ),
    ):
        with pytest.raises(RecipeError, match=message):
            wrong()
