"""Parts encoded by processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshfeed.errors import PrepareError
from meshfeed.prepare.engines.tasks import ONE_THREAD, encoded, prepare_tasks, run_task
from meshfeed.prepare.without_torch import command

_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Local:
    """Processes of this machine.

    Attributes:
        num_workers: how many at most.
        environment: variables that they have beside those of this process.
    """

    num_workers: int
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise PrepareError(f"{self.num_workers} workers; at least one is needed")

    def encode(self, folder: Path, parts: Sequence[int]) -> Generator[int, None, None]:
        tasks = prepare_tasks(folder, parts)
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for task in range(min(self.num_workers, len(parts))):
                words = command(__name__, str(tasks), str(task))
                env = os.environ | ONE_THREAD | dict(self.environment)
                workers.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=2, env=env))
            yield from encoded(tasks, parts, lambda: _end(workers), _LOOK_S)
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()


def num_cores() -> int:
    """The cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> tuple[int, str] | None:
    statuses = [worker.poll() for worker in workers]
    for task, status in enumerate(statuses):
        if status == -signal.SIGKILL:
            how = "was killed, perhaps out of memory; continue with --resume and fewer --workers"
        elif status and status < 0:
            how = f"died of {signal.Signals(-status).name}; continue with --resume"
        elif status:
            how = f"ended with status {status}, see above; continue with --resume"
        else:
            continue
        return task, f"the worker that encoded it {how}"
    return None if None in statuses else (0, "every worker ended without it; continue with --resume")


def main(tasks: str, task: str) -> None:
    """A worker. It ends at once when its run does, even when that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run that gets it ends us
    threading.Thread(target=_end_with_run, daemon=True).start()
    run_task(Path(tasks), int(task))


def _end_with_run() -> None:
    sys.stdin.read()
    os._exit(1)
