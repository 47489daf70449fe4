"""An output in storage: uploaded so that whoever opens it finds all of it, and that a kill loses little.

    manifest.json           first a claim, which tells who is at work; at last the manifest
    *.sums, *.bin, ...      after what lay there is gone; whoever still reads the old store sees other sums
    *.idx, dataset.json     when all that has come is still what was sent: now stores can be opened

What has come is noted in the job's folder, so a later run sends only the rest.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from meshfeed.errors import ChangedError, MissingError
from meshfeed.files import typed_errors
from meshfeed.files.refusals import options_of_environment
from meshfeed.files.url import split, without_secrets
from meshfeed.files.writer import Writer
from meshfeed.prepare.job import read_json, write_json
from meshfeed.prepare.output import FOREIGN, OPENS, OnBytes, Output, manifest_in, step_of
from meshfeed.store.prepared import FORMAT, MANIFEST

_NOTES = "uploads.json"


@dataclass
class Notes:
    """What a run remembers of its uploads, in the job's folder.

    Attributes:
        claim: its own word in the manifest's place.
        sent: name -> bytes and version of what has come.
    """

    claim: str
    sent: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])


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
        """See Output; objects of no bytes that stand for folders in some stores are not files."""
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
        """Whether the claim that lies there is this run's, or of one before it in the same folder."""
        notes = self._notes()
        return notes is not None and self.manifest().get("claim") == notes.claim

    def begin(self) -> None:
        """Where nothing lies, claim it: a user who may not write there hears it before the work is done."""
        if not self.names():
            self._claim()

    def publish(self, on_bytes: OnBytes, *, overwrite: bool) -> None:
        """See Output. Raises PrepareError where another run has begun to publish there."""
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

    def _notes(self) -> Notes | None:
        """Those in the folder; None where no run from there has come to claim the place."""
        path = self.work / _NOTES
        if not path.exists():
            return None
        found = read_json(path)
        return Notes(found["claim"], {name: (size, tag) for name, (size, tag) in found["sent"].items()})

    def _note(self, notes: Notes) -> None:
        write_json(self.work / _NOTES, asdict(notes))

    def _claim(self) -> None:
        notes = self._notes() or Notes(secrets.token_hex(16))
        self._note(notes)  # first, or a kill would leave a claim that nobody knows
        claim = {"claim": notes.claim, "host": socket.gethostname(), "folder": str(self.work)}
        text = json.dumps({"format": f"{FORMAT}, not finished"} | claim)
        self._writer.put(self._prefix + MANIFEST, text.encode())

    def _sizes(self) -> dict[str, int]:
        """Name -> bytes of each file of the output."""
        out = self.work / "out"
        with typed_errors(out):
            files = [each for each in out.rglob("*") if each.is_file()]
            return {each.relative_to(out).as_posix(): each.stat().st_size for each in files}

    def _is_sent(self, name: str, size: int) -> bool:
        """Whether an object that lies there is what this run, or one before it, has sent."""
        notes = self._notes()
        noted = None if notes is None else notes.sent.get(name)
        if noted is None or noted[0] != size:
            return False
        try:
            found = self._writer.stat(self._prefix + name)
        except MissingError:
            return False
        return noted == (found.size_bytes, found.tag)

    def _upload(self, name: str, on_bytes: Callable[[int], None]) -> None:
        found = self._writer.upload(self._prefix + name, self.work / "out" / name, on_bytes)
        notes = self._notes() or Notes("")
        notes.sent[name] = found.size_bytes, found.tag
        self._note(notes)

    def _refuse_taken(self, sizes: Mapping[str, int]) -> None:
        """Raise where what lies there of files of some sizes is not what this run alone has written."""
        changed = [name for name, size in sizes.items() if not self._is_sent(name, size)]
        if changed or not self.is_claimed():
            raise ChangedError(
                f"{self.shown}/{[*changed, MANIFEST][0]}: another run replaced this meanwhile; stop that "
                f"run, then continue with --resume --overwrite"
            )
