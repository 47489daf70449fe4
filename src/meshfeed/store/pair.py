"""The two files of a Megatron store, and what they say of it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path

from meshfeed.files import ByteFile, Cache
from meshfeed.files.sums import SUFFIX
from meshfeed.store.index import Header, fingerprint_of, read_header


class Pair:
    """The .idx and .bin at a path, which messages name. All members raise StoreError.

    cache: where the node keeps what belongs to these files, if anywhere.
    """

    def __init__(self, path: str, idx: ByteFile, data: ByteFile, cache: Cache | None = None) -> None:
        self.path, self.idx, self.data, self.cache = path, idx, data, cache

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
    def is_summed(self) -> bool:
        """Whether there are checksums of its blocks."""
        if self.data.is_remote:
            return self.data.guarded_by is not None
        return Path(self.path + SUFFIX).is_file()

    @contextmanager
    def anew(self) -> Generator[Pair]:
        """The files as they are now, not what the node has cached of them."""
        with self.cache.anew() if self.cache and self.data.is_remote else nullcontext(self.cache) as cache:
            yield Pair(self.path, self.idx.within(cache), self.data.within(cache), cache)
