"""Batches of so many tokens through real feeds: under other layouts, resumed, at the end of a stream, summed by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
import world
from meshfeed.order import draws_of_step, num_steps, start_of_step
from meshfeed.testing import assert_resumable
from observe import content_of
from raw_index import write_raw
from soak import SEED, cases

PACKING = mf.Packing(capacity=64)
LENGTHS = np.random.default_rng(5).integers(0, 60, 90)


def recipe_of(**options: Any) -> mf.Recipe:
    a, b = mf.Lengths(LENGTHS[:60]), mf.Lengths(LENGTHS[60:])
    data = mf.Mixture({"a": (a, 1), "b": (b, 2)}, by="repeat")
    return mf.Recipe(
        data=data, sequence=mf.Documents(), batch=mf.Batch(tokens=300).then(4, tokens=450), **options
    )


def expected(step: int) -> list[tuple[int, int, int]]:
    draws = draws_of_step(recipe_of(), step)
    return sorted(zip(draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist()))


def train(rank: int, text: str, state: Any, steps: int | None) -> tuple[Any, dict[int, Any]]:
    """The state after some steps, and the sequences of each that this rank had tokens of."""
    seen: dict[int, Any] = {}
    with mf.Feed(
        recipe_of(), mf.Layout.parse(text), packing=PACKING, transport=mf.Transport(timeout_s=600)
    ) as feed:
        if state is not None:
            feed.load_state_dict(state)
        for step in feed:
            draws = [each.draws for each in step.microbatches]
            seen[step.index] = [
                each for d in draws for each in zip(d.source.tolist(), d.epoch.tolist(), d.index.tolist())
            ]
            if steps is not None and len(seen) == steps:
                break
        return feed.state_dict(), seen


def test_a_job_goes_on_under_another_layout() -> None:
    (state, first), *_ = world.run(train, 1, "dp1", None, 5)
    assert (
        content_of(state)["step"] == 5
        and "tokens=300, 450 from step 4" in content_of(state)["recipe"]["batch"]
    )
    rest = world.run(train, 2, "dp2", state, None)
    count = num_steps(recipe_of()) or 0
    assert {*first} == set(range(5)) and all({*seen} == set(range(5, count)) for _, seen in rest)
    for step in range(5):
        assert sorted(first[step]) == [each for each in expected(step) if length_of(each)]
    for step in range(5, count):
        both = [each for _, seen in rest for each in seen[step]]
        assert sorted(both) == [each for each in expected(step) if length_of(each)]


def length_of(drawn: tuple[int, int, int]) -> int:
    source, _, index = drawn
    return int(LENGTHS[:60][index] if source == 0 else LENGTHS[60:][index])


def test_amounts_that_begin_later_leave_the_tokens_behind_a_short_step() -> None:
    a, b = mf.Lengths([1, 2] * 20), mf.Lengths([3, 9, 20, 11] * 10)
    data = mf.Mixture({"a": (a, 17)}, by="count").then(1, {"b": (b, 30)}, by="count")
    options: Any = {"sequence": mf.Documents(), "batch": mf.Batch(tokens=40), "seed": 5}
    before, after = (mf.Recipe(data=each, **options) for each in (data, data.then(5, {"a": 28}, by="count")))
    steps = [[draws_of_step(recipe, step).index.tolist() for step in range(5)] for recipe in (before, after)]
    assert len(steps[0][0]) == 17 and steps[0] == steps[1]
    assert start_of_step(before, 5) == start_of_step(after, 5)


def growing(rng: np.random.Generator) -> tuple[list[mf.Recipe], list[int]]:
    """A recipe, and the same with one part of amounts more each; the step at which each further part begins."""
    stores = [mf.Lengths(rng.integers(1, rng.choice([3, 11, 41]), rng.choice([20, 50]))) for _ in "abcd"]
    names = dict(zip("abcd", stores))

    def amounts(known: Any) -> dict[str, Any]:
        chosen = rng.choice([*names], rng.integers(1, 4), replace=False).tolist()
        return {
            name: n if name in known else (names[name], n)
            for name in chosen
            if (n := int(rng.integers(1, 31)))
        }

    data = mf.Mixture(amounts(()), by="count")
    tokens, last, seed = (
        int(rng.choice([40, 60, 100])),
        str(rng.choice(["keep", "keep", "keep", "pad", "drop"])),
        int(rng.integers(99)),
    )
    options: Any = {"sequence": mf.Documents(), "batch": mf.Batch(tokens=tokens, last=last), "seed": seed}
    recipes, begins = [mf.Recipe(data=data, **options)], [0]
    for _ in range(rng.integers(2, 5)):
        end = num_steps(recipes[-1])
        begin = end if end is None or rng.random() < 0.85 else end - 1
        if begin is None or begin <= begins[-1]:
            break
        by = "proportion" if rng.random() < 0.2 else "count"
        data = data.then(begin, amounts(data.names), by=by)
        recipes, begins = [*recipes, mf.Recipe(data=data, **options)], [*begins, begin]
    return recipes, begins


def test_law_steps_of_tokens_are_alike_whatever_follows_and_in_whatever_order_they_are_asked() -> None:
    parts = 0
    for life in range(cases(10, 2_000)):
        rng = np.random.default_rng((SEED, life))
        recipes, begins = growing(rng)
        parts = max(parts, len(recipes))
        for before, after, begin in zip(recipes, recipes[1:], begins[1:]):
            starts = [[start_of_step(each, step) for step in range(begin)] for each in (before, after)]
            assert starts[0] == starts[1], life
            one, other = (draws_of_step(each, begin - 1) for each in (before, after))
            assert (one.source.tolist(), one.index.tolist()) == (
                other.source.tolist(),
                other.index.tolist(),
            ), life
        last, steps = recipes[-1], list(range(begins[-1] + 12))
        starts = [start_of_step(last, step) for step in steps]
        assert starts == sorted(starts), life
        again = replace(last)  # a stream of its own
        found = {step: start_of_step(again, step) for step in rng.permutation(steps).tolist()}
        assert [found[step] for step in steps] == starts, life
    assert parts > 3


def test_a_state_is_of_its_tokens() -> None:
    assert_resumable(recipe_of(), steps=4, packing=PACKING)
    with mf.Feed(recipe_of(), rank=0, packing=PACKING) as feed:
        steps = iter(feed)
        for _ in range(3):
            next(steps)
        state = feed.state_dict()
        assert feed.num_steps == num_steps(recipe_of()) and feed.num_microbatches(0) is None
    later = mf.Recipe(
        data=recipe_of().data, sequence=mf.Documents(), batch=mf.Batch(tokens=300).then(3, tokens=900)
    )
    mf.Feed(later, rank=0, packing=PACKING).load_state_dict(state)
    other = mf.Recipe(data=recipe_of().data, sequence=mf.Documents(), batch=mf.Batch(tokens=301))
    with pytest.raises(mf.errors.StateError, match="batch: saved 'tokens=300', now 'tokens=301'"):
        mf.Feed(other, rank=0, packing=PACKING).load_state_dict(state)
    short = recipe_of(steps=1)
    with pytest.raises(mf.errors.StateError, match="ends after 1 steps"):
        mf.Feed(short, rank=0, packing=PACKING).load_state_dict(state)


# -- sums ----------------------------------------------------------------------------------------------

MANY = 300_000
"""Documents: more than a process sums for itself alone."""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of documents of one to three tokens."""
    folder = tmp_path_factory.mktemp("many")
    lengths = np.random.default_rng(1).integers(1, 4, MANY)
    return write_raw(
        folder / "c",
        lengths=lengths,
        pointers=2 * (np.cumsum(lengths) - lengths),
        documents=np.arange(MANY + 1),
        data=bytes(2 * int(lengths.sum())),
    )


def looked_up(rank: int, path: str, cache: str, step: int, options: Any, ranks: int) -> tuple[int, int]:
    """Sequences whose lengths this process looks up until it has a step, and how many are before the step."""
    count, lengths = 0, mf.Documents.lengths

    def counting(self: mf.Documents, recipe: mf.Recipe, draws: mf.order.Draws) -> Any:
        nonlocal count
        count += len(draws)
        return lengths(self, recipe, draws)

    mf.Documents.lengths = counting
    data = mf.Mixture({"a": (mf.open(path, cache=cache), 1)}, by="tokens")
    recipe = mf.Recipe(data=data, sequence=mf.Documents(), batch=mf.Batch(tokens=2_000), **options)
    with mf.Feed(recipe, mf.Layout(dp=ranks), rank, packing=mf.Packing(capacity=2_000)) as feed:
        feed.load_state_dict(mf.State.at(recipe, step).to_json())
        assert next(iter(feed)).index == step
    return count, start_of_step(recipe, step)


def test_one_process_of_a_node_sums_an_epoch_for_all(many: str, tmp_path: Path) -> None:
    """Totals and sums of 4,096 places; after that, a process looks up some places around a step."""
    cache, few = str(tmp_path / "cache"), 20 * 4_096
    lengths = mf.Lengths(np.random.default_rng(1).integers(1, 4, MANY))  # which no cache knows
    data = mf.Mixture({"a": (lengths, 1)}, by="tokens")
    alone = mf.Recipe(data=data, sequence=mf.Documents(), batch=mf.Batch(tokens=2_000))
    both = world.run(looked_up, 2, many, cache, 250, {}, 2)
    assert sum(count for count, _ in both) < 2 * MANY + 2**18 + 2 * few, (
        "the total and the sums, by one of two"
    )
    for step in (250, 90, 299):
        ((count, start),) = world.run(looked_up, 1, many, cache, step, {}, 1)
        assert count < few and start == start_of_step(alone, step)
    for options in ({"seed": 1}, {"shuffle": "none"}):  # another order has other sums, and the same total
        ((count, _),) = world.run(looked_up, 1, many, cache, 250, options, 1)
        assert MANY <= count < MANY + few
    ((count, _),) = world.run(looked_up, 1, many, cache, 550, {}, 1)
    assert MANY <= count < MANY + few, "and so has another epoch"
