"""Random lives of a job: killed anywhere, gone on under other layouts, other weights, other batch sizes.

Mixture, packing and dynamic cp are on. Whatever happened, the stream of global batches is that of a job with
the final recipe that nobody disturbed, token by token, and every source is gone through once per epoch.
"""

from __future__ import annotations

import json
import os
import pickle
import random
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import meshfeed as mf
import world
from meshfeed.order import draws_of_step
from meshfeed.store import IndexedWriter
from observe import assembled, content_of
from soak import SEED, cases, some

STEPS = 16
SIZES = (23, 40, 11)
"""Documents of each source: some sixty sequences a history, so every source sees several epochs' ends."""

LAYOUTS = ("dp1", "dp2", "cp2", "dp3", "cp2-dp2", "tp2-dp2", "pp2-dp2", "dp4", "tp2-cp2-pp2", "cp4-dp2")
POLICIES = ("dynamic_cp", "balanced", "in_order")
Batches = dict[tuple[int, int, int], list[int]]


@dataclass(frozen=True)
class Change:
    """From a step on: other weights, or another batch size."""

    step: int
    weights: tuple[tuple[int, float], ...] = ()
    sequences: int = 0


@dataclass(frozen=True)
class Life:
    """A job's runs: (layout, policy, first step, step it was killed in), and the changes made between them.

    shards: what its shuffle by blocks is of; None for a global one.
    """

    runs: tuple[tuple[str, str, int, int], ...]
    changes: tuple[Change, ...]
    seed: int
    shards: mf.Blocks | None


def life_of(dice: random.Random, layouts: tuple[str, ...] = LAYOUTS) -> Life:
    """A life at random: one to four kills, in the first epoch, at its very end or later."""
    kills = sorted(dice.sample(range(1, STEPS), dice.randint(1, 4)))
    runs, changes, at = [], [], 0
    for kill in [*kills, STEPS]:
        runs.append((dice.choice(layouts), dice.choice(POLICIES), at, kill))
        at = kill
        what = dice.random()
        if at < STEPS and what < 0.4:
            some = dice.sample(range(3), dice.randint(1, 3))
            changes.append(Change(at, weights=tuple((k, dice.choice([0.01, 0.5, 1.0, 4.0])) for k in some)))
        elif at < STEPS and what < 0.6:
            changes.append(Change(at, sequences=dice.choice([5, 9, 16])))
    shards = mf.Blocks(sequences=dice.randint(1, 9), window=dice.randint(1, 3), lanes=dice.randint(1, 4))
    return Life(tuple(runs), tuple(changes), dice.randrange(3), dice.choice([None, shards]))


@cache
def stores_of(folder: Path) -> tuple[Any, ...]:
    return tuple(mf.open(folder / f"s{k}") for k in range(3))


def recipe_of(folder: Path, life: Life, until: int) -> mf.Recipe:
    """The recipe as a run that starts at step `until` knows it: later changes are not thought of yet."""
    stores = stores_of(folder)
    mixture, batch = mf.Mixture({"s0": (stores[0], 2), "s1": (stores[1], 1)}), mf.Batch(sequences=8)
    for change in life.changes:
        if change.step <= until:
            amounts = {f"s{k}": (stores[k], weight) for k, weight in change.weights}
            mixture = mixture.then(change.step, amounts) if amounts else mixture
            batch = batch.then(change.step, change.sequences) if change.sequences else batch
    shuffle: Any = life.shards or "global"
    return mf.Recipe(data=mixture, sequence=mf.Documents(), batch=batch, seed=life.seed, shuffle=shuffle)


def packing_of(policy: Any) -> mf.Packing:
    return mf.Packing(capacity=256, policy=policy, align=mf.Align(sequence=2), oversize="error")


def batch_of(recipe: mf.Recipe, layout: mf.Layout, policy: str, step: int) -> Batches:
    """The tokens of a global batch, put together from what the ranks get."""
    asked = [r for r in layout.ranks().tolist() if layout.coord(r).tp == 0 and layout.coord(r).pp == 0]
    made = mf.simulate(recipe, layout, [step], ranks=asked, packing=packing_of(policy))
    return assembled(microbatch for got in made for microbatch in got.microbatches)


def check_epochs(recipe: mf.Recipe) -> None:
    """Every source epoch by epoch, each sequence once."""
    seen: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for step in range(STEPS):
        draws = draws_of_step(recipe, step)
        for source, epoch, index in zip(draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist()):
            seen[source].append((epoch, index))
    for source, drawn in seen.items():
        size = SIZES[int(recipe.source_names[source][1])]
        assert [epoch for epoch, _ in drawn] == [k // size for k in range(len(drawn))]
        assert len(set(drawn)) == len(drawn)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, rng = tmp_path_factory.mktemp("sources"), np.random.default_rng(3)
    for k, size in enumerate(SIZES):
        with IndexedWriter(path / f"s{k}", np.uint16) as writer:
            for _ in range(size):
                writer.add_document(rng.integers(0, 60_000, rng.integers(2, 120)).astype(np.uint16))
    return path


def test_lives(folder: Path) -> None:
    dice = random.Random(7)
    tokens: dict[tuple[str, int, int], list[int]] = {}
    kills = defaultdict(int)
    lives = cases(30)
    for _ in range(lives):
        life = life_of(dice)
        final = recipe_of(folder, life, STEPS)
        check_epochs(final)
        saved: dict[str, Any] | None = None
        for text, policy, start, stop in life.runs:
            recipe = recipe_of(folder, life, start)
            feed = mf.Feed(recipe, mf.Layout.parse(text), rank=0, packing=packing_of(policy))
            if saved is not None:
                feed.load_state_dict(saved)
                assert feed.next_step == start
            # the first step of the run, and the last before it is killed
            for step in {start, stop - 1}:
                draws = draws_of_step(final, step)
                wanted = zip(draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist())
                got = batch_of(recipe, mf.Layout.parse(text), policy, step)
                assert sorted(got) == sorted(wanted), (life, step)
                for (source, epoch, index), held in got.items():
                    name = final.source_names[source]
                    assert tokens.setdefault((name, 0, index), held) == held, (life, step, epoch)
            saved = json.loads(json.dumps(mf.State(recipe=recipe.summary(until=stop), step=stop).to_json()))
            kills[int(draws_of_step(final, stop).epoch.max())] += 1
    assert len(tokens) == sum(SIZES) or lives < 1_000
    assert min(kills[epoch] for epoch in range(4)) > lives // 10, "kills in the first epoch and in later ones"


DELIVERIES = ("share", "broadcast", "direct")
SMALL = ("dp1", "dp2", "cp2", "tp2-pp2", "cp2-dp2", "dp3", "tp2-dp2")


def live(rank: int, folder: Path, life: Life, run: int, out: Path) -> None:
    """One run of a life on a real rank, killed while it works on a step, unless it is the last run.

    After every step rank 0 keeps the state, and every rank what it was handed.
    """
    text, policy, start, stop = life.runs[run]
    layout, state = mf.Layout.parse(text), out / "state.json"
    feed = mf.Feed(
        recipe_of(folder, life, start),
        layout,
        packing=packing_of(policy),
        transport=mf.Transport(delivery=DELIVERIES[run % 3], prefetch=run % 3, timeout_s=600),
    )
    place = layout.coord(rank)
    with feed:
        if run:
            feed.load_state_dict(json.loads(state.read_text()))
        for step in feed:
            held = list(step.microbatches)
            if step.index == stop:
                dist.FileStore(str(out / f"events{run}"), -1).set(f"at{rank}", "1")
                dist.FileStore(str(out / "never"), -1).wait(["killed"], timedelta(seconds=600))
            if place.tp == place.pp == 0:
                (out / f"step{step.index}-{run}-{rank}").write_bytes(pickle.dumps(held))
            dist.barrier()
            if rank == 0:
                state.with_suffix(".new").write_text(json.dumps(feed.state_dict()))
                os.replace(state.with_suffix(".new"), state)
            if step.index == STEPS - 1:
                return


@some(1)
@pytest.mark.parametrize("seed", range(cases(2)))
def test_lives_on_real_processes(folder: Path, tmp_path: Path, seed: int) -> None:
    """Jobs that really died, as in test_resume."""
    dice = random.Random(1000 + seed + SEED)
    life = life_of(dice, SMALL)
    while len(life.runs) > 3:
        life = life_of(dice, SMALL)
    for run, (text, _, _, stop) in enumerate(life.runs):
        size = mf.Layout.parse(text).world_size
        job = world.start(live, size, folder, life, run, tmp_path)
        if run + 1 < len(life.runs):
            events = dist.FileStore(str(tmp_path / f"events{run}"), -1)
            events.wait([f"at{rank}" for rank in range(size)], timedelta(seconds=600))
            job.kill(range(size))
            assert [outcome.exitcode for outcome in job.join()] == [-9] * size
            assert content_of(json.loads((tmp_path / "state.json").read_text()))["step"] == stop
        else:
            job.results()
    final = recipe_of(folder, life, STEPS)
    for step in range(STEPS):
        (run,) = {int(file.name.split("-")[1]) for file in tmp_path.glob(f"step{step}-*")}
        assert life.runs[run][2] <= step < life.runs[run][3]
        files = tmp_path.glob(f"step{step}-{run}-*")
        got = assembled(m for file in files for m in pickle.loads(file.read_bytes()))
        assert got == batch_of(final, mf.Layout(), "balanced", step), (life, step)


class Noisy:
    """Items of a user's dataset: different in every epoch, drawn from nothing but where they stand."""

    def __init__(self, name: int, sizes: list[int]) -> None:
        self.name, self.sizes = name, sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, np.ndarray]:
        return {"tokens": mf.order.rng(self.name, at.epoch, at.index).integers(0, 999, self.sizes[at.index])}


def user_recipe(weights: list[tuple[int, tuple[float, float]]]) -> mf.Recipe:
    """A mixture of two users' datasets, its weights from each step on."""
    stores = [
        mf.Mapped(Noisy(k, sizes), lengths=sizes)
        for k, sizes in enumerate(([5, 30, 17, 2, 44, 9, 21], [3, 8, 60, 12]))
    ]
    named = [{f"u{k}": (store, w[k]) for k, store in enumerate(stores)} for _, w in weights]
    mixture = mf.Mixture(named[0])
    for (step, _), sources in zip(weights[1:], named[1:]):
        mixture = mixture.then(step, sources)
    rule = mf.Samples(mf.Field(name="tokens", dtype="int64", split=True), packed=True)
    return mf.Recipe(data=mixture, sequence=rule, batch=mf.Batch(sequences=5), seed=4)


def test_lives_with_other_worker_processes() -> None:
    """Workers, prefetch, packing and weights change at every kill; items differ by epoch, and stay theirs."""
    dice = random.Random(5)
    for _ in range(cases(2)):
        kills = [*sorted(dice.sample(range(1, 10), 2)), 10]
        weights, state, seen = [(0, (1.0, 0.4))], None, {}
        for start, stop in zip([0, *kills], kills):
            if start:
                weights.append((start, (dice.choice([0.2, 1.0]), dice.choice([0.5, 3.0]))))
            recipe = user_recipe(weights)
            machine = mf.Machine(workers=dice.randrange(3))
            packing = packing_of(dice.choice(POLICIES))
            prefetch = dice.choice([0, 1, 3])
            with mf.Feed(
                recipe, packing=packing, transport=mf.Transport(prefetch=prefetch), machine=machine
            ) as feed:
                if state is not None:
                    feed.load_state_dict(json.loads(state))
                for step in feed:
                    seen[step.index] = assembled(step.microbatches)
                    state = json.dumps(feed.state_dict())
                    if step.index == stop - 1:
                        break
        final = user_recipe(weights)
        for step in range(10):
            assert seen[step] == batch_of(final, mf.Layout.parse("cp2-dp2"), "dynamic_cp", step)
