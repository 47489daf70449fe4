"""Outputs of `meshfeed prepare`: which of their files are not documents, and where documents came from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.errors import AccessError
from meshfeed.files import Folder, typed_errors
from meshfeed.files.url import is_remote, local_path, without_secrets

FORMAT = "meshfeed prepare"
"""The "format" in a manifest."""
MANIFEST = "manifest.json"
"""File of an output with its request and results; written last."""
ERRORS = "errors.jsonl"
"""File of an output that lists skipped records."""
ORIGINS = "origins.npy"
"""File beside a dataset.json: the runs of documents that were successive records of an input.

int64 [3, num_runs]: first document of each run, ascending; its input in the manifest; its number there."""
MARKER = "meshfeed-prepare.lock"
"""File in the folder of an unfinished job."""

_HEAD_BYTES = 1 << 12  # "format" is among the first keys, and a list of many inputs follows
_RECORDS = {
    **{"jsonl": "line", "json": "item", "parquet": "row", "arrow": "row"},
    **{"webdataset": "sample", "mds": "sample"},
}
"""Kind of an input -> what one of its records is called; a file of text is one record."""


def place_of(url: str, kind: str, number: int) -> dict[str, Any]:
    """A record of an input as JSON values: its file, and its line from 1, or its item, row or sample from 0.

    number: of the record, from 0. A file of text is one record.
    """
    place = {_RECORDS[kind]: number + (kind == "jsonl")} if kind in _RECORDS else {}
    return {"file": without_secrets(url)} | place


class OriginRuns:
    """Collects what an origins.npy holds, document by document."""

    def __init__(self) -> None:
        self._num_documents, self._last = 0, np.array([[-1, -1]])
        self._runs: list[Longs] = [np.zeros((3, 0), np.int64)]

    def add(self, inputs: Longs, numbers: Longs) -> None:
        """The next documents: input and number of each; int64 [n]."""
        places = np.concatenate((self._last, np.stack((inputs, numbers), axis=1)))
        starts = np.flatnonzero((np.diff(places, axis=0) != [0, 1]).any(axis=1))
        self._runs.append(np.stack((self._num_documents + starts, *places[starts + 1].T)))
        self._num_documents, self._last = self._num_documents + inputs.size, places[-1:]

    def array(self) -> Longs:
        return np.concatenate(self._runs, axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Origins:
    """Where the documents of an output came from.

    Attributes:
        inputs: (url, kind) of each.
        runs: see `ORIGINS`.
    """

    inputs: Sequence[tuple[str, str]]
    runs: Longs

    @classmethod
    def of_store(cls, path: str) -> Self | None:
        """Those of the store at a path; None if it is not on a disk, or has none. Raises StoreError."""
        folder = Path(local_path(path))
        if is_remote(path) or not (folder / ORIGINS).is_file():
            return None
        manifest = folder / MANIFEST
        if not manifest.is_file():  # it is beside train and validation
            manifest = folder.parent / MANIFEST
        with typed_errors(folder):
            inputs = json.loads(manifest.read_bytes())["request"]["inputs"]
            runs = np.load(folder / ORIGINS, mmap_mode="r", allow_pickle=False)
        return cls([(each["url"], each["kind"]) for each in inputs], runs)

    def of(self, documents: Longs) -> list[dict[str, Any]]:
        """The record that each document was; see `place_of`. documents: int64 [n]."""
        first, inputs, numbers = self.runs[:, self.runs[0].searchsorted(documents, side="right") - 1]
        files = (self.inputs[each] for each in inputs.tolist())
        records = zip(files, (numbers + documents - first).tolist())
        return [place_of(url, kind, number) for (url, kind), number in records]


def documents_in(folder: Folder, names: Sequence[str]) -> list[str]:
    """The names of files below a folder that may be documents: not the other files of an output.

    Raises StoreError for a manifest that cannot be read.
    """
    there = set(names)
    jobs = tuple(name.removesuffix(MARKER) for name in names if _base(name) == MARKER)
    found = [name for name in names if not (jobs and name.startswith(jobs))]
    return [name for name in found if _base(name) != ERRORS or not _is_output(folder, name, there)]


def is_report(folder: Folder, name: str) -> bool:
    """Whether a file of a folder lists records that `prepare` skipped. Raises StoreError."""
    if name != ERRORS:
        return False
    try:
        return folder.holds(MANIFEST) and _is_output(folder, name, {MANIFEST})
    except AccessError:  # the answer for a missing object if the bucket may not be listed
        return False


def _is_output(folder: Folder, report: str, there: set[str]) -> bool:
    manifest = f"{report.removesuffix(ERRORS)}{MANIFEST}"
    if manifest not in there:
        return False
    file = folder.file(manifest)
    head = file.peek([(0, min(file.size_bytes, _HEAD_BYTES))])[0]
    return f'"format": "{FORMAT}'.encode() in head


def _base(name: str) -> str:
    return name.rpartition("/")[2]
