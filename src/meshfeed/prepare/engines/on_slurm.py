"""Parts encoded by an array job of Slurm, through its own commands.

FOLDER/slurm/TASK.log has the output of a task.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshfeed.errors import PrepareError
from meshfeed.files import typed_errors
from meshfeed.prepare.engines.tasks import ONE_THREAD, encoded, prepare_tasks, run_task
from meshfeed.prepare.without_torch import command

_LOOK_S = 1.0
_LAG_S = 60.0  # a shared file system may show late what a task has written


@dataclass(frozen=True, slots=True)
class OnSlurm:
    """An Engine of one array job, a core per task, for which it waits. Slurm requeues tasks of lost nodes.

    Attributes:
        num_workers: tasks of the array, at most.
        options: of sbatch, such as "--partition=cpu".

    Every node must see the folder, the inputs and this Python. A killed run leaves its tasks to
    Slurm; the next one, with --resume, takes the parts that they made and ends them.
    """

    num_workers: int
    options: Sequence[str] = ()

    def encode(self, folder: Path, parts: Sequence[int]) -> Generator[int, None, None]:
        if not parts:
            return
        name = f"meshfeed-{hashlib.blake2b(os.fsencode(folder), digest_size=6).hexdigest()}"
        _cancel(name)  # the job of a killed run
        tasks = prepare_tasks(folder, parts)
        logs = folder / "slurm"
        with typed_errors(logs):
            logs.mkdir(exist_ok=True)
        submit = [
            *("sbatch", "--wait", "--quiet", f"--job-name={name}"),
            f"--array=0-{min(self.num_workers, len(parts)) - 1}",
            *("--ntasks=1", "--cpus-per-task=1", "--requeue", f"--output={logs}/%a.log"),
            *self.options,
            *("--wrap", shlex.join(["exec", *command(__name__, str(tasks))])),
        ]
        # the path, so that tasks import the same packages
        env = os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(sys.path)}
        try:
            job = subprocess.Popen(
                submit, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env, text=True
            )
        except FileNotFoundError as missing:
            raise PrepareError(
                "--engine slurm: no sbatch here; run this where Slurm's commands are, or take another engine"
            ) from missing
        lag_ends_s = float("inf")

        def end() -> tuple[int, str] | None:
            """How the job ended, once it has failed, or once its last parts had time to show up."""
            nonlocal lag_ends_s
            status = job.poll()
            if status is None:
                return None
            lag_ends_s = min(lag_ends_s, time.monotonic() + _LAG_S)
            if status == 0 and time.monotonic() < lag_ends_s:
                return None
            reason = job.stderr.read().strip() if job.stderr is not None else ""
            reason = f": {reason}" if reason else ""
            return 0, (
                f"the Slurm job ended without it (status {status}){reason}; see {logs}, then continue with "
                f"--resume"
            )

        try:
            yield from encoded(tasks, parts, end, _LOOK_S)
        finally:
            _cancel(name)
            job.kill()
            job.communicate()


def _cancel(name: str) -> None:
    with suppress(FileNotFoundError):
        subprocess.run(["scancel", "--quiet", f"--name={name}"], check=False, capture_output=True)


def main(tasks: str) -> None:
    """One task of the array."""
    run_task(Path(tasks), int(os.environ["SLURM_ARRAY_TASK_ID"]))
