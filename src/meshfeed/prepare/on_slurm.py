"""Parts encoded by an array job of Slurm, by its own commands.

    FOLDER/slurm/parts.json     the parts of each task
    FOLDER/slurm/TASK.log       what the task printed
    FOLDER/slurm/TASK.error     why it gave up, as JSON

`python -m meshfeed.prepare.on_slurm FOLDER` is what a task runs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from meshfeed.errors import MeshfeedError, PrepareError
from meshfeed.files import typed_errors
from meshfeed.files.message import told, untold
from meshfeed.prepare.encode import encode_part
from meshfeed.prepare.engine import ONE_THREAD
from meshfeed.prepare.job import read_json, write_json
from meshfeed.prepare.part_file import part_path

_LOOK_S = 1.0
_LAG_S = 60.0  # a shared file system may show late what a task has written
_TASK = "SLURM_ARRAY_TASK_ID"


@dataclass(frozen=True, slots=True)
class OnSlurm:
    """An Engine of one array job, a core per task, that is waited for; Slurm requeues what a lost node ran.

    Attributes:
        num_workers: tasks of the array, at most.
        options: of sbatch, such as "--partition=cpu".

    Folder, inputs and this Python must lie where every node sees them. A run that is killed leaves its tasks
    to Slurm; the next one, with --resume, takes what they have made and ends them.
    """

    num_workers: int
    options: Sequence[str] = ()

    def encode(self, folder: Path, parts: Sequence[int]) -> Generator[int, None, None]:
        """See Engine."""
        if not parts:
            return
        shares = [list(parts[task :: self.num_workers]) for task in range(min(self.num_workers, len(parts)))]
        name = f"meshfeed-{hashlib.blake2b(os.fsencode(folder), digest_size=6).hexdigest()}"
        _cancel(name)  # what a killed run has left
        with typed_errors(folder):
            shutil.rmtree(folder / "slurm", ignore_errors=True)
            (folder / "slurm").mkdir()
        write_json(folder / "slurm" / "parts.json", shares)
        job = self._submitted(folder, name, len(shares))
        try:
            yield from _arriving(folder, parts, job)
        finally:
            _cancel(name)
            job.kill()
            job.communicate()

    def _submitted(self, folder: Path, name: str, num_tasks: int) -> subprocess.Popen[str]:
        command = [
            *("sbatch", "--wait", "--quiet", f"--job-name={name}", f"--array=0-{num_tasks - 1}"),
            *("--ntasks=1", "--cpus-per-task=1", "--requeue", f"--output={folder}/slurm/%a.log"),
            *self.options,
            *("--wrap", f"exec {quote(sys.executable)} -m {__name__} {quote(str(folder))}"),
        ]
        path = os.pathsep.join(sys.path)  # a task imports what this process does
        env = os.environ | ONE_THREAD | {"PYTHONPATH": path}
        try:
            return subprocess.Popen(
                command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env, text=True
            )
        except FileNotFoundError as missing:
            raise PrepareError(
                "--engine slurm: no sbatch here; run this where Slurm's commands are, or take another engine"
            ) from missing


def _arriving(folder: Path, parts: Sequence[int], job: subprocess.Popen[str]) -> Generator[int, None, None]:
    """The parts as they come to lie there. Raises what stopped a task, PrepareError where some never come."""
    waiting, patience = set(parts), _LAG_S
    while waiting:
        with suppress(subprocess.TimeoutExpired):
            job.wait(_LOOK_S)
        status = job.poll()
        there = {part for part in waiting if part_path(folder, part).exists()}
        waiting -= there
        yield from sorted(there)
        for refused in sorted((folder / "slurm").glob("*.error")):
            raise untold(read_json(refused))
        if status is not None and waiting:
            if status or patience <= 0:
                raise _unfinished(folder, min(waiting), status, job)
            patience -= _LOOK_S
            time.sleep(_LOOK_S)


def _unfinished(folder: Path, part: int, status: int, job: subprocess.Popen[str]) -> PrepareError:
    said = job.stderr.read().strip() if job.stderr is not None else ""
    shares = read_json(folder / "slurm" / "parts.json")
    task = next(task for task, share in enumerate(shares) if part in share)
    log = folder / "slurm" / f"{task}.log"
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    said = said or (lines[-1] if lines else "nothing")
    return PrepareError(
        f"part {part}: task {task} of the Slurm job ended without it (status {status}), saying: {said}; see "
        f"{log}, and continue with --resume"
    )


def _cancel(name: str) -> None:
    """End the job of this name, if any."""
    with suppress(FileNotFoundError):
        subprocess.run(["scancel", "--quiet", f"--name={name}"], check=False, capture_output=True)


def main(folder: Path) -> int:
    """One task: encode its share."""
    task = int(os.environ[_TASK])
    for part in read_json(folder / "slurm" / "parts.json")[task]:
        try:
            encode_part(folder, part)
        except MeshfeedError as error:
            write_json(folder / "slurm" / f"{task}.error", told(error))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
