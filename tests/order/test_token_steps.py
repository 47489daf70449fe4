"""Batches of so many tokens: where each step begins, against sequences counted one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from corpus import shares_at
from meshfeed.order import (
    drawn_until,
    draws_between,
    draws_of_step,
    has_step,
    num_positions,
    num_steps,
    position_of,
    start_of_step,
    steps_of,
)
from soak import cases

Part = tuple[int, dict[str, float]]
TOKENS = 60


def recipe_of(data: Any, batch: mf.Batch, **options: Any) -> mf.Recipe:
    return mf.Recipe(data=data, sequence=mf.Documents(), batch=batch, **options)


def lengths_of(recipe: mf.Recipe, draws: mf.order.Draws) -> np.ndarray:
    of_each = [store.lengths(np.arange(store.num_documents)).tolist() for store in recipe.sources]
    return np.array([of_each[s][i] for s, i in zip(draws.source.tolist(), draws.index.tolist())], np.int64)


def naive_starts(first: mf.Mixture, parts: list[Part], sizes: list[int], by: Any, shuffle: Any) -> list[int]:
    """Where each step begins. A change of amounts is one at a step of a single sequence.

    The sequences that decide where a step ends are those of the amounts in it.
    """
    mixture, changes, starts, due, tokens = first, dict(parts), [0], 0, 0
    stream, begin, known = None, 0, list[int]()  # lengths of the stream from the last change on
    for step, size in enumerate(sizes):
        if step in changes:
            mixture, stream = mixture.then(starts[-1], changes[step], by=by), None
        if stream is None:
            stream, begin = recipe_of(mixture, mf.Batch(sequences=1), shuffle=shuffle, seed=7), starts[-1]
            known = lengths_of(stream, draws_between(stream, begin, begin + 3_000)).tolist()
        due, position = due + size, starts[-1]
        while tokens + tokens + known[position - begin] < 2 * due:
            tokens, position = tokens + known[position - begin], position + 1
        starts.append(position)
    return starts


stores = st.lists(st.integers(0, TOKENS), min_size=1, max_size=12).filter(any)
shuffles = st.sampled_from(["global", "none", mf.Blocks(sequences=2, window=2, lanes=2)])


@settings(max_examples=cases(20), deadline=None)
@given(
    st.lists(st.tuples(stores, st.sampled_from([1e-6, 0.2, 1, 3])), min_size=1, max_size=3),
    st.lists(
        st.tuples(st.integers(1, 4), st.lists(st.sampled_from([0, 0.5, 2]), min_size=3, max_size=3)),
        max_size=3,
    ),
    st.lists(st.tuples(st.integers(1, 4), st.integers(TOKENS, 200)), max_size=2),
    st.sampled_from(["tokens", "proportion"]),
    shuffles,
)
def test_steps_of_a_mixture_are_those_that_a_plain_loop_cuts(
    sources: list[tuple[list[int], float]],
    changes: list[tuple[int, list[float]]],
    ramp: list[tuple[int, int]],
    by: Any,
    shuffle: Any,
) -> None:
    first = mf.Mixture({str(i): (mf.Lengths(own), share) for i, (own, share) in enumerate(sources)}, by=by)
    mixture, parts, at = first, list[Part](), 0
    for later, amounts in changes:
        given_to = {str(i): amount for i, (_, amount) in enumerate(zip(sources, amounts))}
        if any(given_to.values()):
            at += later
            parts.append((at, given_to))
            mixture = mixture.then(at, given_to, by=by)
    batch, sizes, at = mf.Batch(tokens=100), [100] * 9, 0
    for later, size in ramp:
        at += later
        batch, sizes[at:] = batch.then(at, tokens=size), [size] * (9 - at)
    recipe = recipe_of(mixture, batch, shuffle=shuffle, seed=7)
    starts = naive_starts(first, parts, sizes, by, shuffle)
    start_of_step(recipe, 7)  # from anywhere
    assert [start_of_step(recipe, step) for step in range(len(starts))] == starts
    for step, (start, stop) in enumerate(pairwise(starts)):
        draws = draws_of_step(recipe, step)
        assert len(draws) == stop - start > 0, "no step is empty"
        of, place = steps_of(recipe, np.array([stop - 1, start]))
        assert of.tolist() == [step, step] and place.tolist() == [stop - 1 - start, 0]
        drawn, _ = drawn_until(recipe, step) or (None, None)
        assert drawn is not None and drawn.sum() == start
        assert set(draws.source.tolist()) <= set(np.flatnonzero(shares_at(recipe, step)).tolist())
    last = draws_of_step(recipe, len(starts) - 2)
    where = position_of(recipe, int(last.source[0]), int(last.epoch[0]), int(last.index[0]))
    assert where == starts[-2]


@settings(max_examples=cases(25), deadline=None)
@given(stores, stores, shuffles, st.integers(1, 6), st.booleans())
def test_a_long_sequence_needs_large_steps_where_it_is_drawn(
    short: list[int], long: list[int], shuffle: Any, at: int, grows: bool
) -> None:
    """And in the step behind them, into which it may reach."""
    long = [4 * each for each in long]
    first, then = ({str(i): float(i == grows) for i in range(2)} for grows in (not grows, grows))
    mixture = mf.Mixture({name: (mf.Lengths((short, long)[int(name)]), first[name]) for name in first})

    def made(step: int) -> mf.Recipe:
        batch = mf.Batch(tokens=TOKENS if grows else 4 * TOKENS)
        batch = batch.then(step, tokens=4 * TOKENS if grows else TOKENS)
        return recipe_of(mixture.then(at, then), batch, shuffle=shuffle, seed=7)

    recipe = made(at + (not grows))
    sizes = [recipe.batch.size(step) for step in range(9)]
    starts = naive_starts(mixture, [(at, then)], sizes, "proportion", shuffle)
    assert [start_of_step(recipe, step) for step in range(10)] == starts
    assert all(start < stop for start, stop in pairwise(starts)), "no step is empty"
    if max(long) > TOKENS:
        with pytest.raises(mf.errors.RecipeError, match=f"more than a step of {TOKENS}"):
            num_steps(made(at + grows))


@settings(max_examples=cases(25), deadline=None)
@given(
    stores,
    st.integers(1, 4),
    st.sampled_from(["keep", "drop", "pad"]),
    st.none() | st.integers(1, 9),
    shuffles,
)
def test_where_a_stream_ends(own: list[int], epochs: int, last: Any, steps: int | None, shuffle: Any) -> None:
    """As it would go on, so go its steps; the last is kept, dropped or filled up."""
    store, batch = mf.Lengths(own), mf.Batch(tokens=70, last=last)
    recipe = recipe_of(store, batch, epochs=epochs, steps=steps, shuffle=shuffle)
    endless, size = recipe_of(store, batch, shuffle=shuffle), len(own) * epochs
    starts = [start_of_step(endless, step) for step in range(sum(own) * epochs // 70 + 3)]
    whole = [(start, stop) for start, stop in pairwise(starts) if stop <= size]
    cut = [(start, stop) for start, stop in pairwise(starts) if start < size < stop]
    if last == "keep":
        whole += [(start, size) for start, _ in cut]
    elif last == "pad":
        whole += cut
    whole = whole[:steps]
    assert [has_step(recipe, step) for step in range(len(whole) + 2)] == [True] * len(whole) + [False] * 2
    assert num_steps(recipe) == len(whole)
    assert num_positions(recipe) == (whole[-1][1] if whole else 0)
    for step, (start, stop) in enumerate(whole):
        made, expected = draws_of_step(recipe, step), draws_between(endless, start, stop)
        assert (
            made.index.tolist() == expected.index.tolist() and made.epoch.tolist() == expected.epoch.tolist()
        )
    assert not len(draws_of_step(recipe, len(whole))) and not len(draws_of_step(recipe, 10**9))


def test_an_empty_sequence_where_a_step_ends_is_of_the_next() -> None:
    recipe = recipe_of(mf.Lengths([5, 5, 0, 5, 5]), mf.Batch(tokens=10), shuffle="none")
    assert [start_of_step(recipe, step) for step in range(3)] == [0, 2, 5]


def test_steps_are_within_half_a_sequence_of_their_tokens() -> None:
    lengths = np.random.default_rng(3).integers(0, 2_001, 30_000)
    recipe = recipe_of(mf.Lengths(lengths), mf.Batch(tokens=50_000))
    total = 0
    for step in range(300):
        total += int(lengths[draws_of_step(recipe, step).index].sum())
        assert abs(total - 50_000 * (step + 1)) <= 1_000, f"after step {step}"


def test_passes_and_counts_end_by_tokens_too() -> None:
    a, b = mf.Lengths([9, 1, 5, 5]), mf.Lengths([3] * 10)
    mixture = mf.Mixture({"a": (a, 2), "b": (b, 7)}, by={"a": "repeat", "b": "count"})
    recipe = recipe_of(mixture, mf.Batch(tokens=10))
    drawn = [draws_of_step(recipe, step) for step in range(num_steps(recipe) or 0)]
    counts = np.bincount(np.concatenate([each.source for each in drawn]))
    assert counts.tolist() == [8, 7] and len(drawn) == 6, "61 tokens"


# -- how much is looked up ------------------------------------------------------------------------------


class Counted(mf.Lengths):
    """Documents that count how often somebody looks one up."""

    looked_up = 0

    def extents(self, documents: np.ndarray) -> Any:
        self.looked_up += len(documents)
        return super().extents(documents)


def test_step_1000000_is_found_as_fast_as_step_0() -> None:
    sizes = np.random.default_rng(0).integers(1, 2_000, 300_000), np.full(200_000, 300)
    long, short = (Counted(each) for each in sizes)
    mixture = mf.Mixture({"long": (long, 0.6), "short": (short, 0.4)}, by="tokens")
    recipe = recipe_of(mixture, mf.Batch(tokens=100_000))

    def cost(step: int) -> int:
        before = long.looked_up + short.looked_up
        assert len(draws_of_step(recipe, step)) > 100
        return long.looked_up + short.looked_up - before

    start_of_step(recipe, 0)
    assert long.looked_up + short.looked_up <= 500_000 + 2 * 2**18, "the lengths of an epoch, once"
    assert cost(0) == 4_096
    assert cost(10**6) <= 500_000 + 20 * 4_096, "no more than one epoch of each source, however far"
    assert cost(10**6 + 1) <= 2 * 4_096
    for step in (10**6 + 90, 10**6 - 90, 10**6 + 70):
        assert cost(step) <= 10 * 4_096, "the sums of this epoch are there"


def test_later_amounts_are_not_found_before_their_step() -> None:
    store, other = Counted([100] * 10), Counted([50] * 10**6)
    mixture = mf.Mixture({"a": (store, 1)}).then(10**9, {"b": (other, 1)}).then(2 * 10**9, {"a": 1})
    recipe = recipe_of(mixture, mf.Batch(tokens=1_000))
    start_of_step(recipe, 0)
    before = store.looked_up
    assert [len(draws_of_step(recipe, step)) for step in range(5)] == [10] * 5
    assert store.looked_up - before < 50_000
    assert len(draws_of_step(recipe, 10**9)) == 20 and start_of_step(recipe, 10**9) == 10**10


# -- what a batch of tokens is ----------------------------------------------------------------------------


def test_rows_of_one_length_make_a_batch_of_sequences() -> None:
    store = mf.Lengths([1_000] * 9)
    by_tokens = mf.Recipe(
        data=store, sequence=mf.Windows(64), batch=mf.Batch(tokens=640, last="drop").then(5, tokens=1280)
    )
    by_rows = mf.Recipe(data=store, sequence=mf.Windows(64), batch=mf.Batch(10, last="drop").then(5, 20))
    assert by_tokens.batch == by_rows.batch and by_tokens == by_rows
    assert by_tokens.fingerprint == by_rows.fingerprint
    assert replace(by_tokens, sequence=mf.Windows(32)).batch == mf.Batch(20, last="drop").then(5, 40)
    assert replace(by_tokens, sequence=mf.Documents()).batch == by_rows.batch.in_tokens(64)
    assert replace(by_rows, sequence=mf.Windows(32)).batch == by_rows.batch
    with pytest.raises(
        mf.errors.RecipeError, match="1000 tokens are no whole number of rows of 64; give 960 or 1024"
    ):
        mf.Recipe(data=store, sequence=mf.Windows(64), batch=mf.Batch(tokens=1_000))
    with pytest.raises(mf.errors.RecipeError, match="rows of 64; give 64"):
        mf.Recipe(data=store, sequence=mf.Windows(64), batch=mf.Batch(tokens=10))


def test_it_says_what_it_is() -> None:
    batch = mf.Batch(tokens=4_000_000, last="pad").then(7, tokens=8_000_000)
    assert repr(batch) == "Batch(tokens=4000000, last='pad').then(7, tokens=8000000)"
    assert batch.summary() == "tokens=4000000, 8000000 from step 7; last=pad"
    assert batch.summary(until=7) == "tokens=4000000; last=pad"


def test_what_cannot_be_counted_in_tokens_is_refused_by_name() -> None:
    store = mf.Lengths([5, 90])
    for wrong, message in (
        (lambda: mf.Batch(), r"Batch\(sequences=None\)"),
        (lambda: mf.Batch(tokens=0), r"Batch\(tokens=0\): a whole number from 1"),
        (
            lambda: mf.Batch(8, tokens=9),
            r"Batch\(sequences=8, tokens=9\): give sequences or tokens, not both",
        ),
        (lambda: mf.Batch(tokens=8).then(3, 9), r"Batch.then\(3, sequences=9\): a whole number of tokens"),
        (lambda: mf.Batch(8).then(3, tokens=9), r"Batch.then\(3, tokens=9\): a whole number of sequences"),
        (
            lambda: draws_of_step(recipe_of(store, mf.Batch(tokens=89)), 0),
            r"sequence of 90 tokens.* at least 90",
        ),
        (
            lambda: recipe_of(mf.Mixture({"a": (store, 1)}, batches="per_source"), mf.Batch(tokens=99)),
            "per_source",
        ),
        (
            lambda: mf.Recipe(
                data=store, sequence=mf.Masked(9, vocab_size=9, mask_token=3), batch=mf.Batch(tokens=99)
            ),
            "Masked.*give Batch",
        ),
        (
            lambda: recipe_of(store, mf.Batch(tokens=90)).amended([(3, mf.amendments.BatchSize(8))]),
            "of tokens",
        ),
        (
            lambda: draws_of_step(recipe_of(mf.Lengths([0]), mf.Batch(tokens=9)), 0),
            "no source .* has a token",
        ),
    ):
        with pytest.raises(mf.errors.RecipeError, match=message):
            wrong()
    assert len(draws_of_step(recipe_of(store, mf.Batch(tokens=90)), 0)) > 0


# -- step_at -------------------------------------------------------------------------------------------------


def first_at(tokens: int, begins: list[int]) -> int:
    return next(step for step, begin in enumerate(begins) if begin >= tokens)


@settings(max_examples=cases(40, 800), deadline=None)
@given(
    st.lists(stores, min_size=1, max_size=2),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.sampled_from([0.1, 1, 5])), max_size=3),
    st.lists(st.integers(0, 600), min_size=1, max_size=4),
    st.sampled_from([mf.Documents(), mf.Documents(max_len=7), mf.Windows(3)]),
    st.booleans(),
    shuffles,
)
def test_step_at_is_the_first_step_before_which_so_many_tokens_were_drawn(
    own: list[list[int]],
    changes: list[tuple[int, int, float]],
    amounts: list[int],
    rule: Any,
    is_counted: bool,
    shuffle: Any,
) -> None:
    """Of rows and documents, batches of both kinds, and what changes: against a loop over the steps."""
    unit = "tokens" if is_counted else "sequences"
    times = 3 * max(map(max, own)) if is_counted else 1
    data = mf.Mixture({str(i): (mf.Lengths([*each, 9]), 1) for i, each in enumerate(own)})
    batch, step = mf.Batch(**{unit: 12 * times}), 0
    for later, size, share in changes:
        step += later
        batch = batch.then(step, **{unit: 3 * size * times})
        data = data.then(step, {str(i): share if i else 1 for i in range(len(own))})
    recipe = mf.Recipe(data=data, sequence=rule, batch=batch, shuffle=shuffle, seed=7)
    before = [0]
    while before[-1] < max(amounts):
        draws = draws_of_step(recipe, len(before) - 1)
        before.append(before[-1] + int(rule.lengths(recipe, draws).sum()))
    for tokens in amounts:
        assert mf.step_at(recipe, tokens) == next(k for k, each in enumerate(before) if each >= tokens)


def test_a_change_after_so_many_tokens_moves_no_step_before_it() -> None:
    a, b = mf.Lengths([7, 9, 11]), mf.Lengths([5])
    recipe = recipe_of(a, mf.Batch(11))
    step = mf.step_at(recipe, 250.0)
    data = mf.Mixture({"a": (a, 1)}).then(step, {"b": (b, 1)})
    changed = mf.Recipe(data=data, sequence=mf.Documents(), batch=mf.Batch(11).then(step, 3))
    assert step == 3 == mf.step_at(changed, 250)
    sources = [set(draws_of_step(changed, step).source.tolist()) for step in range(5)]
    assert sources == [{0}, {0}, {0}, {1}, {1}]


def test_a_step_far_away_is_found_by_few_lengths() -> None:
    store = Counted(np.random.default_rng(0).integers(1, 2_000, 300_000))
    step = mf.step_at(recipe_of(store, mf.Batch(256)), 10**15)
    assert store.looked_up <= 3 * 300_000 + 2**18 + 20 * 4_096, "one epoch for its total, and one or two more"
    assert abs(step * 256 / (10**15 / 1_000) - 1) < 0.01


def test_steps_that_nobody_can_find_are_refused() -> None:
    a = mf.Lengths([70] * 9)
    masked = mf.Recipe(data=a, sequence=mf.Masked(9, vocab_size=9, mask_token=3), batch=mf.Batch(8))
    for recipe, tokens, message in (
        (recipe_of(a, mf.Batch(8)), 9.5, r"step_at\(9.5\): a whole number of tokens"),
        (recipe_of(a, mf.Batch(8)), -1, "a whole number of tokens from 0"),
        (recipe_of(a, mf.Batch(8)), True, "a whole number of tokens from 0"),
        (masked, 9, r"step_at: Masked.* rows that are padded.* give the step"),
        (recipe_of(mf.Lengths([0]), mf.Batch(8)), 9, "from step 0 on, no source that is drawn has a token"),
    ):
        with pytest.raises(mf.errors.RecipeError, match=message):
            mf.step_at(recipe, tokens)


def test_rows_of_a_batch_of_tokens_are_amended_in_tokens() -> None:
    rows = mf.Recipe(data=mf.Lengths([300]), sequence=mf.Windows(8), batch=mf.Batch(tokens=64))
    assert rows.amended([(3, mf.amendments.BatchSize(tokens=128))]).batch == mf.Batch(8).then(3, 16)
    with pytest.raises(
        mf.errors.RecipeError, match="100 tokens are no whole number of rows of 8; give 96 or 104"
    ):
        rows.amended([(3, mf.amendments.BatchSize(tokens=100))])
