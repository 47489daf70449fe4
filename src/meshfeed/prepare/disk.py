"""An output on a disk: it appears at one moment, by a rename."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from meshfeed.errors import PrepareError
from meshfeed.files import typed_errors
from meshfeed.files.durable import sync_directory
from meshfeed.formats.prepared import MANIFEST
from meshfeed.prepare.output import OnBytes, Output, manifest_in


class OnDisk(Output):
    """See Output. target: the folder to be; the job works beside it."""

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
            unfinished = (self.work / "job.json").exists()
            if unfinished and self._old.exists() and not self._target.exists():
                self._old.rename(self._target)

    def publish(self, on_bytes: OnBytes, *, overwrite: bool) -> None:
        """See Output. What was there waits in the job's `old` to be removed."""
        self.refuse_kept(overwrite=overwrite)
        with typed_errors(self._target):
            if self._target.exists():
                if self._old.exists():
                    shutil.rmtree(self._old)
                self._target.rename(self._old)
            (self.work / "out").rename(self._target)
            sync_directory(self._target.parent)
