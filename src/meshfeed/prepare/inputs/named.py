"""Files that records name: none outside its folder is read; and whether they are the same later on."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshfeed.errors import MissingError, PrepareError, StoreError
from meshfeed.files import ByteFile, Folder, typed_errors
from meshfeed.files.url import is_http, is_remote, join, local_path, parent, split_url, without_secrets
from meshfeed.formats.documents import read_bytes
from meshfeed.formats.shards import at_once
from meshfeed.plugins import remote_storage
from meshfeed.prepare.inputs.files import changed_since

Fetch = Callable[[str], bytes]
"""Path or URL of a part in a record -> its bytes. Raises StoreError."""

NAMED = "named.json"
"""File of an output: path or URL of each file that was read beside the inputs -> its version.

A version is size and time of the last write on a disk, the tag of an object in storage, and "" of a file that
was missing."""


def fetch_from(folder: str, most_bytes: int, *, own: str = "", named: dict[str, str] | None = None) -> Fetch:
    """A function that reads the parts that a record names: by path within a folder, or as `data:` URLs.

    A URL is read if it is below one of the two folders. Others are refused: whoever made the records chose
    them, and they would be read from this machine, with its credentials.

    folder: base of the paths, or its URL.
    most_bytes: of the parts of a record together.
    own: the folder of the file that has the record, or its URL.
    named: gets the version of each file that is read; see `NAMED`.
    """
    left, versions = most_bytes, {} if named is None else named

    def note(where: str, version: str) -> None:
        if versions.setdefault(where, version) != version:  # ends the run: no record is at fault
            raise PrepareError(str(changed_since(where)))

    def read(name: str) -> bytes:
        base, inside = folder, _relative(name, folder)
        if is_remote(name):
            found = [(each, rest) for each in (folder, own) if (rest := below(name, each)) is not None]
            if not found:
                raise StoreError(
                    f"{without_secrets(name)}: not below the folder of its file; name its folder by "
                    f"--parts-folder, or download the parts first, as img2dataset does"
                )
            base, inside = found[0]
        where = without_secrets(join(base, inside))
        try:
            if is_remote(base):
                with Folder(base).file(inside) as file:
                    version, data = file.version, read_bytes(file, 0, min(file.size_bytes, left + 1))
            else:
                data, version = read_beneath(base, inside, left + 1)
        except MissingError:
            note(where, "")
            raise
        note(where, version)
        return data

    def fetch(name: str) -> bytes:
        nonlocal left
        if name.startswith("data:"):
            return _of_data_url(name)
        _refuse_unreadable(name)
        data = read(name)
        left -= len(data)
        if left < 0:
            raise StoreError(f"its parts have {too_large(most_bytes)}")
        return data

    return fetch


def too_large(most_bytes: int) -> str:
    """The reason for a sample of more bytes."""
    return f"more than {most_bytes:,} bytes; leave it out, or allow it by --max-record-bytes"


def _relative(name: str, folder: str) -> str:
    """A path relative to a folder. Raises StoreError for a path outside it."""
    path = Path(name)
    if not path.is_absolute() or is_remote(folder):
        return name
    if not path.is_relative_to(Path(folder).absolute()):
        raise StoreError(f"{name}: outside {folder}; give the folder of all parts by --parts-folder")
    return path.relative_to(Path(folder).absolute()).as_posix()


def _refuse_unreadable(name: str) -> None:
    """Raises StoreError for text that is neither a path nor a URL."""
    try:
        name.encode()
        split_url(name)
    except ValueError as error:
        raise StoreError(f"{name!r}: neither a path nor a URL: {error}") from error


def below(url: str, folder: str) -> str | None:
    """The path of a URL relative to a folder's URL; None if it is not below that."""
    if not is_remote(folder):
        return None
    (root, path), (base, first) = (_root_and_path(each) for each in (url, folder))
    first = f"{first.rstrip('/')}/"
    return path[len(first) :] if root == base and path.startswith(first) and path != first else None


def _root_and_path(url: str) -> tuple[str, str]:
    """Without user and password of a web address."""
    parts = split_url(url)
    host = parts.netloc.rpartition("@")[2] if is_http(url) else parts.netloc
    return f"{parts.scheme}://{host}".lower(), parts.path + (f"?{parts.query}" if parts.query else "")


def _of_data_url(url: str) -> bytes:
    head, _, body = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("not base64")
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise StoreError(f"{head[:40]}: a data URL that cannot be read: {error}") from error


def read_beneath(folder: str, name: str, most_bytes: int) -> tuple[bytes, str]:
    """Bytes of a file below a local folder, at most `most_bytes`, and its version; see `ByteFile.version`.

    Links are followed as long as they stay below the folder. Raises StoreError for a path
    outside it, and unless it is a regular file.
    """
    path = join(folder, name)
    with typed_errors(path):
        base, real = os.path.realpath(local_path(folder)), os.path.realpath(path, strict=True)
        if not Path(real).is_relative_to(base):
            raise StoreError(
                f"{path}: a link that leads out of {folder}; put the file there itself, or copy the folder "
                f"with all that its links point to: cp -rL"
            )
        with os.fdopen(_opened(base, Path(real).relative_to(base).parts), "rb") as stream:
            found = os.fstat(stream.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise StoreError(f"{path}: not a file")
            return stream.read(most_bytes), f"{found.st_size}-{found.st_mtime_ns}"


def _opened(base: str, names: tuple[str, ...]) -> int:
    """A descriptor of a resolved path below `base`. A link that appeared since is refused."""
    how = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe must not block
    at = os.open(base, how)
    for name in names:
        try:
            below = os.open(name, how | os.O_NOFOLLOW, dir_fd=at)
        finally:
            os.close(at)
        at = below
    return at


# -- afterwards ------------------------------------------------------------------------------------------


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
