"""Amounts by tokens: a source's share of the tokens, whatever the lengths of its sequences."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from corpus import shares_at
from meshfeed.order import drawn_until, draws_between, draws_of_step, num_steps
from soak import cases


def lengths_of(seed: int, count: int, mean: int) -> np.ndarray:
    """From 0 to twice the mean."""
    return np.random.default_rng(seed).integers(0, 2 * mean + 1, count)


def recipe_of(data: mf.Mixture, sequences: int = 16, rule: Any = None, **options: Any) -> mf.Recipe:
    batch = mf.Batch(sequences=sequences)
    return mf.Recipe(data=data, sequence=rule or mf.Documents(), batch=batch, **options)


def tokens_of(recipe: mf.Recipe, lengths: list[np.ndarray], start: int, stop: int) -> np.ndarray:
    """Tokens of each source at some positions, counted sequence by sequence; int64 [sources]."""
    draws = draws_between(recipe, start, stop)
    own = (own[draws.index[draws.source == source]].sum() for source, own in enumerate(lengths))
    return np.fromiter(own, np.int64)


# -- the law --------------------------------------------------------------------------------------------


def test_even_shares_of_tokens_from_documents_of_400_and_4000() -> None:
    long, short = lengths_of(1, 3_000, 4_000), lengths_of(2, 5_000, 400)
    stores = {"long": (mf.Lengths(long), 0.5), "short": (mf.Lengths(short), 0.5)}
    recipe, so_far = recipe_of(mf.Mixture(stores, by="tokens")), np.zeros(2)
    for thousand in range(4):  # steps of 16
        so_far += tokens_of(recipe, [long, short], 16_000 * thousand, 16_000 * (thousand + 1))
        assert so_far / so_far.sum() == pytest.approx([0.5, 0.5], rel=0.01)
    by_documents = tokens_of(recipe_of(mf.Mixture(stores)), [long, short], 0, 16_000)
    assert by_documents[1] / by_documents.sum() == pytest.approx(1 / 11, abs=0.005)


@settings(max_examples=cases(40), deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(1e-6, 1), st.lists(st.integers(0, 5_000), min_size=1, max_size=30).filter(any)),
        min_size=1,
        max_size=6,
    ),
    st.none() | st.integers(1, 3_000),
    st.integers(0, 10**6),
)
def test_a_sequence_counts_for_the_inverse_of_its_mean_length(
    sources: list[tuple[float, list[int]]], max_len: int | None, step: int
) -> None:
    """After any number of draws, each source has had its exact share of them, give or take less than one."""
    data = {str(i): (mf.Lengths(lengths), share) for i, (share, lengths) in enumerate(sources)}
    recipe = recipe_of(mf.Mixture(data, by="tokens"), rule=mf.Documents(max_len=max_len))
    cut = [[min(length, max_len or length) for length in lengths] for _, lengths in sources]
    weights = [Fraction(share) * len(own) / sum(own) for (share, _), own in zip(sources, cut)]
    drawn, epochs = drawn_until(recipe, step) or (None, None)
    assert drawn is not None and epochs is not None
    for had, weight in zip(drawn.tolist(), weights):
        due, bound = weight / sum(weights) * 16 * step, 1 + Fraction(1, 10**6)  # weights have 64 bits
        assert due - bound < had < due + bound
    # what that means for tokens: the expected share is what was asked
    means = [Fraction(sum(own), len(own)) for own in cut]
    expected = [weight * mean for weight, mean in zip(weights, means)]
    for (share, _), tokens in zip(sources, expected):
        assert tokens / sum(expected) == Fraction(share) / sum(Fraction(share) for share, _ in sources)


@pytest.mark.parametrize("rare", [1e-2, 1e-4, 1e-6])
def test_a_rare_source_has_its_tokens_at_every_1000_steps(rare: float) -> None:
    """One draw is 1 % of what the rarest has had by then, so a step has as many sequences as that takes."""
    data = {"much": (mf.Lengths([400] * 90), 1 - rare), "rare": (mf.Lengths([4_000] * 7), rare)}
    sequences = int(1_000 / rare) * 2
    recipe = recipe_of(mf.Mixture(data, by="tokens"), sequences)
    for step in range(1_000, 10_001, 1_000):
        drawn, _ = drawn_until(recipe, step) or (None, None)
        tokens = np.array([400, 4_000]) * drawn
        assert tokens[1] / tokens.sum() == pytest.approx(rare, rel=0.01)


def test_rows_of_one_length_are_mixed_as_by_proportion() -> None:
    stores = {"a": (mf.Lengths([70] * 40), 0.7), "b": (mf.Lengths([900] * 11), 0.3)}
    by_tokens = recipe_of(mf.Mixture(stores, by="tokens"), rule=mf.Windows(16))
    by_sequences = recipe_of(mf.Mixture(stores), rule=mf.Windows(16))
    for step in (0, 1, 2, 10**9):
        assert (
            draws_of_step(by_tokens, step).index.tolist() == draws_of_step(by_sequences, step).index.tolist()
        )
    assert by_tokens.fingerprint != by_sequences.fingerprint
    assert "by tokens" in by_tokens.summary()["data"]


def test_masked_documents_count_what_is_in_their_rows() -> None:
    rule = mf.Masked(10, vocab_size=50, mask_token=3, first_token=1, last_token=2, crop="random")
    stores = {"a": (mf.Lengths([2, 30]), 0.5), "b": (mf.Lengths([4]), 0.5)}
    recipe = recipe_of(mf.Mixture(stores, by="tokens"), rule=rule)
    assert shares_at(recipe, 0) == pytest.approx([6 / 13, 7 / 13]), "7 and 6 tokens a row"


def test_batches_of_one_source_take_turns_by_tokens() -> None:
    stores = {"long": (mf.Lengths([4_000] * 9), 0.5), "short": (mf.Lengths([400] * 9), 0.5)}
    recipe = recipe_of(mf.Mixture(stores, by="tokens", batches="per_source"))
    sources = [set(draws_of_step(recipe, step).source.tolist()) for step in range(110)]
    assert all(len(each) == 1 for each in sources)
    assert sources.count({0}) == 10 and num_steps(recipe) is None


def test_later_amounts_stay_in_tokens() -> None:
    a, b, c = mf.Lengths([4_000] * 9), mf.Lengths([400] * 9), mf.Lengths([40] * 9)
    mixture = mf.Mixture({"a": (a, 0.5), "b": (b, 0.5)}, by="tokens").then(3, {"a": 0.5, "c": (c, 0.5)})
    mixture = mixture.then(5, {"a": 1, "b": 1}, by="proportion").then(7, {"a": 3, "b": 1})
    asked = [shares_at(recipe_of(mixture), step) for step in (0, 3, 5, 7)]
    assert asked[0] == pytest.approx([1 / 11, 10 / 11, 0])
    assert asked[1] == pytest.approx([1 / 101, 0, 100 / 101])
    assert asked[2] == pytest.approx([0.5, 0.5, 0]) and asked[3] == pytest.approx([0.75, 0.25, 0])


# -- what is refused ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cropped(mf.Documents):
    """Documents of another length in every epoch."""

    def lengths(self, recipe: mf.Recipe, draws: mf.order.Draws) -> np.ndarray:
        return super().lengths(recipe, draws) - draws.epoch


class Item:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, np.ndarray]:
        return {"x": np.arange(3)}


def test_sources_whose_tokens_are_not_known_are_refused_by_name() -> None:
    a, empty = mf.Lengths([5, 6]), mf.Lengths([0, 0])
    with pytest.raises(mf.errors.RecipeError, match=r"Cropped.* other lengths in another epoch"):
        draws_of_step(recipe_of(mf.Mixture({"a": (a, 1)}, by="tokens"), rule=Cropped()), 0)
    with pytest.raises(mf.errors.RecipeError, match="source 'none' has no tokens"):
        draws_of_step(recipe_of(mf.Mixture({"a": (a, 1), "none": (empty, 1)}, by="tokens")), 0)
    rested = recipe_of(mf.Mixture({"a": (a, 1), "none": (empty, 0)}, by="tokens"))
    assert set(draws_of_step(rested, 0).source.tolist()) == {0}
    items = mf.Mapped(Item(), version="1")
    with pytest.raises(mf.errors.RecipeError, match=r"Samples.* not known beforehand; give it lengths="):
        draws_of_step(recipe_of(mf.Mixture({"a": (items, 1)}, by="tokens"), rule=mf.Samples("x")), 0)
    counted = mf.Mapped(Item(), version="1", lengths=[3] * 5)
    assert shares_at(recipe_of(mf.Mixture({"a": (counted, 1)}, by="tokens"), rule=mf.Samples("x")), 0) == [1]


def test_units_that_do_not_go_together_are_refused() -> None:
    a, b = mf.Lengths([5]), mf.Lengths([6])
    with pytest.raises(mf.errors.RecipeError, match="'a' has no amount: by='tokens' takes"):
        mf.Mixture({"a": a, "b": (b, 1)}, by="tokens")
    with pytest.raises(mf.errors.RecipeError, match="shares are of sequences"):
        mf.Mixture({"a": (a, 1), "b": (b, 1)}, by={"a": "tokens", "b": "proportion"})
    with pytest.raises(mf.errors.RecipeError, match="never ends"):
        mf.Mixture({"a": (a, 1), "b": (b, 1)}, by={"a": "tokens", "b": "count"})


def test_an_epoch_is_counted_once_for_each_store_and_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = mf.Lengths([5, 6, 7]), []
    whole = mf.Lengths.extents

    def counting(self: mf.Lengths, documents: np.ndarray) -> Any:
        asked.append(len(documents))
        return whole(self, documents)

    monkeypatch.setattr(mf.Lengths, "extents", counting)
    for max_len in (None, 6, None, 6):
        recipe = recipe_of(mf.Mixture({"a": (store, 1)}, by="tokens"), rule=mf.Documents(max_len=max_len))
        tokens = recipe.sequence.epoch_tokens(recipe, 0)
        assert tokens == ((18, 7) if max_len is None else (17, 6))
    assert sum(asked) == 2 * 2 * 3, "two rules, each in two epochs of the first sequences"
