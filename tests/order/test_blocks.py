"""Shuffling by blocks: a permutation that keeps few shards open, wherever and however it is entered."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.mixture import Store
from meshfeed.order import draws_between, draws_of_step, key_of, permute, position_of
from meshfeed.order.blocks import BlockShuffle
from meshfeed.order.permutation import subkeys
from meshfeed.recipe import Rule
from soak import cases

laws = settings(max_examples=cases(40), deadline=None)


@dataclass(frozen=True)
class Sharded(Store):
    """A store of so many sequences, perhaps in shards of its own."""

    size: int
    shard_ends: Any = None
    fingerprint: str = "sharded"

    def lengths(self, documents: np.ndarray) -> np.ndarray:
        return np.ones_like(documents)


class Whole(Rule):
    """Every document is a sequence."""

    def num_sequences(self, store: Sharded) -> int:
        return store.size

    def shard_ends(self, store: Sharded) -> Any:
        return store.shard_ends

    def summary(self) -> str:
        return "Whole()"


def recipe_of(data: Any, blocks: Any = "blocks", batch: Any = 8, **options: Any) -> mf.Recipe:
    batch = mf.Batch(sequences=batch) if isinstance(batch, int) else batch
    return mf.Recipe(data=data, sequence=Whole(), batch=batch, shuffle=blocks, **options)  # type: ignore[arg-type]


blocks_of = st.builds(
    mf.Blocks, sequences=st.integers(1, 40), window=st.integers(1, 6), lanes=st.integers(1, 9)
)


@st.composite
def stores(draw: st.DrawFn, most: int = 200, least: int = 1) -> Sharded:
    size = draw(st.integers(least, most))
    if draw(st.booleans()):
        return Sharded(size)
    edges = draw(st.lists(st.integers(0, size), max_size=12))
    return Sharded(size, np.array([*sorted(edges), size]))


def shard_of(store: Sharded, blocks: mf.Blocks, index: np.ndarray) -> np.ndarray:
    if store.shard_ends is None:
        return index // blocks.sequences
    return np.searchsorted(store.shard_ends, index, side="right")


def by_hand(store: Sharded, blocks: mf.Blocks, key: int) -> list[int]:
    """An epoch as the words say it, with lists."""
    indices = np.arange(store.size)
    ends = store.shard_ends
    if ends is None:
        ends = np.append(indices[blocks.sequences :: blocks.sequences], store.size)
    shards = np.split(indices, ends[:-1])
    # Shards without an index have a place in the order, too: windows are counted in places.
    turns = permute(np.arange(len(shards)), size=len(shards), key=key).tolist()
    place = {s: k for k, s in enumerate(turns)}
    line = np.concatenate([shards[s] for s in turns])
    lanes, at = [], 0
    for lane in np.array_split(line, blocks.lanes):
        of = shard_of(store, blocks, lane).tolist()
        drawn: list[int] = []
        for _, some in groupby(range(lane.size), lambda k: (place[of[k]] - place[of[0]]) // blocks.window):  # noqa: B023
            held = lane[list(some)]
            (own,) = subkeys(np.array(key, np.uint64), np.array([at + len(drawn)]))
            drawn += held[permute(np.arange(held.size), size=held.size, key=own)].tolist()
        lanes.append(drawn)
        at += lane.size
    return [lane[k] for k in range(len(lanes[0])) for lane in lanes if k < len(lane)]


@laws
@given(stores(), blocks_of, st.integers(0, 2**64 - 1))
def test_an_epoch_is_what_the_words_say(store: Sharded, blocks: mf.Blocks, key: int) -> None:
    shuffle = BlockShuffle(blocks, np.array([store.size]), [store.shard_ends])
    source, places, keys = np.zeros(store.size, int), np.arange(store.size), np.array(key, np.uint64)
    made = shuffle.indices(places, source, keys)
    assert made.tolist() == by_hand(store, blocks, key)
    assert np.array_equal(np.sort(made), places), "each index once"
    assert np.array_equal(shuffle.places(made, source, keys), places), "and found again"


@laws
@given(stores(least=20), blocks_of, st.integers(0, 9))
def test_few_shards_are_open_and_none_is_opened_again(store: Sharded, blocks: mf.Blocks, seed: int) -> None:
    epoch = draws_between(recipe_of(store, blocks, seed=seed), 0, store.size).index
    pairs = 0
    for lane in range(blocks.lanes):
        shards = shard_of(store, blocks, epoch[lane :: blocks.lanes])
        _, first = np.unique(shards, return_index=True)
        _, from_end = np.unique(shards[::-1], return_index=True)
        begun = np.bincount(first, minlength=shards.size).cumsum()
        ended = np.bincount(shards.size - from_end, minlength=shards.size).cumsum()  # once the last is drawn
        assert (begun - ended[: shards.size] <= blocks.window).all()
        pairs += first.size
    assert pairs <= len(set(shard_of(store, blocks, epoch).tolist())) + blocks.lanes - 1


@laws
@given(
    st.lists(stores(60), min_size=1, max_size=4),
    blocks_of,
    st.lists(st.integers(0, 700), min_size=1, max_size=30),
    st.integers(-(2**63), 2**63 - 1),
)
def test_any_place_of_a_mixture_is_reached_alone(
    some: list[Sharded], blocks: mf.Blocks, places: list[int], seed: int
) -> None:
    """Every source in shards and lanes of its own, over its epochs, through changes of weights and batches."""
    mixture = mf.Mixture({f"s{k}": (store, k + 1) for k, store in enumerate(some)})
    mixture = mixture.then(20, {"s0": 1}).then(30, {f"s{k}": 1 for k in range(len(some))})
    recipe = recipe_of(mixture, blocks, mf.Batch(sequences=8).then(9, 5), seed=seed)
    whole = draws_between(recipe, 0, 701)
    for place in places:
        one = draws_between(recipe, place, place + 1)
        drawn = tuple(int(each[0]) for each in (one.source, one.epoch, one.index))
        assert drawn == tuple(int(each[place]) for each in (whole.source, whole.epoch, whole.index))
        assert position_of(recipe, *drawn) == place
    for source, store in enumerate(some):
        mine = whole.take(np.flatnonzero(whole.source == source))
        assert mine.epoch.tolist() == [k // store.size for k in range(len(mine))]
        for epoch in range(len(mine) // store.size):
            assert np.array_equal(np.sort(mine.index[mine.epoch == epoch]), np.arange(store.size))


@pytest.mark.parametrize("size", [1, 7, 10**6 + 1, 2**40, 2**61 + 12345, 2**62])
@pytest.mark.parametrize(
    "blocks",
    [
        mf.Blocks(),
        mf.Blocks(sequences=1, window=1, lanes=1),
        mf.Blocks(sequences=2**62, window=2**62, lanes=2**62),
        mf.Blocks(sequences=2**62 - 1, window=2, lanes=3),
        mf.Blocks(sequences=10**9 + 7, window=10**6, lanes=17),
    ],
)
def test_sizes_up_to_the_greatest(size: int, blocks: mf.Blocks) -> None:
    shuffle = BlockShuffle(blocks, np.array([size]), [None])
    chance = np.random.default_rng(3).integers(0, size, 50)
    places = np.unique(np.concatenate((chance, [0, size // 2, size - 1])))
    source, key = np.zeros(places.size, int), np.array(2**64 - 1, np.uint64)
    made = shuffle.indices(places, source, key)
    assert made.min() >= 0 and made.max() < size
    assert np.array_equal(shuffle.places(made, source, key), places)


@pytest.mark.parametrize("at", [10**12, 2**62 - 600])
def test_far_places(at: int) -> None:
    recipe = recipe_of(Sharded(10**6 + 9), batch=256)
    draws = draws_between(recipe, at, at + 500)
    for k in (0, 99, 499):
        assert position_of(recipe, 0, int(draws.epoch[k]), int(draws.index[k])) == at + k


def test_orders_differ_by_seed_epoch_and_source_and_are_pinned() -> None:
    blocks = mf.Blocks(sequences=4, window=2, lanes=2)
    orders = [
        draws_between(recipe_of(Sharded(64), blocks, seed=seed), epoch * 64, epoch * 64 + 64).index.tolist()
        for seed in range(3)
        for epoch in range(3)
    ]
    named = draws_between(recipe_of(mf.Mixture({"a": (Sharded(64), 1)}), blocks), 0, 64).index.tolist()
    assert len({tuple(order) for order in [*orders, named]}) == 10
    assert orders[0][:12] == PINNED, "checkpoints hold no order: it may never change"


PINNED = [43, 26, 41, 30, 38, 28, 39, 29, 36, 31, 42, 27]


def test_every_index_is_as_likely_everywhere() -> None:
    """Where shards fill the lanes: what comes at each place over 4,000 epochs, against an even share."""
    size, epochs = 24, 4000
    shuffle = BlockShuffle(mf.Blocks(sequences=4, window=2, lanes=3), np.array([size]), [None])
    keys = np.array([key_of(0, 0, epoch) for epoch in range(epochs)], np.uint64).repeat(size)
    places = np.tile(np.arange(size), epochs)
    made = shuffle.indices(places, np.zeros_like(places), keys)
    counts = np.zeros((size, size))
    np.add.at(counts, (places, made), 1)
    chi2 = ((counts - epochs / size) ** 2 / (epochs / size)).sum(axis=1)
    assert chi2.max() < 58, chi2  # 23 degrees of freedom: each passes for all but 0.01 % of fair shuffles


@pytest.mark.parametrize("name", ["sequences", "window", "lanes"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "4", True, None, np.float64(4), 2**62 + 1])
def test_options_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(mf.errors.RecipeError, match=name):
        mf.Blocks(**{name: value})


def test_the_word_is_the_defaults_and_other_words_are_refused() -> None:
    assert recipe_of(Sharded(9)).fingerprint == recipe_of(Sharded(9), mf.Blocks()).fingerprint
    with pytest.raises(mf.errors.RecipeError, match="block'"):
        recipe_of(Sharded(9), "block")


@pytest.mark.parametrize("ends", [[], [4, 3, 9], [4, 8], [9, 10], [-1, 9]])
def test_shard_ends_that_cannot_be_are_refused(ends: list[int]) -> None:
    with pytest.raises(mf.errors.RecipeError, match="shard"):
        draws_of_step(recipe_of(Sharded(9, np.array(ends, np.int64))), 0)


def test_documents_go_by_the_shards_of_their_store() -> None:
    class Shards(mf.Lengths):
        shard_ends = np.array([2, 30, 31, 60])

    store = Shards(np.full(60, 5))
    for rule in (mf.Documents(), mf.Masked(5, vocab_size=9, mask_token=1)):
        recipe = mf.Recipe(
            data=store,
            sequence=rule,
            batch=mf.Batch(sequences=60),
            shuffle=mf.Blocks(sequences=7, window=1, lanes=1),
        )
        shards = np.searchsorted(store.shard_ends, draws_of_step(recipe, 0).index, side="right")
        assert len(list(groupby(shards.tolist()))) == 4, "shard after shard"
