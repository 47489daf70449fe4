"""Jobs over text, images and audio on real processes: killed at any point, gone on under other layouts.

A chain is one job. In each of its lives the ranks are other in number and layout, and SIGKILL ends one of them: between
two microbatches, while a part is decoded, while the state is written, or whenever a clock says so. Then all are killed, as
a launcher does it, and the next life goes on from the last state that was written. Whatever happened, each part of each
sequence was trained on once, in its step, and its arrays, drawn at random, are bit by bit those of a job that nobody
disturbed.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from multiprocessing.connection import wait
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import meshfeed as mf
import world
from corpus import write_corpus
from leftovers import as_a_rank_with_workers, check_nothing_is_left
from meshfeed.order import draws_of_step
from observe import assembled, content_of
from pictures import Listen, Look, expected_parts, write_pictures
from soak import SEED, cases

STEPS = 10
SHARES = {"photos": 0.5, "sounds": 0.3, "text": 0.2}
"""Of each source among the tokens."""
LAYOUTS = (
    "dp2", "cp2", "tp2", "pp2", "dp3", "cp3", "dp4", "cp4", "cp2-dp2", "tp2-dp2", "pp2-dp2", "tp2-cp2", "pp2-cp2", "tp2-pp2",
)  # fmt: skip
POLICIES = ("dynamic_cp", "balanced", "in_order")
DELIVERIES = ("share", "broadcast", "direct", "auto")
MOMENTS = ("training", "decoding", "saving", "any")
MOST_KILLS = 3

Place = tuple[int, int, int]
"""(source, epoch, index) of a sequence."""
Ledger = dict[tuple[Place, int], str]
"""(sequence, part) -> digest of its arrays."""


@dataclass(frozen=True)
class Life:
    """One run of a job. victim: the rank that dies; moment: when; count: after how many steps, parts or states."""

    layout: mf.Layout
    policy: str
    delivery: Any
    workers: int
    prefetch: int
    save_every: int
    moment: str
    victim: int
    count: int
    delay_s: float


def life_of(dice: random.Random, moment: str) -> Life:
    layout = mf.Layout.parse(dice.choice(LAYOUTS))
    return Life(
        layout=layout,
        policy=dice.choice(POLICIES),
        delivery=dice.choice(DELIVERIES),
        workers=dice.randrange(3),
        prefetch=dice.randrange(3),
        save_every=dice.randint(1, 3),
        moment=moment,
        victim=dice.randrange(layout.world_size),
        count=dice.randint(1, 12 if moment == "decoding" else 4),
        delay_s=dice.uniform(0, 0.2),
    )


# -- the job -----------------------------------------------------------------------------------------

_parts_left: list[int] = []  # in a rank that dies while it decodes, and in its workers


class Mortal(Look):
    """Look, in a rank that may die of it."""

    def __call__(self, data: bytes, size: Any, rng: np.random.Generator) -> Any:
        if _parts_left:
            _parts_left[0] -= 1
            if _parts_left[0] == 0:
                os.kill(os.getpgrp(), signal.SIGKILL)  # the rank, which leads its group; not its workers
        return super().__call__(data, size, rng)


def recipe_of(folder: Path, seed: int) -> mf.Recipe:
    stores = {name: mf.open(folder / name) for name in SHARES}
    rule = mf.Multimodal(image=Mortal(), audio=Listen())
    # amounts are of sequences
    mean = {name: fmean(map(len, flat_of(folder, name))) for name in SHARES}
    data = mf.Mixture({name: (store, SHARES[name] / mean[name]) for name, store in stores.items()})
    return mf.Recipe(data=data, sequence=rule, batch=mf.Batch(sequences=6), seed=seed, steps=STEPS)


def packing_of(policy: Any) -> mf.Packing:
    return mf.Packing(capacity=128, policy=policy, align=mf.Align(sequence=2), oversize="error")


def live(rank: int, folder: Path, seed: int, life: Life, number: int, out: Path) -> None:
    """Train, keep what came, and save states; until the end or death."""
    as_a_rank_with_workers()
    if life.moment == "decoding":
        _parts_left[:] = [life.count]
    mine = rank == life.victim
    state, saved, trained = out / "state.json", 0, 0
    feed = mf.Feed(
        recipe_of(folder, seed), life.layout, machine=mf.Machine(workers=life.workers), transport=mf.Transport(delivery=life.delivery, prefetch=life.prefetch, timeout_s=600),
        packing=packing_of(life.policy),
    )  # fmt: skip
    with feed, (out / f"{number}-{rank}").open("wb") as came:
        if state.exists():
            feed.load_state_dict(json.loads(state.read_text()))
        for step in feed:
            held: list[mf.Microbatch] = []
            for microbatch in step.microbatches:
                held.append(microbatch)
                if mine and life.moment == "training" and trained == life.count:
                    os.kill(os.getpid(), signal.SIGKILL)
            if mine and life.moment == "any" and trained == 0:
                threading.Timer(life.delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            workers = [each.pid for each in multiprocessing.active_children()]
            pickle.dump((step.index, held if life.layout.coord(rank).tp == 0 else [], workers), came)
            came.flush()
            dist.barrier()
            trained += 1
            if rank == 0 and (trained % life.save_every == 0 or step.index == STEPS - 1):
                saved += 1
                text, new = json.dumps(feed.state_dict()), state.with_suffix(".new")
                if life.moment == "saving" and saved == life.count:
                    new.write_text(text[: len(text) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                new.write_text(text)
                os.replace(new, state)


def ended(job: world.World) -> list[world.Outcome]:
    """How all ranks ended. Once one is dead the others are killed."""
    running = {process.sentinel: process for process in job.processes}
    while running:
        gone = [running.pop(each) for each in wait(list(running), world.HANG_S)]
        assert gone, "all ranks hang"
        if codes := {process.exitcode for process in gone} - {0}:
            job.kill(range(len(job.processes)))
            outcomes = job.join()
            assert -signal.SIGKILL in codes, [each.trace for each in outcomes]
            return outcomes
    return job.join()


# -- what came ---------------------------------------------------------------------------------------


def records(path: Path) -> Iterator[tuple[int, list[mf.Microbatch], list[int]]]:
    """What a rank has kept of its steps; the last may be cut off. None, if it was killed before its first."""
    if not path.exists():
        return
    with path.open("rb") as came:
        while True:
            try:
                yield pickle.load(came)
            except (EOFError, pickle.UnpicklingError):
                return


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


@dataclass(frozen=True)
class Undisturbed:
    """What a job that nobody disturbs trains on in a step.

    parts: sequence -> (kind, the arrays that its processor makes) of each part. tokens: of each sequence.
    """

    parts: dict[Place, list[tuple[str, dict[str, np.ndarray]]]]
    tokens: dict[Place, list[int]]

    @cached_property
    def ledger(self) -> Ledger:
        return {
            (place, number): digest(arrays)
            for place, parts in self.parts.items()
            for number, (_, arrays) in enumerate(parts)
        }


@cache
def undisturbed(folder: Path, seed: int) -> list[Undisturbed]:
    """Step by step: the recipe's draws, parts decoded one by one, tokens as they were written."""
    recipe, steps = recipe_of(folder, seed), []
    for step in range(STEPS):
        draws = draws_of_step(recipe, step)
        places = places_of(draws)
        parts: dict[Place, dict[int, Any]] = {place: {} for place in places}
        for store in recipe.sources:
            store.__enter__()
        for kind in ("image", "audio"):
            for sequence, number, arrays in expected_parts(recipe, draws, kind):
                parts[places[sequence]][number] = kind, arrays
        for store in recipe.sources:
            store.__exit__()
        tokens = {place: flat_of(folder, recipe.source_names[place[0]])[place[2]] for place in places}
        tokens = {place: own for place, own in tokens.items() if own}  # no pack has an empty document
        ordered = {place: [each for _, each in sorted(held.items())] for place, held in parts.items()}
        steps.append(Undisturbed(ordered, tokens))
    return steps


def places_of(draws: mf.order.Draws) -> list[Place]:
    return list(zip(draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist()))


def ledger_of(microbatch: mf.Microbatch, wanted: Undisturbed) -> Ledger:
    """What a pack has of each part; only where its rows begin and end is taken from `wanted`."""
    ledger, begun = Ledger(), Counter[str]()
    for place in places_of(microbatch.draws):
        for number, (_, arrays) in enumerate(wanted.parts[place]):
            own = {}
            for name, array in arrays.items():
                own[name] = microbatch[name][begun[name] : begun[name] + len(array)].numpy()
                begun[name] += len(array)
            ledger[place, number] = digest(own)
    assert all(begun[name] == len(microbatch[name]) for name in ("pixel_values", "image_grid", "waves"))
    return ledger


def check_life(
    out: Path, number: int, life: Life, wanted: list[Undisturbed], begin: int, end: int
) -> list[int]:
    """All that came is what it is to be; of steps begin..end, all came, and once. Returns the workers' pids."""
    came: dict[int, list[tuple[int, list[mf.Microbatch]]]] = {step: [] for step in range(STEPS)}
    workers: list[int] = []
    for rank in life.layout.ranks().tolist():
        for at, (step, held, pids) in enumerate(records(out / f"{number}-{rank}")):
            assert step == begin + at
            workers += pids
            place = life.layout.coord(rank)
            if place.tp == place.pp == 0:
                came[step].append((rank, held))
    for step, of_ranks in came.items():
        ledger = Ledger()
        for _, held in of_ranks:
            for microbatch in held:
                found = ledger_of(microbatch, wanted[step])
                if microbatch.cp_rank == 0:
                    assert not ledger.keys() & found.keys(), "a sequence came twice"
                    ledger |= found
                assert found.items() <= wanted[step].ledger.items(), (number, life, step)
        if begin <= step < end:
            assert ledger == wanted[step].ledger, (number, life, step)
            assert assembled(m for _, held in of_ranks for m in held) == wanted[step].tokens
    return workers


# -- the tests ---------------------------------------------------------------------------------------


@cache
def flat_of(folder: Path, name: str) -> list[list[int]]:
    """The tokens of each document, every placeholder repeated, by who wrote it."""
    return json.loads((folder / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sources")
    flat = {
        "photos": write_pictures(path / "photos", count=17, seed=1),
        "sounds": write_pictures(path / "sounds", count=9, seed=2),
    }
    write_corpus(path / "text", num_tokens=200, mean=8)
    with mf.open(path / "text") as text:
        documents = np.arange(text.num_documents)
        flat["text"] = [text.read(i, 0, n).tolist() for i, n in enumerate(text.lengths(documents).tolist())]
    for name, documents in flat.items():
        (path / f"{name}.json").write_text(json.dumps(documents))
    return path


def test_what_is_to_come_is_what_a_job_gets_that_nobody_disturbs(folder: Path) -> None:
    """And each source gives each of its sequences once per epoch, tokens in the shares asked for."""
    wanted = undisturbed(folder, 0)
    with mf.Feed(recipe_of(folder, 0), packing=packing_of("in_order")) as feed:
        for step, expected in zip(feed, wanted, strict=True):
            held = list(step.microbatches)
            assert assembled(held) == expected.tokens
            found = [ledger_of(microbatch, expected) for microbatch in held]
            assert sum(map(len, found)) == len(expected.ledger)
            assert {key: value for each in found for key, value in each.items()} == expected.ledger
    places = [place for step in wanted for place in step.parts]
    for source, name in enumerate(SHARES):
        drawn = [(epoch, index) for s, epoch, index in places if s == source]
        size = len(flat_of(folder, name))
        assert [epoch for epoch, _ in drawn] == [k // size for k in range(len(drawn))]
        assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("chain", range(cases(1, 200)))
def test_a_chain_of_kills_and_layouts_loses_repeats_and_changes_no_part(
    folder: Path, tmp_path: Path, chain: int, record_property: Any
) -> None:
    dice = random.Random(f"{SEED} {chain}")
    seed = dice.randrange(3)
    wanted, begin, died = undisturbed(folder, seed), 0, []
    while begin < STEPS:
        number = len(died)
        life = life_of(dice, dice.choice(MOMENTS) if number < MOST_KILLS else "never")
        job = world.start(live, life.layout.world_size, folder, seed, life, number, tmp_path)
        killed = -signal.SIGKILL in [outcome.exitcode for outcome in ended(job)]
        state = tmp_path / "state.json"
        end = content_of(json.loads(state.read_text()))["step"] if state.exists() else 0
        workers = check_life(tmp_path, number, life, wanted, begin, end)
        check_nothing_is_left([process.pid for process in job.processes], workers)
        assert killed or end == STEPS, life
        died.append(life.moment if killed else "")
        begin = end
    record_property("kills", " ".join(died))
