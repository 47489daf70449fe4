"""Ranks that are killed, and what the others, the machine and the next job see of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import meshfeed as mf
import world
from corpus import recipe_of, write_corpus
from meshfeed.deliver import share
from meshfeed.deliver.meeting import Meeting
from observe import simulated, take
from soak import cases, some

LONG = timedelta(seconds=600)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=5_000)
    return str(path)


@pytest.fixture(autouse=True)
def clean_machine() -> Iterator[None]:
    """Whatever happens in a test, nothing of ours has a name afterwards."""
    before = named_things()
    yield
    assert named_things() <= before


def named_things() -> set[str]:
    names = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    return {name for name in names if "meshfeed" in name}


def store_at(where: str) -> Any:
    store = dist.FileStore(where, -1)
    store.set_timeout(LONG)
    return store


def endless(rank: int, path: str, layout: str, delivery: str, where: str, call_at: int, prefetch: int) -> Any:
    """Takes batches for ever; says when it has got so far; tells who was lost and what was said of it."""
    store = store_at(where)
    recipe = recipe_of(path, length=32, sequences=8)
    feed = mf.Feed(
        recipe, mf.Layout.parse(layout, ranks_per_node=2 if delivery == "tree" else None), rank, transport=mf.Transport(delivery=delivery, rendezvous=store, prefetch=prefetch, timeout_s=600),
    )  # fmt: skip
    try:
        for step in feed:
            for microbatch in step.microbatches:
                assert microbatch["position_ids"].shape == (1, 32)
            if step.index == call_at:
                store.set(f"at{rank}", "1")
    except mf.errors.PeerError as lost:
        return lost.ranks, str(lost)


def kill_one(
    corpus: str, where: Path, victim: int, call_at: int, prefetch: int, delivery: str = "share", size: int = 4
) -> None:
    jobs = world.start(
        endless, size, corpus, f"tp{size}", delivery, str(where), call_at, prefetch, distributed=False
    )  # fmt: skip
    store_at(str(where)).wait([f"at{rank}" for rank in range(size)], LONG)
    jobs.kill([victim])
    outcomes = jobs.join(300)  # half the timeout of the feed
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.exitcode == -9
            continue
        assert outcome.error is None, outcome.trace
        ranks, said = outcome.result
        assert ranks == (victim,) and f"rank {victim}" in said
    assert not any(process.is_alive() for process in jobs.processes)


@some(2)
@pytest.mark.parametrize("turn", range(cases(6, 30)))
def test_a_killed_rank_ends_the_others_at_once_and_leaves_nothing(
    corpus: str, tmp_path: Path, turn: int
) -> None:
    victim = 0 if turn % 2 == 0 else 1 + turn // 2 % 3
    kill_one(corpus, tmp_path / "store", victim, call_at=turn % 5, prefetch=(0, 1, 4)[turn % 3])


@some(2)
@pytest.mark.parametrize("turn", range(cases(6, 30)))
def test_a_killed_rank_ends_a_tree(corpus: str, tmp_path: Path, turn: int) -> None:
    """The reader, a leader elsewhere, a peer of either: on three nodes of two."""
    victim = (0, 1, 2, 3, 4, 5)[turn * 5 % 6]
    kill_one(
        corpus,
        tmp_path / "store",
        victim,
        call_at=turn % 4,
        prefetch=(0, 1, 4)[turn % 3],
        delivery="tree",
        size=6,
    )


def killed_once_all_are_here(rank: int, path: str) -> Any:
    met = mf.deliver.Meeting.meet

    def meet(self: Any, purpose: str, peers: Any) -> str:
        prefix = met(self, purpose, peers)
        os.kill(os.getpid(), 9)
        return prefix

    feed = mf.Feed(
        recipe_of(path), mf.Layout.parse("tp2"), transport=mf.Transport(delivery="share", timeout_s=600)
    )
    if feed.role.reads:
        mf.deliver.Meeting.meet = meet  # type: ignore[method-assign]
    try:
        next(iter(feed))
    except mf.errors.PeerError as lost:
        return lost.ranks, str(lost)


def test_a_reader_that_dies_as_its_peers_come_is_not_waited_for(corpus: str) -> None:
    reader, peer = world.start(killed_once_all_are_here, 2, corpus, distributed=True).join(300)
    assert reader.exitcode == -9
    assert peer.result is not None, peer.trace
    assert peer.result[0] == (0,) and "cannot reach rank 0" in peer.result[1]


def finite(rank: int, path: str, where: str, steps: int) -> Any:
    recipe = recipe_of(path, length=32, sequences=8)
    feed = mf.Feed(
        recipe,
        mf.Layout.parse("tp2"),
        rank,
        transport=mf.Transport(delivery="share", rendezvous=store_at(where), timeout_s=600),
    )
    return take(feed, steps)


def test_two_jobs_side_by_side_do_not_see_each_other(corpus: str, tmp_path: Path) -> None:
    doomed = world.start(
        endless, 2, corpus, "tp2", "share", str(tmp_path / "one"), 3, 2, distributed=False
    )  # fmt: skip
    other = world.start(finite, 2, corpus, str(tmp_path / "two"), 300, distributed=False)
    store_at(str(tmp_path / "one")).wait(["at0", "at1"], LONG)
    doomed.kill([0])
    assert doomed.join(300)[1].result[0] == (0,)
    again = world.start(finite, 2, corpus, str(tmp_path / "three"), 20, distributed=False)
    expected = simulated(recipe_of(corpus, length=32, sequences=8), mf.Layout.parse("tp2"), 300, 0)
    assert again.results() == [expected[:20]] * 2
    assert other.results() == [expected] * 2


def reader_with_a_child(rank: int, path: str, where: str, fifo: str, delivery: str, starts: str) -> Any:
    """The reader starts a child, as trainers do (for data workers, uploads), before it is killed."""
    store = store_at(where)
    feed = mf.Feed(
        recipe_of(path, length=32, sequences=8), LAYOUT_OF[delivery], rank, transport=mf.Transport(delivery=delivery, rendezvous=store, timeout_s=600),
    )  # fmt: skip
    try:
        for step in feed:
            if step.index == 1 and rank == 0:
                if starts == "program":
                    subprocess.Popen(["cat", fifo], close_fds=False)
                elif os.fork() == 0:
                    with open(fifo) as released:  # waits until somebody opens the other end
                        released.read()
                    os._exit(0)
            if step.index == 2:
                store.set(f"at{rank}", "1")
    except mf.errors.PeerError as lost:
        store.set(f"lost{rank}", "1")
        return lost.ranks


LAYOUT_OF = {
    "share": mf.Layout.parse("tp3"),
    "broadcast": mf.Layout.parse("tp3"),
    "tree": mf.Layout.parse("tp3", ranks_per_node=2),
}


@some(2)
@pytest.mark.parametrize("starts", ["fork", "program"])
@pytest.mark.parametrize("delivery", ["share", "broadcast", "tree"])
def test_a_child_of_the_reader_does_not_keep_it_alive(
    corpus: str, tmp_path: Path, delivery: str, starts: str
) -> None:
    fifo, where = str(tmp_path / "fifo"), str(tmp_path / "store")
    os.mkfifo(fifo)
    jobs = world.start(reader_with_a_child, 3, corpus, where, fifo, delivery, starts, distributed=False)
    store = store_at(where)
    try:
        store.wait(["at0", "at1", "at2"], LONG)
        jobs.kill([0])
        store.wait(["lost1", "lost2"], LONG / 2)  # half the timeout of the feed
    finally:
        with open(fifo, "w"):
            pass
        jobs.kill([0])
    assert [outcome.result for outcome in jobs.join()] == [None, (0,), (0,)]


def killed_while_joining(rank: int, path: str, where: str, delivery: str) -> Any:
    store, meet = store_at(where), Meeting.meet
    if rank == 1:  # comes to the meeting and dies before it connects

        def meet_and_die(*args: Any) -> str:
            prefix = meet(*args)
            os.kill(os.getpid(), 9)
            return prefix

        Meeting.meet = meet_and_die  # type: ignore[method-assign]
    else:

        def meet_and_hurry(meeting: Meeting, *args: Any) -> str:
            prefix = meet(meeting, *args)
            meeting.timeout_s = 1.0  # to connect
            return prefix

        Meeting.meet = meet_and_hurry  # type: ignore[method-assign]
    feed = mf.Feed(
        recipe_of(path),
        mf.Layout.parse("tp3", ranks_per_node=3 - (delivery == "tree")),
        rank,
        transport=mf.Transport(delivery=delivery, rendezvous=store, timeout_s=600),
    )
    with pytest.raises(mf.errors.PeerError) as raised:
        take(feed, 3)
    return str(raised.value)


@pytest.mark.parametrize("delivery", ["share", "broadcast", "tree"])
def test_a_rank_that_dies_between_meeting_and_connecting(corpus: str, tmp_path: Path, delivery: str) -> None:
    outcomes = world.start(
        killed_while_joining, 3, corpus, str(tmp_path / "store"), delivery, distributed=False
    ).join()
    assert [outcome.exitcode for outcome in outcomes] == [0, -9, 0], [o.trace for o in outcomes]
    assert delivery == "tree" or "1" in outcomes[0].result  # in a tree, the others may tire first


@some(2)
@pytest.mark.parametrize("victim", range(4))
def test_a_killed_rank_ends_a_broadcast_and_is_named(corpus: str, tmp_path: Path, victim: int) -> None:
    kill_one(corpus, tmp_path / "store", victim, call_at=3, prefetch=2, delivery="broadcast")


def many_orders(rank: int, path: str) -> list[int]:
    """Feeds that come and go in one process leave no descriptor open."""
    recipe, layout, counts = recipe_of(path, length=32, sequences=8), mf.Layout.parse("tp2"), []
    for delivery in itertools.islice(itertools.cycle(["share", "direct", "broadcast"]), 12):
        with mf.Feed(
            recipe,
            layout,
            transport=mf.Transport(delivery=delivery, timeout_s=600),
            verify=delivery == "direct",
        ) as feed:
            take(feed, 2)
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_feeds_that_come_and_go_keep_no_descriptor(corpus: str) -> None:
    for counts in world.run(many_orders, 2, corpus):
        assert max(counts[6:]) <= max(counts[:6]), counts


def test_last_words_are_heard_though_the_connection_was_reset() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.send(b"a ticket that is never read")
    theirs.send(b"who has died")
    theirs.close()
    assert [share._read_ticket(ours), share._read_ticket(ours)] == [b"who has died", b""]
    other, silent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.settimeout(0.01)
    with pytest.raises(TimeoutError):
        share._read_ticket(other)
    silent.close()


def short_of_descriptors(rank: int, path: str) -> str:
    """Rank 1 may open two more files when the memory of its reader arrives, which has four slots."""
    connect = share.connect

    def connect_and_open(*args: Any) -> socket.socket:
        link = connect(*args)
        most = max(map(int, os.listdir("/proc/self/fd"))) + 4
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        opened = list[int]()
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.dup(0))
        for descriptor in opened[-2:]:
            os.close(descriptor)
        return link

    if rank == 1:
        share.connect = connect_and_open
    transport = mf.Transport(delivery="share", timeout_s=600)
    with pytest.raises(mf.MeshfeedError) as raised:
        take(mf.Feed(recipe_of(path), mf.Layout.parse("tp2"), transport=transport), 6)
    return str(raised.value)


def test_a_rank_that_cannot_open_all_slots_takes_none_for_another(corpus: str) -> None:
    for said in world.run(short_of_descriptors, 2, corpus):
        assert "rank 1 got 2 descriptors of the memory of rank 0" in said


def leaving(rank: int, path: str, leaves: int) -> str:
    """A leader of a node leaves its loop; the others go on."""
    layout, transport = mf.Layout.parse("tp4", ranks_per_node=2), mf.Transport(delivery="tree", timeout_s=600)
    try:
        with mf.Feed(recipe_of(path), layout, transport=transport) as feed:
            take(feed, 3 if rank == leaves else None)
    except mf.errors.PeerError as left:
        return str(left)
    return ""


@pytest.mark.parametrize("leaves", [0, 2])
def test_the_leader_that_leaves_is_named_not_the_reader(corpus: str, leaves: int) -> None:
    told = world.run(leaving, 4, corpus, leaves)
    assert {f"rank {leaves} has closed its feed" in each for each in told if each} == {True}, told
