"""Recipes, their fingerprints, and the states that refuse any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from corpus import recipe_of, write_corpus
from meshfeed.order import draws_of_step
from meshfeed.recipe import Rule
from meshfeed.state import sealed
from meshfeed.summary import brief, code_of, digest_of, same_text
from observe import content_of
from soak import cases


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "c"
    write_corpus(path)
    return path


def test_a_state_of_another_step_than_the_models_is_refused(corpus: Path) -> None:
    feed = mf.Feed(recipe_of(corpus))
    state = mf.State.at(feed.recipe, 3).to_json()
    with pytest.raises(mf.errors.StateError, match="data is at step 3, the model at step 4"):
        feed.load_state_dict(state, step=4)
    assert feed.next_step == 0
    feed.load_state_dict(state, step=3)
    assert feed.next_step == 3


def test_every_part_of_a_recipe_is_in_its_fingerprint(corpus: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "other", seed=1)
    recipe = recipe_of(corpus)
    others = [
        replace(recipe, seed=6),
        replace(recipe, epochs=2),
        replace(recipe, shuffle="none"),
        replace(recipe, shuffle="blocks"),
        replace(recipe, shuffle=mf.Blocks(sequences=7)),
        replace(recipe, shuffle=mf.Blocks(window=7)),
        replace(recipe, shuffle=mf.Blocks(lanes=7)),
        replace(recipe, batch=mf.Batch(sequences=17)),
        replace(recipe, batch=mf.Batch(sequences=16, last="drop")),
        replace(recipe, batch=mf.Batch(sequences=16, last="pad")),
        replace(recipe, batch=mf.Batch(sequences=16).then(3, 17)),
        replace(recipe, batch=mf.Batch(sequences=16).then(3, 18)),
        replace(recipe, batch=mf.Batch(sequences=16).then(4, 17)),
        replace(recipe, epochs=None, data=mf.Mixture({"a": (recipe.data, 1)})),
        replace(recipe, epochs=None, data=mf.Mixture({"b": (recipe.data, 1)})),
        replace(recipe, epochs=None, data=mf.Mixture({"a": (recipe.data, 2)})),
        replace(recipe, epochs=None, data=mf.Mixture({"a": (recipe.data, 1)}, by="repeat")),
        replace(recipe, epochs=None, data=mf.Mixture({"a": (recipe.data, 1)}, by="count")),
        replace(recipe, sequence=mf.Windows(65)),
        replace(recipe, sequence=mf.Windows(64, eod_mask_loss=True)),
        replace(recipe, sequence=mf.Windows(64, reset_position_ids=True)),
        replace(recipe, sequence=mf.Windows(64, reset_attention_mask=True)),
        replace(recipe, seed=-5),
        replace(recipe, epochs=1),
        replace(recipe, data=mf.open(tmp_path / "other")),
    ]
    assert len({each.fingerprint for each in (recipe, *others)}) == len(others) + 1
    assert recipe.fingerprint == recipe_of(corpus).fingerprint
    assert len({tuple(sorted(each.summary())) for each in (recipe, *others)}) == 1
    state = mf.State(recipe=recipe.summary(), step=7)
    state.check(recipe)
    assert state.fingerprint == recipe.fingerprint
    for other in others:
        if replace(other, epochs=None).summary() == recipe.summary():
            continue  # more or fewer epochs, which begin alike
        with pytest.raises(mf.errors.StateError, match="another recipe"):
            state.check(other)


# 312 windows an epoch: 19 steps of 16, and a short one of 8
@pytest.mark.parametrize(
    ("saved", "now", "last", "step", "says"),
    [
        ({"epochs": 1}, {"epochs": 2}, "keep", 5, None),
        ({"epochs": 1}, {"epochs": 2}, "keep", 19, None),
        ({"epochs": 1}, {"epochs": 2}, "keep", 20, "epochs: saved '1', now '2'"),
        ({"epochs": 1}, {"epochs": None}, "keep", 20, "was short"),
        ({"epochs": 1}, {"epochs": 2}, "drop", 19, None),
        ({"epochs": 1}, {"epochs": 2}, "pad", 20, None),
        ({"epochs": 1}, {}, "keep", 19, None),
        ({}, {"epochs": 3}, "keep", 58, None),
        ({}, {"epochs": 3}, "keep", 59, "now '3'"),
        ({"epochs": 2}, {"epochs": 1}, "keep", 19, None),
        ({"epochs": 2}, {"epochs": 1}, "keep", 20, "now '1'"),
        ({"epochs": 2}, {"epochs": 1}, "keep", 21, "step 21, but the recipe ends after 20 steps"),
        ({"epochs": 1}, {"epochs": 1}, "keep", 20, None),
        ({"epochs": 1, "steps": 20}, {"epochs": 1, "steps": 30}, "keep", 20, None),
        ({"epochs": 2, "steps": 20}, {"epochs": 3, "steps": 30}, "keep", 20, None),
        ({"steps": 20}, {"steps": 30}, "keep", 20, None),
        ({"steps": 20}, {"steps": 10}, "keep", 10, None),
        ({"steps": 20}, {"steps": 10}, "keep", 11, "step 11, but the recipe ends after 10 steps"),
        ({"epochs": 1}, {"epochs": 2, "seed": 7}, "drop", 5, "seed: saved '5', now '7'"),
    ],
)
def test_a_state_loads_where_the_steps_before_it_are_the_same(
    corpus: Path, saved: dict[str, int], now: dict[str, int], last: str, step: int, says: str | None
) -> None:
    def feed_of(**options: object) -> mf.Feed:
        recipe = recipe_of(corpus, length=64, **options)
        return mf.Feed(replace(recipe, batch=mf.Batch(sequences=16, last=last)))

    then, feed = feed_of(**saved), feed_of(**now)
    state = mf.State(recipe=then.recipe.summary(until=step), step=step).to_json()
    same = all(
        draws_of_step(then.recipe, k).index.tolist() == draws_of_step(feed.recipe, k).index.tolist()
        for k in range(step)
    )
    if says is None:
        feed.load_state_dict(state)
        assert same and feed.next_step == step
    else:
        with pytest.raises(mf.errors.StateError, match=says):
            feed.load_state_dict(state)
        assert not same


def test_no_flipped_bit_passes(corpus: Path) -> None:
    recipe = recipe_of(corpus, epochs=1)
    text = json.dumps(mf.State(recipe=recipe.summary(until=5), step=5).to_json()).encode()
    passed = []
    for at in range(len(text) * 8):
        flipped = bytearray(text)
        flipped[at // 8] ^= 1 << at % 8
        try:
            state = json.loads(bytes(flipped))
        except ValueError:
            continue
        try:
            mf.Feed(recipe).load_state_dict(state)
        except mf.errors.StateError:
            continue
        passed.append((at, state))
    assert passed == []


def test_a_step_past_the_end_is_refused(corpus: Path) -> None:
    feed = mf.Feed(recipe_of(corpus, epochs=1))
    assert feed.num_steps == 20
    feed.load_state_dict(mf.State(recipe=feed.recipe.summary(until=20), step=20).to_json())
    with pytest.raises(mf.errors.StateError, match="step 21, but the recipe ends after 20 steps"):
        feed.load_state_dict(mf.State(recipe=feed.recipe.summary(until=21), step=21).to_json())
    assert feed.next_step == 20 and list(feed) == [], "a job that is done ends at once"


class Wordy(Rule):
    """A rule that says much of itself."""

    def __init__(self, words: str) -> None:
        self.words, self.fields = words, ()

    def num_sequences(self, store: object) -> int:
        return 64

    def summary(self) -> str:
        return self.words


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\u8a9e", "\U0001f600", '"', "\n"])
def test_no_recipe_makes_a_state_of_more_than_4_kb(corpus: Path, letter: str) -> None:
    store, batch = mf.open(str(corpus)), mf.Batch(sequences=10**9)
    for k in range(1, 200):
        batch = batch.then(k * 10**15, 10**9 + k)
    names = [letter * 100 + str(k) for k in range(9)]
    made = [
        mf.Recipe(
            data=mf.Mixture(dict.fromkeys((*names, more), (store, 0.1))),
            sequence=Wordy(letter * 2000 + more),
            batch=batch,
            seed=-(2**63),
            steps=2**62,
        )
        for more in ("one", "other")
    ]
    states = [mf.State(recipe=recipe.summary(), step=2**62) for recipe in made]
    assert all(len(json.dumps(state.to_json()).encode()) <= 4096 for state in states)
    assert states[0].recipe["data"] != states[1].recipe["data"]
    assert states[0].recipe["sequence"] != states[1].recipe["sequence"]
    # as it was saved when parts were abbreviated by characters, or not at all
    in_full = made[0].summary(until=0) | {"sequence": f"{made[0].sequence.summary()} {code_of(Wordy)}"}
    mf.State(recipe=in_full, step=0).check(made[0])
    with pytest.raises(mf.errors.StateError, match="sequence"):
        mf.State(recipe=in_full, step=0).check(made[1])


@settings(max_examples=cases(50, 1_000), deadline=None)
@given(st.dictionaries(st.text(max_size=9), st.text(max_size=20)), st.data())
def test_a_digest_tells_any_two_summaries_apart(summary: dict[str, str], data: st.DataObject) -> None:
    backwards = dict(reversed(summary.items()))
    assert digest_of(backwards) == digest_of(summary)
    for part in summary:
        changed = data.draw(st.text(max_size=20).filter(lambda text, part=part: text != summary[part]))
        assert digest_of(summary | {part: changed}) != digest_of(summary)
        assert digest_of({k: v for k, v in summary.items() if k != part}) != digest_of(summary)


def test_a_digest_is_pinned() -> None:
    assert digest_of({"seed": "5", "data": "c\u00f6rpus"}) == GOLDEN_DIGEST


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
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.stdout.strip() == recipe_of(corpus).fingerprint


@pytest.mark.parametrize("step", [0, 1, 10**15, 2**63])
def test_a_state_survives_json_and_is_small(corpus: Path, step: int) -> None:
    rule = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    recipe = recipe_of(corpus, seed=-(2**63), length=8192, sequences=10**9, epochs=10**9, **rule)
    state = mf.State(recipe=recipe.summary(), step=step)
    text = json.dumps(state.to_json())
    assert len(text.encode()) <= 4096
    loaded = mf.State.from_json(json.loads(text))
    assert loaded == state
    assert loaded.to_json() == state.to_json()
    endless = replace(recipe, epochs=None)
    mf.State.from_json(mf.State(recipe=endless.summary(), step=step).to_json()).check(endless)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=9), some, max_size=3),
    max_leaves=6,
)


@settings(max_examples=cases(100), deadline=None)
@given(
    st.dictionaries(st.text(max_size=9), st.text(max_size=20)),
    st.integers(0),
    JSON,
    st.sampled_from(["version", "recipe", "step", "more"]),
)
def test_a_state_is_read_whole_or_refused(summary: dict[str, str], step: int, junk: object, key: str) -> None:
    saved = mf.State(recipe=summary, step=step).to_json()
    assert mf.State.from_json(json.loads(json.dumps(saved))).to_json() == saved
    content = {name: value for name, value in content_of(saved).items() if name != "fingerprint"}
    without = {name: value for name, value in content.items() if name != key}
    for spoilt in (
        sealed(content | {key: junk}),
        sealed(without),
        {"meshfeed": junk},
    ):  # as an attacker seals it
        try:
            read = mf.State.from_json(spoilt)
        except mf.errors.StateError:
            continue
        assert read.to_json() == spoilt, "what was read is what was given"


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: {},
        lambda s: [],
        lambda s: "state",
        lambda s: None,
        lambda s: 5,
        lambda s: [s],
        lambda s: {"model": {}, "optimizer": {}},
        lambda s: content_of(s),
        lambda s: {"meshfeed": s},
        lambda s: {"meshfeed": None},
        lambda s: {"meshfeed": np.ones(2)},
        lambda s: {"meshfeed": b"{}"},
        lambda s: {"meshfeed": ""},
        lambda s: {"meshfeed": "{}"},
        lambda s: {"meshfeed": "[]"},
        lambda s: {"meshfeed": DEEP},
        lambda s: {"meshfeed": '{"a":' * 100_000},
        lambda s: {"meshfeed": f'{{"step":{"9" * 5_000}}}'},
        lambda s: {"meshfeed": s["meshfeed"] + " "},
        lambda s: {"meshfeed": s["meshfeed"][:-1]},
        lambda s: {"meshfeed": s["meshfeed"].replace("4", "5", 1)},
        lambda s: sealed(content_of(s)),  # with a fingerprint within
        *(
            lambda s, changed=changed: sealed(_content(s) | changed)
            for changed in (
                *({"version": version} for version in (0, 1, 2, 4, "3", True, 3.0, None, [3])),
                *({"step": step} for step in (None, [4], float("nan"), -1, True, 3.0, "3")),
                *({"recipe": recipe} for recipe in (None, {}, [1, 2], 5, {"seed": 5}, {"seed": "6"})),
                {"data": []},
                {"mine": 5},
            )
        ),
        *(
            lambda s, name=name: sealed({k: v for k, v in _content(s).items() if k != name})
            for name in ("recipe", "step")
        ),
    ],
)
def test_what_is_no_state_is_refused_and_nothing_changes(spoil: object, corpus: Path) -> None:
    feed = mf.Feed(recipe_of(corpus))
    good = mf.State(recipe=feed.recipe.summary(), step=4).to_json()
    feed.load_state_dict(good)
    with pytest.raises(mf.errors.StateError):
        feed.load_state_dict(spoil(good))  # type: ignore[operator]
    assert feed.state_dict() == good


def _content(state: dict[str, str]) -> dict[str, object]:
    return {name: value for name, value in content_of(state).items() if name != "fingerprint"}


def test_a_state_of_an_exchange_is_told_from_one_of_a_feed(corpus: Path) -> None:
    feed = mf.Feed(recipe_of(corpus))
    with mf.Exchange([], packing=mf.Packing(capacity=8)) as exchange:
        with pytest.raises(mf.errors.StateError, match=r"something else: it has 'recipe', 'step'.*'taken'"):
            exchange.load_state_dict(feed.state_dict())
        with pytest.raises(mf.errors.StateError, match=r"something else: it has 'step', 'taken'.*'recipe'"):
            feed.load_state_dict(exchange.state_dict())


def test_a_state_of_another_recipe_is_refused_showing_both(corpus: Path) -> None:
    saved = mf.State(recipe=recipe_of(corpus, seed=5).summary(), step=4).to_json()
    feed = mf.Feed(recipe_of(corpus, seed=77, sequences=8))
    with pytest.raises(mf.errors.StateError) as refused:
        feed.load_state_dict(saved)
    for word in ("seed", "'5'", "'77'", "sequences=16", "sequences=8"):
        assert word in str(refused.value)
    assert "data" not in str(refused.value), "what is the same is not shown"
    assert feed.next_step == 0


def test_a_state_of_other_data_names_both(corpus: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "other", seed=1)
    here, there = recipe_of(corpus), recipe_of(tmp_path / "other")
    with pytest.raises(mf.errors.StateError) as refused:
        mf.State(recipe=here.summary(), step=3).check(there)
    assert f"data: saved {here.data.fingerprint!r}, now {there.data.fingerprint!r}" in str(refused.value)


def test_a_part_that_one_side_lacks_is_shown(corpus: Path) -> None:
    summary = recipe_of(corpus).summary()
    with pytest.raises(mf.errors.StateError, match="weights: saved '1', now None"):
        mf.State(recipe=summary | {"weights": "1"}, step=0).check(recipe_of(corpus))
    del summary["seed"]
    with pytest.raises(mf.errors.StateError, match="seed: saved None, now '5'"):
        mf.State(recipe=summary, step=0).check(recipe_of(corpus))


@pytest.mark.parametrize(
    "make",
    [
        lambda recipe: replace(recipe, epochs=0),
        lambda recipe: replace(recipe, shuffle="some"),
        lambda recipe: replace(recipe, epochs=-1),
        lambda recipe: replace(recipe, seed=2**63),
        lambda recipe: replace(recipe, seed=-(2**63) - 1),
        lambda recipe: mf.Batch(sequences=-1),
        lambda recipe: mf.Batch(sequences=0),
        lambda recipe: mf.Batch(sequences=2.5),
        lambda recipe: mf.Batch(sequences="4"),
        lambda recipe: mf.Batch(sequences=True),
        lambda recipe: replace(recipe, seed=5.0),
        lambda recipe: replace(recipe, seed="5"),
        lambda recipe: replace(recipe, seed=True),
        lambda recipe: replace(recipe, epochs=1.5),
        lambda recipe: replace(recipe, data="corpus"),
        lambda recipe: replace(recipe, sequence=4096),
        lambda recipe: replace(recipe, batch="16"),
        lambda recipe: replace(recipe, data=mf.Mixture({"a": (recipe.data, 1)}), batch=16.0),
        lambda recipe: replace(recipe, data=mf.Mixture({"a": (recipe.data, 1)}), sequence=4096),
        lambda recipe: replace(recipe, epochs=2**62 + 1),
        lambda recipe: mf.Windows(0),
        lambda recipe: mf.Windows("8"),
        lambda recipe: mf.Windows(8.0),
        lambda recipe: mf.Windows(True),
        lambda recipe: mf.Windows(8, reset_position_ids=1),
        lambda recipe: mf.Windows(8, reset_attention_mask=None),
        lambda recipe: mf.Windows(8, eod_mask_loss="no"),
        lambda recipe: mf.Feed(recipe, transport=mf.Transport(prefetch=-1)),
        lambda recipe: mf.Feed(recipe, transport=mf.Transport(timeout_s=0)),
    ],
)
def test_recipes_that_make_no_stream_are_refused(make: object, corpus: Path) -> None:
    with pytest.raises(mf.errors.RecipeError):
        make(recipe_of(corpus))  # type: ignore[operator]


def test_a_text_is_abbreviated_from_one_length_on() -> None:
    """That length is part of every long recipe's fingerprint."""
    assert [brief("x" * n) == "x" * n for n in (799, 800, 801)] == [True, True, False]
    long = brief("x" * 801)
    assert long.startswith("x" * 720 + "... (in full: ") and len(long) <= 800
    assert long != brief("x" * 802) and same_text(long, "x" * 801) and not same_text(long, "x" * 802)


def test_the_largest_recipe(corpus: Path) -> None:
    replace(recipe_of(corpus), epochs=2**62, steps=2**62)


GOLDEN_DIGEST = "086300b1748a8954ee97757b5dd7b89e"
