"""Small stores for tests, made through the real writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import meshfeed as mf
from meshfeed.order import Draws, OwnOrder, asked_until
from meshfeed.store import IndexedWriter


def write_corpus(
    path: Path, *, num_tokens: int = 20_000, seed: int = 0, mean: int = 150, **options: Any
) -> np.ndarray:
    """A store of random documents of 1 to 2 * mean tokens; returns its token stream."""
    rng = np.random.default_rng(seed)
    stream = rng.integers(1, 60_000, num_tokens).astype(np.uint16)
    cuts = np.cumsum(rng.integers(1, 2 * mean, num_tokens // mean * 2))
    with IndexedWriter(path, np.uint16, **options) as writer:
        for document in np.split(stream, cuts[cuts < num_tokens]):
            writer.add_document(document)
    return stream


def recipe_of(
    path: Path | str, *, length: int = 64, sequences: int = 16, seed: int = 5, **options: object
) -> mf.Recipe:
    """The usual recipe over a store: windows of 64, sixteen a step."""
    rule = {
        k: options.pop(k)
        for k in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        if k in options
    }
    return mf.Recipe(
        data=mf.open(str(path)),
        sequence=mf.Windows(length, **rule),
        batch=mf.Batch(sequences=sequences),
        seed=seed,
        **options,
    )


def shares_at(recipe: mf.Recipe, step: int) -> list[float]:
    """The recipe's share of each source in the sequences of a step."""
    before, after = asked_until(recipe, step), asked_until(recipe, step + 1)
    assert before is not None and after is not None
    return ((after - before) / (after - before).sum()).tolist()


def recipe_in(folder: Path, name: str) -> mf.Recipe:
    """The one of that name that the folder's recipes.py makes."""
    made: dict[str, Any] = {}
    exec((folder / "recipes.py").read_text(), made)
    return made[name]


def flip_in_build(feed: mf.Feed, *, once: bool, step: int) -> None:
    """A token changes in memory while this rank builds a step; once, or whenever it builds that step."""
    rule = feed.recipe.sequence
    build = type(rule).build
    wanted = next(iter(mf.simulate(feed.recipe, mf.Layout(), [step]))).batch.draws.index[0]
    flips: list[int] = []

    def flipped(recipe: Any, portion: Any, columns: Any, names: Any, allocate: Any) -> Any:
        built = build(rule, recipe, portion, columns, names, allocate)
        here = np.flatnonzero((portion.draws.index == wanted) & (portion.draws.epoch == 0))
        if here.size and not (once and flips) and "tokens" in built[0]:
            microbatch, row = divmod(int(here[0]), portion.rows)
            built[microbatch]["tokens"][row, 1] ^= 1
            flips.append(1)
        return built

    object.__setattr__(rule, "build", flipped)


class Backwards(mf.Windows, OwnOrder):
    """Windows of one store in an order of its own, the last one first."""

    def num_positions(self, recipe: mf.Recipe) -> int:
        return self.num_sequences(recipe.sources[0])

    def draws_between(self, recipe: mf.Recipe, start: int, stop: int) -> Draws:
        index = self.num_positions(recipe) - 1 - np.arange(start, stop)
        return Draws(np.zeros(index.size, np.int32), np.zeros_like(index), index)
