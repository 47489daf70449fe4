"""mf.Machine, and the encoder of a Feed: what they take, and whom they reach."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import meshfeed as mf
from meshfeed.errors import OptionError
from meshfeed.plan import Packing
from pictures import Listen, LookFirst, recipe_over, write_pictures
from user_datasets import Rich, samples_recipe

RULE: Any = {"image": LookFirst(), "audio": Listen()}
PACKS: Any = {"packing": Packing(capacity=16, oversize="split", microbatches=12)}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[mf.Multimodal], mf.Recipe]:
    path = tmp_path_factory.mktemp("machine") / "store"
    write_pictures(path)
    return lambda rule: replace(recipe_over(mf.open(path), rule), steps=2)


def test_an_encoder_is_checked_wherever_it_is_given(recipe: Callable[..., mf.Recipe]) -> None:
    told, drops = (recipe(mf.Multimodal(**RULE, on_bad=on_bad)) for on_bad in ("error", "drop"))
    layout, message = mf.Layout(), "encoder='ballanced': choose one of with sample, group, balanced"
    anything: Any = "ballanced"
    for refused in (
        lambda: mf.Feed(told, encoder=anything, **PACKS),
        lambda: next(mf.simulate(told, layout, 1, encoder=anything, **PACKS)),
    ):
        with pytest.raises(OptionError, match=message):
            refused()
    with pytest.raises(OptionError, match="does not decode its parts"):
        mf.Feed(drops, encoder="balanced", **PACKS)
    with pytest.raises(OptionError, match="does not decode its parts"):
        next(mf.simulate(drops, layout, 1, encoder="balanced", **PACKS))


@pytest.mark.parametrize(
    "options",
    [
        *({"workers": value} for value in (-1, 2.0, True, "2", None)),
        *({"item_timeout_s": value} for value in (0, -1, None, "5", True, float("inf"), float("nan"))),
    ],
)
def test_a_machine_refuses_other_values(options: dict[str, Any]) -> None:
    (name, value), *_ = options.items()
    with pytest.raises(OptionError, match=rf"Machine\({name}={value!r}\): give"):
        mf.Machine(**options)


def test_a_machine_takes_whole_seconds() -> None:
    assert mf.Machine(item_timeout_s=5).item_timeout_s == 5


def test_a_store_that_is_entered_before_the_feed_has_its_workers() -> None:
    recipe = samples_recipe(Rich(), "ids")
    want = [[m["ids"] for m in step.microbatches] for step in mf.Feed(recipe)]
    with recipe.sources[0] as store:
        with mf.Feed(recipe, machine=mf.Machine(workers=2)) as feed:
            got = [[m["ids"] for m in step.microbatches] for step in feed]
            assert len(multiprocessing.active_children()) == 2
        assert len(store.fetch([mf.order.EpochIndex(0, 1)])) == 1  # still entered
    assert not multiprocessing.active_children()
    assert len(got) == len(want) > 0 and str(got) == str(want)
