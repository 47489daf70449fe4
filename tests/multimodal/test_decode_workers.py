"""Workers that decode, on real ranks: one that dies or hangs ends the job by name; and nothing piles up over steps."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch.distributed as dist

import meshfeed as mf
import world
from leftovers import as_a_rank_with_workers, check_nothing_is_left, held_by, shared_by
from meshfeed.datasets import workers
from meshfeed.parts import Parts
from observe import seen_step, take
from pictures import Look, multimodal, write_pictures
from soak import cases

PACKING = mf.Packing(capacity=64, oversize="truncate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "store"
    write_pictures(path)
    return path


_parts_left: list[int] = []  # in a worker that is to get a signal, the parts that it decodes before
_signal: list[int] = []


class Signalled(Look):
    """Look, in a worker that a signal may reach while it decodes."""

    def __call__(self, data: bytes, size: Any, rng: np.random.Generator) -> Any:
        if _parts_left:
            _parts_left[0] -= 1
            if _parts_left[0] == 0:
                os.kill(os.getpid(), _signal[0])
        return super().__call__(data, size, rng)


def wait_for_end_of_workers() -> None:
    """Those killed may take a moment to go."""
    deadline = time.monotonic() + world.HANG_S
    while multiprocessing.active_children() or "meshfeed-workers" in {
        each.name for each in threading.enumerate()
    }:
        assert time.monotonic() < deadline, "workers are left"
        time.sleep(0.01)


def ending(
    recipe: mf.Recipe, layout: str, delivery: Any, machine: mf.Machine, sent_when_idle: int
) -> tuple[str, str, list[int]]:
    """How a job ended on this rank: type and text of its error; and its workers' pids."""
    options: Any = {"machine": machine, "packing": PACKING}
    feed = mf.Feed(
        recipe, mf.Layout.parse(layout), transport=mf.Transport(delivery=delivery, timeout_s=600), **options
    )
    pids: list[int] = []
    try:
        with feed:
            for step in feed:
                list(step.microbatches)
                pids = [child.pid or 0 for child in multiprocessing.active_children()]
                for pid in pids if sent_when_idle else []:
                    os.kill(pid, sent_when_idle)
    except mf.MeshfeedError as error:
        return type(error).__name__, str(error), pids
    raise AssertionError("the stream has no end")


def two_jobs(rank: int, folder: str, layout: str, delivery: str, when: str, sent: int) -> list[Any]:
    """What `ending` gives of two jobs in a row, in each of which a worker gets a signal; and the descriptors then open."""
    as_a_rank_with_workers()
    cast(Any, workers)._GRACE_S = 0.2
    _parts_left[:], _signal[:] = [4] if when == "decoding" else [], [sent]
    timeout_s = 1 if sent == signal.SIGSTOP else 600
    recipe = multimodal(Path(folder), image=Signalled(), sequences=4)
    ends: list[Any] = []
    for _ in range(2):
        machine = mf.Machine(workers=1, item_timeout_s=timeout_s)
        ends.append(ending(recipe, layout, delivery, machine, sent if when == "idle" else 0))
        wait_for_end_of_workers()
        dist.barrier()
        most = ends[1] if len(ends) > 1 else sys.maxsize
        ends.append(descriptors_down_to(most))
    return ends


def descriptors_down_to(most: int) -> int:
    """Open descriptors: what threads that have just ended hold is closed a moment later."""
    deadline = time.monotonic() + world.HANG_S
    while True:
        gc.collect()
        if (held := held_by()[1]) <= most or time.monotonic() > deadline:
            return held
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("when", "sent", "layout", "delivery", "said"),
    [
        (
            "decoding",
            signal.SIGKILL,
            "tp2",
            "share",
            r"worker 0 \(process \d+\) was killed by signal 9 while",
        ),
        (
            "decoding",
            signal.SIGSTOP,
            "cp2",
            "broadcast",
            "has not arrived after 1 s; check what makes it in a worker",
        ),
        ("idle", signal.SIGKILL, "pp2", "share", r"worker 0 \(process \d+\) was killed by signal 9 while"),
    ],
)
def test_a_worker_that_dies_or_hangs_ends_the_job_by_name_and_leaves_nothing(
    folder: Path, when: str, sent: int, layout: str, delivery: str, said: str
) -> None:
    running = world.start(two_jobs, 2, str(folder), layout, delivery, when, sent)
    pids = [process.pid for process in running.processes]
    for first, descriptors, second, descriptors_then in running.results():
        for kind, text, of_workers in (first, second):
            assert kind == "StoreError"
            assert re.search(r"^rank [01] \(.*could not read step \d+: Multimodal with 1 worker", text), text
            assert re.search(said, text) and re.search(
                rf"{folder}.*document \d+, part \d \(epoch 0\)", text
            ), text
            pids += of_workers
        assert descriptors_then <= descriptors
    check_nothing_is_left(pids[:2], pids)


# -- over many steps --------------------------------------------------------------------------------


def held_over_steps(rank: int, folder: str, num_steps: int) -> list[list[tuple[int, int]]]:
    """(KiB of memory, descriptors) of this rank and of its worker, half-way and at the end."""
    as_a_rank_with_workers()
    seen: list[list[tuple[int, int]]] = []
    recipe = multimodal(Path(folder), sequences=4)
    options: Any = {"machine": mf.Machine(workers=1), "packing": PACKING}
    with mf.Feed(
        recipe, mf.Layout(tp=2), transport=mf.Transport(delivery="share", timeout_s=600), **options
    ) as feed:
        for step in feed:
            list(step.microbatches)
            if step.index in (num_steps // 2, num_steps):
                gc.collect()
                pids = [os.getpid(), *(child.pid or 0 for child in multiprocessing.active_children())]
                seen.append([held_by(pid) for pid in pids])
                assert not shared_by(pids), "what is shared loses its name at once"
            if step.index == num_steps:
                break
    return seen


class Faulting(Look):
    """Look, which fills and frees 40 MiB; in place of its width, page faults of its process so far."""

    def __call__(self, data: bytes, size: Any, rng: np.random.Generator) -> Any:
        filled = [b"x" * (4 << 20) for _ in range(10)]
        del filled
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        made = super().__call__(data, size, rng)
        return {**made, "image_grid": np.array([[size.height, faults]])}


def faults_of_parts(rank: int, folder: str) -> list[int]:
    """Page faults of the worker of this rank at the end of each part, of 16 or more."""
    as_a_rank_with_workers()
    seen: list[int] = []
    recipe = multimodal(Path(folder), image=Faulting())
    with mf.Feed(recipe, machine=mf.Machine(workers=1), packing=PACKING) as feed:
        for step in feed:
            for microbatch in step.microbatches:
                seen += microbatch["image_grid"][:, 1].tolist()
            if len(seen) >= 16:
                break
    return sorted(seen)


def test_a_worker_uses_the_memory_of_a_part_for_the_next(folder: Path) -> None:
    (faults,) = world.run(faults_of_parts, 1, str(folder))
    assert faults[-1] - faults[-6] < 5 * 200, "each part fills 10,240 pages"


def test_memory_and_descriptors_do_not_grow_over_steps(folder: Path) -> None:
    """Whatever leaked a few KiB, or one descriptor, in each step of `make test` would be seen; 200 bytes in a soak."""
    for half_way, at_end in world.run(held_over_steps, 2, str(folder), cases(100, 10_000)):
        for (kib, descriptors), (kib_then, descriptors_then) in zip(half_way, at_end, strict=True):
            assert kib_then < kib + 1024
            assert descriptors_then < descriptors + 30, "more than the parts under way"


class Numbered:
    """Items of a user."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, at: mf.order.EpochIndex) -> dict[str, Any]:
        return {"x": np.full(3, at.index)}


def _feed(folder: Path, kind: str) -> mf.Feed:
    if kind == "parts":
        return mf.Feed(multimodal(folder), packing=PACKING, machine=mf.Machine(workers=2))
    recipe = mf.Recipe(data=mf.Mapped(Numbered()), sequence=mf.Samples("x"), batch=mf.Batch(4))
    return mf.Feed(recipe, machine=mf.Machine(workers=2))


@pytest.mark.parametrize("kind", ["parts", "items"])
def test_a_forked_child_that_leaves_the_feed_leaves_its_parents_workers(folder: Path, kind: str) -> None:
    """Nor does it wait for what a thread of its parent was doing; a feed of its own has its own workers."""
    with _feed(folder, kind) as feed:
        wanted = take(feed, 6)
    seen, done, held = list[Any](), threading.Event(), threading.Event()

    def hold() -> None:
        with getattr(vars(Parts)["sample"], "lock", contextlib.nullcontext()):  # none since Python 3.12
            held.set()
            done.wait()

    with _feed(folder, kind) as feed:
        for step in feed:
            seen.append(seen_step(step, step.microbatches))
            if step.index == 2:
                thread = threading.Thread(target=hold)
                thread.start()
                held.wait()
                if not (child := os.fork()):
                    signal.alarm(int(world.HANG_S))
                    with contextlib.suppress(BaseException):
                        feed.close()
                        with mf.Feed(feed.recipe, packing=feed.packing, machine=mf.Machine(workers=1)) as own:
                            os._exit(0 if take(own, 2) == wanted[:2] else 1)
                    os._exit(2)
                done.set()
                thread.join()
                assert os.waitpid(child, 0)[1] == 0
            if step.index == 5:
                break
    assert seen == wanted
    wait_for_end_of_workers()
