"""Ranks with workers that decode, and what they leave behind or pile up: processes, shared memory, descriptors, memory."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import world
from meshfeed.multimodal import decoding


def as_a_rank_with_workers() -> None:
    """This process may have workers, leads the group that they are in, and gets all arrays through shared memory."""
    multiprocessing.current_process().daemon = False
    os.setpgrp()
    cast(Any, decoding)._SHARED_BYTES = 64


def running_in(groups: Iterable[int]) -> list[int]:
    """Processes of some process groups, without those that have ended."""
    groups, found = set(groups), []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has just ended
            continue
        if int(group) in groups and state != "Z":
            found.append(int(stat.parent.name))
    return found


def check_nothing_is_left(groups: Iterable[int], workers: Iterable[int]) -> None:
    """No process of some groups runs on, and no shared memory has a name of theirs or of their workers'."""
    deadline, groups = time.monotonic() + world.HANG_S, list(groups)
    while left := running_in(groups):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    assert not shared_by((*groups, *workers))


def shared_by(pids: Iterable[int]) -> list[str]:
    """Names in /dev/shm that torch gave to shared memory of some processes."""
    own = {f"torch_{pid}" for pid in pids}
    return [name for name in os.listdir("/dev/shm") if "_".join(name.split("_")[:2]) in own]


def held_by(pid: int | str = "self") -> tuple[int, int]:
    """(KiB of memory, but for that of files; open descriptors) of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status)
    return sum(map(int, kib)), len(os.listdir(f"/proc/{pid}/fd"))
