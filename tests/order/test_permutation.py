"""The keyed bijection: laws on every size."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.order import key_of, permutation, permute, unpermute
from soak import cases


def test_every_index_comes_out_once_for_every_size() -> None:
    for size in range(1, 301):
        out = permute(np.arange(size), size=size, key=key_of(size, 7))
        assert np.array_equal(np.sort(out), np.arange(size))
        assert np.array_equal(unpermute(out, size=size, key=key_of(size, 7)), np.arange(size))


def plain(place: int, size: int, key: int) -> int:
    """The network of `permute` on Python's own integers, from its description."""
    rows = next(r for r in itertools.count(max(1, int(size**0.5) - 2)) if r * r >= size)
    cols = -(-size // rows)
    low = 2**64 - 1

    def stirred(half: int, turn: int) -> int:
        z = (half + key + (turn + 1) * 0x9E3779B97F4A7C15) & low
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & low
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & low
        return z ^ (z >> 31)

    while True:
        left, right = divmod(place, cols)
        for turn in range(0, 8, 2):
            left = (left + stirred(right, turn) % rows) % rows
            right = (right + stirred(left, turn + 1) % cols) % cols
        place = left * cols + right
        if place < size:
            return place


@settings(max_examples=cases(200), deadline=None)
@given(
    st.integers(1, 2**32)
    | st.integers(1, 9)
    | st.builds(lambda root, more: root * root + more, st.integers(2, 2**31), st.integers(-1, 2)),
    st.integers(0, 2**64 - 1),
    st.data(),
)
def test_it_is_the_network_that_it_says(size: int, key: int, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, size - 1))
    assert int(permute(place, size=size, key=key)) == plain(place, size, key)


@settings(max_examples=cases(30), deadline=None)
@given(st.integers(301, 40_000), st.integers(0, 2**64 - 1))
def test_every_index_comes_out_once_for_larger_sizes(size: int, key: int) -> None:
    out = permute(np.arange(size), size=size, key=key)
    assert np.array_equal(np.bincount(out, minlength=size), np.ones(size))
    assert np.array_equal(unpermute(out, size=size, key=key), np.arange(size))
    assert np.array_equal(
        permute(unpermute(np.arange(size), size=size, key=key), size=size, key=key), np.arange(size)
    )


@pytest.mark.parametrize(
    "size", [2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**53 + 1, (2**31 - 1) ** 2 + 1, 2**62 - 1, 2**62]
)
def test_the_edges_of_large_sizes(size: int) -> None:
    places = np.array([0, 1, size // 2, size - 2, size - 1])
    for key in (0, 2**63, 2**64 - 1):
        out = permute(places, size=size, key=key)
        assert ((out >= 0) & (out < size)).all()
        assert np.unique(out).size == places.size
        assert np.array_equal(unpermute(out, size=size, key=key), places)
        assert np.array_equal(permute(unpermute(places, size=size, key=key), size=size, key=key), places)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_order_of_a_few_is_as_likely_as_any(size: int) -> None:
    orders = list(itertools.permutations(range(size)))
    seen = dict.fromkeys(orders, 0)
    for key in range(200 * len(orders)):
        seen[tuple(permute(np.arange(size), size=size, key=key_of(key)).tolist())] += 1
    chi2 = sum((count - 200) ** 2 / 200 for count in seen.values())
    assert chi2 < {2: 12, 3: 23, 4: 53}[size], seen  # each passes for all but 0.05 % of fair shuffles


@pytest.mark.parametrize("size", [5, 10, 17, 100])
def test_every_place_goes_anywhere(size: int) -> None:
    trials = 60 * size
    counts = np.zeros((size, size))
    for key in range(trials):
        counts[np.arange(size), permute(np.arange(size), size=size, key=key_of(key, size))] += 1
    chi2 = ((counts - 60) ** 2 / 60).sum()
    degrees = (size - 1) ** 2  # rows and columns both sum to the trials
    assert chi2 < degrees + 4 * np.sqrt(2 * degrees) + 10


@settings(max_examples=cases(200), deadline=None)
@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.data())
def test_inverse_at_any_size(size: int, key: int, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)), np.int64)
    out = permute(places, size=size, key=key)
    assert out.min() >= 0
    assert out.max() < size
    assert np.array_equal(unpermute(out, size=size, key=key), places)


def test_sizes_side_by_side_are_shuffled_as_each_alone() -> None:
    sizes = np.array([1, 2, 5, 10, 17, 50, 101, 10_001, 10_000, 9_999, 10**12 + 1])  # squares, and one more
    places = sizes - 1
    alone = [int(permute(np.array([place]), size=int(size), key=7)[0]) for place, size in zip(places, sizes)]
    assert permute(places, size=sizes, key=np.full(sizes.size, 7, np.uint64)).tolist() == alone


def test_a_large_size_is_a_bijection_on_what_is_asked() -> None:
    out = permute(np.arange(1_000_000), size=1_000_003, key=1)
    assert np.unique(out).size == 1_000_000


def test_keys_and_their_parts_matter() -> None:
    keys = {key_of(seed, source, epoch) for seed in range(10) for source in range(10) for epoch in range(10)}
    assert len(keys) == 1000
    first = permute(np.arange(1000), size=1000, key=key_of(1, 0, 0))
    second = permute(np.arange(1000), size=1000, key=key_of(1, 0, 1))
    assert (first == second).mean() < 0.01
    for bit in range(64):
        other = permute(np.arange(1000), size=1000, key=key_of(1, 0, 0) ^ (1 << bit))
        assert (first == other).mean() < 0.02, bit


def test_parts_of_a_key_are_not_run_together() -> None:
    assert len({key_of(), key_of(0), key_of(0, 0), key_of(1), key_of(1, 0), key_of(0, 1), key_of(256)}) == 7
    assert key_of(-1) != key_of(2**63 - 1)
    for part in (-(2**63), 2**63 - 1):
        assert 0 <= key_of(part) < 2**64


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
    assert unpermute(np.array(GOLDEN), size=1000, key=GOLDEN_KEY).tolist() == list(range(8))


def test_another_process_sees_the_same_order() -> None:
    code = (
        "from meshfeed.order import key_of, permute; import numpy as np; "
        "print(permute(np.arange(8), size=1000, key=key_of(1234, 0, 0)).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "99"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(GOLDEN)


def test_what_is_asked_is_left_alone() -> None:
    places = np.arange(50)
    permute(places, size=100, key=3)
    assert np.array_equal(places, np.arange(50))
    places.flags.writeable = False
    whole = permute(places, size=100, key=3)
    assert [int(permute(int(p), size=100, key=3)) for p in places] == whole.tolist()
    assert permute(places[::-7], size=100, key=3).tolist() == whole[::-7].tolist()


def test_shapes_are_kept() -> None:
    assert permute(3, size=10, key=0).shape == ()
    assert permute(np.arange(6).reshape(2, 3), size=10, key=0).shape == (2, 3)
    assert permute(np.zeros(0, np.int64), size=10, key=0).shape == (0,)
    assert permute([], size=10, key=0).shape == (0,)
    assert permute([[1], [2]], size=10, key=0).shape == (2, 1)
    for out in (permute(3, size=10, key=0), unpermute(np.arange(4, dtype=np.int8), size=10, key=0)):
        assert out.dtype == np.int64


@pytest.mark.parametrize(
    ("places", "size"),
    [([10], 10), ([-1], 10), ([0], 0), ([0], 2**62 + 1), ([0], -1), ([3, 12, 4], 10), ([2**62], 2**62)],
)
def test_what_is_outside_is_refused(places: list[int], size: int) -> None:
    for walk in (permute, unpermute):
        with pytest.raises(mf.errors.RecipeError, match=f"permutation of {size}"):
            walk(np.array(places), size=size, key=0)


GOLDEN_KEY = 3045955967248346714
GOLDEN = [964, 706, 840, 878, 63, 823, 21, 497]
GOLDEN_LARGE = [1263240014744734195, 1987879215200051316, 3352941652955883429]


def test_a_board_has_as_many_rows_as_its_root_rounded_up() -> None:
    """Also where a float cannot hold the size."""
    roots = [*range(2, 300), *(2**26 + i for i in range(-9, 9)), *(2**31 - i for i in range(9)), 2**31]
    sizes = [size for root in roots for size in range(root**2 - 3, root**2 + 4) if 1 <= size <= 2**62]
    rows, cols = permutation._board(np.array(sizes))
    expected = [math.isqrt(size - 1) + 1 for size in sizes]
    assert rows.tolist() == expected
    assert cols.tolist() == [-(-size // row) for size, row in zip(sizes, expected)]
    for i in range(0, len(sizes), 97):
        assert [int(each) for each in permutation._board(np.array(sizes[i]))] == [rows[i], cols[i]]
