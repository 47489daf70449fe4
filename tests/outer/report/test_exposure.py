"""Exposure against a scan of every step, token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.errors import RecipeError, StoreError
from meshfeed.order import (
    Draws,
    OwnOrder,
    drawn_until,
    draws_between,
    draws_of_source,
    draws_of_step,
    key_of,
    num_positions,
    positions_of,
)
from meshfeed.order.stream import stream_of
from meshfeed.report.drawn import drawn_of_sources
from meshfeed.report.exposure import exposures
from soak import cases

Sight = tuple[int, int, int, int, int, int, int]
"""A document's source and number, step, place, epoch, index, tokens held."""


def documents_held(recipe: mf.Recipe, source: int, epoch: int, index: int) -> Counter[int]:
    """Document -> its tokens among those of a sequence, and the last label."""
    rule, store = recipe.sequence, recipe.sources[source]
    lengths = store.lengths(np.arange(store.num_documents))
    if isinstance(rule, mf.Masked):
        lengths = lengths.clip(max=rule.length - 2)
    if not isinstance(rule, mf.Windows):
        return Counter({index: int(lengths[index])} if lengths[index] else {})
    owner = np.repeat(np.arange(lengths.size), lengths)
    shift = key_of(recipe.seed, recipe.source_keys[source], epoch, rule.length) % rule.length if epoch else 0
    return Counter(owner[(index * rule.length + shift + np.arange(rule.length + 1)) % owner.size].tolist())


def scanned(recipe: mf.Recipe, wanted: set[tuple[int, int]], until: int) -> Iterator[Sight]:
    for step in range(until):
        draws = draws_of_step(recipe, step)
        each = zip(draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist())
        for place, (source, epoch, index) in enumerate(each):
            for document, tokens in documents_held(recipe, source, epoch, index).items():
                if (source, document) in wanted:
                    yield source, document, step, place, epoch, index, tokens


def found_by_arithmetic(recipe: mf.Recipe, wanted: list[tuple[int, int]], until: int) -> Counter[Any]:
    sources, documents = np.array(wanted, np.int64).reshape(-1, 2).T
    found = exposures(recipe, sources, documents, until)
    positions = [recipe.batch.position(s) + p for s, p in zip(found.step.tolist(), found.place.tolist())]
    assert positions == sorted(positions)
    assert np.array_equal(found.draws.source, sources[found.document])
    held: Counter[Any] = Counter()  # a window may hold both ends of a document that fills the ring
    columns = documents[found.document], found.step, found.place, found.draws.epoch, found.draws.index
    for sight, tokens in zip(
        zip(found.draws.source.tolist(), *(each.tolist() for each in columns)),
        (found.end - found.begin).tolist(),
    ):
        assert tokens > 0
        held[sight] += tokens
    return held


of_lengths = st.lists(st.integers(0, 12), min_size=1, max_size=30).map(
    lambda lengths: mf.Lengths([*lengths, 9])  # a window of 8 and its last label
)
stores = of_lengths | of_lengths.map(lambda store: store[len(store) // 2 :])
shuffles = st.sampled_from(["global", "none", mf.Blocks(sequences=3, window=2, lanes=2)])


MASKED = mf.Masked(9, vocab_size=9, mask_token=9, first_token=10, last_token=11)


@st.composite
def recipes(draw: st.DrawFn) -> mf.Recipe:
    batch = mf.Batch(draw(st.integers(1, 7)), last=draw(st.sampled_from(["keep", "drop", "pad"])))
    rule = draw(st.sampled_from([mf.Documents(), MASKED, mf.Windows(1), mf.Windows(3), mf.Windows(8)]))
    options: dict[str, Any] = {"sequence": rule, "seed": draw(st.integers(0, 9)), "shuffle": draw(shuffles)}
    if draw(st.booleans()):
        batch = batch.then(draw(st.integers(1, 5)), draw(st.integers(1, 9)))
    own = [draw(stores) for _ in range(draw(st.integers(1, 3)))]
    if len(own) == 1:
        return mf.Recipe(data=own[0], batch=batch, epochs=draw(st.sampled_from([None, 1, 3])), **options)
    weights = st.sampled_from([1, 3, 0.2, 0.01])
    per_source = draw(st.booleans())
    data = mf.Mixture(
        {str(at): (store, draw(weights)) for at, store in enumerate(own)},
        batches="per_source" if per_source else "mixed",
    )
    if draw(st.booleans()):
        data = data.then(draw(st.integers(1, 6)), {"0": draw(weights), "new": (draw(stores), draw(weights))})
    return mf.Recipe(data=data, batch=batch, **options)


@settings(max_examples=cases(60, 1_500), deadline=None)
@given(recipes(), st.integers(0, 16), st.data())
def test_it_is_what_a_scan_of_every_step_finds(recipe: mf.Recipe, until: int, data: st.DataObject) -> None:
    there = [(s, d) for s, store in enumerate(recipe.sources) for d in range(store.num_documents)]
    wanted = data.draw(st.lists(st.sampled_from(there), unique=True))
    found = found_by_arithmetic(recipe, wanted, until)
    assert found == Counter({sight[:-1]: sight[-1] for sight in scanned(recipe, set(wanted), until)})


@settings(max_examples=cases(30, 600), deadline=None)
@given(recipes(), st.integers(0, 16), st.data())
def test_what_each_source_gave_is_what_a_scan_counts(
    recipe: mf.Recipe, until: int, data: st.DataObject
) -> None:
    """Also of a recipe whose amendments leave out steps and documents."""
    changes: list[Any] = []
    for step in data.draw(st.lists(st.integers(0, 12), max_size=3)):
        source = data.draw(st.integers(0, len(recipe.sources) - 1))
        some = st.lists(st.integers(0, recipe.sources[source].num_documents - 1), min_size=1, unique=True)
        exclude = mf.amendments.Exclude({recipe.source_names[source]: sorted(data.draw(some))})
        changes.append((step, data.draw(st.sampled_from([mf.amendments.SkipSteps(step, step + 3), exclude]))))
    recipe, added = recipe.amended(changes), 2 if isinstance(recipe.sequence, mf.Masked) else 0
    wanted = np.zeros((2, len(recipe.sources)), np.int64)
    for step in range(until):
        gone = {} if isinstance(recipe.sequence, mf.Windows) else recipe.amendments.excluded_at(step)
        draws = draws_of_step(recipe, step)
        for source, index in zip(draws.source.tolist(), draws.index.tolist()):
            if not recipe.skips(step):
                one = Draws(np.array([source], np.int32), np.zeros(1, np.int64), np.array([index]))
                empty = index in gone.get(source, np.zeros(0)).tolist()
                wanted[:, source] += 1, added if empty else recipe.sequence.lengths(recipe, one)[0]
    assert np.array_equal(drawn_of_sources(recipe, until), wanted)


@settings(max_examples=cases(30, 600), deadline=None)
@given(recipes(), st.randoms(use_true_random=False), st.integers(0, 90))
def test_positions_of_draws_in_any_order(recipe: mf.Recipe, random: Any, stop: int) -> None:
    draws = draws_between(recipe, 0, 80)
    order = np.array(random.sample(range(len(draws)), len(draws)), np.int64)
    assert positions_of(recipe, draws.take(order)).tolist() == order.tolist()
    assert (
        positions_of(recipe, draws.take(order), stop).tolist() == np.where(order < stop, order, -1).tolist()
    )


@settings(max_examples=cases(30, 600), deadline=None)
def places_of(recipe: mf.Recipe, draws: Draws) -> list[int]:
    """In their epochs."""
    return stream_of(recipe).unshuffled(draws.source, draws.epoch, draws.index).tolist()


@given(recipes(), st.integers(1, 12))
def test_draws_of_one_source_are_those_of_the_stream(recipe: mf.Recipe, until: int) -> None:
    """Counted as `drawn_until` says, and back to their places."""
    for step in range(until):
        before, after = (drawn_until(recipe, each) or ([], []) for each in (step, step + 1))
        for source, _, draws in draws_of_step(recipe, step).by_source():
            first, stop = int(before[0][source]), int(after[0][source])
            alone = draws_of_source(recipe, source, first, stop)
            assert alone.epoch.tolist() == draws.epoch.tolist()
            assert alone.index.tolist() == draws.index.tolist()
            size = recipe.sequence.num_sequences(recipe.sources[source])
            assert places_of(recipe, alone) == (np.arange(first, stop) % size).tolist()


def test_blocks_of_a_source_alone_have_its_own_size() -> None:
    data = mf.Mixture({"a": (mf.Lengths([1] * 7), 1), "b": (mf.Lengths([1] * 40), 1)})
    shuffle = mf.Blocks(sequences=3, window=2, lanes=2)
    recipe = mf.Recipe(data=data, sequence=mf.Documents(), batch=mf.Batch(4), shuffle=shuffle)
    draws = draws_of_source(recipe, 1, 0, 40)
    assert sorted(draws.index.tolist()) == list(range(40)) == places_of(recipe, draws)


def test_far_away_and_past_the_end() -> None:
    """Sequence by sequence where no scan comes: there and back."""
    data = mf.Mixture({"a": (mf.Lengths([3] * 1000), 0.9), "b": (mf.Lengths([5] * 77), 0.1)}).then(
        10**9, {"a": 0.5, "b": 0.5}
    )
    recipe = mf.Recipe(data=data, sequence=mf.Documents(), batch=mf.Batch(50))
    for start in (0, 50 * 10**9 - 20_000, 10**14):
        draws = draws_between(recipe, start, start + 40_000)
        assert np.array_equal(positions_of(recipe, draws), np.arange(start, start + 40_000))
    ends = mf.Recipe(data=mf.Lengths([3] * 10), sequence=mf.Documents(), batch=mf.Batch(4), epochs=2)
    assert num_positions(ends) == 20
    later = Draws(np.zeros(2, np.int32), np.array([1, 2]), np.array([4, 4]))
    assert (positions_of(ends, later) >= 0).tolist() == [True, False]


@dataclass(frozen=True)
class InTheirOrder(mf.Windows, OwnOrder):
    """Windows in an order of its own."""

    def num_positions(self, recipe: mf.Recipe) -> int:
        return 10

    def draws_between(self, recipe: mf.Recipe, start: int, stop: int) -> Draws:
        return Draws(
            np.zeros(stop - start, np.int32), np.zeros(stop - start, np.int64), np.arange(start, stop)
        )


def test_an_order_without_an_inverse_is_refused_by_name() -> None:
    one, own = np.zeros(1, np.int64), mf.Lengths([30])
    with pytest.raises(RecipeError, match=r"InTheirOrder\(.*has an order of its own"):
        exposures(mf.Recipe(data=own, sequence=InTheirOrder(4), batch=mf.Batch(2)), one, one, 3)
    with pytest.raises(StoreError, match="document 7 asked for"):
        exposures(mf.Recipe(data=own, sequence=mf.Windows(4), batch=mf.Batch(2)), one, one + 7, 3)


class Items:
    """Without lengths: each counts as a token."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, np.ndarray]:
        return {"x": np.zeros(at.index)}


def test_what_is_counted_one_by_one() -> None:
    own, batch = mf.Lengths([30]), mf.Batch(2)
    recipe = mf.Recipe(data=own, sequence=InTheirOrder(4), batch=batch)
    assert np.ravel(drawn_of_sources(recipe, 9)).tolist() == [10, 40]
    recipe = mf.Recipe(data=mf.Mapped(Items()), sequence=mf.Samples("x"), batch=batch)
    assert np.ravel(drawn_of_sources(recipe, 6)).tolist() == [12, 12]


def test_an_excluded_document_is_not_seen_any_more(tmp_path: Path) -> None:
    shares = dict[str, Any]()
    for name, size in {"code": 31, "docs": 17, "web": 43}.items():
        with mf.IndexedWriter(tmp_path / name, np.uint16) as writer:
            for tokens in range(1, size + 1):
                writer.add_document(np.arange(tokens, dtype=np.uint16))
        shares[name] = mf.open(tmp_path / name), 1
    recipe = mf.Recipe(data=mf.Mixture(shares), sequence=mf.Documents(), batch=mf.Batch(6))
    changes = (
        (3, mf.amendments.Exclude({"web": [*range(0, 40, 2)]})),
        (6, mf.amendments.SkipSteps(8, 11)),
        (9, mf.amendments.BatchSize(9)),
    )
    for amended in (recipe, recipe.amended(changes)):
        seen = [
            (simulated.batch.step, *at)
            for simulated in mf.simulate(amended, mf.Layout(), 30, packing=mf.Packing(capacity=128))
            for microbatch in simulated.microbatches
            for at in zip(microbatch.draws.source.tolist(), microbatch.draws.index.tolist())
        ]
        sources, documents = np.repeat([0, 2], 20), np.tile(np.arange(20), 2)
        with amended.sources[0], amended.sources[2]:
            found = exposures(amended, sources, documents, 30)
        listed = zip(
            found.step.tolist(), sources[found.document].tolist(), documents[found.document].tolist()
        )
        assert sorted(listed) == sorted(each for each in seen if each[1] in (0, 2) and each[2] < 20)
