"""Servers as child processes that die with the test that started them, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import psutil

_PR_SET_PDEATHSIG = 1
_UP_S = 300.0


def free_port() -> int:
    """A port that nobody had a moment ago; who binds it may still find it taken, and should ask again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def server(
    command: Sequence[str], up: int | Callable[[], bool], log: Path, **options: Any
) -> Generator[subprocess.Popen[bytes], None, None]:
    """A process that runs until the end of the `with`; entered once it is up. Raises where it ends before.

    up: the port on which it listens then, or a function that says so.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=_die_with_parent, **options
        )
    try:
        until = time.monotonic() + _UP_S
        while not (_listens(process.pid, up) if isinstance(up, int) else up()):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{command[0]} did not come up: {log.read_text()[-2000:]}")
            time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def _listens(pid: int, port: int) -> bool:
    """Whether this process or a child of it does: somebody else may have taken the port since `free_port`."""
    with contextlib.suppress(psutil.NoSuchProcess):
        own = psutil.Process(pid)
        for process in (own, *own.children(recursive=True)):
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN and each.laddr.port == port:
                    return True
    return False
