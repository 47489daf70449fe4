"""An output in storage: uploaded so that whoever opens it finds all of it, and that a kill loses little.

    manifest.json           first a claim, which tells who is at work; at last the manifest
    *.sums, *.bin, ...      after what lay there is gone; whoever still reads the old store sees other sums
    *.idx, dataset.json     when all that has come is still what was sent: now stores can be opened

What has come is noted in the job's folder, so a later run sends only the rest.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from meshfeed.errors import ChangedError, MissingError, PrepareError
from meshfeed.files import typed_errors
from meshfeed.files.refusals import options_of_environment
from meshfeed.files.url import split, without_secrets
from meshfeed.files.writer import Writer
from meshfeed.prepare.job import Request, read_json, write_json
from meshfeed.store.prepared import ERRORS, FORMAT, MANIFEST

Told = Callable[[int, int], None]
"""Is told of bytes: that are there, and that are to come to be there in all."""

_NOTES = "uploads.json"
_FOLDER, _COLUMN = r"((train|validation)/)?", r"(tokens|loss_mask)"
_STEPS = (
    rf"{_FOLDER}{_COLUMN}\.sums",
    rf"{_FOLDER}({_COLUMN}\.bin|origins\.npy)",
    rf"{_FOLDER}{_COLUMN}\.idx",
    rf"{_FOLDER}dataset\.json",
    rf"{re.escape(ERRORS)}|tokenizer\.json",
    re.escape(MANIFEST),
)
_OPENS, FOREIGN = 2, len(_STEPS)
SHOWN = 3
"""Names in a message."""


def step_of(name: str) -> int:
    """When the turn of a file of an output is: those of lower steps come before it, and go after it.

    From _OPENS on they let a store be opened; FOREIGN is for whatever `prepare` does not write.
    """
    return next((step for step, names in enumerate(_STEPS) if re.fullmatch(names, name)), FOREIGN)


def foreign_files(shown: str, names: Sequence[str]) -> str:
    """The message for an output that holds files of somebody else."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (
        f"{shown}: holds {', '.join(names[:SHOWN])}{more}, which prepare did not write and will not replace; "
        f"move it away, or choose another --out"
    )


@dataclass
class Notes:
    """What a run remembers of its uploads, in the job's folder.

    Attributes:
        claim: its own word in the manifest's place.
        sent: name -> bytes and version of what has come.
    """

    claim: str
    sent: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])


class InStorage:
    """An Output in object storage. url: of the folder to be. work: of the job, on a disk here."""

    def __init__(self, url: str, work: Path) -> None:
        root, path = split(url)
        self.url, self.work, self._shown = url.rstrip("/"), work, without_secrets(url).rstrip("/")
        self._root, self._prefix = root, f"{path.strip('/')}/".lstrip("/")

    @cached_property
    def _writer(self) -> Writer:
        return Writer(self._root, options_of_environment(self._root, os.environ))

    # -- the contract of Output -----------------------------------------------------------------------------

    def refuse_existing(self, request: Request, *, resume: bool, overwrite: bool) -> None:
        """See Output; whatever is no output of `prepare` is never replaced."""
        names = self._names()
        self._refuse_foreign(names)
        ours = resume and (self._is_claimed() or self.finished(request) is not None)
        if names and not overwrite and not ours:
            raise PrepareError(self._exists(resume=resume))

    def finished(self, request: Request) -> dict[str, Any] | None:
        """See Output."""
        found = self._manifest()
        return found if found.get("request") == request.told() else None

    def restore(self) -> None:
        """See Output: nothing was taken away that could be put back."""

    def begin(self) -> None:
        """Where nothing lies, claim it: so that who may not write there hears it before the work is done."""
        if not self._names():
            self._claim()

    def publish(self, told: Told, *, overwrite: bool) -> None:
        """See Output. Raises StoreError, and PrepareError where another run has come to work there."""
        there = set(self._names())
        self._refuse_foreign(there)
        if not self._is_claimed():
            if there and not overwrite:
                raise PrepareError(self._exists(resume=True))
            self._claim()
        sizes = self._sizes()
        data = {name for name in sizes if step_of(name) < _OPENS}
        sent = {name for name in there & sizes.keys() if self._is_sent(name, sizes[name])}
        if not data <= sent:
            for name in sorted(there - data - {MANIFEST}, key=step_of, reverse=True):
                self._writer.delete(self._prefix + name)
        done, total = sum(sizes[name] for name in sent), sum(sizes.values())
        told(done, total)
        left = sorted(sizes.keys() - sent, key=lambda name: (step_of(name), name))
        for is_data, names in groupby(left, data.__contains__):
            if not is_data:
                self._refuse_taken({name: sizes[name] for name in data})
            for name in names:
                self._upload(name, lambda num_bytes, done=done: told(done + num_bytes, total))
                done += sizes[name]
        told(done, total)

    # -- what lies there -----------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        """Names of the objects there; those of no bytes that stand for folders in some stores are none."""
        found = self._writer.list(self._prefix.rstrip("/"))
        names = {path.removeprefix(self._prefix): size for path, size in found}
        return [name for name, size in names.items() if size or step_of(name) != FOREIGN]

    def _manifest(self) -> dict[str, Any]:
        """What lies in the manifest's place; {} for nothing, or nothing of ours."""
        path = self._prefix + MANIFEST
        try:
            stat = self._writer.stat(path)
            told = json.loads(bytes(self._writer.read(path, 0, stat.size_bytes, stat.tag)))
        except (MissingError, ValueError):
            return {}
        known = isinstance(told, dict) and str(cast(Any, told).get("format", "")).startswith(FORMAT)
        return cast(dict[str, Any], told) if known else {}

    def _refuse_foreign(self, names: Collection[str]) -> None:
        foreign = sorted(name for name in names if step_of(name) == FOREIGN)
        if not foreign and MANIFEST in names and not self._manifest():
            foreign = [MANIFEST]
        if foreign:
            raise PrepareError(foreign_files(self._shown, foreign))

    def _exists(self, *, resume: bool) -> str:
        found = self._manifest()
        if "claim" not in found:
            more = ", and was made by another job" if resume else ""
            return (
                f"{self._shown}: exists already{more}; choose another --out, or replace it with --overwrite"
            )
        return (
            f"{self._shown}: a run on {found['host']} is preparing this, or was killed, in "
            f"{found['folder']}; resume there with --resume, choose another --out, "
            f"or replace it with --overwrite"
        )

    # -- claims and uploads --------------------------------------------------------------------------------

    def _notes(self) -> Notes | None:
        """Those in the folder; None where no run from there has come to claim the place."""
        path = self.work / _NOTES
        if not path.exists():
            return None
        found = read_json(path)
        return Notes(found["claim"], {name: (size, tag) for name, (size, tag) in found["sent"].items()})

    def _note(self, notes: Notes) -> None:
        write_json(self.work / _NOTES, asdict(notes))

    def _is_claimed(self) -> bool:
        """Whether the claim that lies there is this run's, or of one before it in the same folder."""
        notes = self._notes()
        return notes is not None and self._manifest().get("claim") == notes.claim

    def _claim(self) -> None:
        notes = self._notes() or Notes(secrets.token_hex(16))
        self._note(notes)  # first, or a kill would leave a claim that nobody knows
        told = {"claim": notes.claim, "host": socket.gethostname(), "folder": str(self.work)}
        text = json.dumps({"format": f"{FORMAT}, not finished"} | told)
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
        if changed or not self._is_claimed():
            raise ChangedError(
                f"{self._shown}/{[*changed, MANIFEST][0]}: another run replaced this meanwhile; stop that "
                f"run, then continue with --resume --overwrite"
            )
