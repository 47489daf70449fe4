"""Position -> draw, over any store."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.order import draws_between, draws_of_step, num_positions, num_steps


@dataclass(frozen=True)
class Numbered:
    """A store of so many sequences, and nothing in them."""

    size: int
    fingerprint: str = "numbered"

    def lengths(self, documents: np.ndarray) -> np.ndarray:
        return np.ones_like(documents)


class Whole:
    """Every document is a sequence."""

    def num_sequences(self, store: Numbered) -> int:
        return store.size

    def summary(self) -> str:
        return "Whole()"


def recipe(size: int, **options: object) -> mf.Recipe:
    sequences = int(options.pop("sequences", 4))  # type: ignore[call-overload]
    return mf.Recipe(data=Numbered(size), sequence=Whole(), batch=mf.Batch(sequences=sequences), **options)  # type: ignore[arg-type]


def pairs(draws: mf.Draws) -> list[tuple[int, int, int]]:
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


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    st.integers(1, 50), st.lists(st.integers(0, 120), min_size=2, max_size=6).map(sorted), st.integers(-9, 9)
)
def test_pieces_of_the_stream_fit_together(size: int, cuts: list[int], seed: int) -> None:
    endless = recipe(size, seed=seed)
    cuts.sort()
    whole = pairs(draws_between(endless, cuts[0], cuts[-1]))
    assert [p for a, b in pairwise(cuts) for p in pairs(draws_between(endless, a, b))] == whole


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


def test_any_position_is_reached_at_once() -> None:
    far = draws_of_step(recipe(10**12), 10**12 // 4)
    assert far.epoch.tolist() == [1] * 4
    assert len(set(far.index.tolist())) == 4


def test_runs_of_draws() -> None:
    draws = draws_between(recipe(50), 0, 10)
    assert pairs(draws.between(2, 5)) == pairs(draws)[2:5]
    assert pairs(draws.take(np.array([3, 1]))) == [pairs(draws)[3], pairs(draws)[1]]
    with pytest.raises(ValueError, match="read-only"):
        draws.index[0] = 1


def test_what_makes_no_stream_is_refused() -> None:
    with pytest.raises(mf.RecipeError, match="steps count from 0"):
        draws_of_step(recipe(5), -1)
    with pytest.raises(mf.RecipeError, match="no sequence"):
        draws_of_step(recipe(0), 0)


def test_seeds_and_shuffle_decide() -> None:
    def first(**options: object) -> list[int]:
        return draws_between(recipe(1000, **options), 0, 20).index.tolist()

    assert first(seed=1) == first(seed=1)
    assert first(seed=1) != first(seed=2)
    assert first(seed=-1) != first(seed=1)
    assert first(shuffle="none") == list(range(20))
