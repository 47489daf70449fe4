"""Proportions at every prefix, from anywhere: the laws of an interleaving."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.order import Interleaving
from meshfeed.order.interleave import BLOCK, WholeBatches
from soak import cases, some

RNG = np.random.default_rng(0)


def position(turns: Interleaving | WholeBatches, source: int, count: int) -> int:
    """Of one draw; -1 if it never comes."""
    return int(turns.positions(np.array([source]), np.array([count]))[0])


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


@some(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_source_is_ever_one_draw_from_its_share(family: str) -> None:
    weights = FAMILIES[family]
    assert (
        drift(
            weights,
            0,
            cases(10**5, 10**6)
            if len(weights) in (2, 1000) and "Z" not in family
            else cases(20_000, 200_000),
        )
        < 1
    )


weights_of_any_size = st.lists(
    st.integers(1, 10**6) | st.floats(1e-9, 1.0) | st.sampled_from([1, 0.1, 1e-6]), min_size=1, max_size=40
)


@settings(max_examples=cases(60), deadline=None)
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


@settings(max_examples=cases(60), deadline=None)
@given(weights_of_any_size, st.data())
def test_every_draw_of_a_source_has_its_place(weights: list[float], data: st.DataObject) -> None:
    interleaving = Interleaving(weights)
    source = data.draw(st.integers(0, len(weights) - 1))
    count = data.draw(st.integers(0, 10**6) | st.integers(0, 2**40))
    if (count + 1) / interleaving.weights[source] > 2**61:
        count = 0
    at = position(interleaving, source, count)
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


@pytest.mark.parametrize("weights", [[1] * 3, [1] * 7, [1] * 10, [1] * 49, [2, 3]])
def test_ratios_that_no_binary_fraction_holds_repeat_with_their_period(weights: list[float]) -> None:
    """1/10 is no multiple of 2**-64; the schedule is that of the ratio, not of what rounding leaves."""
    period = int(sum(weights))
    for start in (0, 7 * BLOCK, 10**6 * BLOCK, 10**9 * BLOCK):
        source, _ = Interleaving(weights).draws(start, start + 2 * BLOCK)
        assert np.array_equal(source[period:], source[:-period]), start


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


GOLDEN_RATIOS = {
    (1, 2, 4): "da4e76090e435d4e",
    (1, 5): "e2bec2c66709e5d4",
    (0.2, 0.8): "9aec57f63f81b39d",
    (1, 2, 3, 4): "6e197cafa51e2715",
    (5, 3, 2): "6aec15048f09b7bc",
    (7, 2, 1): "1af262a34669dadd",
    (1, 1, 1, 97): "f5ebcffb476e04d3",
    (1e-06, 1, 3.5): "16488fe572e4865f",
}


@pytest.mark.parametrize("weights", GOLDEN_RATIOS)
def test_golden_ratios_across_the_edges_of_blocks(weights: tuple[float, ...]) -> None:
    """Three segments of two blocks; what rounding alone decides shows after thousands of draws."""
    made = hashlib.blake2b(digest_size=8)
    for start in (0, 7 * BLOCK, 10**9 * BLOCK):
        for part in Interleaving(weights).draws(start, start + 2 * BLOCK):
            made.update(part.astype("<i8").tobytes())
    assert made.hexdigest() == GOLDEN_RATIOS[weights]


GOLDEN_EDGES = {
    "0.001 and 0.999": "6601fe51ac185384",
    "1e-6": "b7d77bad577595e8",
    "0.7 and 0.3": "0d8fb448ba7f2da9",
    "ten equal": "83ad1e681024ce60",
    "ten of any size": "49b3a62788f765e5",
    "ten magnitudes": "abef0e03e9c26d6d",
    "a thousand of any size": "9c35f7f678dc74ab",
    "a thousand, Zipf": "772411deba4902d0",
    "one large, a thousand small": "d0a707c5bc6b12c8",
}


@pytest.mark.parametrize("family", GOLDEN_EDGES)
def test_golden_edges_of_many_sources(family: str) -> None:
    """Counts at edges of blocks near and far: which sources are rounded up where others cannot make up for it."""
    turns, made = Interleaving(FAMILIES[family]), hashlib.blake2b(digest_size=8)
    for edge in [*range(1, 40), *(7**k for k in range(3, 19))]:
        made.update(turns.counts(edge * BLOCK).astype("<i8").tobytes())
    assert made.hexdigest() == GOLDEN_EDGES[family]


GOLDEN = [0, 1, 0, 0, 1, 0, 0, 2, 1, 0, 0, 1, 0, 0, 1, 0, 0, 2, 1, 0]
GOLDEN_FAR = [0, 1, 0, 0, 1, 0, 0, 2, 1, 0, 0, 1, 0, 0, 1, 0, 0, 2, 1, 0]


EXTREME = {
    "2**-61": [1, 2.0**-61],
    "1e-30": [1, 1e-30],
    "all floats": [1e308, 1.0, 5e-324],
    "counts": [2**61, 1, 1],
    "many tiny": [1.0, 2.0, *[1e-25] * 50],
    "2**-62 to 2**-66": [1, *[2.0**-k for k in range(62, 67)]],
}


@pytest.mark.parametrize("family", EXTREME)
@pytest.mark.parametrize("start", [0, 10**6, 10**15, 2**59 - 3000, 2**61 + 12_345])
def test_shares_below_what_a_word_holds_are_scheduled_like_any(family: str, start: int) -> None:
    weights = EXTREME[family]
    interleaving = Interleaving(weights)
    source, count = interleaving.draws(start, start + 2000)
    assert interleaving.counts(start).sum() == start
    total, rounding = sum(map(Fraction, weights)), Fraction(len(weights) + 1, 2**64)
    for at in (start, start + 2000):
        for weight, drawn in zip(weights, interleaving.counts(at).tolist()):
            assert abs(drawn - Fraction(weight) / total * at) < 1 + rounding * at
    for at in (0, 999, 1999):
        assert position(interleaving, int(source[at]), int(count[at])) == start + at
    assert all(
        position(interleaving, s, 2**61 + 2**60) < 0 for s in range(len(weights)) if weights[s] < max(weights)
    )


def test_what_comes_beyond_the_last_position_never_comes() -> None:
    """2**62 draws are all there are; a source of next to no share owes none of them."""
    assert position(Interleaving([1, 1e-30]), 1, 0) < 0
    assert position(Interleaving([1, 1]), 0, 2**61) < 0
    assert position(Interleaving([1, 1]), 0, 2**61 - 1) in (2**62 - 2, 2**62 - 1)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_runs_are_an_interleaving_of_runs(size: int) -> None:
    weights = [5, 3, 2]
    inner, runs = Interleaving(weights), WholeBatches(Interleaving(weights), size)
    source, _ = inner.draws(0, 400)
    wanted = source.repeat(size).tolist()
    counted = [wanted[:at].count(wanted[at]) for at in range(300)]
    for start, stop in ((0, 300), (0, 0), (7, 7), (size, 2 * size + 1), (131, 299)):
        made, count = runs.draws(start, stop)
        assert (made.tolist(), count.tolist()) == (wanted[start:stop], counted[start:stop])
    for at in range(0, 300, 7):
        assert runs.counts(at).tolist() == [wanted[:at].count(s) for s in range(3)]
        assert position(runs, wanted[at], counted[at]) == at
    far = 10**15 * size + size // 2
    made, count = runs.draws(far, far + 50)
    assert runs.positions(made, count).tolist() == list(range(far, far + 50))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "at least one"),
        ([1, 0], "above 0"),
        ([1, -1], "above 0"),
        ([float("nan")], "finite"),
        ([float("inf"), 1], "finite"),
        (["much"], "finite"),
    ],
)
def test_weights_that_are_none(weights: list[float], message: str) -> None:
    with pytest.raises(mf.errors.RecipeError, match=message):
        Interleaving(weights)
