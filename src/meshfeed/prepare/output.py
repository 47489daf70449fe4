"""Where a job lies while it runs, where its output goes, and what may be replaced."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

from meshfeed.errors import PrepareError
from meshfeed.files import Cache, typed_errors
from meshfeed.files.durable import sync_directory
from meshfeed.files.url import is_http, is_remote, local_path, without_secrets
from meshfeed.prepare.engine import Engine, Local
from meshfeed.prepare.job import Request
from meshfeed.prepare.storage import FOREIGN, SHOWN, InStorage, foreign_files, step_of
from meshfeed.store.prepared import FORMAT, MANIFEST, MARKER

_OURS = ("job", "old", "out", "parts", "slurm", "spans", "tasks", "tokenizer", "uploads")

_UNBEGUN = {"job.json", "spans.npy", "parts", "tasks", MARKER}


class Output(Protocol):
    """Where an output goes, and the folder of the job that makes it.

    Attributes:
        url: of the folder to be, or its path.
        work: of the job, on a disk; what is published is its `out`.
    """

    url: str
    work: Path

    def refuse_existing(self, request: Request, *, resume: bool, overwrite: bool) -> None:
        """Raises PrepareError where something is in the way that stays, StoreError where that is not known.

        What stays is all, but with overwrite an output of `prepare` that holds nothing of what is read, and
        with resume what this very job has made.
        """
        ...

    def finished(self, request: Request) -> dict[str, Any] | None:
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


def output_of(out: str, work: str | os.PathLike[str] | None, engine: Engine) -> Output:
    """The output that a path or URL names. work: folder to work in. Raises PrepareError, StoreError."""
    shown = without_secrets(out)
    if not is_remote(out):
        if work is not None:
            raise PrepareError(
                f"--work {os.fspath(work)}: only for an output in storage; one on a disk is "
                f"made beside {shown}"
            )
        return OnDisk(Path(local_path(out)).absolute())
    if is_http(out):
        raise PrepareError(f"{shown}: cannot write to a web server; give s3://, gs://, az:// or a path")
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
    """An Output on a disk. target: the folder to be; the job lies beside it."""

    def __init__(self, target: Path) -> None:
        self._target, self.url = target, str(target)
        self.work = target.with_name(f"{target.name}.preparing")

    def refuse_existing(self, request: Request, *, resume: bool, overwrite: bool) -> None:
        """See Output."""
        if resume and self.finished(request) is not None:
            return
        self._refuse_kept(", and was made by another job" if resume else "", overwrite=overwrite)
        if self._target.exists():
            self._refuse_inputs(request)
            self._refuse_foreign()

    def finished(self, request: Request) -> dict[str, Any] | None:
        """See Output."""
        found = self._manifest()
        return found if found.get("request") == request.told() else None

    def restore(self) -> None:
        """See Output."""
        work, target = self.work, self._target
        with typed_errors(target):
            if (work / "job.json").exists() and (work / "old").exists() and not target.exists():
                (work / "old").rename(target)

    def begin(self) -> None:
        """See Output: that the job could be made beside it says enough."""

    def publish(self, told: Callable[[int, int], None], *, overwrite: bool) -> None:
        """See Output: at one moment; what was there waits in `old` to be cleared."""
        work, target = self.work, self._target
        with typed_errors(target):
            old = work / "old"
            self._refuse_kept(overwrite=overwrite)
            if target.exists():
                self._refuse_foreign()
                if old.exists():
                    shutil.rmtree(old)
                target.rename(old)
            (work / "out").rename(target)
            sync_directory(target.parent)

    def _manifest(self) -> dict[str, Any]:
        """What an output of `prepare` says of itself; {} for nothing, or nothing of ours."""
        path = self._target / MANIFEST
        with typed_errors(path):
            if not path.is_file():
                return {}
            try:
                told: Any = json.loads(path.read_bytes())
            except (ValueError, RecursionError):
                return {}
        known = isinstance(told, dict) and cast(Any, told).get("format") == FORMAT
        return cast(dict[str, Any], told) if known else {}

    def _refuse_kept(self, more: str = "", *, overwrite: bool) -> None:
        """Raises PrepareError where something is there that stays: all, or all but what `prepare` made."""
        target = self._target
        with typed_errors(target):
            if target.is_symlink():
                raise PrepareError(f"{target}: is a symbolic link; give the path it points to")
            if not target.exists() or (target.is_dir() and not any(target.iterdir())):
                return
        if not overwrite:
            raise PrepareError(
                f"{target}: exists already{more}; choose another --out, or replace it with --overwrite"
            )
        if not self._manifest():
            raise PrepareError(
                f"{target}: was not made by `meshfeed prepare`, so it will not be replaced; choose "
                f"another --out"
            )

    def _refuse_foreign(self) -> None:
        """Raises PrepareError where a user has put files into an output of `prepare`."""
        with typed_errors(self._target):
            foreign = _foreign(self._target)
        if foreign:
            raise PrepareError(foreign_files(str(self._target), foreign))

    def _refuse_inputs(self, request: Request) -> None:
        """Raises PrepareError where what is read lies in what would be replaced."""
        given = (request.encoder.get(name) for name in ("tokenizer", "template"))
        for each in [one.url for one in request.inputs] + [str(name) for name in given if name is not None]:
            if is_remote(each) or not Path(each).exists():
                continue
            if Path(each).resolve().is_relative_to(self._target.resolve()):
                raise PrepareError(
                    f"{each}: is an input, and lies in {self._target}, which would be replaced; move "
                    f"one of them"
                )


def refuse_unfinished(work: Path) -> None:
    """Raises PrepareError where a job was not finished."""
    with typed_errors(work):
        if (work / "job.json").exists():
            raise PrepareError(
                f"{work}: an earlier run did not finish; continue it with --resume, or start over with "
                f"--overwrite"
            )


def forget_unbegun(work: Path) -> bool:
    """Whether nothing of a job was done yet; it is then no job any more, and `held` clears up."""
    with typed_errors(work):
        if {path.name for path in work.iterdir()} - _UNBEGUN:
            return False
        if any(path.suffix != ".tmp" for path in (work / "parts").glob("*")):
            return False
        (work / "job.json").unlink(missing_ok=True)
        return True


@contextmanager
def held(output: Output) -> Generator[None, None, None]:
    """The folder of a job, made if missing, and no other run's; it goes again where no job was saved in it.

    Raises PrepareError where another run has it.
    """
    work = output.work
    lock = _locked(work)
    try:
        output.restore()
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
            (work / MARKER).unlink(missing_ok=True)
            if not any(work.iterdir()):
                work.rmdir()


def _locked(work: Path) -> int:
    """The lock of a job's folder. It is the folder's marker, too: no other folder is touched."""
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
            os.close(lock)  # whoever had it has removed it since
        except BlockingIOError:
            os.close(lock)
            raise PrepareError(f"{work}: another run is preparing this; wait for it, or stop it") from None


def _refuse_unmarked(work: Path) -> None:
    """Raises PrepareError for a folder that a user has filled. An empty one may be used."""
    names = sorted(path.name for path in work.iterdir())
    if names and MARKER not in names:
        raise PrepareError(
            f"{work}: prepare works in a folder of this name, but this one holds {', '.join(names[:SHOWN])}"
            f"{' and more' if len(names) > SHOWN else ''}, which it did not write; move the folder away, or "
            f"choose another --out"
        )


def _foreign(target: Path) -> list[str]:
    """What lies in an output that `prepare` has not written."""
    files = (path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir())
    return sorted(name for name in files if step_of(name) == FOREIGN)
