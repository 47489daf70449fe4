"""What a recipe begins anew, against the draws themselves."""

from __future__ import annotations

import numpy as np
import pytest

import meshfeed as mf
from corpus import Backwards, recipe_of, write_corpus
from meshfeed.metrics.edges import edges_of
from meshfeed.order import drawn_until, draws_of_step

STEPS = 3000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=20_000)
    return str(path)


def test_epochs_and_windows_begin_as_often_as_is_told(corpus: str) -> None:
    data = mf.Mixture({"web": (mf.open(corpus), 0.8), "code": (mf.open(corpus), 0.2)})
    blocks = mf.Blocks(sequences=8, window=2, lanes=4)
    recipe = mf.Recipe(data=data, sequence=mf.Windows(16), batch=mf.Batch(sequences=24), shuffle=blocks)
    edges = edges_of(recipe, 0)
    assert list(edges) == [
        "an epoch of web",
        "a shuffle window of web",
        "an epoch of code",
        "a shuffle window of code",
    ]
    drawn, epochs = (np.array(each) for each in zip(*(drawn_until(recipe, s) or () for s in range(STEPS))))
    sizes = drawn[-1] / epochs[-1]
    for source, name in enumerate(("web", "code")):
        for what, size in (("an epoch", sizes[source]), ("a shuffle window", 2 * 4 * 8)):
            begins = np.flatnonzero(np.diff(drawn[:, source] // size) > 0)
            assert np.diff(begins).mean() == pytest.approx(edges[f"{what} of {name}"], rel=0.05), (what, name)


def test_a_window_opens_its_shards_at_its_edge(corpus: str) -> None:
    recipe = recipe_of(corpus, length=8, sequences=16, shuffle=mf.Blocks(sequences=32, window=2, lanes=2))
    every = edges_of(recipe, 0)["a shuffle window"]
    assert every == 8
    opened, edges = set[int](), list[int]()
    for step in range(1, 64):
        shards = {*(draws_of_step(recipe, step).index // 32).tolist()}
        if shards - opened:
            edges.append(step)
        opened |= shards
    away = [min(step % 8, -step % 8) for step in edges[1:]]
    assert max(away) <= 1, "the two lanes begin theirs within a step"
    assert {round(step / 8) for step in edges[1:]} == set(range(1, 9))


def test_what_has_no_edges(corpus: str) -> None:
    assert list(edges_of(recipe_of(corpus), 0)) == ["an epoch"]
    wide = mf.Blocks(sequences=1024, window=4, lanes=64)
    assert list(edges_of(recipe_of(corpus, shuffle=wide), 0)) == ["an epoch"], (
        "a window of more than an epoch"
    )
    by_tokens = mf.Recipe(data=mf.open(corpus), sequence=mf.Documents(), batch=mf.Batch(tokens=2_000))
    assert edges_of(by_tokens, 0) == {}
    own = mf.Recipe(data=mf.open(corpus), sequence=Backwards(16), batch=mf.Batch(8))
    assert edges_of(own, 0) == {}
