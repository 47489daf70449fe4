"""A file of tokens and nothing else, such as nanoGPT's train.bin: one document."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from meshfeed.arrays import Array, Longs
from meshfeed.errors import StoreError
from meshfeed.files import ByteFile, Cache, FileStats
from meshfeed.formats.documents import sampled_digest
from meshfeed.store.base import LengthsIndex, StreamStore
from meshfeed.store.format import Place, StoreFormat

VERSION = 1
DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
_LOAD, _UNPACK = "write its tokens by np.load(path).tofile('train.bin')", "unpack it"
_ALONE = "write its tokens alone to a file, in one dtype"
_OTHERS = {
    b"\x93NUMPY": ("a .npy file", _LOAD),
    b"PK\x03\x04": ("a zip archive, as of np.savez or torch.save", _ALONE),
    b"LITPKDS": ("of lit-gpt, with a header", _ALONE),
    b"\x89HDF": ("an HDF5 file", _ALONE),
    b"PAR1": ("a Parquet file", "name it .parquet, and give column= in place of dtype="),
    b"\x1f\x8b\x08": ("packed by gzip", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("packed by zstd", _UNPACK),
    b"\xfd7zXZ": ("packed by xz", _UNPACK),
}
"""The first bytes of files that are no tokens -> what they are, and what to do."""
_HEADED = [np.array(each, "<i4").tobytes() for each in ((20240520, 1), (20240801, 7))]
"""The first bytes of shards of llm.c, of GPT-2's and of Llama 3's tokens: magic number and version."""
_HEADED_BYTES = 256 * 4
_STEP_BYTES = 1 << 24


class RawStore(StreamStore):
    """Tokens of one dtype, little-endian, from the first byte of a file to its last.

    The file does not record where documents end: it is one document, and `Windows` cuts the whole stream.

    Args:
        file: holds the tokens.
        dtype: of them.
        cache: where a node keeps data derived from the file.
    """

    def __init__(self, file: ByteFile, dtype: np.dtype[Any], cache: Cache) -> None:
        super().__init__()
        self.path, self._file, self._dtype = file.url, file, dtype
        self.kept_in, self.wants_ahead = cache, file.is_remote

    def check(self) -> RawStore:
        """Check that the file holds whole tokens, from its first byte on. Raises StoreError."""
        if not self._file.size_bytes:
            raise StoreError(f"{self.path}: an empty file holds no tokens; write it or copy it again")
        if self._file.size_bytes % self._dtype.itemsize:
            raise StoreError(
                f"{self.path}: {self._file.size_bytes} bytes are not a whole number of {self._dtype.name} "
                f"tokens; give the dtype that it was written with, or copy it again"
            )
        head = self._file.peek([(0, 8)])[0]
        if head in _HEADED:
            raise StoreError(
                f"{self.path}: begins with the header of llm.c and modded-nanogpt, {_HEADED_BYTES:,} bytes "
                f"that would be read as tokens; write those alone: np.fromfile(path, {self._dtype.name!r}, "
                f"offset={_HEADED_BYTES}).tofile('train.bin')"
            )
        for magic, (what, cure) in _OTHERS.items():
            if head.startswith(magic):
                raise StoreError(f"{self.path}: {what}, whose bytes would be read as tokens; {cure}")
        return self

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    @property
    def documents(self) -> LengthsIndex:
        return LengthsIndex(np.array([0, self._file.size_bytes // self._dtype.itemsize]))

    @cached_property
    def fingerprint(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Hex digest of the dtype, the size and sampled blocks; on the Hub, of its hash instead of blocks.

        Elsewhere it does not depend on the path.
        """
        return sampled_digest(f"raw {VERSION} {self._dtype.name}", [self._file])

    @property
    def files_version(self) -> str:
        return self._file.version

    @property
    def stats(self) -> FileStats:
        return self._file.stats

    def acquire(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(self._file)

    def read_into(self, out: Array, starts: Longs, stops: Longs) -> None:
        width = self._dtype.itemsize
        self._file.read_into(out.view(np.uint8), starts * width, (stops - starts) * width)
        if self._dtype.kind == "i" and out.min(initial=0) < 0:
            bad, ends = int((out < 0).argmax()), (stops - starts).cumsum()
            i = int(ends.searchsorted(bad, side="right"))
            raise StoreError(
                f"{self.path}: token {stops[i] - ends[i] + bad}, counted from 0, is {out[bad]}; tokens are "
                f"whole numbers from 0; give the dtype that it was written with, or copy it again"
            )

    def will_need(self, starts: Longs, stops: Longs) -> None:
        starts, stops = self._ranges(starts, stops)
        self._file.will_need(starts * self._dtype.itemsize, stops * self._dtype.itemsize)

    def forget_needs(self) -> None:
        self._file.forget_needs()

    def facts(self) -> dict[str, Any]:
        return {"format": "raw tokens", "size_bytes": self._file.size_bytes}

    def verify(self) -> Iterator[float]:
        """Read every token, yielding the part done, in (0, 1]; there is no checksum to compare."""
        total, step = self.num_tokens, _STEP_BYTES // self._dtype.itemsize
        with self:
            for begin in range(0, total, step):
                end = min(begin + step, total)
                self.read_stream(np.array([begin]), np.array([end]))
                yield end / total


class RawFormat(StoreFormat):
    """A file without an index, whose dtype the user gives."""

    name = "raw tokens"
    lies_at = "a file of raw tokens with dtype="
    options = ("dtype",)

    def open(self, place: Place) -> RawStore | None:
        """The store, if there is a dtype and such a file. Raises OptionError for another dtype."""
        if place.dtype is None or not place.name or not place.holds(place.beside, place.name):
            return None
        dtype = place.dtype_among(DTYPES)
        return None if dtype is None else RawStore(place.beside.file(place.name), dtype, place.cache).check()
