"""What a position costs, anywhere in the stream, and what ten thousand sources cost at the start.

Draws of a step at position 10**12 against position 0, for one store, a mixture of 10 and one of 1,000. Each
contestant forgets what it had worked out, so every time is that of a job that has just resumed there. The
same under a shuffle by blocks, also for a store in 100,000 shards of its own; and, in a job that goes on, a
shuffle by blocks against a global one. Then a warm start, opening included, of 10,000 stores against one with
as many documents; and drift, the largest distance of any source from its share over 10**6 draws.
"""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import measure
import numpy as np
from measure import Row, in_turn, ratio

import meshfeed as mf
from meshfeed.order import Interleaving, draws_between
from meshfeed.order.schedule import interleaving_of
from meshfeed.order.stream import Stream
from meshfeed.store import IndexedWriter

BATCH, FAR, SOURCES = 256, 10**12, 10_000
NOISE = 1.1  # what should be 1


class Sharded(mf.Lengths):
    """A store in shards of its own, of one to twenty documents."""

    shard_ends = np.cumsum(np.random.default_rng(3).integers(1, 21, 100_000))

    def __init__(self) -> None:
        super().__init__(np.ones(int(self.shard_ends[-1]), np.int8))


def measured(short: bool) -> Iterator[Row]:
    """All of it."""
    yield from positions(short)
    yield from blocks(short)
    yield from drift(short)
    yield from many_sources(short)


def named(sources: int) -> str:
    """A number of sources in words."""
    return f"{sources:,} source{'s' * (sources > 1)}"


def recipe_of(sources: int) -> mf.Recipe:
    """A mixture of stores of some size; no file is behind it."""
    sizes = np.random.default_rng(0).integers(1000, 10**6, sources)
    weights = np.random.default_rng(1).dirichlet(np.ones(sources)) + 1e-6
    stores = [mf.Lengths(np.ones(int(size), np.int8)) for size in sizes // 1000]
    stores_of = {f"s{k}": (store, float(weight)) for k, (store, weight) in enumerate(zip(stores, weights))}
    data = mf.Mixture(stores_of) if sources > 1 else stores[0]
    return mf.Recipe(data=data, sequence=mf.Documents(), batch=mf.Batch(sequences=BATCH))


def draw_anew(recipe: mf.Recipe, start: int) -> None:
    """The draws of a step, as a job that has just resumed there works them out."""
    interleaving_of.cache_clear()
    stream = Stream(recipe)
    source, epoch, place = stream.places(start, start + BATCH)
    stream.indices(source, epoch, place)


def positions(short: bool) -> Iterator[Row]:
    """Position 10**12 against position 0."""
    for sources in (1, 10) if short else (1, 10, 1000):
        recipe = recipe_of(sources)
        draws = {"0": partial(draw_anew, recipe, 0), "far": partial(draw_anew, recipe, FAR)}
        seconds = in_turn(draws, rounds=1 if short else 15)
        yield Row(
            name=f"{BATCH} draws at position 10¹², {named(sources)}",
            against="at position 0",
            value=ratio(seconds["far"], seconds["0"]),
            aim=NOISE,
        )


def blocks(short: bool) -> Iterator[Row]:
    """A shuffle by blocks: just resumed at 10**12 against 0, and going on against the global shuffle."""
    recipes = {named(sources): recipe_of(sources) for sources in ((1,) if short else (1, 10, 1000))}
    recipes["1 source in 100,000 shards"] = replace(recipe_of(1), data=Sharded())
    for name, plain in recipes.items():
        recipe = replace(plain, shuffle="blocks")

        draws = {"0": partial(draw_anew, recipe, 0), "far": partial(draw_anew, recipe, FAR)}
        cold = in_turn(draws, rounds=1 if short else 15)
        under_way = {
            "blocks": partial(draws_between, recipe, FAR, FAR + BATCH),
            "global": partial(draws_between, plain, FAR, FAR + BATCH),
        }
        warm = in_turn(under_way, rounds=1 if short else 25)
        yield Row(
            name=f"{BATCH} draws at position 10¹², shuffled by blocks, {name}",
            against="at position 0",
            value=ratio(cold["far"], cold["0"]),
            aim=NOISE,
        )
        yield Row(
            name=f"{BATCH} draws of a job under way, shuffled by blocks, {name}",
            against="shuffled globally",
            value=ratio(warm["blocks"], warm["global"]),
        )


def drift(short: bool) -> Iterator[Row]:
    """The largest distance from a share at any prefix of 10**6 draws."""
    rng = np.random.default_rng(2)
    for sources in (2,) if short else (2, 10, 1000):
        weights = rng.dirichlet(np.ones(sources))
        source, count = Interleaving(weights.tolist()).draws(0, 10**6)
        behind = count - weights[source] * np.arange(10**6)
        ahead = count + 1 - weights[source] * np.arange(1, 10**6 + 1)
        worst = max(np.abs(behind).max(), np.abs(ahead).max())
        yield Row(
            name=f"furthest of any of {sources:,} sources from its share in 10⁶ draws",
            value=worst,
            unit="draws",
            aim=1.0,
        )


def many_sources(short: bool) -> Iterator[Row]:
    """A warm start of 10,000 stores against one."""
    sources = 100 if short else SOURCES
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as folder:
        for k in range(sources):
            write(Path(folder) / f"s{k}", documents=2)
        write(Path(folder) / "one", documents=2 * sources)

        def first_batch(names: list[str]) -> None:
            stores = {name: (mf.open(Path(folder) / name), 1.0) for name in names}
            recipe = mf.Recipe(
                data=mf.Mixture(stores), sequence=mf.Windows(64), batch=mf.Batch(sequences=BATCH)
            )
            with mf.Feed(recipe, transport=mf.Transport(prefetch=0)) as feed:
                list(next(iter(feed)).microbatches)

        many, one = [f"s{k}" for k in range(sources)], ["one"]
        seconds = in_turn({"many": lambda: first_batch(many), "one": lambda: first_batch(one)}, rounds=3)
    yield Row(
        name="opening one of 10,000 sources, until a first batch",
        value=(median(seconds["many"]) - median(seconds["one"])) / sources * 1e6,
        unit="µs",
    )


def write(path: Path, documents: int) -> None:
    """A store of documents of 100 tokens."""
    with IndexedWriter(path, np.uint16) as writer:
        for _ in range(documents):
            writer.add_document(np.zeros(100, np.uint16))


if __name__ == "__main__":
    measure.main(__doc__, measured)
