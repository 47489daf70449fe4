"""Batches of so many tokens: where each step begins, against sequences counted one by one."""

from __future__ import annotations

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
        (lambda: recipe_of(store, mf.Batch(tokens=99), shuffle="replacement"), "replacement"),
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


# -- thresholds ---------------------------------------------------------------------------------------------


def first_at(tokens: int, begins: list[int]) -> int:
    return next(step for step, begin in enumerate(begins) if begin >= tokens)


@settings(max_examples=cases(60), deadline=None)
@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 600), st.integers(1, 9)), min_size=1, max_size=3),
    st.lists(st.integers(1, 600), max_size=2),
    st.booleans(),
)
def test_a_change_at_so_many_tokens_is_at_the_first_step_that_begins_there(
    size: int, ramp: list[tuple[int, int]], changes: list[int], is_counted: bool
) -> None:
    """Rows of 8 tokens, by a batch of sequences or of tokens, against a loop over the steps."""
    batch: Any = mf.Batch(tokens=size * 8) if is_counted else mf.Batch(size)
    begins, at, sizes, changed = [0], 0, [size], list[tuple[int, int]]()
    for later, then in ramp:
        at += later
        while begins[-1] < at:
            begins.append(begins[-1] + sizes[-1] * 8)
        if changed and changed[-1][0] == len(begins) - 1:
            return  # two within one step are refused; see below
        changed.append((len(begins) - 1, then))
        batch = batch.then(at_tokens=at, **({"tokens": then * 8} if is_counted else {"sequences": then}))
        sizes.append(then)
    while begins[-1] < 2_000:
        begins.append(begins[-1] + sizes[-1] * 8)
    mixture, parts, at = mf.Mixture({"a": (mf.Lengths([99]), 1), "b": (mf.Lengths([99]), 1)}), [0], 0
    for later in changes:
        at += later
        if first_at(at, begins) in parts:
            return
        parts.append(first_at(at, begins))
        mixture = mixture.then(sources={"a": 1, "b": len(parts)}, at_tokens=float(at))
    recipe = mf.Recipe(data=mixture, sequence=mf.Windows(8), batch=batch)
    assert recipe.batch.stages == ((0, size), *changed) and not recipe.batch.thresholds
    assert isinstance(recipe.data, mf.Mixture) and [part.step for part in recipe.data.parts] == parts
    assert [start_of_step(recipe, step) * 8 for step in range(len(begins))] == begins


def test_thresholds_of_documents_go_by_the_tokens_of_their_steps() -> None:
    a, b = mf.Lengths([7, 9, 11]), mf.Lengths([5])
    mixture = mf.Mixture({"a": (a, 1)}).then(at_tokens=250, sources={"b": (b, 1)})
    batch = mf.Batch(tokens=100).then(at_tokens=301, tokens=50)
    recipe = mf.Recipe(data=mixture, sequence=mf.Documents(), batch=batch)
    assert recipe.source_names == ("a", "b") and recipe.batch.stages == ((0, 100), (4, 50))
    sources = [set(draws_of_step(recipe, step).source.tolist()) for step in range(5)]
    assert sources == [{0}, {0}, {0}, {1}, {1}]
    assert recipe == mf.Recipe(
        data=mf.Mixture({"a": (a, 1)}).then(3, {"b": (b, 1)}),
        sequence=mf.Documents(),
        batch=mf.Batch(tokens=100).then(4, tokens=50),
    )


@settings(max_examples=cases(20, 400), deadline=None)
@given(
    st.lists(stores, min_size=2, max_size=2),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 5)), max_size=3),
    st.lists(st.tuples(st.integers(1, 500), st.sampled_from([0.1, 1, 5])), max_size=3),
    st.sampled_from(["tokens", "proportion"]),
    shuffles,
)
def test_thresholds_of_documents_by_the_number_are_where_a_plain_count_has_them(
    own: list[list[int]],
    size: int,
    ramp: list[tuple[int, int]],
    changes: list[tuple[int, float]],
    by: Any,
    shuffle: Any,
) -> None:
    """Each change moves the steps of those after it."""
    first = mf.Mixture({str(i): (mf.Lengths(each), 1) for i, each in enumerate(own)}, by=by)
    batch, mixture, due = mf.Batch(size), first, list[tuple[int, Any]]()
    for later, given_sizes in zip(np.cumsum([at for at, _ in ramp]).tolist(), ramp):
        batch = batch.then(at_tokens=later, sequences=given_sizes[1])
        due.append((later, given_sizes[1]))
    for later, (_, share) in zip(np.cumsum([at for at, _ in changes]).tolist(), changes):
        mixture = mixture.then(at_tokens=later, sources={"0": 1, "1": share})
        due.append((later, {"0": 1, "1": share}))
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 7}
    wanted = recipe_of(first, mf.Batch(size), **options)
    for tokens, change in sorted(due, key=lambda each: each[0]):
        step, seen = 0, 0
        while seen < tokens:
            seen += int(lengths_of(wanted, draws_of_step(wanted, step)).sum())
            step += 1
        data: Any = wanted.data
        last = data.parts[-1].step if isinstance(change, dict) else wanted.batch.stages[-1][0]
        if step <= last:
            with pytest.raises(mf.errors.RecipeError, match=f"give a step after {last}"):
                recipe_of(mixture, batch, **options)
            return
        if isinstance(change, dict):
            wanted = recipe_of(data.then(step, change), wanted.batch, **options)
        else:
            wanted = recipe_of(data, wanted.batch.then(step, change), **options)
    made = recipe_of(mixture, batch, **options)
    assert made == wanted and made.fingerprint == wanted.fingerprint


def test_a_threshold_far_away_is_found_by_few_lengths() -> None:
    store = Counted(np.random.default_rng(0).integers(1, 2_000, 300_000))
    recipe = recipe_of(store, mf.Batch(256).then(at_tokens=10**15, sequences=512))
    assert store.looked_up <= 3 * 300_000 + 2**18 + 20 * 4_096, "one epoch for its total, and one or two more"
    (_, (step, _)) = recipe.batch.stages
    assert abs(step * 256 / (10**15 / 1_000) - 1) < 0.01


def test_thresholds_that_mean_nothing_are_refused() -> None:
    a = mf.Lengths([70] * 9)
    mixture = mf.Mixture({"a": (a, 1)})

    def of_rows(batch: mf.Batch) -> mf.Recipe:
        return mf.Recipe(data=a, sequence=mf.Windows(8), batch=batch)

    for wrong, message in (
        (lambda: mf.Batch(8).then(3, 9, at_tokens=5), "give one of them"),
        (lambda: mf.Batch(8).then(sequences=9), "give one of them"),
        (lambda: mf.Batch(8).then(at_tokens=9.5, sequences=9), "a whole number of tokens above 0"),
        (lambda: mf.Batch(8).then(at_tokens=9, sequences=0), "a whole number of sequences"),
        (lambda: mf.Batch(8).then(at_tokens=9, sequences=3).then(at_tokens=9, sequences=4), "above 9"),
        (lambda: mf.Batch(8).then(at_tokens=9, sequences=3).then(7, 4), "after a change at 9 tokens"),
        (lambda: mixture.then(at_tokens=9, sources={"a": 1}).then(7, {"a": 1}), "after a change at 9 tokens"),
        (lambda: mixture.then(at_tokens=9, sources={"b": 1}), "source 'b' is new"),
        (lambda: mixture.then(at_tokens=9), "give the amounts"),
        (
            lambda: of_rows(mf.Batch(8).then(at_tokens=9, sequences=3).then(at_tokens=10, sequences=4)),
            "give a step after 1",
        ),
        (
            lambda: mf.Recipe(
                data=a,
                sequence=mf.Masked(9, vocab_size=9, mask_token=3),
                batch=mf.Batch(8).then(at_tokens=9, sequences=3),
            ),
            r"at_tokens=: Masked.* rows that are padded.* give the step",
        ),
        (
            lambda: recipe_of(a, mf.Batch(8).then(at_tokens=9, sequences=3), shuffle="replacement"),
            "at_tokens=: under shuffle='replacement'",
        ),
        (
            lambda: recipe_of(mf.Lengths([0]), mf.Batch(8).then(at_tokens=9, sequences=3)),
            "from step 0 on, no source that is drawn has a token",
        ),
        (
            lambda: recipe_of(a, mf.Batch(8).then(at_tokens=9, sequences=3).then(at_tokens=10, sequences=4)),
            "give a step after 1",
        ),
    ):
        with pytest.raises(mf.errors.RecipeError, match=message):
            wrong()
    assert "then(at_tokens=90, sequences=3)" in repr(mf.Batch(8).then(at_tokens=90, sequences=3))
    assert "at 90 tokens" in repr(mixture.then(at_tokens=90, sources={"a": 1}))


def test_rows_of_a_batch_of_tokens_are_amended_in_tokens() -> None:
    rows = mf.Recipe(data=mf.Lengths([300]), sequence=mf.Windows(8), batch=mf.Batch(tokens=64))
    assert rows.amended([(3, mf.amendments.BatchSize(tokens=128))]).batch == mf.Batch(8).then(3, 16)
    with pytest.raises(
        mf.errors.RecipeError, match="100 tokens are no whole number of rows of 8; give 96 or 104"
    ):
        rows.amended([(3, mf.amendments.BatchSize(tokens=100))])
