"""The two files of a Megatron store, and what they say of it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from meshfeed.files import ByteFile, Cache, LocalFile
from meshfeed.files.cached import CachedFile
from meshfeed.files.sums import SUFFIX
from meshfeed.store.index import Header, fingerprint_of, read_header


class Pair:
    """The .idx and .bin at a path, which messages name. All members raise StoreError."""

    def __init__(self, path: str, idx: ByteFile, data: ByteFile) -> None:
        self.path, self.idx, self.data = path, idx, data

    @property
    def files(self) -> tuple[ByteFile, ByteFile]:
        """The .bin and the .idx."""
        return self.data, self.idx

    @cached_property
    def header(self) -> Header:
        """The header of the index and the sizes of both files, checked."""
        return read_header(self.path, self.idx, self.data)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_of(self.header, self.idx, self.data)

    @property
    def is_checked(self) -> bool:
        """Whether `Index.check` is known to find no fault."""
        return False

    @property
    def cache(self) -> Cache | None:
        """Where the node keeps what belongs to these files."""
        return self.idx.cache if isinstance(self.idx, CachedFile) else None

    @property
    def is_summed(self) -> bool:
        """Whether there are checksums of its blocks."""
        if self.data.is_remote:
            return self.data.guarded_by is not None
        return Path(self.path + SUFFIX).is_file()

    @contextmanager
    def anew(self) -> Generator[Pair]:
        """The files as they are now, not what the node has cached of them."""
        idx, data = self.idx, self.data
        if isinstance(idx, CachedFile) and isinstance(data, CachedFile):
            with data.cache.anew() as cache:
                yield Pair(self.path, idx.within(cache), data.within(cache))
        else:
            yield Pair(self.path, LocalFile(idx.url), LocalFile(data.url))
