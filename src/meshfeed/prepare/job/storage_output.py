"""An output in storage. An incomplete one cannot be opened, and a kill loses little.

    manifest.json           first a claim, which names the current run; last the manifest
    *.sums, *.bin, ...      once the old objects are gone; readers of the old store see other sums
    *.idx, dataset.json     once everything before is confirmed: now stores can be opened

The job's folder notes what was uploaded, so a later run sends only the rest.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from meshfeed.errors import ChangedError, MissingError
from meshfeed.files import typed_errors
from meshfeed.files.url import split, without_secrets
from meshfeed.formats.prepared import FORMAT, MANIFEST
from meshfeed.prepare.job.job import read_json, write_json
from meshfeed.prepare.job.output import FOREIGN, OPENS, OnBytes, Output, manifest_in, step_of
from meshfeed.prepare.job.writer import Writer
from meshfeed.remote.errors import options_of_environment

_NOTES = "uploads.json"


class InStorage(Output):
    """See Output. url: of the folder to be. work: of the job, on a disk here."""

    def __init__(self, url: str, work: Path) -> None:
        root, path = split(url)
        self.url, self.work, self.shown = url.rstrip("/"), work, without_secrets(url).rstrip("/")
        self._root, self._prefix = root, f"{path.strip('/')}/".lstrip("/")

    @cached_property
    def _writer(self) -> Writer:
        return Writer(self._root, options_of_environment(self._root, os.environ))

    def names(self) -> list[str]:
        """See Output; empty objects that represent folders in some stores are not files."""
        found = self._writer.list(self._prefix.rstrip("/"))
        names = {path.removeprefix(self._prefix): size for path, size in found}
        return [name for name, size in names.items() if size or step_of(name) != FOREIGN]

    def manifest(self) -> dict[str, Any]:
        """See Output; it may be a claim."""
        path = self._prefix + MANIFEST
        try:
            stat = self._writer.stat(path)
            return manifest_in(json.loads(bytes(self._writer.read(path, 0, stat.size_bytes, stat.tag))))
        except (MissingError, ValueError):
            return {}

    def is_claimed(self) -> bool:
        """Whether the claim there is this run's, or that of an earlier one in the same folder."""
        claim = self._notes()["claim"]
        return claim is not None and self.manifest().get("claim") == claim

    def begin(self) -> None:
        """Claim it if it is empty, so that missing permission to write shows before the work is done."""
        if not self.names():
            self._claim()

    def publish(self, on_bytes: OnBytes, *, overwrite: bool) -> None:
        """See Output. Raises PrepareError if another run has begun to publish there."""
        claimed = self.is_claimed()
        self.refuse_kept(overwrite=overwrite or claimed, resume=True)
        there = set(self.names())
        if not claimed:
            self._claim()
        sizes = self._sizes()
        data = {name for name in sizes if step_of(name) < OPENS}
        sent = {name for name in there & sizes.keys() if self._is_sent(name, sizes[name])}
        if not data <= sent:
            for name in sorted(there - data - {MANIFEST}, key=step_of, reverse=True):
                self._writer.delete(self._prefix + name)
        done, total = sum(sizes[name] for name in sent), sum(sizes.values())
        on_bytes(done, total)
        left = sorted(sizes.keys() - sent, key=lambda name: (step_of(name), name))
        for is_data, names in groupby(left, data.__contains__):
            if not is_data:
                self._refuse_taken({name: sizes[name] for name in data})
            for name in names:
                self._upload(name, lambda num_bytes, done=done: on_bytes(done + num_bytes, total))
                done += sizes[name]
        on_bytes(done, total)

    def _notes(self) -> dict[str, Any]:
        """What the job noted in its folder: its claim, and [bytes, version] of each object that it sent."""
        path = self.work / _NOTES
        return read_json(path) if path.exists() else {"claim": None, "sent": {}}

    def _claim(self) -> None:
        notes = self._notes()
        notes["claim"] = notes["claim"] or secrets.token_hex(16)
        write_json(self.work / _NOTES, notes)  # first, or a kill would leave a claim without an owner
        claim = {"claim": notes["claim"], "host": socket.gethostname(), "folder": str(self.work)}
        text = json.dumps({"format": f"{FORMAT}, not finished"} | claim)
        self._writer.put(self._prefix + MANIFEST, text.encode())

    def _sizes(self) -> dict[str, int]:
        """Name -> bytes of each file of the output."""
        out = self.work / "out"
        with typed_errors(out):
            files = [each for each in out.rglob("*") if each.is_file()]
            return {each.relative_to(out).as_posix(): each.stat().st_size for each in files}

    def _is_sent(self, name: str, size: int) -> bool:
        """Whether an object there is what this job has sent."""
        noted = self._notes()["sent"].get(name)
        if noted is None or noted[0] != size:
            return False
        try:
            found = self._writer.stat(self._prefix + name)
        except MissingError:
            return False
        return noted == [found.size_bytes, found.tag]

    def _upload(self, name: str, on_bytes: Callable[[int], None]) -> None:
        found = self._writer.upload(self._prefix + name, self.work / "out" / name, on_bytes)
        notes = self._notes()
        notes["sent"][name] = [found.size_bytes, found.tag]
        write_json(self.work / _NOTES, notes)

    def _refuse_taken(self, sizes: Mapping[str, int]) -> None:
        """Raises ChangedError if an object is not what this job sent, or the claim is gone."""
        changed = [name for name, size in sizes.items() if not self._is_sent(name, size)]
        if changed or not self.is_claimed():
            raise ChangedError(
                f"{self.shown}/{[*changed, MANIFEST][0]}: another run replaced this meanwhile; stop that "
                f"run, then continue with --resume --overwrite"
            )
