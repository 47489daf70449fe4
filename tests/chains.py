"""Chains of lives of a job over documents with parts, on real processes: killed at any point, gone on under other layouts.

A chain is one job. In each of its lives the ranks are other in number and layout, and SIGKILL ends one of them: between
two microbatches, while a part is decoded, while the state is written, or whenever a clock says so. Then all are killed, as
a launcher does it, and the next life goes on from the last state that was written. A `Job` says what is trained on, and
holds what came against what was to come.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import meshfeed as mf
import world
from leftovers import as_a_rank_with_workers, check_nothing_is_left
from observe import content_of
from soak import SEED

LAYOUTS = (
    "dp2", "cp2", "tp2", "pp2", "dp3", "cp3", "dp4", "cp4", "cp2-dp2", "tp2-dp2", "pp2-dp2", "tp2-cp2", "pp2-cp2", "tp2-pp2",
)  # fmt: skip
POLICIES = ("dynamic_cp", "balanced", "in_order")
DELIVERIES = ("share", "broadcast", "direct", "auto")
MOMENTS = ("training", "decoding", "saving", "any")
MOST_KILLS = 3


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
    encoder: Any = "with sample"


def life_of(dice: random.Random, moment: str, encoders: Sequence[str]) -> Life:
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
        encoder=encoders[0] if len(encoders) == 1 else dice.choice(encoders),
    )


Held = list[tuple[int, list[mf.Microbatch]]]
"""(rank, its microbatches of a step), of ranks that are the first of their tp group and pipeline."""


@dataclass(frozen=True)
class Job:
    """What a chain trains on. Ranks get it, so its functions are of modules.

    recipe_of: of a folder and a seed. packing_of: of a policy. steps: of the job. wanted: step by step, what a job that nobody
    disturbs trains on. check: fails unless what came of a step is of what is wanted, and all of it if it is complete.
    encoders: what `Feed(encoder=)` may be.
    """

    recipe_of: Callable[[Path, int], mf.Recipe]
    packing_of: Callable[[Any], mf.Packing]
    steps: int
    wanted: Callable[[Path, int], list[Any]]
    check: Callable[[Any, Held, Life, bool], None]
    encoders: Sequence[str] = ("with sample",)


# -- the job -----------------------------------------------------------------------------------------

_parts_left: list[int] = []  # in a rank that dies while it decodes, and in its workers


def may_die() -> None:
    """For a processor: the rank may die while it decodes this part."""
    if _parts_left:
        _parts_left[0] -= 1
        if _parts_left[0] == 0:
            os.kill(os.getpgrp(), signal.SIGKILL)  # the rank, which leads its group; not its workers


def live(rank: int, job: Job, folder: Path, seed: int, life: Life, number: int, out: Path) -> None:
    """Train, keep what came, and save states; until the end or death."""
    as_a_rank_with_workers()
    if life.moment == "decoding":
        _parts_left[:] = [life.count]
    mine = rank == life.victim
    state, saved, trained = out / "state.json", 0, 0
    feed = mf.Feed(
        job.recipe_of(folder, seed), life.layout, machine=mf.Machine(workers=life.workers), transport=mf.Transport(delivery=life.delivery, prefetch=life.prefetch, timeout_s=600),
        packing=job.packing_of(life.policy), encoder=life.encoder,
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
            if rank == 0 and (trained % life.save_every == 0 or step.index == job.steps - 1):
                saved += 1
                text, new = json.dumps(feed.state_dict()), state.with_suffix(".new")
                if life.moment == "saving" and saved == life.count:
                    new.write_text(text[: len(text) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                new.write_text(text)
                os.replace(new, state)


def ended(job: world.World) -> list[world.Outcome]:
    """How all ranks ended. Once one is killed the others are, too; some may have noticed before."""
    running = {process.sentinel: process for process in job.processes}
    codes = set[int]()
    while running and -signal.SIGKILL not in codes:
        gone = [running.pop(each) for each in wait(list(running), world.HANG_S)]
        assert gone, "all ranks hang"
        codes |= {process.exitcode for process in gone} - {0}
    if codes:
        job.kill(range(len(job.processes)))
    outcomes = job.join()
    assert not codes or -signal.SIGKILL in codes, "\n".join(each.trace for each in outcomes)
    return outcomes


# -- what came -------------------------------------------------------------------------------------------


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


def check_life(
    job: Job, out: Path, number: int, life: Life, wanted: Sequence[Any], begin: int, end: int
) -> list[int]:
    """All that came is what it is to be; of steps begin..end, all came, and once. Returns the workers' pids."""
    came: dict[int, Held] = {step: [] for step in range(job.steps)}
    workers: list[int] = []
    for rank in life.layout.ranks().tolist():
        for at, (step, held, pids) in enumerate(records(out / f"{number}-{rank}")):
            assert step == begin + at
            workers += pids
            place = life.layout.coord(rank)
            if place.tp == place.pp == 0:
                came[step].append((rank, held))
    for step, of_ranks in came.items():
        job.check(wanted[step], of_ranks, life, begin <= step < end)
    return workers


def run_chain(job: Job, folder: Path, out: Path, chain: int, record_property: Any) -> None:
    """One chain, from its first life to the end of the job."""
    dice = random.Random(f"{SEED} {chain}")
    seed = dice.randrange(3)
    wanted, begin, died = job.wanted(folder, seed), 0, list[str]()
    while begin < job.steps:
        number = len(died)
        life = life_of(dice, dice.choice(MOMENTS) if number < MOST_KILLS else "never", job.encoders)
        ranks = world.start(live, life.layout.world_size, job, folder, seed, life, number, out)
        killed = -signal.SIGKILL in [outcome.exitcode for outcome in ended(ranks)]
        state = out / "state.json"
        end = content_of(json.loads(state.read_text()))["step"] if state.exists() else 0
        workers = check_life(job, out, number, life, wanted, begin, end)
        check_nothing_is_left([process.pid for process in ranks.processes], workers)
        assert killed or end == job.steps, life
        died.append(life.moment if killed else "")
        begin = end
    record_property("kills", " ".join(died))
