"""How much a recipe fetches with a cache smaller than its corpus is told about before it runs."""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
from corpus import write_corpus
from meshfeed.fetched import cut_by_shards, fetched_per_byte, warning_of
from meshfeed.files import Fetching
from meshfeed.order import draws_of_step, num_steps
from meshfeed.remote.cut import Cut, cut_at
from services.needs import needs
from services.nginx import Nginx

LENGTH, COUNT, BLOCK = 64, 4_000, 64 * 64  # a block holds 64 windows of a byte a token


class Far(mf.Lengths):
    """A store that a node fetches into a small cache, a byte a token. check_bytes: that have one checksum."""

    limit_bytes, check_bytes = 0, 1

    @property
    def fetching(self) -> Fetching:
        return Fetching(self.num_tokens, BLOCK, self.limit_bytes, self.check_bytes)

    @property
    def edges(self) -> np.ndarray:
        """Of its blocks."""
        return vars(self).get("_edges", Cut(self.num_tokens, BLOCK).edges)

    def cut(self, begins: np.ndarray, ends: np.ndarray) -> None:
        self._edges = cut_at((begins, ends), self.num_tokens, BLOCK, self.check_bytes).edges


def recipe_of(shuffle: Any, share: float, **options: Any) -> mf.Recipe:
    """Windows of a corpus of which the cache holds a share."""
    store = Far(np.full(COUNT, LENGTH + 1))
    store.limit_bytes = int(share * store.num_tokens)
    batch = mf.Batch(sequences=100)
    return mf.Recipe(data=store, sequence=mf.Windows(LENGTH), batch=batch, shuffle=shuffle, **options)


def fetched_by_an_lru(recipe: mf.Recipe) -> float:
    """Bytes fetched over bytes read in the last epoch of three, by a cache that drops the block used longest ago."""
    (store,), held, fetched, room = recipe.sources, OrderedDict[int, int](), 0, recipe.sources[0].limit_bytes
    sizes, steps = np.diff(store.edges).tolist(), num_steps(recipe) or 0
    for step in range(steps):
        for block in blocks_of(recipe, draws_of_step(recipe, step)):
            if block not in held:
                held[block] = sizes[block]
                room -= sizes[block]
                fetched += sizes[block] * (step >= steps * 2 // 3)
            held.move_to_end(block)
            while room < 0:
                room += held.popitem(last=False)[1]
    return fetched / store.num_tokens


def blocks_of(recipe: mf.Recipe, draws: mf.order.Draws) -> list[int]:
    """The blocks that the windows of a step need, last labels included."""
    (store,), starts, lengths = recipe.sources, np.zeros_like(draws.index), np.full_like(draws.index, LENGTH)
    begins, ends, _ = recipe.sequence.stream_ranges(recipe, 0, draws, starts, lengths, ahead=0)
    first = store.edges.searchsorted(begins, side="right") - 1
    last = store.edges.searchsorted(np.minimum(ends + 1, store.num_tokens)) - 1
    return [block for low, high in zip(first.tolist(), last.tolist()) for block in range(low, high + 1)]


@pytest.mark.parametrize(("share", "check_bytes"), [(0.1, 1), (0.2, 1), (0.2, 1024), (0.6, 1)])
@pytest.mark.parametrize(
    "shuffle",
    [
        "global",
        mf.Blocks(sequences=512, window=1, lanes=1),
        mf.Blocks(sequences=100, window=1, lanes=2),
        mf.Blocks(sequences=256, window=2, lanes=2),
        mf.Blocks(sequences=100, window=4, lanes=8),
    ],
    ids=str,
)
def test_it_is_about_what_a_cache_fetches(shuffle: Any, share: float, check_bytes: int) -> None:
    """Within a third, and within twice where the cache holds about half of the open shards, or some of the joints
    between them."""
    recipe = recipe_of(shuffle, share, epochs=3)
    recipe.sources[0].check_bytes = check_bytes
    cut_by_shards(recipe)
    is_close = share < 0.5 or not isinstance(shuffle, mf.Blocks)
    ratio = fetched_per_byte(recipe) / fetched_by_an_lru(recipe)
    assert abs(np.log(ratio)) < np.log(1.34 if is_close else 2)


def test_what_is_read_in_order_or_fits_is_fetched_once() -> None:
    assert fetched_per_byte(recipe_of("none", 0.1, epochs=1)) == 1
    assert fetched_per_byte(recipe_of("global", 1.0, epochs=1)) == 1
    near = mf.Recipe(
        data=mf.Lengths(np.full(9, 9)), sequence=mf.Windows(3), batch=mf.Batch(sequences=3), epochs=1
    )
    assert fetched_per_byte(near) == 1 and warning_of(near) is None


@pytest.mark.parametrize("rule", [mf.Windows(LENGTH), mf.Documents()], ids=str)
def test_shards_meet_only_in_their_joints(rule: Any) -> None:
    """Whatever the epoch: so no other block is fetched for two shards."""
    lengths = np.random.default_rng(0).integers(0, 2 * LENGTH, 300)
    recipe = mf.Recipe(data=mf.Lengths(lengths), sequence=rule, batch=mf.Batch(sequences=7), steps=1)
    (store,), count, shard = recipe.sources, recipe.sequence.num_sequences(recipe.sources[0]), 40
    with store:
        begins, ends = rule.joints(recipe, 0, np.arange(shard, count, shard))
        read_by = np.zeros((-(-count // shard), store.num_tokens), np.bool_)
        for epoch in range(5):
            index = np.arange(count)
            draws = mf.order.Draws(np.zeros(count, np.int32), np.full(count, epoch), index)
            draws = rule.look_up(recipe, draws)
            of = [rule.lengths(recipe, draws)]
            for ahead in (0, 1):
                low, high, row = rule.stream_ranges(
                    recipe, 0, draws, np.zeros(count, np.int64), *of, ahead=ahead
                )
                for begin, end, at in zip(low.tolist(), high.tolist(), row.tolist()):
                    read_by[at // shard, begin:end] = True
    joint = np.zeros(store.num_tokens, np.bool_)
    for begin, end in zip(begins.tolist(), ends.tolist()):
        joint[begin:end] = True
    assert not ((read_by.sum(axis=0) > 1) & ~joint).any()
    assert joint.sum() <= 2 * LENGTH * begins.size


def test_only_a_cache_that_is_smaller_is_cut_by_shards() -> None:
    for share, shuffle, is_cut in (
        (0.5, "global", False),
        (0.5, mf.Blocks(sequences=99), True),
        (1.0, mf.Blocks(sequences=99), False),
    ):
        recipe = recipe_of(shuffle, share, epochs=1)
        cut_by_shards(recipe)
        assert (np.unique(np.diff(recipe.sources[0].edges)[:-1]).size > 1) == is_cut


def test_sources_share_the_cache() -> None:
    alone = recipe_of("global", 0.5, epochs=1)
    (store,) = alone.sources
    both = mf.Recipe(
        data=mf.Mixture({"a": (store, 0.5), "b": (store, 0.5)}),
        sequence=mf.Windows(LENGTH),
        batch=mf.Batch(sequences=100),
        steps=9,
    )
    assert fetched_per_byte(both) == pytest.approx(1.5 * fetched_per_byte(alone))


def test_checksums_of_large_blocks_are_named() -> None:
    """Two shards fetch the one between them, if the cache cannot keep it."""
    recipe = recipe_of(mf.Blocks(sequences=64, window=1, lanes=1), 0.2, epochs=1)
    assert warning_of(recipe) is None
    recipe.sources[0].check_bytes = BLOCK
    assert f".sums of less than {BLOCK} bytes each" in (warning_of(recipe) or "")


def test_a_feed_says_so_before_it_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    needs("nginx")
    (tmp_path / "served").mkdir()
    write_corpus(tmp_path / "served/c", num_tokens=200_000)
    with Nginx(tmp_path / "served") as server:
        for blocks, shuffle, told in (
            (8, "global", "shuffle by mf.Blocks"),
            (400, "global", ""),
            (8, "none", ""),
        ):
            caplog.clear()
            cache = mf.Cache(tmp_path / f"{blocks}", limit_bytes=blocks * 4096, block_bytes=4096)
            recipe = mf.Recipe(
                data=mf.open(f"{server.url}/c", cache=cache),
                sequence=mf.Windows(64),
                batch=mf.Batch(sequences=4),
                shuffle=shuffle,
                steps=1,
            )
            with caplog.at_level(logging.WARNING, "meshfeed"), mf.Feed(recipe):
                found = [each.getMessage() for each in caplog.records]
            assert len(found) == bool(told) and told in "".join(found)
