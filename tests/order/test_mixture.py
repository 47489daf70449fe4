"""Mixtures over segments: inside every source nothing is lost, repeated or moved."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from corpus import shares_at, write_corpus
from meshfeed.order import drawn_until, draws_of_step, num_positions, num_steps, position_of
from soak import cases


def store(size: int, length: int = 5) -> mf.Lengths:
    return mf.Lengths(np.full(size, length))


def recipe_of(data: Any, *, sequences: int | mf.Batch = 16, **options: Any) -> mf.Recipe:
    batch = sequences if isinstance(sequences, mf.Batch) else mf.Batch(sequences=sequences)
    return mf.Recipe(data=data, sequence=mf.Documents(), batch=batch, **options)


def steps_of(recipe: mf.Recipe, count: int) -> list[list[tuple[int, int, int]]]:
    made = (draws_of_step(recipe, step) for step in range(count))
    return [list(zip(d.source.tolist(), d.epoch.tolist(), d.index.tolist())) for d in made]


def check_sources(steps: list[list[tuple[int, int, int]]], sizes: list[int]) -> None:
    """Every source is gone through epoch by epoch, each sequence once."""
    seen: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for step in steps:
        for source, epoch, index in step:
            seen[source].append((epoch, index))
    for source, drawn in seen.items():
        epochs = [epoch for epoch, _ in drawn]
        assert epochs == [k // sizes[source] for k in range(len(drawn))]
        assert len(set(drawn)) == len(drawn)
        assert all(0 <= index < sizes[source] for _, index in drawn)


changes = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.sampled_from([0, 0.001, 0.2, 1, 3]), min_size=4, max_size=4)),
    max_size=4,
)


@settings(max_examples=cases(80), deadline=None)
@given(st.lists(st.integers(1, 60), min_size=4, max_size=4), changes, st.integers(1, 40))
def test_weights_may_change_and_sources_come_and_go(
    sizes: list[int], changes: list[tuple[int, list[float]]], sequences: int
) -> None:
    stores = [store(size) for size in sizes]
    names = "abcd"
    mixture, step, met = mf.Mixture({"a": (stores[0], 1), "b": (stores[1], 0.3)}), 0, {"a", "b"}
    for later, weights in changes:
        step += later
        amounts: dict[str, Any] = {}
        for name, own, weight in zip(names, stores, weights):
            if weight:
                amounts[name] = weight if name in met else (own, weight)
        if amounts:
            mixture = mixture.then(step, amounts)
            met |= set(amounts)
    recipe = recipe_of(mixture, sequences=sequences)
    steps = steps_of(recipe, step + 6)
    assert all(len(batch) == sequences for batch in steps)
    order = [names.index(name) for name in mixture.names]
    check_sources(steps, [sizes[at] for at in order])
    counts = np.bincount([s for batch in steps for s, _, _ in batch], minlength=len(order))
    assert drawn_until(recipe, step + 6)[0].tolist() == counts.tolist()
    for source, epoch, index in steps[-1][:5]:
        at = position_of(recipe, source, epoch, index)
        assert at is not None and steps[at // sequences][at % sequences] == (source, epoch, index)


def test_a_change_moves_nothing_that_came_before() -> None:
    first = mf.Mixture({"a": (store(50), 2), "b": (store(70), 1)})
    later = first.then(5, {"a": 1, "c": (store(30), 4)}).then(9, {"b": 1, "c": 1})
    assert steps_of(recipe_of(first), 5) == steps_of(recipe_of(later), 5)
    assert {s for batch in steps_of(recipe_of(later), 9)[5:] for s, _, _ in batch} == {0, 2}


def test_a_source_keeps_its_order_beside_others() -> None:
    """Its name keys its shuffle, so another source changes only where its turns come."""
    own = store(40)
    alone = steps_of(recipe_of(mf.Mixture({"a": (own, 1)}), sequences=8), 10)
    mixed = steps_of(recipe_of(mf.Mixture({"b": (store(9), 1), "a": (own, 1)}), sequences=8), 20)
    taken = [(e, i) for batch in mixed for s, e, i in batch if s == 1]
    assert taken == [(e, i) for batch in alone for _, e, i in batch][: len(taken)]


@pytest.mark.parametrize(
    ("by", "amounts", "counts"),
    [
        ("repeat", (1, 1), (100, 30)),
        ("repeat", (0.5, 3), (50, 90)),
        ("count", (17, 400), (17, 400)),
        ("count", (1, 1), (1, 1)),
    ],
)
@pytest.mark.parametrize("last", ["keep", "drop", "pad"])
def test_amounts_end_the_stream_exactly(by: Any, amounts: Any, counts: Any, last: Any) -> None:
    mixture = mf.Mixture({"a": (store(100), amounts[0]), "b": (store(30), amounts[1])}, by=by)
    recipe = recipe_of(mixture, sequences=mf.Batch(sequences=16, last=last))
    total = sum(counts)
    ends = {"keep": total, "drop": total // 16 * 16, "pad": -(-total // 16) * 16}
    steps = -(-ends[last] // 16)
    assert (num_positions(recipe), num_steps(recipe)) == (ends[last], steps)
    made = steps_of(recipe, steps + 1)
    assert made[-1] == []
    assert sum(map(len, made)) == ends[last]
    check_sources(made, [100, 30])
    if last == "keep":
        assert tuple(drawn_until(recipe, steps)[0].tolist()) == counts


@pytest.mark.parametrize("last", ["keep", "drop", "pad"])
def test_epochs_of_one_store_end_as_they_are_told_to(last: Any) -> None:
    recipe = recipe_of(store(25), sequences=mf.Batch(sequences=8, last=last), epochs=2)
    wanted = {"keep": [8] * 6 + [2], "drop": [8] * 6, "pad": [8] * 7}[last]
    made = steps_of(recipe, num_steps(recipe) or 0)
    assert [len(batch) for batch in made] == wanted
    assert num_positions(recipe) == sum(wanted)
    flat = [(e, i) for batch in made for _, e, i in batch]
    assert len(set(flat)) == len(flat), "what fills a last step is what would come next"


def test_so_many_steps_and_no_more() -> None:
    assert num_steps(recipe_of(store(25), steps=3)) == 3
    assert num_steps(recipe_of(store(25), steps=30, epochs=1)) == 2
    assert num_positions(recipe_of(store(25), steps=1, epochs=1)) == 16
    assert num_steps(recipe_of(mf.Mixture({"a": (store(25), 1)}), steps=7)) == 7
    assert num_steps(recipe_of(store(25))) is None


def test_a_ramp_of_batch_sizes_cuts_the_same_stream() -> None:
    ramp = mf.Batch(sequences=4).then(3, 8).then(5, 2)
    assert [ramp.position(step) for step in range(8)] == [0, 4, 8, 12, 20, 28, 30, 32]
    assert [ramp.step(p) for p in (0, 3, 4, 12, 19, 20, 28, 29, 30)] == [0, 0, 1, 3, 3, 4, 5, 5, 6]
    ramped, plain = recipe_of(store(50), sequences=ramp), recipe_of(store(50), sequences=4)
    flat = [draw for batch in steps_of(ramped, 8) for draw in batch]
    assert flat == [draw for batch in steps_of(plain, 9) for draw in batch][:34]
    assert num_steps(recipe_of(store(25), sequences=ramp, epochs=1)) == 5


def test_a_state_loads_where_only_the_future_changed() -> None:
    own, other = store(50), store(70)
    first = mf.Mixture({"a": (own, 2), "b": (other, 1)})
    saved = json.loads(json.dumps(mf.State(recipe=recipe_of(first).summary(until=6), step=6).to_json()))
    state = mf.State.from_json(saved)
    state.check(recipe_of(first))
    state.check(recipe_of(first.then(6, {"a": 1})))
    state.check(recipe_of(first, sequences=mf.Batch(sequences=16).then(8, 32)))
    state.check(recipe_of(first, steps=100))
    for changed in (
        recipe_of(first.then(5, {"a": 1})),
        recipe_of(mf.Mixture({"a": (own, 2), "b": (other, 1.5)})),
        recipe_of(mf.Mixture({"a": (own, 2), "c": (other, 1)})),
        recipe_of(first, sequences=mf.Batch(sequences=16).then(2, 32)),
        recipe_of(own),
    ):
        with pytest.raises(mf.errors.StateError, match="saved") as told:
            state.check(changed)
        assert "now" in str(told.value)


def test_a_state_stays_small_whatever_the_mixture() -> None:
    sources = {f"source-{k:05}": (store(3), 1.0 + k) for k in range(2000)}
    mixture = mf.Mixture(sources)
    for step in range(1, 60):
        mixture = mixture.then(step, {"source-00000": step})
    recipe = recipe_of(mixture)
    text = json.dumps(mf.State(recipe=recipe.summary(until=70), step=70).to_json())
    assert len(text) <= 4096
    changed = recipe_of(mf.Mixture(sources | {"source-01999": (store(3), 7.0)}))
    assert changed.summary(until=1) != recipe.summary(until=1)


def test_a_step_tells_what_was_drawn_of_each_source(tmp_path: Path) -> None:
    for k in range(2):
        write_corpus(tmp_path / f"c{k}", num_tokens=2000, seed=k)
    data = mf.Mixture({f"c{k}": (mf.open(tmp_path / f"c{k}"), k + 1) for k in range(2)})
    recipe = mf.Recipe(data=data, sequence=mf.Windows(32), batch=mf.Batch(sequences=9))
    with mf.Feed(recipe) as feed:
        for step in feed:
            drawn = step.stats.source_drawn
            assert drawn.sum() == 9 * (step.index + 1)
            assert abs(drawn[1] - 2 * drawn[0]) <= 3
            np.testing.assert_allclose(step.stats.source_epochs, drawn / 62)
            if step.index == 20:
                break


def test_the_share_that_is_asked_changes_with_the_very_step() -> None:
    mixture = (
        mf.Mixture({"a": (store(50), 3), "b": (store(70), 1)}).then(5, {"b": 1}).then(6, {"a": 1, "b": 4})
    )
    recipe = recipe_of(mixture)
    asked = [shares_at(recipe, step) for step in range(8)]
    np.testing.assert_allclose(asked, [[0.75, 0.25]] * 5 + [[0, 1]] + [[0.2, 0.8]] * 2, atol=1e-12)
    for step, (first, _) in enumerate(asked):
        drawn = sum(source == 0 for source, _, _ in steps_of(recipe, 8)[step])
        assert abs(drawn - 16 * first) <= 1, "and so does what is drawn"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mf.Mixture({}), "at least one source"),
        (lambda: mf.Mixture({"a": (store(1), 0)}), "above 0"),
        (lambda: mf.Mixture({"a": (store(1), -1)}), "from 0"),
        (lambda: mf.Mixture({"a": (store(1), float("nan"))}), "finite"),
        (lambda: mf.Mixture({"a": (store(1), True)}), "finite number"),
        (lambda: mf.Mixture({"a": 0.5}), "give .store, amount."),
        (lambda: mf.Mixture({"a": ("path", 0.5)}), "give .store, amount."),
        (lambda: mf.Mixture({"": (store(1), 0.5)}), "a name"),
        (lambda: mf.Mixture({"a": (store(1), 0.5)}, by="count"), "whole number"),
        (lambda: mf.Mixture({"a": (store(1), 1)}, by="share"), "choose one of"),
        (lambda: mf.Mixture({"a": (store(1), 1)}).then(0, {"a": 2}), "a step after 0"),
        (lambda: mf.Mixture({"a": (store(1), 1)}).then(4, {"a": 2}).then(4, {"a": 1}), "a step after 4"),
        (lambda: mf.Mixture({"a": (store(1), 1)}).then(4, {"b": 2}), "'b' is new"),
        (lambda: mf.Mixture({"a": (store(1), 1)}).then(4, {"a": (store(1), 2)}), "another store"),
        (lambda: mf.Batch(sequences=2).then(0, 4), "a step after 0"),
        (lambda: mf.Batch(sequences=2).then(3, 0), "from 1"),
        (lambda: mf.Batch(sequences=2, last="lose"), "choose one of"),
        (lambda: recipe_of(mf.Mixture({"a": (store(1), 1)}), epochs=2), 'by="repeat"'),
        (lambda: recipe_of(store(1), steps=0), "steps=0"),
    ],
)
def test_what_is_no_mixture_is_refused_in_words(make: Any, message: str) -> None:
    with pytest.raises(mf.errors.RecipeError, match=message):
        make()


def test_a_source_without_a_sequence_is_named() -> None:
    empty = recipe_of(mf.Mixture({"a": (store(5), 1), "b": (store(0), 1)}))
    with pytest.raises(mf.errors.RecipeError, match="makes no sequence"):
        draws_of_step(empty, 0)
    too_little = recipe_of(mf.Mixture({"a": (store(5), 1), "b": (store(5), 0.01)}, by="repeat"))
    with pytest.raises(mf.errors.RecipeError, match=r"'b': 0\.01 passes"):
        draws_of_step(too_little, 0)
