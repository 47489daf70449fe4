"""Laws of random jobs: any rule, mixture, batch, amendments, packing and layout; see `recipes`.

That later changes keep what comes before is in test_later_changes.py, that columns are cut like tokens in
sequence/test_columns.py, the laws of plans of any lengths in plan/.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis import strategies as st

import meshfeed as mf
import world
from meshfeed.order import draws_of_step, num_steps, positions_of, start_of_step
from observe import simulated, take
from planning import check_packs, check_plan
from recipes import FOUR, SIZES, Job, jobs, packings, write_stores
from soak import SEED, cases

HEALTH = HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stores(tmp_path_factory.mktemp("jobs"))


def last_step(job: Job) -> int:
    """A step that the job has, or None is no example."""
    end = num_steps(job.recipe)
    if end == 0:
        reject()
    return min(10, end - 1 if end is not None else 10)


# -- a feed is what simulate says, however a step was reached ------------------------------------------------


def lives(rank: int, folder: str, number: int) -> list[str]:
    """Jobs that every rank draws alike: runs from any step, under any layout; tells what differs from simulate."""
    wrong = list[str]()

    @seed(SEED)
    @settings(
        max_examples=number,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=HEALTH,
    )
    @given(st.data())
    def live(data: st.DataObject) -> None:
        job = data.draw(jobs(Path(folder)))
        packing, last = data.draw(packings(job)), last_step(job)
        delivery: Any = data.draw(st.sampled_from(["auto", "direct", "broadcast", "share", "tree"]))
        runs = data.draw(
            st.lists(st.tuples(st.integers(0, last), st.sampled_from(FOUR)), min_size=1, max_size=3)
        )
        transport = mf.Transport(delivery=delivery, timeout_s=300, prefetch=data.draw(st.integers(0, 2)))
        layout = layout_of(runs[0][1])
        free: dict[str, Any] = {"packing": packing, "no_loss": "allow"}
        feed = mf.Feed(job.recipe, layout, pad_rows=packing is None, transport=transport, **free)
        with feed:
            for at, (step, text) in enumerate(runs):
                further = range(step, step + 6)  # two of them are skipped, at the most
                expected = simulated(job.recipe, layout_of(text), further, rank, **free)[:2]
                if at and (text != runs[at - 1][1] or data.draw(st.booleans())):
                    with feed.run(step, layout=layout_of(text), generation=at) as run:
                        found = take(run, 2)
                else:
                    feed.load_state_dict(json.loads(json.dumps(feed.state_dict(step))))
                    found = take(feed, 2)
                if found != expected:
                    wrong.append(f"run {at} of {runs}: {job}")

    live()
    return wrong


def layout_of(text: str) -> mf.Layout:
    return mf.Layout.parse(text, ranks_per_node=2)


def test_a_feed_is_what_simulate_says_however_a_step_was_reached(folder: Path) -> None:
    assert world.run(lives, 4, str(folder), cases(8, 1_000)) == [[]] * 4


# -- order, state, exclusion, plans -------------------------------------------------------------------------


@settings(max_examples=cases(40, 3_000), deadline=None, suppress_health_check=HEALTH)
@given(st.data())
def test_positions_are_the_inverse_of_the_order(folder: Path, data: st.DataObject) -> None:
    job = data.draw(jobs(folder))
    recipe, step = job.recipe, data.draw(st.integers(0, last_step(job)))
    begin, draws = start_of_step(recipe, step), draws_of_step(recipe, step)
    padded = recipe.batch.last == "pad" and step == (num_steps(recipe) or 0) - 1
    found = positions_of(recipe, draws)
    assert padded or found.tolist() == list(range(begin, begin + len(draws)))


@settings(max_examples=cases(40, 3_000), deadline=None, suppress_health_check=HEALTH)
@given(st.data())
def test_a_state_loads_under_its_recipe_and_no_other(folder: Path, data: st.DataObject) -> None:
    """Another recipe that it loads under has the same steps before it."""
    job = data.draw(jobs(folder))
    recipe, step = job.recipe, data.draw(st.integers(1, last_step(job) + 1))
    state = mf.State.from_json(json.loads(json.dumps(mf.State.at(recipe, step).to_json())))
    state.check(recipe)
    assert state.step == step
    other = data.draw(other_recipes(job))
    try:
        state.check(other)
    except mf.errors.StateError:
        return
    for each in range(step):
        ours, theirs = draws_of_step(recipe, each), draws_of_step(other, each)
        names = [
            [of.source_names[s] for s in draws.source] for of, draws in ((recipe, ours), (other, theirs))
        ]
        assert names[0] == names[1]
        assert np.array_equal(ours.epoch, theirs.epoch) and np.array_equal(ours.index, theirs.index)


@st.composite
def other_recipes(draw: Any, job: Job) -> mf.Recipe:
    """The recipe of a job with one of its parts from another job."""
    part = draw(st.sampled_from(["data", "sequence", "batch", "seed", "shuffle", "epochs", "ledger"]))
    other = draw(jobs(job.folder))
    try:
        if part == "ledger":
            return job.given.amended(other.ledger)
        made = replace(job.given, **{part: getattr(other.given, part)}).amended(job.ledger)
        num_steps(made)
        return made
    except (mf.errors.RecipeError, mf.errors.StoreError):
        reject()


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores whose tokens tell where they lie: each is its place in the stream of its source, from 0."""
    folder = tmp_path_factory.mktemp("numbered")
    for number, (name, (num_tokens, mean)) in enumerate(SIZES.items()):
        cuts = np.cumsum(np.random.default_rng(number).integers(1, 2 * mean, num_tokens))
        with mf.IndexedWriter(folder / name, np.int32) as writer:
            for document in np.split(np.arange(num_tokens, dtype=np.int32), cuts[cuts < num_tokens]):
                writer.add_document(document)
    return folder


@settings(max_examples=cases(40, 3_000), deadline=None, suppress_health_check=HEALTH)
@given(st.data())
def test_what_is_excluded_moves_nothing_else(numbered: Path, data: st.DataObject) -> None:
    """Token by token: the same sequences at the same places, without loss where a document is gone."""
    job = data.draw(jobs(numbered, most_amendments=0))
    recipe, last = job.recipe, last_step(job)
    if isinstance(recipe.sequence, mf.Masked):
        reject()
    name, at = data.draw(st.sampled_from(recipe.source_names)), data.draw(st.integers(0, last))
    store = recipe.sources[recipe.source_names.index(name)]
    gone = data.draw(st.sets(st.integers(0, store.num_documents - 1), min_size=1), "excluded")
    amended = recipe.amended([(at, mf.amendments.Exclude({name: sorted(gone)}))])
    packing = data.draw(packings(job))
    with store:
        ends = np.cumsum(store.lengths(np.arange(store.num_documents)))
    for step in range(max(at - 1, 0), min(at + 3, last + 1)):
        whole, rest = (losses_of(each, step, packing) for each in (recipe, amended))
        kept = {
            place: count
            for place, count in whole.items()
            if step < at
            or place[0] != name
            or not gone & {*np.searchsorted(ends, place[1:], "right").tolist()}
        }
        assert rest == kept, (step, at, gone)


def losses_of(recipe: mf.Recipe, step: int, packing: mf.Packing | None) -> Counter[tuple[str, int, int]]:
    """(source, token, label) of all that bears loss in a step."""
    found = Counter[tuple[str, int, int]]()
    (made,) = mf.simulate(recipe, mf.Layout(), [step], packing=packing, no_loss="allow")
    for microbatch in made.microbatches:
        names = [recipe.source_names[source] for source in microbatch.draws.source.tolist()]
        tokens, labels, mask = (microbatch[name] for name in ("tokens", "labels", "loss_mask"))
        if packing is None:
            of = [[name] * tokens.shape[1] for name in names]
            of += [[""] * tokens.shape[1]] * (len(tokens) - len(of))
        else:
            sizes = microbatch["cu_seqlens_padded"].diff().tolist()
            of = [[name for name, size in zip(names, sizes) for _ in range(size)]]
            of[0] += [""] * (tokens.shape[1] - len(of[0]))
        for row in range(len(tokens)):
            for name, token, label, bears in zip(
                of[row], tokens[row].tolist(), labels[row].tolist(), mask[row]
            ):
                if bears:
                    found[name, token, label] += 1
    return found


@settings(max_examples=cases(40, 3_000), deadline=None, suppress_health_check=HEALTH)
@given(st.data())
def test_plans_are_total_and_capped(folder: Path, data: st.DataObject) -> None:
    job = data.draw(jobs(folder))
    packing, step = data.draw(packings(job)), data.draw(st.integers(0, last_step(job)))
    if packing is None or packing.oversize != "error":
        reject()
    layout = mf.Layout.parse(data.draw(st.sampled_from(FOUR)))
    options: dict[str, Any] = {"packing": packing, "no_loss": "allow"}
    made = next(iter(mf.simulate(job.recipe, layout, [step], ranks=[0], **options)), None)
    if made is None:  # it is skipped
        reject()
    lengths = job.recipe.sequence.lengths(job.recipe, made.batch.draws)
    check_plan(made.batch.plan, lengths, packing, dp=layout.dp, cp=layout.cp)
    check_packs(made.batch.plan, packing)
