"""Recipes, their fingerprints, and the states that refuse any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import meshfeed as mf
from corpus import recipe_of, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "c"
    write_corpus(path)
    return path


def test_every_part_of_a_recipe_is_in_its_fingerprint(corpus: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "other", seed=1)
    recipe = recipe_of(corpus)
    others = [
        replace(recipe, seed=6),
        replace(recipe, epochs=2),
        replace(recipe, shuffle="none"),
        replace(recipe, batch=mf.Batch(sequences=17)),
        replace(recipe, sequence=mf.Windows(65)),
        replace(recipe, sequence=mf.Windows(64, eod_mask_loss=True)),
        replace(recipe, data=mf.open(tmp_path / "other")),
    ]
    assert len({each.fingerprint for each in (recipe, *others)}) == len(others) + 1
    assert recipe.fingerprint == recipe_of(corpus).fingerprint


def test_a_fingerprint_is_the_same_in_another_process_and_place(corpus: Path, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"copy{suffix}").write_bytes(corpus.with_name(f"c{suffix}").read_bytes())
    code = (
        "import sys, meshfeed as mf; print(mf.Recipe(data=mf.open(sys.argv[1]), sequence=mf.Windows(64), "
        "batch=mf.Batch(sequences=16), seed=5).fingerprint)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "copy")],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == recipe_of(corpus).fingerprint


def test_a_state_survives_json_and_is_small(corpus: Path) -> None:
    state = mf.State(recipe=recipe_of(corpus).summary(), step=10**15)
    text = json.dumps(state.to_json())
    assert len(text) <= 4096
    assert mf.State.from_json(json.loads(text)) == state


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: {},
        lambda s: [],
        lambda s: "state",
        lambda s: None,
        lambda s: s | {"version": 2},
        lambda s: s | {"step": -1},
        lambda s: s | {"step": True},
        lambda s: s | {"step": 3.0},
        lambda s: s | {"step": "3"},
        lambda s: s | {"fingerprint": "0" * 32},
        lambda s: s | {"recipe": s["recipe"] | {"seed": "6"}},
        lambda s: s | {"recipe": 5},
        lambda s: {k: v for k, v in s.items() if k != "step"},
    ],
)
def test_what_is_no_state_is_refused_and_nothing_changes(spoil: object, corpus: Path) -> None:
    feed = mf.Feed(recipe_of(corpus))
    good = mf.State(recipe=feed.recipe.summary(), step=4).to_json()
    feed.load_state_dict(good)
    with pytest.raises(mf.StateError):
        feed.load_state_dict(spoil(good))  # type: ignore[operator]
    assert feed.state_dict() == good


def test_a_state_of_another_recipe_is_refused_showing_both(corpus: Path) -> None:
    saved = mf.State(recipe=recipe_of(corpus, seed=5).summary(), step=4).to_json()
    feed = mf.Feed(recipe_of(corpus, seed=77, sequences=8))
    with pytest.raises(mf.StateError) as refused:
        feed.load_state_dict(saved)
    for word in ("seed", "'5'", "'77'", "sequences=16", "sequences=8"):
        assert word in str(refused.value)
    assert feed.state_dict()["step"] == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda recipe: replace(recipe, epochs=0),
        lambda recipe: replace(recipe, shuffle="some"),
        lambda recipe: replace(recipe, seed=2**63),
        lambda recipe: mf.Batch(sequences=0),
        lambda recipe: mf.Windows(0),
        lambda recipe: mf.Feed(recipe, prefetch=-1),
        lambda recipe: mf.Feed(recipe, timeout_s=0),
    ],
)
def test_recipes_that_make_no_stream_are_refused(make: object, corpus: Path) -> None:
    with pytest.raises(mf.RecipeError):
        make(recipe_of(corpus))  # type: ignore[operator]
