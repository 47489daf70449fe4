"""Where a job lies while it runs, where its output goes, and what may be replaced."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshfeed.errors import PrepareError
from meshfeed.files import typed_errors
from meshfeed.prepare.job import read_json
from meshfeed.store.indexed_writer import sync_directory

MANIFEST = "manifest.json"
_OURS = ("job", "old", "out", "parts", "slurm", "spans", "tokenizer")


def refuse_existing(
    target: Path, work: Path, request: Mapping[str, Any], *, resume: bool, overwrite: bool
) -> None:
    """Raises PrepareError where an output, or a job that was not finished, is in the way."""
    with typed_errors(target):
        there = target.exists() and not (target.is_dir() and not any(target.iterdir()))
        if there and not overwrite and not (resume and finished(target, request) is not None):
            more = ", and is not what this job makes" if resume else ""
            raise PrepareError(
                f"{target}: exists already{more}; take another path, or replace it: --overwrite"
            )
        if (work / "job.json").exists() and not (resume or overwrite):
            raise PrepareError(
                f"{work}: an earlier run was not finished; go on: --resume, or start anew: --overwrite"
            )


def finished(target: Path, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of a finished output, where it is of the same request."""
    path = target / MANIFEST
    manifest: dict[str, Any] = read_json(path) if path.is_file() else {}
    return manifest if manifest.get("request") == request else None


@contextmanager
def held(work: Path, target: Path) -> Generator[None, None, None]:
    """The folder of a job, made if missing, and no other run's; it goes again where no job was saved in it.

    Raises PrepareError where another run has it.
    """
    lock = _locked(work)
    try:
        _put_back(work, target)
        yield
    finally:
        try:
            if work.exists() and not (work / "job.json").exists():
                clear(work)
        finally:
            os.close(lock)


def publish(work: Path, target: Path) -> None:
    """Put the folder's `out` at the target, at one moment; what was there waits in `old` to be cleared."""
    with typed_errors(target):
        old = work / "old"
        if target.exists():
            if old.exists():
                shutil.rmtree(old)
            target.rename(old)
        (work / "out").rename(target)
        sync_directory(target.parent)


def _put_back(work: Path, target: Path) -> None:
    """What an earlier run had taken away, to be killed before the new was there."""
    with typed_errors(target):
        if (work / "job.json").exists() and (work / "old").exists() and not target.exists():
            (work / "old").rename(target)


def clear(work: Path, *, lock: bool = True) -> None:
    """Remove what is ours, the job first; and, with the lock, the folder, where nothing else is in it."""
    with typed_errors(work):
        (work / "job.json").unlink(missing_ok=True)
        for path in sorted(work.iterdir()):
            if path.name.partition(".")[0] not in _OURS:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if lock:
            (work / "lock").unlink(missing_ok=True)
            if not any(work.iterdir()):
                work.rmdir()


def _locked(work: Path) -> int:
    path = work / "lock"
    while True:
        with typed_errors(work):
            work.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                return lock
            os.close(lock)  # whoever had it has removed it since
        except BlockingIOError:
            os.close(lock)
            raise PrepareError(f"{work}: another run is preparing this; wait for it, or end it") from None
