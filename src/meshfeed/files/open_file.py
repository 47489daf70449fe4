"""A file by its path or URL: from the disk as it is, else through the node's cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshfeed.errors import StoreError
from meshfeed.files.byte_file import ByteFile, Content
from meshfeed.files.cache import Cache
from meshfeed.files.cached import CachedFile
from meshfeed.files.link import Link, link_of, retried
from meshfeed.files.local import LocalFile
from meshfeed.files.refusals import options_of_environment
from meshfeed.files.url import is_remote, join, local_path, split


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder on this machine or in remote storage, and how to read from it.

    Attributes:
        url: its path or URL.
        cache: where what is fetched is kept; None takes the default one when it is needed.
        options: for the storage client; see `Client`.
    """

    url: str
    cache: Cache | None = None
    options: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def is_remote(self) -> bool:
        """Whether it is far away."""
        return is_remote(self.url)

    @property
    def kept(self) -> Path:
        """Where to keep what is worked out of its files, on this node; made if missing. Raises CacheError."""
        return (self.cache or Cache()).kept()

    def file(
        self, name: str, content: Content | None = None, sums: tuple[str, int] | None = None
    ) -> ByteFile:
        """A file in it, by a relative name. content: what must hold of its bytes; None where nobody says.

        sums: name of the file with checksums of its blocks, and which of the two files there it is. Blocks
        are compared as they come from remote storage; a local file is taken as it is.

        Raises StoreError for a name that leaves the folder.
        """
        url = join(self.url, name)
        if not self.is_remote and content is None:
            return LocalFile(url)
        beside = None if sums is None else (join(self.url, sums[0]), sums[1])
        return CachedFile(url, self.cache or Cache(), self.options, content, beside)

    def holds(self, name: str) -> bool:
        """Whether there is such a file. Raises StoreError where storage cannot say."""
        url = join(self.url, name)
        if not self.is_remote:
            try:
                return Path(url).is_file()
            except (OSError, ValueError) as error:
                raise StoreError(f"{url}: {error}") from error
        return bool(self._ask("exists", url)["exists"])

    def names(self) -> list[tuple[str, int]]:
        """(relative name, bytes) of all files below it, sorted. Raises StoreError: HTTP has no listing."""
        if not self.is_remote:
            root = Path(local_path(self.url))
            try:
                files = [each for each in root.rglob("*") if each.is_file()]
                return sorted((str(each.relative_to(root)), each.stat().st_size) for each in files)
            except OSError as error:
                raise StoreError(f"{root}: {error}") from error
        prefix = split(self.url)[1].rstrip("/") + "/"
        found: list[tuple[str, int]] = [(name, size) for name, size in self._ask("list", self.url)["found"]]
        return [(name.removeprefix(prefix), size) for name, size in found]

    def _ask(self, do: str, url: str) -> dict[str, Any]:
        cache = self.cache or Cache()
        link: Link = link_of(cache)
        root, path = split(url)
        options = options_of_environment(root, os.environ) | dict(self.options)

        def ask() -> dict[str, Any]:
            return link.ask(link.connected(), do=do, root=root, path=path, options=options)[0]

        return retried(cache, ask)
