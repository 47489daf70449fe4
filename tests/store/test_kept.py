"""What functions keep of a store goes with it: a store lives no longer than its recipe and feeds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshfeed as mf
from meshfeed.store.kept import kept_by_store
from observe import take
from pictures import Listen, Look, recipe_over, write_pictures


class Store:
    pass


def test_results_are_kept_for_each_store_the_last_ones_alone() -> None:
    calls: list[tuple[Any, int]] = []

    @kept_by_store(most=2)
    def doubled(store: Store, number: int) -> int:
        calls.append((store, number))
        return 2 * number

    one, other = Store(), Store()
    asked = [(one, 1), (one, 2), (one, 1), (other, 1), (one, 3), (one, 1), (one, 2), (other, 1)]
    assert [doubled(*each) for each in asked] == [2 * number for _, number in asked]
    assert calls == [(one, 1), (one, 2), (other, 1), (one, 3), (one, 2)]


def test_no_result_is_another_stores_that_came_to_its_address() -> None:
    @kept_by_store(most=4)
    def first(store: Any) -> Any:
        return store.first

    for number in range(100):
        store = Store()
        store.first = number  # type: ignore[attr-defined]
        assert first(store) == number


RULES: dict[str, Callable[[], Any]] = {
    "multimodal": lambda: mf.Multimodal(image=Look(), audio=Listen()),
    "decoded by a worker": lambda: mf.Multimodal(image=Look(), audio=Listen()),
    "columns": mf.Documents,
    "masked": lambda: mf.Masked(8, vocab_size=9_000, mask_token=1, special_tokens=(2, 3)),
}


@pytest.mark.parametrize("kind", RULES)
def test_a_store_lives_no_longer_than_its_recipe(kind: str, tmp_path: Path) -> None:
    write_pictures(tmp_path / "store", mask=True)
    rule, folder = RULES[kind](), {"masked": "store-flat/tokens", "columns": "store-flat"}.get(kind, "store")
    recipe = recipe_over(mf.open(tmp_path / folder, cache=tmp_path / "cache"), rule)
    packing: Any = {"packing": mf.Packing(capacity=64, oversize="truncate")} if rule.packed else {}
    assert len(list(mf.simulate(recipe, mf.Layout.parse("dp2"), 3, **packing))) == 6
    with mf.Feed(recipe, machine=mf.Machine(workers=int(kind == "decoded by a worker")), **packing) as feed:
        take(feed, 3)
    store = recipe.sources[0]
    seen = weakref.ref(store)
    del recipe, feed, store, rule
    gc.collect()
    assert seen() is None
