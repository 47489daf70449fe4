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
from meshfeed.files import Fetching
from meshfeed.order import draws_of_step, num_steps
from meshfeed.sequence.fetched import fetched_per_byte, warning_of
from services.needs import needs
from services.nginx import Nginx

LENGTH, COUNT, BLOCK = 64, 4_000, 64 * 64  # a block holds 64 windows of a byte a token


class Far(mf.Lengths):
    """A store that a node fetches into a small cache."""

    limit_bytes = 0

    @property
    def fetching(self) -> Fetching:
        return Fetching(self.num_tokens, BLOCK, self.limit_bytes)


def recipe_of(shuffle: Any, share: float, **options: Any) -> mf.Recipe:
    """Windows of a corpus of which the cache holds a share."""
    store = Far(np.full(COUNT, LENGTH + 1))
    store.limit_bytes = int(share * store.num_tokens)
    batch = mf.Batch(sequences=100)
    return mf.Recipe(data=store, sequence=mf.Windows(LENGTH), batch=batch, shuffle=shuffle, **options)


def fetched_by_an_lru(recipe: mf.Recipe) -> float:
    """Bytes fetched over bytes read in the last epoch of three, by a cache that drops the block used longest ago."""
    (store,), held, count = recipe.sources, OrderedDict[int, None](), 0
    most = store.limit_bytes // BLOCK
    steps = num_steps(recipe) or 0
    for step in range(steps):
        for index in draws_of_step(recipe, step).index.tolist():
            for block in {index * LENGTH // BLOCK, (index + 1) * LENGTH // BLOCK}:
                count += block not in held and step >= steps * 2 // 3
                held[block] = None
                held.move_to_end(block)
                if len(held) > most:
                    held.popitem(last=False)
    return count * BLOCK / (store.num_tokens)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.6])
@pytest.mark.parametrize(
    "shuffle",
    [
        "global",
        "replacement",
        mf.Blocks(sequences=512, window=1, lanes=1),
        mf.Blocks(sequences=100, window=1, lanes=2),
        mf.Blocks(sequences=256, window=2, lanes=2),
        mf.Blocks(sequences=100, window=4, lanes=8),
    ],
    ids=str,
)
def test_it_is_about_what_a_cache_fetches(shuffle: Any, share: float) -> None:
    """Within a third, and within twice where the cache holds about half of the open shards, or some of the joints
    between them."""
    recipe = recipe_of(shuffle, share, epochs=3)
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
