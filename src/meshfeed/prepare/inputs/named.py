"""Files that records name, and shards that an index names: whether they are still what a job has read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshfeed.errors import MissingError
from meshfeed.files import ByteFile, Folder
from meshfeed.files.url import parent, without_secrets
from meshfeed.formats.shards import at_once
from meshfeed.plugins import remote_storage
from meshfeed.prepare.inputs.samples import below

NAMED = "named.json"
"""File of an output: path or URL of each file that was read beside the inputs -> its version.

A version is size and time of the last write on a disk, the tag of an object in storage, and "" of a file that
was missing."""


def as_it_is(file: ByteFile) -> ByteFile:
    """A file in its version of now: a node may know an earlier one. Raises StoreError."""
    if file.is_remote:
        remote_storage().CachedFile.glance([file], [1])
    return file


def first_changed(named: Mapping[str, str], inputs: Sequence[str]) -> str | None:
    """The first of some files that has another version now; None if there is none. Raises StoreError.

    inputs: their paths and URLs, with passwords, which the others are without.
    """
    secret = {parent(url)[0] for url in inputs if without_secrets(url) != url}

    def version(url: str) -> str:
        found = ((base, name) for base in secret if (name := below(url, base)) is not None)
        base, name = next(found, parent(url))
        try:
            return as_it_is(Folder(base).file(name)).version
        except MissingError:
            return ""

    found = zip(named.items(), at_once(version, list(named)))
    return next((url for (url, known), now in found if known != now), None)
