"""A later phase with another rule, of documents that the earlier one did not take: a run of another recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import meshfeed as mf
import world
from observe import simulated, take
from soak import cases

SIZE = 331


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose tokens count up."""
    path, rng, at = tmp_path_factory.mktemp("phases") / "one", np.random.default_rng(0), 0
    with mf.IndexedWriter(path, "int32") as writer:
        while at < SIZE:
            size = min(int(rng.integers(0, 25)), SIZE - at)
            writer.add_document(np.arange(at, at + size, dtype="i4"))
            at += size
    return path


def phases(path: Path, cut: int, begin: int, lengths: tuple[int, int]) -> tuple[mf.Recipe, mf.Recipe]:
    """The same data in windows of both lengths: from step `begin` on, what lies behind document `cut`."""
    store = mf.open(path)
    data = mf.Mixture({"first": (store[:cut], 1)}).then(begin, {"rest": (store[cut:], 1)})
    short, long = (
        mf.Recipe(data=data, sequence=mf.Windows(length), batch=mf.Batch(tokens=48), seed=3)
        for length in lengths
    )
    return short, long


@settings(max_examples=cases(20), deadline=None)
@given(st.integers(11, 20), st.integers(1, 2), st.permutations([4, 12]), st.integers(0, 3))
def test_no_token_comes_twice(path: Path, cut: int, begin: int, lengths: list[int], further: int) -> None:
    """And a run that begins in the second phase, as after a kill, is the same."""
    short, long = phases(path, cut, begin, (lengths[0], lengths[1]))
    border = int(mf.open(path)[:cut].num_tokens)
    stop, tokens = begin + min(further, (SIZE - border - 1) // 48), list[int]()
    assume(border > 48 * begin)
    with mf.Feed(short, mf.Layout(), micro_batch_size=2) as feed:
        first = take(feed, begin)
        with feed.run(begin, recipe=long) as run:
            then = take(run, stop - begin)
    assert first == simulated(short, mf.Layout(), begin, 0, micro_batch_size=2)
    assert then == simulated(long, mf.Layout(), range(begin, stop), 0, micro_batch_size=2)
    for recipe, steps in ((short, range(begin)), (long, range(begin, stop))):
        for made in mf.simulate(recipe, mf.Layout(), steps):
            seen = np.concatenate([m["tokens"].ravel() for m in made.microbatches]).tolist()
            assert all((token < border) == (recipe is short) for token in seen)
            tokens += seen
    assert len(tokens) == len({*tokens}) == 48 * stop


def _rank(rank: int, layout: mf.Layout, recipes: Any) -> Any:
    with mf.Feed(recipes[0], layout, micro_batch_size=1) as feed:
        seen = take(feed, 3)
        with feed.run(3, recipe=recipes[1]) as run:
            return seen + take(run, 3)


def test_every_rank_goes_on(path: Path) -> None:
    recipes, layout = phases(path, 14, 3, (4, 12)), mf.Layout.parse("tp2-pp2")
    for rank, got in enumerate(world.run(_rank, 4, layout, recipes)):
        wanted = simulated(recipes[0], layout, 3, rank, micro_batch_size=1)
        assert got == wanted + simulated(recipes[1], layout, range(3, 6), rank, micro_batch_size=1)
