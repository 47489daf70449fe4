"""The job of test_strangers, attacked while it joins: `python strangers_job.py FOLDER`; writes FOLDER/found.json.

It runs in a network namespace of its own, which holds its abstract sockets. Rank 0 waits at its listener; the
attackers find that in /proc/net/unix, as any user can, and are there before the other ranks come.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import socket
import struct
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import meshfeed as mf
import world
from corpus import recipe_of
from observe import take
from soak import SOAK

RANKS, STEPS, NOBODY, MANY = 3, 4, 65_534, 20
CASES = (("impostor", NOBODY), *itertools.product(("garbage", "silence", "flood"), (NOBODY, 0)))
if not SOAK:
    CASES = (("impostor", NOBODY), ("garbage", 0), ("silence", NOBODY), ("flood", NOBODY))
SAYS = {"garbage": b"abc", "impostor": struct.pack("<q", 1)}  # an impostor says what rank 1 would
LAYOUT = mf.Layout.parse("tp3")


def rank_of_job(rank: int, path: str, where: str) -> list[Any]:
    """A rank takes some steps under each attack; ranks other than the reader come once it is under way."""
    import torch.distributed as dist

    store = dist.FileStore(where, -1)
    seen: list[Any] = []
    for case in range(len(CASES)):
        if rank:
            store.wait([f"under attack {case}"])
        with mf.Feed(
            recipe_of(path),
            LAYOUT,
            rank,
            transport=mf.Transport(delivery="share", rendezvous=store, timeout_s=600),
        ) as feed:
            seen.append(take(feed, STEPS))
    return seen


def attack(orders: Connection, kind: str, user: int, names: list[str], ranks: list[int]) -> None:
    """What a process of `user` does until it is told to stop; says what it got."""
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    links = [_connected(names[-1]) for _ in range(MANY)]
    for link in links if kind in SAYS else ():
        with contextlib.suppress(OSError):
            link.send(SAYS[kind])
    orders.send("under way")
    while kind == "flood" and not orders.poll():
        with contextlib.suppress(OSError):
            _connected(names[-1], wait=False).close()
    orders.recv()
    got = [_received(link) for link in links] + ([_opened(rank) for rank in ranks] if user else [])
    orders.send(sorted(set(got)))


def _connected(name: str, wait: bool = True) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.setblocking(wait)
    link.connect(f"\0{name}")
    return link


def _received(link: socket.socket) -> str:
    """What the job has sent to a stranger."""
    if not select.select([link], [], [], 0)[0]:
        return "nothing"
    try:
        data, fds, _, _ = socket.recv_fds(link, 1 << 16, 250)
    except ConnectionResetError:
        return "nothing"
    return f"{len(data)} bytes, {len(fds)} descriptors" if data or fds else "nothing"


def _opened(rank: int) -> str:
    """What the memory of a rank gives to another user."""
    try:
        return f"descriptors {os.listdir(f'/proc/{rank}/fd')}"
    except PermissionError:
        return "nothing"


def doors() -> list[str]:
    """The names at which any rank of this network namespace waits."""
    lines = Path("/proc/self/net/unix").read_text().splitlines()
    listening = [line.split()[-1] for line in lines[1:] if line.split()[3] == "00010000"]
    return [name[1:] for name in listening if re.fullmatch(r"@meshfeed-[0-9a-f]{32}", name)]


def main(folder: str) -> dict[str, Any]:
    import torch.distributed as dist

    where = f"{folder}/store"
    job = world.start(rank_of_job, RANKS, f"{folder}/text", where, distributed=False)
    pids, store = [process.pid for process in job.processes], dist.FileStore(where, -1)
    got: dict[str, Any] = {}
    before: set[str] = set()
    for at, (kind, user) in enumerate(CASES):
        while not (names := [name for name in doors() if name not in before]):
            assert all(process.is_alive() for process in job.processes), job.join()
            time.sleep(0.01)
        before |= set(names)
        ours, theirs = world.context.Pipe()
        process = world.context.Process(target=attack, args=(theirs, kind, user, names, pids))
        process.start()
        assert ours.recv() == "under way"
        store.set(f"under attack {at}", "1")
        while names[-1] in doors():  # the reader closes it once its peers are in
            assert all(each.is_alive() for each in job.processes), job.join()
            time.sleep(0.01)
        ours.send("stop")
        got[f"{kind} {user}"] = ours.recv()
        process.join()
    return {"got": got, "seen": json.dumps(job.results())}


if __name__ == "__main__":
    (Path(sys.argv[1]) / "found.json").write_text(json.dumps(main(sys.argv[1])))
