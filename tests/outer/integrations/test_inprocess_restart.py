"""In-process restart, as Megatron-LM uses it: NVIDIA's wrapper calls the training function again after a failure.

It raises in the middle of whatever the other ranks do, counts restarts, and numbers the ranks that are left anew.
The feed lives on in each process, and `Feed.run` finds the step. Collectives are gloo's.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

import meshfeed as mf
import world
from services.needs import wheel
from services.processes import free_port

FAILS_AT, KILLED_AT, STEPS = 3, 6, 10
PACKING = mf.Packing(capacity=128)


@pytest.fixture
def recipe(tmp_path: Path) -> mf.Recipe:
    with mf.IndexedWriter(tmp_path / "c", np.uint16) as writer:
        for length in range(1, 60):
            writer.add_document(np.zeros(length, np.uint16))
    return mf.Recipe(data=mf.open(tmp_path / "c"), sequence=mf.Documents(), batch=mf.Batch(11))


def _rank(
    number: int, recipe: mf.Recipe, port: int, wrapper_port: int
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Restart and step -> the sequences that this process has trained on. Rank 1 fails, then rank 2 is killed."""
    from nvidia_resiliency_ext import inprocess

    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # the wrapper starts a process of its own
    store = TCPStore("127.0.0.1", port, None, False)
    os.environ.update(RANK=str(number), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1")
    feed = mf.Feed(recipe, packing=PACKING, transport=mf.Transport(timeout_s=60))
    seen, taken = dict[tuple[int, int], list[tuple[int, int]]](), [0]

    def train(call_wrapper: Any = None) -> None:
        restart, rank, size = call_wrapper.iteration, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        own = PrefixStore(f"restart {restart}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timedelta(seconds=12))
        place: Any = {"layout": mf.Layout(dp=size), "rank": rank, "generation": restart, "rendezvous": store}
        for step in feed.run(taken[0], **place, meet=True):
            draws = [microbatch.draws for microbatch in step.microbatches]
            drawn = [at for each in draws for at in zip(each.epoch.tolist(), each.index.tolist())]
            if (restart, step.index, number) == (0, FAILS_AT, 1):
                raise ValueError("a soft failure")
            if (restart, step.index, number) == (1, KILLED_AT, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))
            seen[restart, step.index] = drawn
            taken[0] = step.index + 1
            call_wrapper.ping()
            if step.index == STEPS - 1:
                break
        dist.destroy_process_group()

    train.__annotations__["call_wrapper"] = inprocess.CallWrapper  # how it is asked for
    soon = timedelta(milliseconds=50)
    inprocess.Wrapper(
        store_kwargs={"port": wrapper_port, "timeout": timedelta(seconds=60)},
        monitor_thread_interval=soon,
        monitor_process_interval=soon,
        progress_watchdog_interval=soon,
        last_call_wait=soon,
    )(train)()
    feed.close()
    return seen


def test_survivors_go_on_where_the_job_was(recipe: mf.Recipe) -> None:
    wheel("nvidia_resiliency_ext")
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    job = world.start(_rank, 3, recipe, store.port, free_port(), distributed=False)
    outcomes = job.join()
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert outcomes[2].exitcode == -signal.SIGKILL
    seen, begins = [outcomes[number].result for number in (0, 1)], 0
    for restart, size in enumerate((3, 3, 2)):
        layout, trained = mf.Layout(dp=size), [[s for r, s in each if r == restart] for each in seen]
        for rank, steps in enumerate(trained):
            assert steps == [*range(begins, begins + len(steps))]
            for simulated in mf.simulate(recipe, layout, steps, packing=PACKING):
                if simulated.rank == rank:
                    draws = [microbatch.draws for microbatch in simulated.microbatches]
                    wanted = [at for each in draws for at in zip(each.epoch.tolist(), each.index.tolist())]
                    assert seen[rank][restart, simulated.batch.step] == wanted
        begins += min(map(len, trained))  # what all survivors have committed
    assert begins == STEPS
