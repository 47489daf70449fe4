"""The tasks of a run: they claim parts, one at a time, and encode them. Engines start them.

A run and its tasks share the job's folder, so tasks may run on any machine that sees it.

    FOLDER/tasks/RUN/parts.json   the parts to encode
    FOLDER/tasks/RUN/PART.claim   symbolic link that names the task that encodes the part
    FOLDER/tasks/RUN/TASK.error   why the task gave up

An engine starts `run_task(tasks, task)` for some tasks, with the folder of its run, and reports how they
ended; `encoded` does the rest. Tasks of a killed run find that their folder is gone.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Protocol

from meshfeed import errors
from meshfeed.errors import MeshfeedError, PrepareError
from meshfeed.files import typed_errors
from meshfeed.prepare.job.encode_part import encode
from meshfeed.prepare.job.job import load_job, read_json, write_json

ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
"""Environment of each task: many processes of one thread encode more than a few of many threads."""


class Engine(Protocol):
    """Runs the encoding of a job's parts."""

    def encode(self, folder: Path, parts: Sequence[int]) -> Generator[int, None, None]:
        """Call `encode_part(folder, part)` for each part, anywhere that sees the folder and the inputs.

        Yields each part, in any order, once it is in the folder. When the iterator is closed, or raises,
        nothing keeps running. Raises errors of `encode_part`, and PrepareError naming the part whose worker
        died.
        """
        ...


def prepare_tasks(folder: Path, parts: Sequence[int]) -> Path:
    """The folder of a new run's tasks, in that of its job. Raises StoreError."""
    tasks = folder / "tasks" / secrets.token_hex(4)
    with typed_errors(folder):
        shutil.rmtree(tasks.parent, ignore_errors=True)
        tasks.parent.mkdir(exist_ok=True)
        tasks.mkdir()
    write_json(tasks / "parts.json", list(parts))
    return tasks


def run_task(tasks: Path, task: int) -> None:
    """Encode parts until each has been claimed by some task. A restarted task keeps its claims."""
    try:
        job = load_job(tasks.parents[1])
        encoder = job.encoder()
        for part in read_json(tasks / "parts.json"):
            if _claim(tasks, part, task):
                encode(job, encoder, part)
    except MeshfeedError as error:
        kind = (errors.class_of(error) or MeshfeedError).__name__
        write_json(tasks / f"{task}.error", {"kind": kind, "text": str(error)})


def encoded(
    tasks: Path, parts: Sequence[int], end: Callable[[], tuple[int, str] | None], look_s: float
) -> Generator[int, None, None]:
    """Each of the parts once it is encoded.

    end: returns the task that failed and how, once no more parts will come; None while all is well.

    Raises the error of the first task that gave up, and PrepareError for a task that died.
    """
    missing = set(parts)
    while missing:
        ended = end()  # before the listing, which then has everything that the task wrote
        with typed_errors(tasks):
            names = [path.name for path in (tasks.parents[1] / "parts").iterdir()]
        done = missing & {int(name) for name in names if name.isdecimal()}
        missing -= done
        yield from sorted(done)
        for path in tasks.glob("*.error"):
            error = read_json(path)
            raise getattr(errors, error["kind"])(error["text"])
        if missing and ended is not None:
            task, how = ended
            part = next((part for part in sorted(missing) if _owner(tasks, part) == str(task)), min(missing))
            raise PrepareError(f"part {part}: {how}")
        if not done:
            time.sleep(look_s)


def _claim(tasks: Path, part: int, task: int) -> bool:
    try:
        (tasks / f"{part}.claim").symlink_to(str(task))  # atomic, unlike writing a file
    except FileExistsError:
        return _owner(tasks, part) == str(task)
    return True


def _owner(tasks: Path, part: int) -> str | None:
    try:
        return str((tasks / f"{part}.claim").readlink())
    except FileNotFoundError:
        return None
