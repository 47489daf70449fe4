"""Recipes of windows whose length changes, of stores in which every token is known by its value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import meshfeed as mf
from meshfeed.order import draws_of_step
from meshfeed.store import DatasetWriter

LENGTHS = {"one": 331, "other": 170}
"""Tokens of each store."""


def write_stores(path: Path) -> Path:
    """Two stores whose tokens count up, the second from 1,000 on, with a loss mask."""
    rng = np.random.default_rng(0)
    for first, (name, total) in zip((0, 1000), LENGTHS.items()):
        with DatasetWriter(path / name, {"tokens": "i4", "loss_mask": "u1"}) as writer:
            at = 0
            while at < total:
                size = min(int(rng.integers(1, 25)), total - at)
                tokens = np.arange(first + at, first + at + size, dtype="i4")
                writer.add_document(tokens=tokens, loss_mask=(tokens % 5 > 0).astype("u1"))
                at += size
    return path


def stores(folder: Path, **options: Any) -> dict[str, Any]:
    return {name: mf.open(folder / name, **{"ignore": ["loss_mask"]} | options) for name in LENGTHS}


def inputs_of(recipe: mf.Recipe, step: int) -> list[tuple[int, list[int]]]:
    """(source, tokens) of each sequence of a step, in stream order; labels are the tokens after them."""
    size = len(draws_of_step(recipe, step))
    (made,) = mf.simulate(recipe, mf.Layout(), [step], micro_batch_size=size)
    (microbatch,) = made.microbatches
    found = []
    for source, tokens, labels in zip(*(microbatch[name] for name in ("source", "tokens", "labels"))):
        assert tokens[1:].tolist() == labels[:-1].tolist()
        found.append((int(source), tokens.tolist()))
    return found


def recipe_of(folder: Path, **options: Any) -> mf.Recipe:
    rule = mf.Windows(8, reset_attention_mask=True).then(4, 24).then(9, 12)
    data = mf.Mixture({name: (store, 1) for name, store in stores(folder).items()})
    return mf.Recipe(
        **{"data": data, "sequence": rule, "batch": mf.Batch(tokens=24 * 8), "seed": 3} | options
    )
