"""torchft's manager says when a step begins who takes part in it, and `Feed.at` gives each its part of the step.

The model counts the tokens that it was trained on. So whoever is lost and comes back, it must hold what one
process would have counted: a step that is lost or comes twice shows, and a sequence that two replicas had.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import meshfeed as mf
import world
from services.needs import wheel
from soak import some

LOST_AT, JOINS_AT, WIDTH = 3, 6, 64
PACKING = mf.Packing(capacity=128)
LIMIT = timedelta(seconds=60)


@pytest.fixture
def recipe(tmp_path: Path) -> mf.Recipe:
    rng = np.random.default_rng(0)
    with mf.IndexedWriter(tmp_path / "c", np.uint16) as writer:
        for _ in range(300):
            writer.add_document(rng.integers(0, WIDTH, rng.integers(1, 60)).astype(np.uint16))
    return mf.Recipe(data=mf.open(tmp_path / "c"), sequence=mf.Documents(), batch=mf.Batch(11))


def _replica(number: int, recipe: mf.Recipe, lighthouse: str, port: int, options: dict[str, Any]) -> Any:
    """A replica group of one process. Number 2 is killed in a step, number 3 comes later and heals.

    All stop three steps after it has joined. Returns the model, and step -> its replica number and how many.
    """
    from torchft import Manager, ProcessGroupGloo

    test = TCPStore("127.0.0.1", port, None, False)
    own = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    counts, taken = torch.zeros(WIDTH), dict[int, tuple[int, int]]()
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        state_dict=lambda: {"counts": counts.clone()},
        load_state_dict=lambda state: counts.copy_(state["counts"]),
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=own.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{number}",
        init_sync=False,
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        connect_timeout=LIMIT,
        hostname="127.0.0.1",
        **options,
    )
    try:
        with mf.Feed(recipe, packing=PACKING) as feed:
            if number == 3:
                test.wait(["join"])
            elif test.add("here", 1) == 3:
                test.set("all here", "")
            test.wait(["all here"])
            while not test.check(["last"]) or manager.current_step() <= int(test.get("last")):
                if manager.current_step() == JOINS_AT:
                    test.set("join", "")
                manager.start_quorum()
                replica, replicas = manager.participating_rank(), manager.num_participants()
                gradient = torch.zeros(WIDTH)
                if replica is not None:
                    step = feed.at(manager.current_step(), mf.Layout(dp=replicas), replica)
                    for microbatch in step.microbatches:
                        real = microbatch["tokens"][microbatch["sequence_ids"] >= 0]
                        gradient += torch.bincount(real.long(), minlength=WIDTH)
                    if number == 2 and step.index == LOST_AT:
                        os.kill(os.getpid(), signal.SIGKILL)
                gradient *= replicas  # of which the manager takes the mean
                manager.allreduce(gradient).wait()
                at = manager.current_step()
                if manager.should_commit():
                    counts += gradient
                    taken[at] = replica, replicas
                    if number == 3 and replica is not None and not test.check(["last"]):
                        test.set("last", str(at + 3))
            return counts.tolist(), taken
    finally:
        manager.shutdown(wait=False)


@some(1)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_each_step_is_whole_whichever_replicas_take_part(recipe: mf.Recipe, asynchronous: bool) -> None:
    wheel("torchft")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer("127.0.0.1:0", 2, join_timeout_ms=20_000, heartbeat_timeout_ms=3_000)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    options = {"use_async_quorum": asynchronous}
    try:
        where = lighthouse.address(), store.port
        job = world.start(_replica, 4, recipe, *where, options, distributed=False)
        outcomes = job.join()
    finally:
        lighthouse.shutdown()
    assert [outcome.error for outcome in outcomes] == [None] * 4
    (first, taken), second, third = (outcomes[number].result for number in (0, 1, 3))
    assert sorted(taken) == [*range(int(store.get("last")) + 1)]
    assert taken[LOST_AT - 1][1] == 3 and taken[LOST_AT][1] == 2 and taken[max(taken)][1] == 3
    assert first == second[0] == third[0] == _counted(recipe, len(taken))


def _counted(recipe: mf.Recipe, steps: int) -> list[float]:
    """What one process would have counted after so many steps."""
    counts = np.zeros(WIDTH)
    with recipe.sources[0] as store:
        for simulated in mf.simulate(recipe, mf.Layout(), steps, packing=PACKING):
            documents = simulated.batch.draws.index
            for document, length in zip(documents.tolist(), store.lengths(documents).tolist()):
                counts += np.bincount(store.read(document, 0, length), minlength=WIDTH)
    return counts.tolist()
