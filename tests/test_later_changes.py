"""What comes later changes nothing before it: a step has the same data under every recipe that begins as it does."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
from corpus import write_corpus
from meshfeed.feed.amending import Recipes
from meshfeed.order import draws_of_step, start_of_step
from pictures import Listen, Look, write_pictures

STEPS = range(20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    for seed, name in enumerate(("web", "code", "more", "others")):
        write_corpus(folder / name, num_tokens=1_000, mean=30, seed=seed)
        write_pictures(folder / f"{name} pictures", count=11 + seed, seed=seed)
    for name, mean in (("A", 9), ("B", 5)):  # of which more than 4,096 sequences of an epoch are drawn
        write_corpus(folder / name, num_tokens=20_000 * mean, mean=mean)
    return folder


def fields_of(recipe: mf.Recipe, steps: Any = STEPS) -> list[tuple[Any, ...]]:
    """Step, names of the sources and all fields of each microbatch."""
    packing = (
        None
        if recipe.sequence.row_lengths or isinstance(recipe.sequence, mf.Masked)
        else mf.Packing(capacity=512)
    )
    made: list[tuple[Any, ...]] = []
    for each in mf.simulate(recipe, mf.Layout(), steps, packing=packing):
        for m in each.microbatches:
            draws, names = m.draws, recipe.source_names
            of = (
                [names[source] for source in draws.source.tolist()],
                draws.epoch.tolist(),
                draws.index.tolist(),
            )
            made.append((each.batch.step, *of, {name: m[name].tolist() for name in sorted(m)}))
    return made


@pytest.mark.parametrize(
    "rule",
    [
        mf.Windows(64),
        mf.Masked(32, vocab_size=999, mask_token=1000, crop="random"),
        mf.Multimodal(image=Look(), audio=Listen()),
    ],
    ids=["windows", "masked", "pictures"],
)
def test_what_is_random_in_a_source_follows_from_its_name(folder: Path, rule: Any) -> None:
    """A grown source has another number under a recipe that names one more source later."""
    of = " pictures" if isinstance(rule, mf.Multimodal) else ""
    web, code, more, others = (mf.open(folder / f"{name}{of}") for name in ("web", "code", "more", "others"))
    grown = [(2, mf.Grow("web", str(folder / f"more{of}")))]
    first = mf.Mixture({"web": (web, 3), "code": (code, 1)})
    now, later = (
        mf.Recipe(data=data, sequence=rule, batch=mf.Batch(6), seed=3).amended(grown)
        for data in (first, first.then(50, {"web": 1, "others": (others, 1)}))
    )
    mf.State.at(now, 20).check(later)
    fields = fields_of(now)
    assert fields == fields_of(later)
    name = f"web+{more.fingerprint[:8]}"
    assert now.source_names.index(name) != later.source_names.index(name)
    epochs = [epochs for _, names, epochs, *_ in fields if name in names]
    assert epochs and max(max(each) for each in epochs) > 0


def test_two_sources_that_grow_have_their_own_sums_of_tokens(folder: Path) -> None:
    """As ranks see it: one that has amended, and one that begins with the whole ledger."""
    data = mf.Mixture({"web": (mf.open(folder / "web"), 4), "code": (mf.open(folder / "code"), 1)})
    recipe = mf.Recipe(data=data, sequence=mf.Documents(), batch=mf.Batch(tokens=20_000), steps=40)
    later, sooner = (
        mf.Amendment(step, mf.Grow("web", str(folder / name))) for step, name in ((6, "A"), (4, "B"))
    )
    recipes = Recipes(recipe)
    assert start_of_step(recipe, 3) > 0  # its stream is there, as in a job that trains
    for ledger in (mf.Ledger((later,)), mf.Ledger((sooner,)), mf.Ledger((later, sooner))):
        known, fresh = recipes.under(ledger), recipe.amended(ledger)
        for step in (39, 5, 20, 0):
            assert start_of_step(known, step) == start_of_step(fresh, step)
        for step in (12, 30):
            ours, theirs = draws_of_step(known, step), draws_of_step(fresh, step)
            assert np.array_equal(ours.source, theirs.source) and np.array_equal(ours.index, theirs.index)
    starts = [start_of_step(recipes.under(ledger), step) for step in STEPS]
    assert all(first < second for first, second in pairwise(starts))
