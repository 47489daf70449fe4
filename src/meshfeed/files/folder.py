"""Opens a file by path or URL: directly from the disk, or through the node's cache."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshfeed.errors import MissingError
from meshfeed.files.byte_file import ByteFile, Content, LocalFile, typed, typed_errors
from meshfeed.files.cache.cache import Cache
from meshfeed.files.url import is_hub, is_remote, join, local_path, without_secrets
from meshfeed.plugins import remote_storage


@dataclass(frozen=True, slots=True, repr=False)
class Folder:
    """A folder on this machine or in remote storage, and how to read from it.

    Attributes:
        url: its path or URL.
        cache: for fetched blocks.
        options: of the storage client; see `Client`.
    """

    url: str
    cache: Cache = field(default_factory=Cache)
    options: Mapping[str, str] = field(default_factory=dict[str, str])

    def __repr__(self) -> str:
        return f"Folder({without_secrets(self.url)!r})"

    @property
    def is_remote(self) -> bool:
        return is_remote(self.url)

    def file(
        self, name: str, content: Content | None = None, sums: tuple[str, int] | None = None
    ) -> ByteFile:
        """A file in it, by a relative name. content: the declared size and hashes; None if unknown.

        sums: name of the file with checksums of its blocks, and the index of this file there. Blocks are
        checked as they arrive from remote storage; a local file is not checked.

        Raises StoreError for a name that leaves the folder.
        """
        url = join(self.url, name)
        if not self.is_remote and content is None:
            return LocalFile(url)
        beside = None if sums is None else (join(self.url, sums[0]), sums[1])
        return remote_storage().CachedFile(url, self.cache, self.options, content, beside)

    def holds(self, name: str) -> bool:
        """Whether such a file exists. Raises StoreError if storage does not answer."""
        file = self.file(name)
        if not self.is_remote:
            with typed_errors(file.url):
                return Path(file.url).is_file()
        try:
            return file.size_bytes >= 0
        except MissingError:
            return False

    def names(self) -> list[tuple[str, int]]:
        """(relative name, bytes) of all files below it, sorted.

        A link to a folder is not followed: it is listed as NAME/ with 0 bytes. So is a broken link, as NAME;
        opening it fails. Raises StoreError if the folder cannot be listed: over HTTP, or without permission
        for a folder below it.
        """
        if not self.is_remote:
            return sorted(_below(Path(local_path(self.url))))
        return remote_storage().listed(self.url, self.cache, self.options)


def pinned(url: str, cache: Cache, options: Mapping[str, str]) -> str:
    """A URL on the Hugging Face Hub at the commit of its revision; any other URL or path unchanged.

    Processes of a node that ask within half a minute share one request. If the default process group is
    initialised, all ranks get the commit that the first one found. Raises StoreError.
    """
    return remote_storage().pinned(url, cache, options) if is_hub(url) else url


def _below(root: Path) -> Iterator[tuple[str, int]]:
    """See `Folder.names`; of a local folder."""

    def refuse(error: OSError) -> None:
        raise typed(error.filename, error) from error

    for folder, inside, names in os.walk(root, onerror=refuse):
        for path in (Path(folder, name) for name in inside):
            if path.is_symlink():
                yield f"{path.relative_to(root)}/", 0
        for name in names:
            path = Path(folder, name)
            with typed_errors(path):
                try:
                    status = path.stat()
                except FileNotFoundError:
                    yield str(path.relative_to(root)), 0
                    continue
                if stat.S_ISREG(status.st_mode):
                    yield str(path.relative_to(root)), status.st_size
