"""Shared memory among other users of the machine: who may join, and what one who may not can do."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import strangers_job
from strangers_job import LAYOUT, MANY, NOBODY, RANKS, STEPS

import meshfeed as mf
import quick
import world
from corpus import recipe_of, write_corpus
from meshfeed.deliver.local import Listener, connect
from observe import simulated, take
from services.needs import needs, needs_root


@pytest.fixture
def corpus() -> Iterator[str]:
    """A corpus that every user may read."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        write_corpus(Path(folder, "text"), num_tokens=5_000)
        yield folder


def test_attacks_on_a_job_that_joins_change_nothing_and_get_nothing(corpus: str) -> None:
    needs_root()
    needs("unshare", "ip")
    here = Path(__file__).parent
    paths = os.pathsep.join([*filter(None, sys.path), str(here), str(here.parent)])
    environment = {
        name: value for name, value in os.environ.items() if name != world.SHARED
    }  # ranks of that network
    script = f"ip link set lo up && exec {quick.python()} {here / 'strangers_job.py'} {corpus}"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", script],
        env=environment | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads((Path(corpus) / "found.json").read_text())
    recipe = recipe_of(f"{corpus}/text")
    expected = [[simulated(recipe, LAYOUT, STEPS, rank)] * len(strangers_job.CASES) for rank in range(RANKS)]
    assert json.loads(told["seen"]) == json.loads(json.dumps(expected))
    assert told["got"] == {f"{kind} {user}": ["nothing"] for kind, user in strangers_job.CASES}
    attacks = sum(user == NOBODY for _, user in strangers_job.CASES)
    assert done.stderr.count(f"a process of user {NOBODY}") == attacks, done.stderr  # once in each


def become_nobody() -> None:
    """Be another user, who may still read the checkout: it may lie in a folder that is closed to others."""
    libc = ctypes.CDLL(None, use_errno=True)
    keep_capabilities, version_3, read_and_search = 8, 0x20080522, 1 << 2
    assert libc.prctl(keep_capabilities, 1, 0, 0, 0) == 0
    os.setuid(NOBODY)
    header = struct.pack("@Ii", version_3, 0)
    held = struct.pack("@6I", read_and_search, read_and_search, 0, 0, 0, 0)
    assert libc.capset(header, held) == 0, os.strerror(ctypes.get_errno())


def of_two_users(rank: int, path: str) -> tuple[list[int], str]:
    if rank == 1:
        become_nobody()
    feed = mf.Feed(
        recipe_of(path), mf.Layout.parse("tp2"), transport=mf.Transport(delivery="share", timeout_s=60)
    )
    with pytest.raises(mf.errors.PeerError) as raised, feed:
        take(feed, 1)
    return list(raised.value.ranks), str(raised.value)


def test_ranks_of_two_users_are_told_so(corpus: str) -> None:
    """At once, by the reader too, which sees a stranger like any other."""
    needs_root()
    for ranks, said in world.run(of_two_users, 2, f"{corpus}/text"):
        assert ranks == [0], said
        assert (
            f"it runs as user 0, this rank as user {NOBODY}; start all ranks of a machine as one user" in said
        )


def squat(pipe: Any, name: str) -> None:
    os.setuid(NOBODY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        pipe.send("listening")
        link, _ = listener.accept()
        pipe.send(link.recv(100))


def test_a_door_that_another_user_has_taken_over_is_not_trusted() -> None:
    needs_root()
    ours, theirs = world.context.Pipe()
    process = world.context.Process(target=squat, args=(theirs, name := f"meshfeed-test-{os.getpid()}"))
    process.start()
    assert ours.recv() == "listening"
    with pytest.raises(PermissionError, match=f"runs as user {NOBODY}"):
        connect(name, 1, 20)
    assert ours.recv() == b""  # it was said nothing
    process.join()


def connections_to(listener: Listener, count: int) -> list[socket.socket]:
    links = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
    for link in links:
        link.connect(f"\0{listener.name}")
    return links


@pytest.mark.parametrize("says", [b"", b"abc", b"x" * 8, b"x" * 100, bytes(8)])
def test_whoever_says_nothing_that_makes_sense_keeps_nobody_waiting(says: bytes) -> None:
    """Silence, garbage, a rank that is not expected: before and between the ranks that are."""
    with Listener() as listener:
        strangers = connections_to(listener, MANY)
        for link in strangers if says else ():
            link.send(says)
        first = connect(listener.name, 1, 20)
        strangers += connections_to(listener, MANY)
        second = connect(listener.name, 2, 20)
        again = connect(listener.name, 2, 20)  # a rank is taken once
        came = dict(listener.accept([1, 2], 60, lambda: False))
        assert sorted(came) == [1, 2]
        for link, rank in ((first, 1), (second, 2)):
            came[rank].send(b"to %d" % rank)
            assert link.recv(10) == b"to %d" % rank
        for link in (*strangers, again):
            assert strangers_job._received(link) == "nothing"
    for link in (*strangers, first, second, again, *came.values()):
        link.close()


def test_waiting_for_ranks_ends_in_time_or_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    with Listener() as listener, caplog.at_level(logging.WARNING):
        for timeout_s, is_over in ((0.01, lambda: False), (1e6, lambda: True)):
            with pytest.raises(TimeoutError):
                list(listener.accept([1], timeout_s, is_over))
    assert not caplog.records


def test_a_full_queue_of_connections_is_waited_for() -> None:
    """Python's own timeout would fail at once, which a flood of connections could bring about."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{(name := f'meshfeed-test-full-{os.getpid()}')}")
        listener.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
            first.connect(f"\0{name}")
            began = time.monotonic()
            with pytest.raises(TimeoutError, match="queue of connections was full"):
                connect(name, 1, 0.25)
            assert time.monotonic() - began >= 0.2
