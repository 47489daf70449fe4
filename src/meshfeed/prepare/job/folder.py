"""The folder of a job: its marker and lock, and what is removed when the job is done."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from meshfeed.errors import PrepareError
from meshfeed.files import typed_errors
from meshfeed.formats.prepared import MARKER
from meshfeed.prepare.job.job import JOB
from meshfeed.prepare.job.output import Output, some

_OURS = ("job", "old", "out", "parts", "slurm", "spans", "tasks", "tokenizer", "uploads")
_UNBEGUN = {JOB, "spans.npy", "parts", "tasks", MARKER}


def forget_unbegun(work: Path) -> bool:
    """Whether no part of a job was encoded yet. If so, the job is dropped, and `held` cleans up."""
    with typed_errors(work):
        if {path.name for path in work.iterdir()} - _UNBEGUN:
            return False
        if any(path.suffix != ".tmp" for path in (work / "parts").glob("*")):
            return False
        (work / JOB).unlink(missing_ok=True)
        return True


@contextmanager
def held(output: Output) -> Generator[None, None, None]:
    """Holds the folder of a job, made if missing, for this run alone; removes it if no job was saved in it.

    Raises PrepareError if another run holds it.
    """
    work = output.work
    lock = _locked(work)
    try:
        output.restore()
        yield
    finally:
        try:
            with typed_errors(work):
                if not (work / JOB).exists():
                    clear(work)
                    (work / MARKER).unlink(missing_ok=True)
                    if not any(work.iterdir()):
                        work.rmdir()
        finally:
            os.close(lock)


def clear(work: Path) -> None:
    """Remove our files, the job first, except the lock."""
    with typed_errors(work):
        (work / JOB).unlink(missing_ok=True)
        for path in sorted(work.iterdir()):
            if path.name.partition(".")[0] in _OURS:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(
                    missing_ok=True
                )


def _locked(work: Path) -> int:
    """The lock of a job's folder. It also marks the folder: no folder without it is touched."""
    path = work / MARKER
    while True:
        with typed_errors(work):
            work.mkdir(parents=True, exist_ok=True)
            try:
                _refuse_unmarked(work)
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                continue  # a run that just ended has removed the folder
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                return lock
            os.close(lock)  # its holder has removed it since
        except BlockingIOError:
            os.close(lock)
            raise PrepareError(f"{work}: another run is preparing this; wait for it, or stop it") from None


def _refuse_unmarked(work: Path) -> None:
    """Raises PrepareError for a folder with other files. An empty one may be used."""
    names = sorted(path.name for path in work.iterdir())
    if names and MARKER not in names:
        raise PrepareError(
            f"{work}: prepare works in a folder of this name, but this one holds {some(names)}, which it did "
            f"not write; move the folder away, or choose another --out"
        )
