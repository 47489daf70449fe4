"""Parts encoded on Ray: on a running cluster, or on one that is started on this machine for the run."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshfeed.errors import PrepareError
from meshfeed.extras import install
from meshfeed.prepare.engines.tasks import ONE_THREAD, encoded, prepare_tasks, run_task

_STORE_BYTES = 80 << 20  # nothing goes through Ray's object store; this is the least it accepts
_REACH_S, _LOOK_S = 30.0, 0.1


@dataclass(frozen=True, slots=True)
class OnRay:
    """An Engine of Ray tasks, one core each. If a node is lost, Ray restarts its tasks elsewhere.

    Attributes:
        num_workers: tasks, at most.
        address: of a running cluster, "auto" for that of this machine. None takes $RAY_ADDRESS; if that is
            not set, Ray is started here, for this run and this machine alone.

    Every node must see the folder and the inputs, and have meshfeed installed.
    """

    num_workers: int
    address: str | None = None

    def encode(self, folder: Path, parts: Sequence[int]) -> Generator[int, None, None]:
        if not parts:
            return
        tasks = prepare_tasks(folder, parts)
        with self._cluster() as ray:
            start = ray.remote(num_cpus=1)(_run_task).remote
            started = [start(tasks, task) for task in range(min(self.num_workers, len(parts)))]
            try:
                yield from encoded(tasks, parts, lambda: _end(ray, started), _LOOK_S)
            finally:
                for task in started:
                    ray.cancel(task, force=True)

    @contextmanager
    def _cluster(self) -> Generator[Any]:
        try:
            ray = importlib.import_module("ray")
        except ImportError as missing:
            raise PrepareError(f"--engine ray needs the package ray: {install('ray')}") from missing
        if ray.is_initialized():
            yield ray
            return
        address = self.address or os.environ.get("RAY_ADDRESS")
        if address:
            _refuse_silent(address)
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
        here = {
            "num_cpus": self.num_workers,
            "object_store_memory": _STORE_BYTES,
            "_node_ip_address": "127.0.0.1",
        }
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(address, **quiet) if address else ray.init(**quiet, **here)
        except (ConnectionError, RuntimeError, ValueError) as failed:
            raise PrepareError(
                f"Ray at {address or 'this machine'} cannot be used: {failed}; if it needs a token, set "
                f"RAY_AUTH_MODE=token"
            ) from failed
        try:
            yield ray
        finally:
            ray.shutdown()


def _refuse_silent(address: str) -> None:
    """Raise PrepareError if nothing answers at host:port; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except OSError as error:
        raise PrepareError(
            f"Ray at {address} cannot be reached: {error}; look at --ray-address and $RAY_ADDRESS"
        ) from error


def _end(ray: Any, started: list[Any]) -> tuple[int, str] | None:
    done, running = ray.wait(started, num_returns=len(started), timeout=0)
    for task in done:
        try:
            ray.get(task)
        except ray.exceptions.RayError as lost:
            first = str(lost).strip().partition("\n")[0]
            how = f"the Ray task that encoded it is lost: {first}; continue with --resume"
            return started.index(task), how
    return None if running else (0, "every Ray task ended without it; continue with --resume")


def _run_task(tasks: Path, task: int) -> None:
    os.environ.update(ONE_THREAD)
    run_task(tasks, task)
