"""mf.Machine, and the arguments of rules and stores that moved to it or to the Feed: old spellings work as before."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import meshfeed as mf
from meshfeed.errors import OptionError
from meshfeed.plan import Packing
from meshfeed.sequence import rule_of
from pictures import Listen, LookFirst, recipe_over, write_pictures
from user_datasets import Rich, samples_recipe

RULE: Any = {"image": LookFirst(), "audio": Listen()}
PACKS: Any = {"packing": Packing(capacity=16, oversize="split", microbatches=12)}


def old(made: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What an old spelling makes."""
    with pytest.warns(DeprecationWarning, match="is an argument of the Feed now"):
        return made(*args, **options)


def balanced(**options: Any) -> Any:
    return old(mf.Multimodal, **RULE, encoder="balanced", **options)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[mf.Multimodal], mf.Recipe]:
    path = tmp_path_factory.mktemp("machine") / "store"
    write_pictures(path)
    return lambda rule: replace(recipe_over(mf.open(path), rule), steps=2)


def test_old_settings_are_seen_outside_a_feed_and_in_copies(recipe: Callable[..., mf.Recipe]) -> None:
    rule = balanced(workers=3)
    twins = (
        rule,
        copy.copy(rule),
        copy.deepcopy(rule),
        pickle.loads(pickle.dumps(rule)),
        replace(rule, on_bad="blank"),
        replace(replace(rule), max_bad_share=1),
    )
    for each in twins:
        told = recipe(each)
        assert each.sees_step and rule_of(told).sees_step and each._machine.workers == 3
        feed = mf.Feed(told, **PACKS)
        assert feed._stepping.rule.sees_step and feed._machine.workers == 3
        assert {field.name for field in each.fields} == {field.name for field in feed._stepping.rule.fields}
        assert "image_send_rows" in {field.name for field in each.fields}
    plain = mf.Multimodal(**RULE)
    assert rule.summary() == plain.summary() and repr(rule._moved) not in repr(rule)
    assert recipe(rule).fingerprint == recipe(plain).fingerprint
    other = old(replace, rule, encoder="with sample")
    assert not other.sees_step and mf.Feed(recipe(other), **PACKS)._machine.workers == 3


def test_the_recipe_of_a_feed_keeps_old_settings(recipe: Callable[..., mf.Recipe]) -> None:
    first = mf.Feed(recipe(balanced(workers=2)), **PACKS)
    second = mf.Feed(first.recipe, **PACKS)
    assert second._stepping.rule.sees_step and second._machine == first._machine == mf.Machine(workers=2)
    other = mf.Feed(second.recipe, machine=mf.Machine(workers=5), **PACKS)
    assert other._machine.workers == 5 and other._stepping.rule.sees_step
    step = next(mf.simulate(other.recipe, mf.Layout(dp=2), 1, **PACKS))
    assert "image_send_rows" in step.microbatches[0]
    against = old(mf.Multimodal, **RULE, encoder="with sample")
    assert mf.Feed(
        recipe(against), encoder="balanced", **PACKS
    )._stepping.rule.sees_step  # the Feed's, where it says so


def test_of_several_old_workers_the_largest_count(recipe: Callable[..., mf.Recipe]) -> None:
    many, few = old(mf.Mapped, Rich(), workers=8, timeout_s=5), old(mf.Mapped, Rich(), workers=1, timeout_s=9)
    for stores in (
        {"a": many, "b": few},
        {"b": few, "a": many},
        {"a": many, "b": few, "c": mf.Mapped(Rich())},
    ):
        data = mf.Mixture({name: (store, 1) for name, store in stores.items()}, by="repeat")
        of_all = mf.Recipe(data=data, sequence=mf.Samples("ids"), batch=4)  # pyright: ignore[reportArgumentType]
        assert mf.Feed(of_all)._machine == mf.Machine(workers=8, item_timeout_s=9)
    for twin in (copy.copy(many), pickle.loads(pickle.dumps(many))):
        alone = mf.Recipe(data=twin, sequence=mf.Samples("ids"), batch=mf.Batch(4))
        assert mf.Feed(alone)._machine == mf.Machine(workers=8, item_timeout_s=5)


def test_an_encoder_is_checked_wherever_it_is_given(recipe: Callable[..., mf.Recipe]) -> None:
    told, wrong = recipe(mf.Multimodal(**RULE)), recipe(
        old(mf.Multimodal, **RULE, encoder="ballanced")
    )  # fmt: skip
    layout, message = mf.Layout(), "encoder='ballanced': choose one of with sample, balanced"
    anything: Any = "ballanced"
    for refused in (
        lambda: mf.Feed(told, encoder=anything, **PACKS),
        lambda: next(mf.simulate(told, layout, 1, encoder=anything, **PACKS)),
        lambda: mf.Feed(wrong, **PACKS),
        lambda: next(mf.simulate(wrong, layout, 1, **PACKS)),
        lambda: mf.Feed(wrong, encoder="balanced", **PACKS),
    ):
        with pytest.raises(OptionError, match=message):
            refused()
    drops = recipe(balanced(on_bad="drop"))
    with pytest.raises(OptionError, match="does not decode its parts"):
        mf.Feed(drops, **PACKS)
    with pytest.raises(OptionError, match="does not decode its parts"):
        next(mf.simulate(drops, layout, 1, **PACKS))


def test_a_plain_subclass_takes_old_spellings_and_a_dataclass_carries_them() -> None:
    class Plain(mf.Multimodal):
        pass

    @dataclass(frozen=True)
    class Mine(mf.Multimodal):
        more: int = 0

    assert old(Plain, **RULE, encoder="balanced").sees_step
    with pytest.raises(TypeError, match="workers"):
        Mine(workers=2)  # type: ignore[call-arg]
    assert replace(Mine(more=1), on_bad="blank").more == 1


@pytest.mark.parametrize(
    "options",
    [
        *({"workers": value} for value in (-1, 2.0, True, "2", None)),
        *({"item_timeout_s": value} for value in (0, -1, None, "5", True, float("inf"), float("nan"))),
        *({"index_cache": value} for value in (5, b"folder", True)),
    ],
)
def test_a_machine_refuses_other_values(options: dict[str, Any]) -> None:
    (name, value), *_ = options.items()
    with pytest.raises(OptionError, match=rf"Machine\({name}={value!r}\): give"):
        mf.Machine(**options)
    if name != "index_cache":
        with pytest.warns(DeprecationWarning), pytest.raises(OptionError, match=f"{name}="):
            mf.Mapped(Rich(), **{name.removeprefix("item_"): value})  # pyright: ignore[reportCallIssue]


def test_a_machine_takes_paths_and_whole_seconds(tmp_path: Path) -> None:
    for folder in (None, str(tmp_path), tmp_path):
        assert mf.Machine(workers=0, item_timeout_s=5, index_cache=folder).index_cache == folder


def test_a_store_that_is_entered_before_the_feed_has_its_workers() -> None:
    recipe = samples_recipe(Rich(), "ids")
    want = [[m["ids"] for m in step.microbatches] for step in mf.Feed(recipe)]
    with recipe.sources[0] as store:
        with mf.Feed(recipe, machine=mf.Machine(workers=2)) as feed:
            got = [[m["ids"] for m in step.microbatches] for step in feed]
            assert len(multiprocessing.active_children()) == 2
        assert len(store.fetch([mf.EpochIndex(0, 1)])) == 1  # still entered
    assert not multiprocessing.active_children()
    assert len(got) == len(want) > 0 and str(got) == str(want)
