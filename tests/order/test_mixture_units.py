"""How a mixture's amounts are given, and batches of one source each."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mixture import check_sources, recipe_of, steps_of, store

import meshfeed as mf
from corpus import shares_at
from meshfeed.order import (
    drawn_until,
    draws_between,
    num_positions,
    num_steps,
    position_of,
)
from observe import content_of
from soak import cases

A, B, C = store(100), store(30), store(7)


# -- amounts ----------------------------------------------------------------------------------------


def test_without_amounts_sources_are_mixed_by_their_sizes() -> None:
    bare = recipe_of(mf.Mixture({"a": A, "b": B}))
    weighed = recipe_of(mf.Mixture({"a": (A, 100), "b": (B, 30)}))
    assert steps_of(bare, 40) == steps_of(weighed, 40)
    assert num_steps(bare) is None
    assert shares_at(bare, 0) == pytest.approx([100 / 130, 30 / 130])
    assert bare.fingerprint != weighed.fingerprint, "where the rule makes other sequences, it weighs by those"
    assert "by size" in bare.summary()["data"]


def test_by_size_goes_by_what_the_rule_makes_of_a_store() -> None:
    class Half(mf.Documents):
        def num_sequences(self, store: Any) -> int:
            return super().num_sequences(store) // (2 if store is A else 1)

    recipe = mf.Recipe(data=mf.Mixture({"a": A, "b": B}), sequence=Half(), batch=mf.Batch(sequences=8))
    assert shares_at(recipe, 0) == pytest.approx([50 / 80, 30 / 80])


def test_a_later_part_may_go_by_size_and_bring_stores() -> None:
    mixture = mf.Mixture({"a": (A, 0.5), "b": (B, 0.5)}).then(3, {"a": A, "b": B, "c": C}).then(5, {"c": 1})
    recipe = recipe_of(mixture)
    shares = [shares_at(recipe, step) for step in range(6)]
    assert shares[2] == [0.5, 0.5, 0] and shares[5] == [0, 0, 1]
    assert shares[3] == shares[4] == pytest.approx([100 / 137, 30 / 137, 7 / 137])
    check_sources(steps_of(recipe, 9), [100, 30, 7])


@pytest.mark.parametrize("by", ["repeat", "count"])
def test_a_store_without_an_amount_is_taken_once(by: Any) -> None:
    recipe = recipe_of(mf.Mixture({"a": A, "b": (B, 2)}, by=by))
    same = mf.Mixture({"a": (A, 1), "b": (B, 2)}, by={"a": "repeat", "b": by})
    assert recipe.fingerprint == recipe_of(same).fingerprint
    assert num_positions(recipe) == {"repeat": 160, "count": 102}[by]


@pytest.mark.parametrize("last", ["keep", "drop", "pad"])
def test_passes_and_counts_in_one_mixture(last: Any) -> None:
    mixture = mf.Mixture(
        {"a": (A, 0.5), "b": (B, 41), "c": (C, 3)}, by={"a": "repeat", "b": "count", "c": "repeat"}
    )
    recipe = recipe_of(mixture, sequences=mf.Batch(sequences=16, last=last))
    total = 50 + 41 + 21
    assert num_positions(recipe) == {"keep": total, "drop": 112, "pad": 112}[last]
    same = recipe_of(mf.Mixture({"a": (A, 50), "b": (B, 41), "c": (C, 21)}, by="count"))
    assert steps_of(recipe, 7) == steps_of(same, 7)
    assert drawn_until(recipe, 7)[0].tolist() == [50, 41, 21]


def test_units_are_part_of_the_fingerprint() -> None:
    mixtures = [
        mf.Mixture({"a": A, "b": B}),
        mf.Mixture({"a": (A, 1), "b": (B, 1)}),
        mf.Mixture({"a": (A, 1), "b": (B, 1)}, by="repeat"),
        mf.Mixture({"a": (A, 1), "b": (B, 1)}, by="count"),
        mf.Mixture({"a": (A, 1), "b": (B, 1)}, by={"a": "repeat", "b": "count"}),
        mf.Mixture({"a": (A, 1), "b": (B, 1)}, by={"a": "count", "b": "repeat"}),
        mf.Mixture({"a": (A, 1), "b": (B, 1), "c": (C, 0)}),
        mf.Mixture({"a": (A, 1), "b": (B, 1)}, batches="per_source"),
    ]
    assert len({recipe_of(mixture).fingerprint for mixture in mixtures}) == len(mixtures)
    twice = mf.Mixture({"a": (A, 1), "b": (B, 1)}, by={"a": "repeat", "b": "repeat"})
    assert recipe_of(twice).fingerprint == recipe_of(mixtures[2]).fingerprint


@pytest.mark.parametrize("by", ["proportion", "repeat", "count"])
def test_a_source_of_nothing_rests_and_keeps_its_place(by: Any) -> None:
    mixture = mf.Mixture({"a": (A, 3), "b": (B, 0), "c": (C, 1)}, by=by)
    recipe = recipe_of(mixture)
    assert {s for batch in steps_of(recipe, 20) for s, _, _ in batch} == {0, 2}
    assert drawn_until(recipe, 1)[0][1] == 0 and shares_at(recipe, 0)[1] == 0
    assert position_of(recipe, 1, 0, 0) is None
    if by == "proportion":
        later = recipe_of(mixture.then(4, {"b": 1, "c": 0}))
        assert {s for batch in steps_of(later, 9)[4:] for s, _, _ in batch} == {1}
        check_sources(steps_of(later, 9), [100, 30, 7])
    elif by == "repeat":
        assert num_positions(recipe) == 307


def test_next_to_nothing_beside_a_lot() -> None:
    recipe = recipe_of(mf.Mixture({"a": (A, 1.0), "b": (B, 1e-30), "c": (C, 5e-324)}))
    assert {s for batch in steps_of(recipe, 30) for s, _, _ in batch} == {0}
    assert draws_between(recipe, 10**15, 10**15 + 100).source.tolist() == [0] * 100
    assert position_of(recipe, 1, 0, 0) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mf.Mixture({"a": A, "b": (B, 1)}), "'a' has no amount, but others have"),
        (lambda: mf.Mixture({"a": (A, 0), "b": (B, 0)}), "above 0"),
        (lambda: mf.Mixture({"a": (A, 1)}).then(3, {"a": 0}), "above 0"),
        (lambda: mf.Mixture({"a": (A, 1), "b": (B, 1)}, by={"a": "repeat"}), "'b' is not named"),
        (lambda: mf.Mixture({"a": (A, 1)}, by={"a": "repeat", "b": "count"}), "by names 'b'"),
        (lambda: mf.Mixture({"a": (A, 1)}, by={"a": "size"}), "choose one of"),
        (lambda: mf.Mixture({"a": (A, 1), "b": (B, 1)}, by={"a": "repeat", "b": "proportion"}), "never ends"),
        (lambda: mf.Mixture({"a": (A, 1.5), "b": (B, 1)}, by={"a": "count", "b": "repeat"}), "whole number"),
        (lambda: mf.Mixture({"a": (A, 1, 2)}), "give .store, amount."),
        (lambda: mf.Mixture({"a": (A, 1)}, batches="alternate"), "mixed, per_source"),
    ],
)
def test_amounts_that_do_not_go_together_are_refused(make: Any, message: str) -> None:
    with pytest.raises(mf.errors.RecipeError, match=message):
        make()


# -- batches of one source each ---------------------------------------------------------------------


def sources_of(steps: list[list[tuple[int, int, int]]]) -> list[int]:
    assert all(len({source for source, _, _ in step}) == 1 for step in steps)
    return [step[0][0] for step in steps]


@settings(max_examples=cases(40, 600), deadline=None)
@given(
    weights=st.lists(st.sampled_from([0, 0.01, 0.3, 1, 2, 7]), min_size=3, max_size=3).filter(any),
    later=st.lists(st.sampled_from([0, 0.5, 1, 4]), min_size=3, max_size=3).filter(any),
    sequences=st.integers(1, 40),
    ramp=st.integers(1, 40),
    changes=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    shuffle=st.sampled_from(["global", "blocks", "none"]),
)
def test_every_batch_is_of_one_source_and_sources_keep_their_shares(
    weights: list[float],
    later: list[float],
    sequences: int,
    ramp: int,
    changes: tuple[int, int],
    shuffle: Any,
) -> None:
    """Through a change of weights and one of the batch size; at most one batch from the share since each."""
    stores = dict(zip("abc", (A, B, C)))
    mixture = mf.Mixture({name: (stores[name], w) for name, w in zip("abc", weights)}, batches="per_source")
    mixture = mixture.then(changes[0], dict(zip("abc", later)))
    batch = mf.Batch(sequences=sequences).then(changes[1], ramp)
    recipe = recipe_of(mixture, sequences=batch, shuffle=shuffle)
    count = max(changes) + 30
    steps = steps_of(recipe, count)
    assert [len(step) for step in steps] == [sequences] * changes[1] + [ramp] * (count - changes[1])
    check_sources(steps, [100, 30, 7])
    turns = sources_of(steps)
    edges = sorted({0, *changes, count})
    for start, stop in pairwise(edges):
        share = np.array(later if start >= changes[0] else weights) / sum(
            later if start >= changes[0] else weights
        )
        for k in range(start, stop):
            given_so_far = np.bincount(turns[start : k + 1], minlength=3)
            assert (np.abs(given_so_far - share * (k + 1 - start)) < 1 + 1e-9).all()
    flat = [draw for step in steps for draw in step]
    for at in (0, len(flat) // 2, len(flat) - 1):
        assert position_of(recipe, *flat[at]) == at
        one = draws_between(recipe, at, at + 1)
        assert (int(one.source[0]), int(one.epoch[0]), int(one.index[0])) == flat[at]
    drawn = Counter(source for source, _, _ in flat)
    assert drawn_until(recipe, count)[0].tolist() == [drawn[s] for s in range(3)]


def test_it_is_reached_from_anywhere_at_once() -> None:
    recipe = recipe_of(mf.Mixture({"a": (A, 2), "b": (B, 1)}, batches="per_source"), sequences=32)
    far = draws_between(recipe, 32 * 10**12, 32 * (10**12 + 90))
    turns = far.source.reshape(90, 32)
    assert (turns == turns[:, :1]).all() and 29 <= (turns[:, 0] == 1).sum() <= 31


@pytest.mark.parametrize(
    ("last", "batches"),
    [("drop", [100 // 16, 60 // 16, 40 // 16]), ("pad", [-(-100 // 16), -(-60 // 16), 3])],
)
def test_amounts_that_end_make_whole_batches(last: Any, batches: list[int]) -> None:
    mixture = mf.Mixture(
        {"a": (A, 1), "b": (B, 2), "c": (C, 40)},
        by={"a": "repeat", "b": "repeat", "c": "count"},
        batches="per_source",
    )
    recipe = recipe_of(mixture, sequences=mf.Batch(sequences=16, last=last))
    assert num_steps(recipe) == sum(batches)
    steps = steps_of(recipe, sum(batches) + 1)
    assert steps.pop() == [] and all(len(step) == 16 for step in steps)
    turns = sources_of(steps)
    assert [turns.count(s) for s in range(3)] == batches
    check_sources(steps, [100, 30, 7])


def test_a_source_that_fills_no_batch_is_left_out_under_drop() -> None:
    mixture = mf.Mixture({"a": A, "c": C}, by="repeat", batches="per_source")
    recipe = recipe_of(mixture, sequences=mf.Batch(sequences=16, last="drop"))
    assert set(sources_of(steps_of(recipe, 6))) == {0} and num_steps(recipe) == 6


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (mf.Batch(sequences=16), r"'a': 100 sequences do not fill batches of 16; .*leaves 4 out, last='pad'"),
        (mf.Batch(sequences=10, last="drop").then(3, 20), "batches of one size"),
        (mf.Batch(sequences=200, last="drop"), "no source of the mixture fills a batch"),
    ],
)
def test_amounts_that_make_no_whole_batches_are_refused(batch: mf.Batch, message: str) -> None:
    mixture = mf.Mixture({"a": A, "b": B}, by="repeat", batches="per_source")
    with pytest.raises(mf.errors.RecipeError, match=message):
        num_steps(recipe_of(mixture, sequences=batch))
    assert num_steps(recipe_of(mixture, sequences=10)) == 13


def test_a_feed_of_such_batches_resumes_under_another_layout() -> None:
    """Through real Feeds of one process: a state from the middle, one reader, then two replicas."""
    data = mf.Mixture({"a": (A, 2), "b": (B, 1)}, batches="per_source")
    recipe = recipe_of(data, sequences=8)
    packing = mf.Packing(capacity=64)
    with mf.Feed(recipe, packing=packing) as feed:
        for step in feed:
            if step.index == 4:
                break
        saved = json.loads(json.dumps(feed.state_dict()))
    wanted = steps_of(recipe, 8)[content_of(saved)["step"]]
    layout = mf.Layout(dp=2)
    seen: list[tuple[int, int, int]] = []
    for rank in range(2):
        feed = mf.Feed(recipe, layout, rank=rank, packing=packing)
        feed.load_state_dict(saved)
        with feed:
            step = next(iter(feed))
            for m in step.microbatches:
                seen += zip(m.draws.source.tolist(), m.draws.epoch.tolist(), m.draws.index.tolist())
    assert sorted(seen) == sorted(wanted) and len({source for source, _, _ in seen}) == 1
    other = mf.Recipe(
        data=mf.Mixture({"a": (A, 2), "b": (B, 1)}), sequence=mf.Documents(), batch=recipe.batch
    )
    with pytest.raises(mf.errors.StateError, match="per_source"):
        mf.Feed(other, packing=packing).load_state_dict(saved)
