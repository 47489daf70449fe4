"""Position -> draw, over any store."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.mixture import Store
from meshfeed.order import (
    concatenated,
    draws_between,
    draws_of_step,
    key_of,
    num_positions,
    num_steps,
    permute,
)
from meshfeed.recipe import Rule
from soak import cases


@dataclass(frozen=True)
class Numbered(Store):
    """A store of so many sequences, and nothing in them."""

    size: int
    fingerprint: str = "numbered"

    def lengths(self, documents: np.ndarray) -> np.ndarray:
        return np.ones_like(documents)


class Whole(Rule):
    """Every document is a sequence."""

    def num_sequences(self, store: Numbered) -> int:
        return store.size

    def summary(self) -> str:
        return "Whole()"


def recipe(size: int, **options: object) -> mf.Recipe:
    sequences = int(options.pop("sequences", 4))  # type: ignore[call-overload]
    rule = Whole()
    return mf.Recipe(data=Numbered(size), sequence=rule, batch=mf.Batch(sequences=sequences), **options)


def pairs(draws: mf.order.Draws) -> list[tuple[int, int, int]]:
    return list(zip(draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist()))


@pytest.mark.parametrize("shuffle", ["global", "none"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_every_index_once_an_epoch(size: int, shuffle: str) -> None:
    all_draws = draws_between(recipe(size, epochs=3, shuffle=shuffle), 0, 3 * size + 50)
    assert len(all_draws) == 3 * size
    for epoch in range(3):
        now = all_draws.index[all_draws.epoch == epoch]
        assert np.array_equal(np.sort(now), np.arange(size))
        if shuffle == "none":
            assert np.array_equal(now, np.arange(size))
    if shuffle == "global" and size >= 64:
        first, second = all_draws.index[:size], all_draws.index[size : 2 * size]
        assert not np.array_equal(first, second), "each epoch in an order of its own"


@settings(max_examples=cases(100), deadline=None)
@given(
    st.integers(1, 50), st.lists(st.integers(0, 120), min_size=2, max_size=6).map(sorted), st.integers(-9, 9)
)
def test_pieces_of_the_stream_fit_together(size: int, cuts: list[int], seed: int) -> None:
    endless = recipe(size, seed=seed)
    cuts.sort()
    whole = pairs(draws_between(endless, cuts[0], cuts[-1]))
    assert [p for a, b in pairwise(cuts) for p in pairs(draws_between(endless, a, b))] == whole


@pytest.mark.parametrize("size", [1, 5, 1000, 4096, 10_001])
@pytest.mark.parametrize("start", [0, 4_000, 10**9 + 7])
def test_small_steps_of_blocks_are_pieces_of_a_large_one(size: int, start: int) -> None:
    """Those are computed together, across steps and epochs, and this one by itself."""
    endless = recipe(size, shuffle=mf.Blocks(sequences=64, window=3, lanes=5), seed=size)
    whole = pairs(draws_between(endless, start, start + 9_000))
    cuts = [start, start, *range(start + 7, start + 9_000, 256), start + 9_000]
    assert [p for a, b in pairwise(cuts) for p in pairs(draws_between(endless, a, b))] == whole


@settings(max_examples=cases(100), deadline=None)
@given(
    st.integers(1, 30),
    st.sampled_from(["global", "none"]),
    st.none() | st.integers(1, 4),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 150),
    st.integers(0, 60),
)
def test_the_stream_is_what_a_plain_loop_makes_it(
    size: int, shuffle: str, epochs: int | None, seed: int, start: int, count: int
) -> None:
    expected = []
    for position in range(start, start + count):
        epoch, place = divmod(position, size)
        if epochs is not None and epoch >= epochs:
            break
        if shuffle == "global":
            place = int(permute(place, size=size, key=key_of(seed, 0, epoch)))
        expected.append((0, epoch, place))
    made = draws_between(recipe(size, shuffle=shuffle, epochs=epochs, seed=seed), start, start + count)
    assert pairs(made) == expected
    assert (made.source.dtype, made.epoch.dtype, made.index.dtype) == (np.int32, np.int64, np.int64)


@settings(max_examples=cases(100), deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5))
def test_steps_end_to_end_are_the_stream(size: int, sequences: int, epochs: int) -> None:
    finite = recipe(size, sequences=sequences, epochs=epochs)
    steps = [draws_of_step(finite, step) for step in range(num_steps(finite) or 0)]
    assert all(len(step) == sequences for step in steps[:-1])
    assert len(steps[-1]) == (size * epochs - 1) % sequences + 1
    whole = concatenated(steps)
    assert pairs(whole) == pairs(draws_between(finite, 0, size * epochs))
    assert whole.epoch.tolist() == sorted(whole.epoch.tolist())
    counted = np.zeros((epochs, size), int)
    np.add.at(counted, (whole.epoch, whole.index), 1)
    assert (counted == 1).all()
    assert len(draws_of_step(finite, len(steps))) == 0


def test_an_endless_stream_has_no_end() -> None:
    endless = recipe(5)
    assert num_positions(endless) is None
    assert num_steps(endless) is None
    longer, shorter = recipe(5, epochs=9), recipe(5, epochs=2)
    assert pairs(draws_between(longer, 0, 10)) == pairs(draws_between(shorter, 0, 10))
    assert pairs(draws_between(endless, 0, 45)) == pairs(draws_between(longer, 0, 45))


@pytest.mark.parametrize(("size", "sequences", "epochs"), [(10, 4, 1), (10, 4, 3), (8, 4, 2), (3, 16, 1)])
def test_steps_cut_the_stream_and_the_last_may_be_short(size: int, sequences: int, epochs: int) -> None:
    finite = recipe(size, sequences=sequences, epochs=epochs)
    assert num_positions(finite) == size * epochs
    count = num_steps(finite)
    assert count == -(-size * epochs // sequences)
    steps = [pairs(draws_of_step(finite, step)) for step in range(count)]
    assert [len(step) for step in steps[:-1]] == [sequences] * (count - 1)
    assert [p for step in steps for p in step] == pairs(draws_between(finite, 0, size * epochs))
    assert pairs(draws_of_step(finite, count)) == []
    assert pairs(draws_of_step(finite, 10**12)) == []
    assert pairs(draws_between(finite, 10**12, 10**12 + 9)) == []
    assert pairs(draws_between(finite, 3, 3)) == []


def test_any_position_is_reached_at_once() -> None:
    far = draws_of_step(recipe(10**12), 10**12 // 4)
    assert far.epoch.tolist() == [1] * 4
    assert len(set(far.index.tolist())) == 4


@pytest.mark.parametrize("size", [1, 7, 1000, 10**9, 10**13, 2**62])
def test_a_position_of_a_million_millions(size: int) -> None:
    position = 10**12
    draws = draws_between(recipe(size), position, position + 20)
    for at, (_, epoch, index) in enumerate(pairs(draws)):
        assert epoch == (position + at) // size, "epochs beyond 32 bits are told apart too"
        place = (position + at) % size
        assert index == int(permute(place, size=size, key=key_of(0, 0, epoch)))
    assert pairs(draws_between(recipe(size, shuffle="none"), position, position + 1)) == [
        (0, position // size, position % size)
    ]


def test_runs_of_draws() -> None:
    draws = draws_between(recipe(50), 0, 10)
    assert pairs(draws.between(2, 5)) == pairs(draws)[2:5]
    assert pairs(draws.take(np.array([3, 1]))) == [pairs(draws)[3], pairs(draws)[1]]
    assert pairs(draws.between(8, 99)) == pairs(draws)[8:]
    assert pairs(concatenated([draws.between(0, 4), draws.between(4, 10)])) == pairs(draws)
    for made in (draws, draws.take(np.array([0])), draws.between(0, 1), concatenated([draws])):
        for array in (made.source, made.epoch, made.index):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1


def test_what_makes_no_stream_is_refused() -> None:
    with pytest.raises(mf.errors.RecipeError, match="steps count from 0"):
        draws_of_step(recipe(5), -1)
    with pytest.raises(mf.errors.RecipeError, match="no sequence"):
        draws_of_step(recipe(0), 0)
    with pytest.raises(mf.errors.RecipeError, match=r"positions -5\.\.3"):
        draws_between(recipe(5), -5, 3)


def test_positions_end_where_their_arithmetic_does() -> None:
    last = 2**62 // 4 - 2  # a damaged state may say any step
    assert len(draws_of_step(recipe(2**61), last)) == 4
    for step in (last + 1, 2**62, 2**80):
        with pytest.raises(mf.errors.RecipeError, match="counts them from 0"):
            draws_of_step(recipe(7), step)
        assert len(draws_of_step(recipe(7, epochs=2), step)) == 0


def test_seeds_and_shuffle_decide() -> None:
    def first(**options: object) -> list[int]:
        return draws_between(recipe(1000, **options), 0, 20).index.tolist()

    assert first(seed=1) == first(seed=1)
    assert first(seed=1) != first(seed=2)
    assert first(seed=-1) != first(seed=1)
    assert first(shuffle="none") == list(range(20))
