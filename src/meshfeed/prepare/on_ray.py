"""Parts encoded on Ray: a cluster that is there, or one that is started on this machine for the run."""

from __future__ import annotations

import importlib
import os
import socket
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshfeed.errors import MeshfeedError, PrepareError
from meshfeed.extras import install
from meshfeed.files.message import told, untold
from meshfeed.prepare.encode import encode_part
from meshfeed.prepare.engine import ONE_THREAD

_STORE_BYTES = 80 << 20  # nothing but numbers of parts goes through Ray's object store; this is its least
_REACH_S = 30.0


@dataclass(frozen=True, slots=True)
class OnRay:
    """An Engine of Ray tasks, a core each; a task whose node is lost is tried again, elsewhere.

    Attributes:
        num_workers: tasks at once at most.
        address: of a running cluster, "auto" for that of this machine. None takes $RAY_ADDRESS; where that is
            not set either, Ray is started here, for this run and this machine alone.

    Folder and inputs must lie where every node sees them, and meshfeed must be installed there.
    """

    num_workers: int
    address: str | None = None

    def encode(self, folder: Path, parts: Sequence[int]) -> Generator[int, None, None]:
        """See Engine."""
        if not parts:
            return
        with self._cluster() as ray:
            encoded = ray.remote(num_cpus=1)(_encoded)
            waiting, running = deque(parts), dict[Any, int]()
            part = parts[0]
            try:
                while waiting or running:
                    while waiting and len(running) < self.num_workers:
                        part = waiting.popleft()
                        running[encoded.remote(folder, part)] = part
                    (done, *_), _ = ray.wait(list(running), num_returns=1)
                    part = running.pop(done)
                    refused = ray.get(done)
                    if refused is not None:
                        raise untold(refused)
                    yield part
            except ray.exceptions.RayError as lost:
                first = str(lost).strip().partition("\n")[0]
                raise PrepareError(
                    f"part {part}: the Ray task that encoded it is lost: {first}; continue with --resume"
                ) from lost
            finally:
                for task in running:
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
                f"Ray at {address or 'this machine'} cannot be used: {failed}; where it wants a token, set "
                f"RAY_AUTH_MODE=token"
            ) from failed
        try:
            yield ray
        finally:
            ray.shutdown()


def _refuse_silent(address: str) -> None:
    """Raise PrepareError where nobody answers at host:port; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except OSError as error:
        raise PrepareError(
            f"Ray at {address} cannot be reached: {error}; look at --ray-address and $RAY_ADDRESS"
        ) from error


def _encoded(folder: Path, part: int) -> dict[str, str] | None:
    """Encode a part; the error where it is refused. As a value: no node unpickles what another has raised."""
    os.environ.update(ONE_THREAD)
    try:
        encode_part(folder, part)
    except MeshfeedError as error:
        return told(error)
    return None
