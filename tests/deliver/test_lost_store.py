"""The host of the rendezvous store is stopped, cut off or killed: every rank ends within twice its timeout."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import meshfeed as mf
import world
from corpus import recipe_of, write_corpus
from soak import cases

TIMEOUT_S = 15.0  # of a call on the store


def serve(rank: int, told: Any) -> None:
    """A host of a store; it tells its port."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    told.send(store.port)
    threading.Event().wait()


class Line:
    """A line to a port that can be cut: connections stay open, and nothing comes through."""

    def __init__(self, port: int) -> None:
        self._listener, self._to = socket.create_server(("127.0.0.1", 0)), port
        self.port: int = self._listener.getsockname()[1]
        self.cut = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here = self._listener.accept()[0]
            try:
                there = socket.create_connection(("127.0.0.1", self._to))
            except OSError:  # the host is dead
                here.close()
                continue
            for one, other in ((here, there), (there, here)):
                threading.Thread(target=self._forward, args=(one, other), daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if not self.cut.is_set():
                    other.sendall(data)


@pytest.fixture
def host() -> Iterator[tuple[int, int]]:
    """A process that serves a store, and its port."""
    ours, theirs = world.context.Pipe()
    (process,) = world.start(serve, 1, theirs, distributed=False).processes
    yield process.pid, ours.recv()
    process.kill()
    process.join()


def states_of(pid: int) -> set[str]:
    """What the threads of a process do; the thread that serves goes on until another has taken a signal."""
    stats = (each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat"))
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


def ending(feed: mf.Feed, after: Any) -> tuple[str, str, list[str], float]:
    """How a feed ends, and how long after the host was lost."""
    try:
        with feed:
            for step in feed:
                list(step.microbatches)
                if step.index == 1:
                    after("trains")
    except mf.MeshfeedError as error:
        spent = time.time() - float(after("lost"))
        return type(error).__name__, str(error), getattr(error, "__notes__", []), spent
    return "done", "", [], 0.0


def rank_of_a_job(rank: int, path: str, port: int, folder: str) -> Any:
    """Ranks 0 and 1 train, and the storage of rank 1 has failed; rank 2 waits for rank 3."""
    where = Path(folder)
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60))

    def after(what: str) -> str:
        if what == "trains":
            (where / f"trains{rank}").touch()
        while not (where / "lost").exists():
            time.sleep(0.01)
        return (where / "lost").read_text()

    if rank == 3:
        return None
    while rank == 2 and not (where / "train").exists():  # all others train
        time.sleep(0.01)
    layout, name = (mf.Layout(dp=2), "training") if rank < 2 else (mf.Layout(tp=4), "waiting")
    delivery = "direct" if rank < 2 else "share"
    feed = mf.Feed(
        recipe_of(path, steps=4), layout, rank, transport=mf.Transport(delivery=delivery, timeout_s=TIMEOUT_S, rendezvous=store, name=name),
    )  # fmt: skip
    if rank == 1:
        load, begun = feed.recipe.sequence.load, iter(range(10**6))  # type: ignore[attr-defined]

        def broken(*given: Any) -> Any:
            if next(begun) == 2:  # of its third step
                after("lost")
                raise mf.errors.MissingError("shard 7")
            return load(*given)

        object.__setattr__(feed.recipe.sequence, "load", broken)
    return ending(feed, after)


@pytest.mark.parametrize("how", ["cut off", "stopped", "killed"][: cases(1, 3)])
def test_every_rank_ends_when_the_store_is_lost(tmp_path: Path, host: tuple[int, int], how: str) -> None:
    write_corpus(tmp_path / "text", num_tokens=20_000)
    pid, port = host
    line = Line(port)
    jobs = world.start(rank_of_a_job, 4, str(tmp_path / "text"), line.port, str(tmp_path), distributed=False)
    direct: Any = dist.TCPStore("127.0.0.1", port, None, False)
    deadline = time.monotonic() + 200
    begun = [tmp_path / "trains0", tmp_path / "trains1"]
    while not all(path.exists() for path in begun):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    before = direct.num_keys()
    (tmp_path / "train").touch()
    while (
        direct.num_keys() < before + 4
    ):  # who rank 2 is, what it brings, that it is there, how many are: it waits
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if how == "cut off":
        line.cut.set()
    else:
        os.kill(pid, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
        while how == "stopped" and {"T"} != states_of(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    (tmp_path / "lost.new").write_text(str(time.time()))
    os.rename(tmp_path / "lost.new", tmp_path / "lost")
    first, failing, waiting, _ = jobs.results(200)
    assert first[0] == "done", "who needs nothing more trains to the end"
    assert failing[0] == "MissingError", failing
    assert "could not report this error to the other ranks" in failing[2][0], failing
    assert waiting[0] == "DeliveryError" and f"the rendezvous store at 127.0.0.1:{line.port}" in waiting[1]
    # twice, as the page of limits says, and half a minute that a busy machine may take
    assert max(first[3], failing[3], waiting[3]) < 2 * TIMEOUT_S + 30, (first, failing, waiting)


def test_nothing_is_amended_without_an_answer_of_the_store(tmp_path: Path, host: tuple[int, int]) -> None:
    """The others may have begun a run without this rank."""
    write_corpus(tmp_path / "text", num_tokens=20_000)
    line = Line(host[1])
    store = dist.TCPStore("127.0.0.1", line.port, None, False, timeout=timedelta(seconds=60))
    transport = mf.Transport(delivery="direct", timeout_s=4, rendezvous=store)
    recipe, ledger = recipe_of(tmp_path / "text", sequences=4), tmp_path / "ledger.jsonl"
    with mf.Feed(recipe, mf.Layout(dp=2), 1, transport=transport, ledger=ledger) as feed:
        next(iter(feed))
        line.cut.set()
        with pytest.raises(mf.errors.DeliveryError, match="has not answered for 2 s") as lost:
            feed.amend(mf.amendments.BatchSize(8))
        assert "nothing has changed" in lost.value.__notes__[0]
        assert not feed.ledger and feed.recipe.batch == recipe.batch
