"""Whoever waits for a lock says for whom, ends in time, and never gives up on one that works."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import meshfeed as mf
from meshfeed.errors import CacheError, StateError
from meshfeed.files.cache.once import once_per_node
from meshfeed.files.local import lock
from meshfeed.files.local.lock import locked

_HOLD = """
import sys, time
from pathlib import Path
from meshfeed.files.local.lock import locked
with locked(Path(sys.argv[1]), 0o666):
    print("held", flush=True)
    time.sleep(3600)
"""
_MAKE = """
import sys, time
from pathlib import Path
from meshfeed.files.cache.once import once_per_node
def make(part):
    print("held", flush=True)
    time.sleep(3600)
once_per_node(Path(sys.argv[1]), lambda path: path.read_text(), make)
"""


@contextlib.contextmanager
def process(script: str, path: Path) -> Generator[subprocess.Popen[str]]:
    """A process that holds a lock."""
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "held\n"
            yield child
        finally:
            child.kill()


def test_a_lock_that_nobody_else_should_hold_for_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with process(_HOLD, tmp_path / "a.lock") as holder:
        with (
            pytest.raises(CacheError, match=rf"a\.lock: process {holder.pid} \(host .+\) has held this lock"),
            locked(tmp_path / "a.lock", limit_s=0.3),
        ):
            pass
        os.kill(holder.pid, signal.SIGSTOP)
        with (
            pytest.raises(
                CacheError, match=rf"process {holder.pid} \(host .+, stopped by SIGSTOP\) has held"
            ),
            locked(tmp_path / "a.lock", limit_s=0.3, works=True),
        ):
            pass
        assert not caplog.records


def test_one_that_works_is_waited_for_and_told_after_ten_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_SAY_S", 0.5)
    with process(_HOLD, tmp_path / "a.lock") as holder, caplog.at_level(logging.WARNING, "meshfeed"):
        killed = threading.Event()

        def kill() -> None:
            while not caplog.records:
                time.sleep(0.1)
            time.sleep(1.0)
            killed.set()
            holder.kill()

        threading.Thread(target=kill).start()
        with locked(tmp_path / "a.lock", limit_s=0.3, works=True):
            assert killed.is_set(), "held until its holder died"
    said = [record.getMessage() for record in caplog.records]
    assert f"for process {holder.pid} (host {os.uname().nodename}), which holds {tmp_path}/a.lock" in said[0]


def test_a_holder_of_another_host_is_known_by_what_it_wrote(tmp_path: Path) -> None:
    (tmp_path / "a.lock").write_text("process 7 (host far)")
    with (tmp_path / "a.lock").open() as file:
        assert str(lock._Holder.of(file.fileno(), tmp_path / "a.lock")) == "process 7 (host far)"
    with locked(tmp_path / "b.lock"), (tmp_path / "b.lock").open() as file:
        assert f"process {os.getpid()} " in str(lock._Holder.of(file.fileno(), tmp_path / "b.lock"))


@pytest.mark.parametrize("folder", ["", "/dev/shm"], ids=["disk", "memory"])
def test_an_inode_is_of_its_device(tmp_path: Path, folder: str) -> None:
    """Files of two devices may have one inode: the holder of the other one is not named."""
    with tempfile.NamedTemporaryFile(dir=folder or tmp_path) as file:
        place = lock._place_of(file.fileno())
        device, _, inode = place.rpartition(":")
        major, _, minor = device.partition(":")
        assert int(inode) == os.stat(file.name).st_ino
        for other in (f"{major}:ff{minor}", f"ff{major}:{minor}"):
            told = f"1: FLOCK  ADVISORY  WRITE 4711 {other}:{inode} 0 EOF\n"
            own = f"2: FLOCK  ADVISORY  WRITE 12 {place} 0 EOF\n"
            waits = f"2: -> FLOCK  ADVISORY  WRITE 13 {place} 0 EOF\n"
            posix = f"3: POSIX  ADVISORY  WRITE 14 {place} 0 EOF\n"
            assert lock._pid_in(told, place) == lock._pid_in(told + posix + waits, place) == 0
            assert lock._pid_in(own + waits + posix + told, place) == 12
        with locked(Path(file.name)):
            assert lock._pid_in(Path("/proc/locks").read_text(), place) == os.getpid()


def test_many_that_hold_it_in_turn_are_not_one_that_holds_it_long(tmp_path: Path) -> None:
    until = time.monotonic() + 4

    def turns(seed: int) -> int:
        rng, num_turns = random.Random(seed), 0
        while time.monotonic() < until:
            with locked(tmp_path / "a.lock", limit_s=2.0):
                num_turns += 1
                time.sleep(rng.uniform(0, 0.05))
            time.sleep(rng.uniform(0, 0.2))
        return num_turns

    with ThreadPoolExecutor(8) as pool:
        assert min(pool.map(turns, range(8))) > 0


def test_what_a_stopped_process_makes_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "LIMIT_S", 0.5)
    with process(_MAKE, tmp_path / "key") as maker:

        def ask() -> str:
            return once_per_node(
                tmp_path / "key", Path.read_text, lambda part: part.write_text("mine") and None
            )

        os.kill(maker.pid, signal.SIGSTOP)
        with pytest.raises(CacheError, match=f"process {maker.pid} .*, stopped by SIGSTOP"):
            ask()
        os.kill(maker.pid, signal.SIGCONT)
        threading.Timer(1.0, maker.kill).start()
        assert ask() == "mine", "of one that goes on, until it dies"


def test_the_lock_beside_a_ledger(tmp_path: Path) -> None:
    """It is only held for a moment, so the time of the feed ends the wait."""
    amended = mf.amendments.Ledger().added(mf.amendments.Amendment(step=3, change=mf.amendments.BatchSize(4)))
    path = tmp_path / "ledger.jsonl"
    with process(_HOLD, tmp_path / "ledger.jsonl.lock") as holder:
        began = time.monotonic()
        with pytest.raises(StateError, match=f"{path}: cannot write the ledger .*process {holder.pid}"):
            amended.keep(path, timeout_s=0.5)
        assert time.monotonic() - began < 50
    amended.keep(path, timeout_s=0.5)
    assert mf.amendments.Ledger.read(path) == amended
