"""The place of an output, and what may be replaced there. On a disk, it appears at once, by a rename."""

from __future__ import annotations

import json
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshfeed.errors import PrepareError
from meshfeed.files import typed_errors
from meshfeed.files.local.durable import sync
from meshfeed.files.url import is_remote
from meshfeed.formats.prepared import ERRORS, FORMAT, MANIFEST
from meshfeed.prepare.inputs.named import NAMED
from meshfeed.prepare.job.job import JOB, Request

OnBytes = Callable[[int, int], None]
"""Called with bytes: written so far, and in total."""

_SHOWN = 3
_FOLDER, _COLUMN = r"((train|validation)/)?", r"(tokens|loss_mask|parts|part_sizes)"
_STEPS = (
    rf"{_FOLDER}{_COLUMN}\.sums",
    rf"{_FOLDER}({_COLUMN}\.bin|origins\.npy)",
    rf"{_FOLDER}{_COLUMN}\.idx",
    rf"{_FOLDER}dataset\.json",
    rf"{re.escape(ERRORS)}|{re.escape(NAMED)}|tokenizer\.json",
    re.escape(MANIFEST),
)
OPENS, FOREIGN = 2, len(_STEPS)


def step_of(name: str) -> int:
    """The step at which a file of an output is written; files are removed in the reverse order.

    Files from step OPENS on make a store readable. FOREIGN is for files that `prepare` does not write.
    """
    return next((step for step, names in enumerate(_STEPS) if re.fullmatch(names, name)), FOREIGN)


def some(names: Sequence[str]) -> str:
    """The first of some names, for a message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


class Output(ABC):
    """The place of an output, and the folder of the job that makes it.

    Attributes:
        url: of the folder to make, or its path.
        shown: the same in messages, without secrets.
        work: folder of the job, on a disk; what is published is its `out`.
    """

    url: str
    shown: str
    work: Path

    @abstractmethod
    def names(self) -> list[str]:
        """The files there now. Raises StoreError, and PrepareError if it cannot be a folder."""

    @abstractmethod
    def manifest(self) -> dict[str, Any]:
        """The manifest of what `prepare` wrote there; {} if it wrote nothing. Raises StoreError."""

    @abstractmethod
    def publish(self, on_bytes: OnBytes, *, overwrite: bool) -> None:
        """Put the job's `out` there, and remove what was there. Raises StoreError, PrepareError."""

    def begin(self) -> None:
        """Check, as far as possible, that it can be published in the end. Raises StoreError."""
        return

    def restore(self) -> None:
        """Restore what an earlier run moved before it was killed. Raises StoreError."""
        return

    def holds(self, path: str) -> bool:
        """Whether a file on a disk would be replaced."""
        return False

    def is_claimed(self) -> bool:
        """Whether a run of the same job has begun to publish there."""
        return False

    def finished(self, request: Request) -> dict[str, Any] | None:
        """The manifest of a finished output of the same request; else None. Raises StoreError."""
        found = self.manifest()
        return found if found.get("request") == request.record() else None

    def refuse_existing(self, request: Request, *, resume: bool, overwrite: bool) -> None:
        """Raises PrepareError if something is in the way; with resume, this job's own output is not."""
        if resume and (self.is_claimed() or self.finished(request) is not None):
            return
        given = (request.encoder.get(name) for name in ("tokenizer", "template"))
        for each in [one.url for one in request.inputs] + [str(name) for name in given if name is not None]:
            if overwrite and not is_remote(each) and Path(each).exists() and self.holds(each):
                raise PrepareError(f"{each}: is an input in {self.shown}, which would be replaced; move it")
        self.refuse_kept(overwrite=overwrite, resume=resume)

    def refuse_kept(self, *, overwrite: bool, resume: bool = False) -> None:
        """Raises PrepareError if files must stay: all, or with overwrite those that are not prepare's."""
        names = self.names()
        if not names:
            return
        manifest = self.manifest()
        if not overwrite and "claim" in manifest:
            raise PrepareError(
                f"{self.shown}: a run on {manifest['host']} is preparing this, or was killed, in "
                f"{manifest['folder']}; resume there with --resume, choose another --out, or replace it with "
                f"--overwrite"
            )
        if not overwrite:
            raise PrepareError(
                f"{self.shown}: exists already{', and was made by another job' if resume else ''}; choose "
                f"another --out, or replace it with --overwrite"
            )
        if not manifest:
            raise PrepareError(
                f"{self.shown}: was not made by `meshfeed prepare`, so it will not be replaced; choose "
                f"another --out"
            )
        foreign = sorted(name for name in names if step_of(name) == FOREIGN)
        if foreign:
            raise PrepareError(
                f"{self.shown}: holds {some(foreign)}, which prepare did not write and will not replace; "
                f"move it away, or choose another --out"
            )


class OnDisk(Output):
    """See Output. target: the folder to make; the job works next to it."""

    def __init__(self, target: Path) -> None:
        self._target, self.url, self.shown = target, str(target), str(target)
        self.work = target.with_name(f"{target.name}.preparing")
        self._old = self.work / "old"

    def names(self) -> list[str]:
        target = self._target
        with typed_errors(target):
            if target.is_symlink():
                raise PrepareError(f"{target}: is a symbolic link; give the path it points to")
            found = (
                [target] if target.is_file() else [each for each in target.rglob("*") if not each.is_dir()]
            )
            return [each.relative_to(target).as_posix() for each in found]

    def manifest(self) -> dict[str, Any]:
        path = self._target / MANIFEST
        with typed_errors(path):
            if not path.is_file():
                return {}
            try:
                return manifest_in(json.loads(path.read_bytes()))
            except (ValueError, RecursionError):
                return {}

    def holds(self, path: str) -> bool:
        return Path(path).resolve().is_relative_to(self._target.resolve())

    def restore(self) -> None:
        with typed_errors(self._target):
            unfinished = (self.work / JOB).exists()
            if unfinished and self._old.exists() and not self._target.exists():
                self._old.rename(self._target)

    def publish(self, on_bytes: OnBytes, *, overwrite: bool) -> None:
        """See Output. What was there moves to the job's `old`, to be removed."""
        self.refuse_kept(overwrite=overwrite)
        with typed_errors(self._target):
            if self._target.exists():
                if self._old.exists():
                    shutil.rmtree(self._old)
                self._target.rename(self._old)
            (self.work / "out").rename(self._target)
            sync(self._target.parent)


def manifest_in(found: Any) -> dict[str, Any]:
    """A manifest, or the claim in its place; {} for anything else."""
    known = isinstance(found, dict) and str(found.get("format", "")).startswith(FORMAT)
    return found if known else {}
