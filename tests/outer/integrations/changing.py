"""A job that changes while it trains: its recipe, and the amendments that lives make."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

import meshfeed as mf
from loops import VOCAB
from meshfeed.recipe import Change

PACKING = mf.Packing(capacity=128)
DOCUMENTS = {"a": 90, "b": 60, "more": 40}
"""Of the sources, and of the store that they grow by."""
KINDS = ("Exclude", "Reweigh", "SkipSteps", "BatchSize", "Grow")


def write(folder: Path) -> Path:
    rng = np.random.default_rng(5)
    for name, number in DOCUMENTS.items():
        with mf.IndexedWriter(folder / name, np.uint16) as writer:
            for _ in range(number):
                writer.add_document(rng.integers(1, VOCAB, rng.integers(2, 60)).astype(np.uint16))
    return folder


def recipe(folder: Path, *, packed: bool) -> mf.Recipe:
    """Documents in packs, or rows of windows."""
    rule = mf.Documents() if packed else mf.Windows(16)
    data = mf.Mixture({name: (mf.open(folder / name), 1) for name in ("a", "b")})
    return mf.Recipe(data=data, sequence=rule, batch=mf.Batch(11 if packed else 12), seed=7)


def options(packed: bool) -> dict[str, Any]:
    """Of a Feed of that recipe; without `pad_rows`, those of `simulate`."""
    return {"packing": PACKING} if packed else {"pad_rows": True}


def change(folder: Path, dice: random.Random, step: int) -> Change:
    """An amendment that is made in this step. A recipe may have to refuse it."""
    kind = dice.choice(KINDS)
    name = dice.choice(["a", "b"])
    if kind == "Exclude":
        return mf.amendments.Exclude({name: dice.sample(range(DOCUMENTS[name]), 20)})
    if kind == "Reweigh":
        return mf.amendments.Reweigh({"a": dice.choice([0.2, 1, 5]), "b": 1})
    if kind == "SkipSteps":
        first = step + dice.randint(1, 6)
        return mf.amendments.SkipSteps(first, first + dice.randint(1, 2))
    if kind == "Grow":
        return mf.amendments.Grow(name, str(folder / "more"))
    return mf.amendments.BatchSize(dice.randint(5, 20))
