"""Where a job lies while it runs, where its output goes, and what may be replaced."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from meshfeed.errors import PrepareError
from meshfeed.files import Cache, typed_errors
from meshfeed.files.url import is_http, is_remote, local_path, without_secrets
from meshfeed.prepare.engine import Engine, Local
from meshfeed.prepare.job import MANIFEST, read_json
from meshfeed.prepare.storage import InStorage
from meshfeed.store.indexed_writer import sync_directory

_OURS = ("job", "old", "out", "parts", "slurm", "spans", "tokenizer", "uploads")


class Place(Protocol):
    """Where an output goes, and the folder of the job that makes it.

    Attributes:
        url: of the folder to be, or its path.
        work: of the job, on a disk; what is published is its `out`.
    """

    url: str
    work: Path

    def refuse_existing(self, request: Mapping[str, Any], *, resume: bool, overwrite: bool) -> None:
        """Raises PrepareError where an output is in the way, StoreError where that cannot be known."""
        ...

    def finished(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """The manifest of a finished output, where it is of the same request."""
        ...

    def restore(self) -> None:
        """Put back what an earlier run had taken away, to be killed before the new was there."""
        ...

    def begin(self) -> None:
        """Find out, as far as possible, whether it can be published in the end."""
        ...

    def publish(self, told: Callable[[int, int], None], *, overwrite: bool) -> None:
        """Put the folder's `out` there; what was there goes.

        told: of bytes, so far and in all, where that takes long.
        """
        ...


def place_of(out: str, work: str | os.PathLike[str] | None, engine: Engine) -> Place:
    """The place that a path or URL names; work: folder to work in. Raises PrepareError, StoreError."""
    shown = without_secrets(out)
    if not is_remote(out):
        if work is not None:
            raise PrepareError(
                f"--work {os.fspath(work)}: is for outputs in storage; what is made on a disk is made beside "
                f"{shown}"
            )
        return OnDisk(Path(local_path(out)).absolute())
    if is_http(out):
        raise PrepareError(f"{shown}: a web server takes no files; write to s3://, gs://, az:// or a path")
    if work is None and not isinstance(engine, Local):
        raise PrepareError(
            f"{shown}: its parts may be encoded on other machines; name a folder that all of them see: "
            f"--work DIR"
        )
    parent = Cache().make() / "preparing" if work is None else Path(work).absolute()
    digest = hashlib.blake2b(out.rstrip("/").encode(), digest_size=4).hexdigest()
    name = shown.rstrip("/").rpartition("/")[2]
    return InStorage(out, parent / f"{name}-{digest}.preparing")


class OnDisk:
    """A Place on a disk. target: the folder to be; the job lies beside it."""

    def __init__(self, target: Path) -> None:
        self._target, self.url = target, str(target)
        self.work = target.with_name(f"{target.name}.preparing")

    def refuse_existing(self, request: Mapping[str, Any], *, resume: bool, overwrite: bool) -> None:
        """See Place."""
        target = self._target
        with typed_errors(target):
            there = target.exists() and not (target.is_dir() and not any(target.iterdir()))
            if there and not overwrite and not (resume and self.finished(request) is not None):
                more = ", and is not what this job makes" if resume else ""
                raise PrepareError(
                    f"{target}: exists already{more}; take another path, or replace it: --overwrite"
                )

    def finished(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """See Place."""
        path = self._target / MANIFEST
        manifest: dict[str, Any] = read_json(path) if path.is_file() else {}
        return manifest if manifest.get("request") == request else None

    def restore(self) -> None:
        """See Place."""
        work, target = self.work, self._target
        with typed_errors(target):
            if (work / "job.json").exists() and (work / "old").exists() and not target.exists():
                (work / "old").rename(target)

    def begin(self) -> None:
        """See Place: that the job could be made beside it says enough."""

    def publish(self, told: Callable[[int, int], None], *, overwrite: bool) -> None:
        """See Place: at one moment; what was there waits in `old` to be cleared."""
        work, target = self.work, self._target
        with typed_errors(target):
            old = work / "old"
            if target.exists():
                if old.exists():
                    shutil.rmtree(old)
                target.rename(old)
            (work / "out").rename(target)
            sync_directory(target.parent)


def refuse_unfinished(work: Path) -> None:
    """Raises PrepareError where a job was not finished."""
    with typed_errors(work):
        if (work / "job.json").exists():
            raise PrepareError(
                f"{work}: an earlier run was not finished; go on: --resume, or start anew: --overwrite"
            )


@contextmanager
def held(place: Place) -> Generator[None, None, None]:
    """The folder of a job, made if missing, and no other run's; it goes again where no job was saved in it.

    Raises PrepareError where another run has it.
    """
    work = place.work
    lock = _locked(work)
    try:
        place.restore()
        yield
    finally:
        try:
            if work.exists() and not (work / "job.json").exists():
                clear(work)
        finally:
            os.close(lock)


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
