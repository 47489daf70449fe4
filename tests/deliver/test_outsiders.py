"""Processes that are no members of a run: each is refused by name, and the run goes on untouched."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import meshfeed as mf
import transports
import world
from corpus import recipe_of, write_corpus
from observe import simulated, take

LONG = timedelta(seconds=world.HANG_S)
PACKING = mf.Packing(capacity=8)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=20_000)
    return str(path)


def store_at(port: int) -> Any:
    """A connection of this process's own, which is a rank of no launcher's job."""
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    return dist.TCPStore("127.0.0.1", port, None, False)


def run(function: Callable[..., Any], num_processes: int, *args: Any) -> list[Any]:
    """Every process's result; the first argument after its number is the port of their store."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return world.run(function, num_processes, server.port, *args, distributed=False)


def source_of(kind: str, path: str, layout: mf.Layout, rank: int, **options: Any) -> Any:
    options["timeout_s"] = 600
    if kind == "exchange":
        rows = ({"tokens": np.full(3, number)} for number in range(10**6))
        return mf.Exchange(rows, layout, rank, **transports.of(packing=PACKING, **options))
    return mf.Feed(recipe_of(path), layout, rank, **transports.of(delivery=kind, **options))


# what an outsider is: layout, rank, and a vocabulary for which it fails before it has met anybody
OUTSIDERS = [
    ("tp2", 1, None),
    ("dp2", 0, None),  # a second job of the same name
    ("dp4", 3, None),  # a larger one, with ranks that the first has not
    ("tp2", 1, 1),
    ("dp4", 2, 1),
]


def job_and_outsiders(rank: int, port: int, path: str, kind: str) -> Any:
    """Ranks 0 and 1 train in two loops; process 2 is each outsider in turn, in both of them."""
    store, told = store_at(port), []
    if rank < 2:
        with source_of(kind, path, mf.Layout(tp=2), rank, rendezvous=store_at(port)) as source:
            for loop in range(2):
                told += take(source, 2)
                steps = iter(source)
                store.set(f"training {loop} {rank}", "1")
                store.wait([f"refused {loop}"], LONG)
                told += take(steps, 3)
        return told
    for loop in range(2):
        store.wait([f"training {loop} 0", f"training {loop} 1"], LONG)
        for layout, other, vocab_size in OUTSIDERS:
            options = {} if vocab_size is None or kind == "exchange" else {"vocab_size": vocab_size}
            where = mf.Layout.parse(layout)
            source = source_of(kind, path, where, other, rendezvous=store_at(port), **options)
            with pytest.raises(mf.MeshfeedError) as raised:
                take(source, 1)
            told.append((type(raised.value).__name__, str(raised.value)))
        store.set(f"refused {loop}", "1")
    return told


@pytest.mark.parametrize("kind", ["share", "broadcast", "direct", "exchange"])
def test_an_outsider_is_refused_and_the_job_goes_on(corpus: str, kind: str) -> None:
    *members, refused = run(job_and_outsiders, 3, corpus, kind)
    assert [[seen["step"] for seen in each] for each in members] == [list(range(10))] * 2
    if kind != "exchange":
        expected = [simulated(recipe_of(corpus), mf.Layout(tp=2), 10, rank) for rank in range(2)]
        assert members == expected
    for (_, rank, _), (error, text) in zip(OUTSIDERS * 2, refused):
        who = (
            f"two processes of this job are rank {rank}"
            if rank < 2
            else f"rank {rank} is not among the ranks"
        )
        assert (error, who in text) == ("PeerError", True), text


def larger_later(rank: int, port: int, path: str) -> list[str]:
    """Rank 0 begins a layout of two ranks, the others one of four; then all begin that of four."""
    store, told = store_at(port), []
    for attempt in range(2):
        mistaken = attempt == 0 and rank == 0
        if attempt == 0 and rank:
            store.wait(["began0"], LONG)
        layout = mf.Layout(dp=2 if mistaken else 4)
        with source_of("direct", path, layout, rank, rendezvous=store_at(port)) as source:
            try:
                steps = iter(source)
                take([next(steps)])
                store.set(f"began{rank}", "1")
                if mistaken:
                    store.wait([f"over0{other}" for other in (1, 2, 3)], LONG)
                take([next(steps)])
                told.append("trained")
            except mf.errors.PeerError as error:
                told.append("disagrees" if "rank 1 and rank 0 disagree" in str(error) else "not among")
        store.set(f"over{attempt}{rank}", "1")
        store.wait([f"over{attempt}{other}" for other in range(4)], LONG)
    return told


def test_who_was_not_counted_is_in_the_run_of_which_it_is(corpus: str) -> None:
    told = run(larger_later, 4, corpus)
    assert [each[1] for each in told] == ["trained"] * 4
    assert [each[0] for each in told[:2]] == ["disagrees"] * 2, "ranks 2 and 3 may have begun before that"
    assert {each[0] for each in told[2:]} <= {"disagrees", "not among"}


def loop_in(child: Callable[..., None], *args: Any) -> str:
    """What a forked child sends back."""
    ours, theirs = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child(*args, theirs)
        finally:
            os._exit(0)
    theirs.close()
    text = ours.recv()
    os.waitpid(pid, 0)
    return str(text)


def begin(make: Callable[[], Any], pipe: Any) -> None:
    try:
        pipe.send(f"trained {len(take(make(), 1))}")
    except mf.MeshfeedError as error:
        pipe.send(f"{type(error).__name__}: {error}")


def with_children(rank: int, path: str, kind: str, where: str) -> Any:
    """Rank 0 forks a child that makes the same Feed: before the first loop, and in three loops."""
    told, steps = [], []
    store = dist.FileStore(f"{path} {kind}", 2) if where == "files" else None

    def make() -> Any:
        return source_of(kind, path, mf.Layout(tp=2), rank, rendezvous=store)

    if rank == 0 and store is None:
        told.append(loop_in(begin, make))
    dist.barrier()
    with make() as source:
        for _ in range(3):
            loop = iter(source)
            steps += take(loop, 1)
            if rank == 0:
                told.append(loop_in(begin, make))
            steps += take(loop, 1)
    return [seen["step"] for seen in steps], told


def test_a_child_that_is_forked_before_the_first_feed_is_refused(corpus: str) -> None:
    """Two ranks of an interpreter that had no feed yet join the default group, and one forks before it has one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = (
        "import os, sys; import torch.distributed as dist; import meshfeed as mf\n"
        "path, port = sys.argv[1:]; other = os.fork(); rank = int(not other)\n"
        "dist.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}', rank=rank, world_size=2)\n"
        "def say(*words): os.write(1, (' '.join(map(str, words)) + chr(10)).encode())  # in one piece\n"
        "def steps():\n"
        "    recipe = mf.Recipe(data=mf.open(path), sequence=mf.Windows(16), batch=4, steps=3)\n"
        "    with mf.Feed(recipe, mf.Layout(dp=2)) as feed: return len(list(feed))\n"
        "child = os.fork() if rank == 0 else 1\n"
        "if not child:\n"
        "    try: say('child', steps())\n"
        "    except mf.errors.DeliveryError as error: say('child', 'forked process' in str(error))\n"
        "    os._exit(0)\n"
        "if rank == 0: os.waitpid(child, 0)\n"
        "say(rank, steps()); dist.barrier(); dist.destroy_process_group()\n"
        "if other: say('ended', os.waitpid(other, 0)[1])\n"
    )
    words = [sys.executable, "-c", code, corpus, str(port)]
    told = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True).stdout.splitlines()
    assert sorted(told) == ["0 3", "1 3", "child True", "ended 0"]


@pytest.mark.parametrize(
    ("kind", "where"), [("share", "default group"), ("exchange", "default group"), ("broadcast", "files")]
)
def test_a_forked_child_is_refused_and_its_parent_goes_on(corpus: str, kind: str, where: str) -> None:
    (steps, told), (others, _) = world.run(with_children, 2, corpus, kind, where)
    assert steps == others == list(range(6))
    wanted = "two processes of this job are rank 0" if where == "files" else "forked"
    assert len(told) == (3 if where == "files" else 4)
    for text in told:
        assert text.startswith(("PeerError", "DeliveryError")) and wanted in text, text
