"""The keyed bijection: laws on every size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.order import key_of, permute, unpermute


def test_every_index_comes_out_once_for_every_size() -> None:
    for size in range(1, 301):
        out = permute(np.arange(size), size=size, key=key_of(size, 7))
        assert np.array_equal(np.sort(out), np.arange(size))
        assert np.array_equal(unpermute(out, size=size, key=key_of(size, 7)), np.arange(size))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.data())
def test_inverse_at_any_size(size: int, key: int, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)), np.int64)
    out = permute(places, size=size, key=key)
    assert out.min() >= 0
    assert out.max() < size
    assert np.array_equal(unpermute(out, size=size, key=key), places)


def test_a_large_size_is_a_bijection_on_what_is_asked() -> None:
    out = permute(np.arange(1_000_000), size=1_000_003, key=1)
    assert np.unique(out).size == 1_000_000


def test_keys_and_their_parts_matter() -> None:
    keys = {key_of(seed, source, epoch) for seed in range(10) for source in range(10) for epoch in range(10)}
    assert len(keys) == 1000
    first = permute(np.arange(1000), size=1000, key=key_of(1, 0, 0))
    second = permute(np.arange(1000), size=1000, key=key_of(1, 0, 1))
    assert (first == second).mean() < 0.01


def test_it_spreads_evenly() -> None:
    # where the first 100 of 10,000 places go, over 400 keys, in 50 bins: chi-square with 49 degrees
    bins = np.zeros(50)
    for key in range(400):
        bins += np.bincount(permute(np.arange(100), size=10_000, key=key_of(key)) // 200, minlength=50)
    expected = bins.sum() / 50
    assert ((bins - expected) ** 2 / expected).sum() < 90  # 0.03 % of fair shuffles exceed it


def test_neighbours_part() -> None:
    out = permute(np.arange(100_000), size=100_000, key=key_of(5))
    assert abs(np.corrcoef(out[:-1], out[1:])[0, 1]) < 0.02
    assert (np.diff(out) == 1).mean() < 1e-3


def test_golden_values_pin_the_order_across_versions() -> None:
    assert key_of(1234, 0, 0) == GOLDEN_KEY
    assert permute(np.arange(8), size=1000, key=key_of(1234, 0, 0)).tolist() == GOLDEN
    assert permute(np.arange(3), size=2**62, key=key_of(1234, 0, 0)).tolist() == GOLDEN_LARGE


def test_shapes_are_kept() -> None:
    assert permute(3, size=10, key=0).shape == ()
    assert permute(np.arange(6).reshape(2, 3), size=10, key=0).shape == (2, 3)
    assert permute(np.zeros(0, np.int64), size=10, key=0).shape == (0,)


@pytest.mark.parametrize(("places", "size"), [([10], 10), ([-1], 10), ([0], 0), ([0], 2**62 + 1)])
def test_what_is_outside_is_refused(places: list[int], size: int) -> None:
    with pytest.raises(mf.RecipeError):
        permute(np.array(places), size=size, key=0)


GOLDEN_KEY = 3045955967248346714
GOLDEN = [964, 706, 840, 878, 63, 823, 21, 497]
GOLDEN_LARGE = [1263240014744734195, 1987879215200051316, 3352941652955883429]
