"""Real processes for tests: a function run by every rank of a small gloo job.

Two fork servers import torch once; each rank is forked from one of them, so that a world of eight starts in a moment.
Each is an interpreter with a hash seed of its own: ranks that differ in one bit iterate over sets in different orders, as
real ranks do. Where several processes run the tests, all share the two servers (see conftest.py). Results and errors come
back over pipes; a rank that dies is reported, never waited for.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver as forkserver
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from soak import SEED, cases

HASH_SEEDS = tuple(str((2 * SEED + server) % 2**32) for server in (1, 2))
"""PYTHONHASHSEED of each fork server."""
HANG_S = float(cases(600, 3_600))
"""A rank that is silent for so long hangs: far beyond what a busy machine takes."""
AFTER_FAILURE_S = 60.0
"""How long the other ranks may go on where one failed and all should have ended well."""

SHARED = "MESHFEED_TESTS_RANKS"
"""Environment variable: where the servers listen that this process shares with others."""
_PRELOADED_FOR_ALL = (
    "lightning.pytorch",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "vlm_models",
    "megatron_world",
    "torch.distributed.checkpoint",
    "world_preload",
)
"""Modules of shared servers; that of a framework that is missing is left out."""
_FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parent / "outer" / "integrations")]
"""Where the modules of `preload` are."""


class _Server(forkserver.ForkServer):
    """A fork server of this process, or one that another process began and ends."""

    def __init__(self, shared: str = "") -> None:
        super().__init__()
        if shared:
            self._forkserver_address = shared
            self._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # it lives as long as who began it

    def ensure_running(self) -> None:
        if self._forkserver_address is None or self._forkserver_pid is not None:
            super().ensure_running()


_shared = os.environ.get(SHARED, "").split()
_servers = [_Server(address) for address in _shared] or [_Server() for _ in HASH_SEEDS]
_preloaded = [*_PRELOADED_FOR_ALL] if _shared else ["world_preload"]  # the last one freezes what all imported


def preload(module: str) -> None:
    """Have all ranks from now on forked from processes that have imported this, too."""
    if module not in _preloaded:
        _preloaded.insert(0, module)
        _servers[:] = [_Server() for _ in HASH_SEEDS]


def share() -> None:
    """Begin servers for this process and all that it starts. What ranks print then goes nowhere."""
    if SHARED not in os.environ:
        _preloaded[:] = _PRELOADED_FOR_ALL
        with _printing_nowhere():
            _start_servers()
        os.environ[SHARED] = " ".join(str(server._forkserver_address) for server in _servers)


@contextlib.contextmanager
def _printing_nowhere() -> Iterator[None]:
    """For processes that begin meanwhile: the terminal is not theirs."""
    kept, nowhere = [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for number, file in zip((1, 2), kept):
            os.dup2(file, number)
        for file in (*kept, nowhere):
            os.close(file)


class _Forked(multiprocessing.context.ForkServerProcess):
    """A process forked from the fork server of this number."""

    server = 0

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        _start_servers()
        with pytest.MonkeyPatch.context() as patch:
            chosen = _servers[process_obj.server]
            patch.setattr(forkserver, "connect_to_new_process", chosen.connect_to_new_process)
            return multiprocessing.context.ForkServerProcess._Popen(process_obj)


class _Context(multiprocessing.context.ForkServerContext):
    Process = _Forked


context = _Context()


def _start_servers() -> None:
    """Both at once: they import at the same time."""
    # a fork server of Python 3.11 looks for what to preload in PYTHONPATH alone
    path = os.pathsep.join([*_FOLDERS, *filter(None, sys.path)])
    for server, seed in zip(_servers, HASH_SEEDS, strict=True):
        server.set_forkserver_preload(_preloaded)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONHASHSEED", seed)
            patch.setenv("PYTHONPATH", path)
            server.ensure_running()


@dataclass
class Outcome:
    """How one rank ended: its result, its error (type name, message), or its exit code alone."""

    result: Any = None
    error: tuple[str, str] | None = None
    exitcode: int | None = None
    trace: str = ""


@dataclass
class World:
    """A running job."""

    processes: list[Any]
    pipes: list[Connection]
    store: (
        Any  # where the ranks meet; served by this process, as torchrun's agent does, for as long as it lives
    )
    outcomes: list[Outcome] = field(default_factory=list)

    def join(self, timeout_s: float = HANG_S, after_failure_s: float = HANG_S) -> list[Outcome]:
        """Every rank's outcome; fails the test where one is still running after `timeout_s`.

        after_failure_s: the same once a rank has failed.
        """
        outcomes = [Outcome() for _ in self.processes]
        open_pipes = dict(zip(self.pipes, range(len(self.pipes))))
        while open_pipes:
            failed = "".join(f"\n{outcome.trace}" for outcome in outcomes if outcome.error)
            ready = wait(list(open_pipes), min(timeout_s, after_failure_s) if failed else timeout_s)
            if not ready:
                stuck = sorted(open_pipes.values())
                self.kill(range(len(self.processes)))
                pytest.fail(f"ranks {stuck} hang{failed}")
            for pipe in ready:
                rank = open_pipes.pop(pipe)
                with contextlib.suppress(EOFError, ConnectionResetError):  # it died before it could say
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
        for process, outcome in zip(self.processes, outcomes):
            process.join(HANG_S)
            if process.is_alive():
                process.kill()
                pytest.fail(f"{process.name} answered and then hung at its exit")
            outcome.exitcode = process.exitcode
        return outcomes

    def results(self, timeout_s: float = HANG_S, after_failure_s: float = AFTER_FAILURE_S) -> list[Any]:
        """Every rank's result; fails the test where one raised. See `join`."""
        outcomes = self.join(timeout_s, after_failure_s)
        for rank, outcome in enumerate(outcomes):
            if outcome.error or outcome.exitcode:
                pytest.fail(f"rank {rank} failed ({outcome.exitcode}): {outcome.error}\n{outcome.trace}")
        return [outcome.result for outcome in outcomes]

    def kill(self, ranks: Iterable[int]) -> None:
        """SIGKILL, as a cluster does it."""
        for rank in ranks:
            self.processes[rank].kill()


def start(
    function: Callable[..., Any], world_size: int, *args: Any, distributed: bool = True, **kwargs: Any
) -> World:
    """Start `function(rank, *args)` on every rank, with torch.distributed over gloo unless told otherwise."""
    from datetime import timedelta

    import torch.distributed as dist

    patience = timedelta(seconds=HANG_S)
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=patience, wait_for_workers=False)
    processes: list[Any] = []
    pipes: list[Connection] = []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_main,
            args=(theirs, function, rank, world_size, store.port, distributed, args, kwargs),
            name=f"rank{rank}",
            daemon=True,
        )
        process.server = rank.bit_count() % len(_servers)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    return World(processes, pipes, store)


def run(function: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Run to the end; every rank's result."""
    return start(function, world_size, *args, **kwargs).results()


def _main(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    distributed: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    import torch
    import torch.distributed as dist

    # What a rank starts itself is forked, as under torchrun. Otherwise it would first start a fork server of its own,
    # which imports all of this once more.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    outcome = Outcome()
    try:
        if distributed:
            store = dist.TCPStore("127.0.0.1", port, None, False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        outcome.result = function(rank, *args, **kwargs)
        if distributed:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException as error:
        outcome.error = (type(error).__name__, str(error))
        outcome.trace = traceback.format_exc()
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    if outcome.error:
        os._exit(1)  # a peer may be gone: do not wait for it in torch's own clean-up


def limit_waits(feed: Any, seconds: float) -> None:
    """From now on the loop of a feed waits so long at most; to meet its peers it had all of `timeout_s`."""
    feed._loop.on._timeout_s = seconds
    if feed._loop.on._verifier is not None:
        feed._loop.on._verifier._meeting.timeout_s = seconds


@contextlib.contextmanager
def waiting_in_vain_for(missing: int) -> Iterator[None]:
    """In this process, a meeting's clock leaps past its timeout once nobody but `missing` is awaited."""
    from meshfeed.deliver import Meeting

    wait_for_all = Meeting._wait_for_all

    def leaping(meeting: Meeting, prefix: str, purpose: str, peers: Sequence[int]) -> bool:
        while set(meeting._missing_ranks(prefix, peers)) - {missing} and not meeting.cancelled.wait(0.01):
            pass
        times = iter([0.0])
        with pytest.MonkeyPatch.context() as patch:
            clock = SimpleNamespace(monotonic=lambda: next(times, math.inf))
            patch.setattr("meshfeed.deliver.meeting.time", clock)
            return wait_for_all(meeting, prefix, purpose, peers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Meeting, "_wait_for_all", leaping)
        yield


def hears_interrupts() -> None:
    """In a child, before it begins: Ctrl-C ends it, though whoever began the tests ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def die_together() -> NoReturn:
    """SIGKILL to this rank once every rank has come here: a rank that hears of another's death first would fail instead."""
    import torch.distributed as dist

    try:
        dist.barrier()  # the one that leaves it last may lose the others in it
    finally:
        os.kill(os.getpid(), signal.SIGKILL)
