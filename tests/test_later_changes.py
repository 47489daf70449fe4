"""What comes later changes nothing before it: a step has the same data under every recipe that begins as it does."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import meshfeed as mf
import meshfeed.order.tokens
from corpus import write_corpus
from meshfeed.order import draws_between, draws_of_step, extend, is_over_early, num_steps, start_of_step
from pictures import Listen, Look, write_pictures
from recipes import TIMES, Job, jobs, later_changes, write_stores
from soak import cases

STEPS = range(20)
HEALTH = HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    for seed, name in enumerate(("web", "code", "more", "others")):
        write_corpus(folder / name, num_tokens=1_000, mean=30, seed=seed)
        write_pictures(folder / f"{name} pictures", count=11 + seed, seed=seed)
    for name, mean in (("A", 9), ("B", 5)):  # of which more than 4,096 sequences of an epoch are drawn
        write_corpus(folder / name, num_tokens=20_000 * mean, mean=mean)
    return folder


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stores(tmp_path_factory.mktemp("jobs"))


def fields_of(recipe: mf.Recipe, steps: Any = STEPS) -> list[tuple[Any, ...]]:
    """Step, names of the sources and all fields of each microbatch."""
    packing = (
        None
        if recipe.sequence.row_length or isinstance(recipe.sequence, mf.Masked)
        else mf.Packing(capacity=512)
    )
    made: list[tuple[Any, ...]] = []
    for each in mf.simulate(recipe, mf.Layout(), steps, packing=packing, no_loss="allow"):
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
    grown = [(2, mf.amendments.Grow("web", str(folder / f"more{of}")))]
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


class OfOneJob:
    """A recipe under one ledger after another, as a feed has it: each stream is made of the one before.

    Where the ledger does not go on from the one before, of the first.
    """

    def __init__(self, given: mf.Recipe) -> None:
        self.given, self.last = given, (mf.amendments.Ledger(), given)

    def under(self, ledger: mf.amendments.Ledger) -> mf.Recipe:
        known, before = self.last
        further, latest = ledger.amendments[len(known) :], max((each.step for each in known), default=0)
        if not ledger.begins_with(known) or any(each.step < latest for each in further):
            before, further = self.given, ledger.amendments
        amended = before.amended(further)
        extend(amended, before)
        self.last = ledger, amended
        return amended


def test_two_sources_that_grow_have_their_own_sums_of_tokens(folder: Path) -> None:
    """As ranks see it: one that has amended, and one that begins with the whole ledger."""
    data = mf.Mixture({"web": (mf.open(folder / "web"), 4), "code": (mf.open(folder / "code"), 1)})
    recipe = mf.Recipe(data=data, sequence=mf.Documents(), batch=mf.Batch(tokens=20_000), steps=40)
    later, sooner = (
        mf.amendments.Amendment(step, mf.amendments.Grow("web", str(folder / name)))
        for step, name in ((6, "A"), (4, "B"))
    )
    recipes = OfOneJob(recipe)
    assert start_of_step(recipe, 3) > 0  # its stream is there, as in a job that trains
    for ledger in (
        mf.amendments.Ledger((later,)),
        mf.amendments.Ledger((sooner,)),
        mf.amendments.Ledger((later, sooner)),
    ):
        known, fresh = recipes.under(ledger), recipe.amended(ledger)
        for step in (39, 5, 20, 0):
            assert start_of_step(known, step) == start_of_step(fresh, step)
        for step in (12, 30):
            ours, theirs = draws_of_step(known, step), draws_of_step(fresh, step)
            assert np.array_equal(ours.source, theirs.source) and np.array_equal(ours.index, theirs.index)
    starts = [start_of_step(recipes.under(ledger), step) for step in STEPS]
    assert all(first < second for first, second in pairwise(starts))


def data_of(recipe: mf.Recipe, steps: Any, *, fields: bool = True) -> dict[int, Any]:
    """Step -> its draws by the names of their sources, and all fields of its microbatches."""
    made = dict[int, Any]()
    for step in steps:
        draws, names = draws_of_step(recipe, step), recipe.source_names
        of = [names[source] for source in draws.source.tolist()]
        made[step] = [list(zip(of, draws.epoch.tolist(), draws.index.tolist()))]
    if fields:
        for step, *microbatch in fields_of(recipe, steps):
            made[step].append(microbatch)
    return made


@settings(max_examples=cases(40, 3_000), deadline=None, suppress_health_check=HEALTH)
@given(st.data())
def test_what_comes_later_changes_nothing_before_it(stores: Path, data: st.DataObject) -> None:
    check_that_later_changes_keep_what_comes_before(data, data.draw(jobs(stores)))


@settings(max_examples=cases(20, 3_000), deadline=None, suppress_health_check=HEALTH)
@given(data=st.data())
@pytest.mark.parametrize("of_tokens", [False, True])
def test_what_comes_later_changes_nothing_before_it_in_jobs_that_grow(
    stores: Path, of_tokens: bool, data: st.DataObject
) -> None:
    """With sums of few sequences, as jobs have that draw thousands in a step."""
    job = data.draw(jobs(stores, grows=True, of_tokens=of_tokens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshfeed.order.tokens, "BLOCK", 4)
        check_that_later_changes_keep_what_comes_before(data, job)


def check_that_later_changes_keep_what_comes_before(data: st.DataObject, job: Job) -> None:
    """Under every recipe under which a state loads: alone, and where streams of one job share what they know."""
    recipe, end = job.recipe, num_steps(job.recipe)
    most = 10 if end is None else max(min(end, 10), 1)
    step = data.draw(st.integers(-(-most // 2), most))
    later = data.draw(later_changes(job, step))
    state = mf.State.from_json(mf.State.at(recipe, step).to_json())
    try:
        state.check(later.recipe)
    except mf.errors.StateError:
        reject()
    steps = range(step)
    assert data_of(later.recipe, steps) == data_of(recipe, steps)
    recipes = OfOneJob(later.given)
    # each stream is made of the one before; without the first amendment, other sources have their numbers
    for ledger in ((), job.ledger, later.ledger[::-1], later.ledger[1:], later.ledger):
        with contextlib.suppress(mf.errors.RecipeError):
            _ = data_of(recipes.under(mf.amendments.Ledger(ledger)), [step + 3, step], fields=False)
    known = recipes.under(mf.amendments.Ledger(later.ledger))
    assert data_of(known, data.draw(st.permutations(steps)), fields=False) == data_of(
        recipe, steps, fields=False
    )


@settings(max_examples=cases(40, 3_000), deadline=None, suppress_health_check=HEALTH)
@given(st.data())
def test_amounts_are_drawn_as_they_are_given(stores: Path, data: st.DataObject) -> None:
    """Step by step, against a plain loop: sizes, amounts that end, shares, and each source in its own order."""
    times = data.draw(st.sampled_from([1, 1, 1, TIMES]))
    recipe: Any = data.draw(jobs(stores, most_amendments=0, times=times)).recipe
    parts = recipe.data.parts if isinstance(recipe.data, mf.Mixture) else None
    if recipe.batch.tokens is None and recipe.steps:
        assert is_over_early(recipe) == ((num_steps(recipe) or 0) < recipe.steps)
    if parts is None:
        reject()
    begins = [min(part.step, recipe.steps or part.step) for part in parts]
    ends = [*begins[1:], num_steps(recipe)]
    sizes = [recipe.sequence.num_sequences(store) for store in recipe.sources]
    drawn = dict[str, list[tuple[int, int]]]()
    for part, end in zip(parts, ends):
        wanted = [0] * len(sizes)
        for each in part.amounts:
            size = sizes[each.source] if each.by == "repeat" else 1
            wanted[each.source] = round(Fraction(each.amount) * size)
        left, counts, at = None if part.is_endless else sum(wanted), [0] * len(sizes), part.step
        while at < (begins[-1] + 5 if end is None else end):
            draws, size = draws_of_step(recipe, at), recipe.batch.size(at)
            for source, epoch, index in zip(
                draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist()
            ):
                drawn.setdefault(recipe.source_names[source], []).append((epoch, index))
                counts[source] += 1
            at += 1
            if recipe.batch.tokens is None and recipe.data.batches == "mixed":
                due = (
                    size
                    if left is None or recipe.batch.last == "pad"
                    else min(size, left - sum(counts) + len(draws))
                )
                assert len(draws) == due and (due == size or recipe.batch.last == "keep")
            assert len(draws)
        if left is not None and at < (recipe.steps or 10**9):
            check_amounts(recipe, wanted, counts, at, is_cut=part is not parts[-1] and left > sum(counts))
    for name, found in drawn.items():
        store = recipe.sources[recipe.source_names.index(name)]
        alone = mf.Mixture({name: (store, 1)})
        own = draws_between(replace(recipe, data=alone, batch=mf.Batch(1), steps=None), 0, len(found))
        assert found == list(zip(own.epoch.tolist(), own.index.tolist()))


def check_amounts(recipe: Any, wanted: list[int], counts: list[int], at: int, *, is_cut: bool) -> None:
    """What was drawn of amounts that end, before the steps from `at` on."""
    last, total, per_source = recipe.batch.last, sum(wanted), recipe.data.batches == "per_source"
    rest = max(total - sum(counts), 0)
    if per_source:
        size = recipe.batch.size(0)
        whole = [-(-each // size) if last == "pad" else each // size for each in wanted]
        assert is_cut or counts == [each * size for each in whole]
    elif is_cut or last == "drop":
        assert all(abs(count - each * sum(counts) / total) < 1 for count, each in zip(counts, wanted))
        assert is_cut or recipe.batch.tokens or rest < recipe.batch.size(at)
    elif last == "keep":
        assert counts == wanted
    else:
        assert all(count >= each for count, each in zip(counts, wanted))
        assert recipe.batch.tokens or sum(counts) - total < recipe.batch.size(at - 1)


@pytest.mark.parametrize("steps", [3, 4, 1_000])
def test_a_feed_says_that_its_steps_are_never_reached(
    folder: Path, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    for batch in (mf.Batch(5), mf.Batch(tokens=320)):  # 15 windows of 64
        recipe = mf.Recipe(
            data=mf.open(folder / "web"), sequence=mf.Windows(64), batch=batch, epochs=1, steps=steps
        )
        caplog.clear()
        with caplog.at_level(logging.WARNING, "meshfeed"), mf.Feed(recipe):
            assert num_steps(recipe) == 3
        told = [each.getMessage() for each in caplog.records]
        assert [f"steps={steps} is never reached" in each for each in told] == [True] * (steps > 3)
