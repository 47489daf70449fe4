"""Outputs of `meshfeed prepare`: which of their files are not documents."""

from __future__ import annotations

from collections.abc import Sequence

from meshfeed.errors import AccessError
from meshfeed.files import Folder

FORMAT = "meshfeed prepare"
"""The "format" in a manifest."""
MANIFEST = "manifest.json"
"""File of an output with its request and results; written last."""
ERRORS = "errors.jsonl"
"""File of an output that lists skipped records."""
MARKER = "meshfeed-prepare.lock"
"""File in the folder of an unfinished job."""

_HEAD_BYTES = 1 << 12  # "format" is among the first keys, and a list of many inputs follows


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
