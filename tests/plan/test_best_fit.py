"""Histogram best fit against best fit one by one."""

import bisect

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed.errors import PlanError
from meshfeed.plan import best_fit
from soak import cases


def one_by_one(lengths, capacity):
    """The number of bins of best-fit-decreasing."""
    spaces = []
    for length in sorted((x for x in lengths if x), reverse=True):
        at = bisect.bisect_left(spaces, length)
        space = spaces.pop(at) if at < len(spaces) else capacity
        if space - length:
            bisect.insort(spaces, space - length)
        one_by_one.bins += space == capacity
    return one_by_one.bins


@settings(max_examples=cases(300), deadline=None)
@given(lengths=st.lists(st.integers(0, 60), max_size=200), capacity=st.integers(60, 130))
def test_as_many_bins_as_one_by_one_and_none_overfull(lengths, capacity):
    one_by_one.bins = 0
    bins, num_bins = best_fit(np.array(lengths, np.int64), capacity)
    assert num_bins == max(one_by_one(lengths, capacity), 1 if lengths else 0)
    tokens = np.bincount(bins, weights=lengths, minlength=num_bins)
    assert tokens.max(initial=0) <= capacity
    assert bins.size == len(lengths) and bins.max(initial=0) <= max(num_bins - 1, 0)


def test_little_waste_on_many_documents():
    lengths = np.clip(np.random.default_rng(0).lognormal(6.5, 1, 200_000), 1, 8192).astype(np.int32)
    bins, num_bins = best_fit(lengths, 8192)
    assert lengths.sum(dtype=np.int64) / (num_bins * 8192) > 0.999
    assert np.bincount(bins, weights=lengths).max() <= 8192


@pytest.mark.parametrize("lengths", [[5, 11], [3, -1]])
def test_wrong_input_is_refused_in_words(lengths):
    with pytest.raises(PlanError, match=r"document 1: .* do not fit a bin of 10"):
        best_fit(np.array(lengths), 10)
