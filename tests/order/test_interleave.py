"""Proportions at every prefix, from anywhere: the laws of an interleaving."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.order import Interleaving
from meshfeed.order.interleave import BLOCK

RNG = np.random.default_rng(0)
FAMILIES = {
    "0.001 and 0.999": [0.001, 0.999],
    "1e-6": [1e-6, 1 - 1e-6],
    "0.7 and 0.3": [0.7, 0.3],
    "ten equal": [1] * 10,
    "ten of any size": RNG.dirichlet(np.ones(10)).tolist(),
    "ten magnitudes": [10.0**-k for k in range(10)],
    "a thousand of any size": RNG.dirichlet(np.ones(1000)).tolist(),
    "a thousand, Zipf": [1 / k for k in range(1, 1001)],
    "one large, a thousand small": [1000, *[1] * 999],
}


def drift(weights: list[float], start: int, stop: int) -> float:
    """The largest distance of any source from its share at any prefix start < k <= stop.

    A source is furthest behind just before a draw of it, and furthest ahead just after.
    """
    share = np.array([float(Fraction(w) / sum(map(Fraction, weights))) for w in weights])
    interleaving = Interleaving(weights)
    source, count = interleaving.draws(start, stop)
    before = count - share[source] * np.arange(start, stop)
    after = count + 1 - share[source] * np.arange(start + 1, stop + 1)
    at_end = interleaving.counts(stop) - share * stop
    return float(max(np.abs(before).max(), np.abs(after).max(), np.abs(at_end).max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_source_is_ever_one_draw_from_its_share(family: str) -> None:
    weights = FAMILIES[family]
    assert drift(weights, 0, 10**6 if len(weights) in (2, 1000) and "Z" not in family else 200_000) < 1


weights_of_any_size = st.lists(
    st.integers(1, 10**6) | st.floats(1e-9, 1.0) | st.sampled_from([1, 0.1, 1e-6]), min_size=1, max_size=40
)


@settings(max_examples=60, deadline=None)
@given(weights_of_any_size, st.integers(0, 2**61) | st.integers(0, 10**7))
def test_anywhere_counts_are_shares_rounded_and_only_grow(weights: list[float], position: int) -> None:
    interleaving = Interleaving(weights)
    total = sum(Fraction(word, 2**64) for word in interleaving._words)
    assert total == 1
    source, count = interleaving.draws(position, position + 3000)
    held = interleaving.counts(position).tolist()
    assert sum(held) == position
    for k, (s, c) in enumerate(zip(source.tolist(), count.tolist()), position):
        assert held[s] == c
        word = interleaving._words[s]
        assert abs((c << 64) - word * k) < 2**64 + 2**40  # before the draw
        assert abs(((c + 1) << 64) - word * (k + 1)) < 2**64 + 2**40  # after it
        held[s] += 1
    assert interleaving.counts(position + 3000).tolist() == held


@settings(max_examples=60, deadline=None)
@given(weights_of_any_size, st.data())
def test_every_draw_of_a_source_has_its_place(weights: list[float], data: st.DataObject) -> None:
    interleaving = Interleaving(weights)
    source = data.draw(st.integers(0, len(weights) - 1))
    count = data.draw(st.integers(0, 10**6) | st.integers(0, 2**40))
    if (count + 1) / interleaving.weights[source] > 2**61:
        count = 0
    at = interleaving.position(source, count)
    found = interleaving.draws(at, at + 1)
    assert (int(found[0][0]), int(found[1][0])) == (source, count)


def test_pieces_fit_together() -> None:
    whole = Interleaving([0.5, 0.3, 0.2]).draws(0, 3 * BLOCK)
    fresh = Interleaving([0.5, 0.3, 0.2])
    cuts = [0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5, 3 * BLOCK]
    for start, stop in reversed(list(pairwise(cuts))):
        for one, all_ in zip(fresh.draws(start, stop), whole):
            assert np.array_equal(one, all_[start:stop])
    assert [part.size for part in fresh.draws(5, 5)] == [0, 0]


def test_counts_that_weights_name_are_met_exactly() -> None:
    for counts in ([3, 5, 8], [1, 999_983], [10_000] * 7, [1, 10, 100, 1000]):
        assert Interleaving(counts).counts(sum(counts)).tolist() == counts


def test_equal_weights_take_turns() -> None:
    source, _ = Interleaving([1] * 8).draws(0, 8 * 100)
    assert all(sorted(turn) == list(range(8)) for turn in source.reshape(-1, 8).tolist())


@pytest.mark.parametrize(
    "weights", [[1] * 7, [1] * 10, [1] * 49, [3, 3, 3, 1], [0.1] * 10, [1, 2, 3, 4, 5, 6]]
)
def test_weights_that_no_binary_fraction_holds_come_in_whole_periods(weights: list[float]) -> None:
    """1/10 is no multiple of 2**-64; the schedule is that of the ratio, not of what rounding leaves."""
    period = round(sum(weights) / min(weights))
    own = [round(weight / min(weights)) for weight in weights]
    blocks = BLOCK // period
    for start in (0, BLOCK * period, BLOCK * period * 10**6):  # edges of blocks that begin a period
        source, _ = Interleaving(weights).draws(start, start + blocks * period)
        for turn in source.reshape(blocks, period):
            assert np.bincount(turn, minlength=len(weights)).tolist() == own


def test_a_batch_holds_each_source_within_one_of_its_rounded_share() -> None:
    for weights in FAMILIES.values():
        interleaving = Interleaving(weights)
        for size in (64, 256):
            source, _ = interleaving.draws(0, 100 * size)
            counts = np.stack([np.bincount(b, minlength=len(weights)) for b in source.reshape(-1, size)])
            share = interleaving.weights * size
            assert (counts >= np.floor(share) - 1).all() and (counts <= np.ceil(share) + 1).all()


def test_golden_draws_pin_the_schedule_across_versions() -> None:
    source, _ = Interleaving([0.6, 0.3, 0.1]).draws(0, 20)
    assert source.tolist() == GOLDEN
    far, _ = Interleaving([0.6, 0.3, 0.1]).draws(10**15, 10**15 + 20)
    assert far.tolist() == GOLDEN_FAR


GOLDEN = [0, 1, 0, 0, 1, 0, 0, 2, 1, 0, 0, 1, 0, 0, 1, 0, 0, 2, 1, 0]
GOLDEN_FAR = [0, 1, 0, 0, 1, 0, 0, 2, 1, 0, 0, 1, 0, 0, 1, 0, 0, 2, 1, 0]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "at least one"),
        ([1, 0], "above 0"),
        ([1, -1], "above 0"),
        ([float("nan")], "finite"),
        ([float("inf"), 1], "finite"),
        (["much"], "finite"),
        ([1, 1e-30], "leave that source out"),
    ],
)
def test_weights_that_are_none(weights: list[float], message: str) -> None:
    with pytest.raises(mf.RecipeError, match=message):
        Interleaving(weights)
