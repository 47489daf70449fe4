"""The common part of stores whose documents are in many files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Array
from meshfeed.errors import OptionError
from meshfeed.files import ByteFile, Cache, Content, FileStats, Folder, typed_errors
from meshfeed.files.cached import CachedFile
from meshfeed.files.url import join, without_secrets
from meshfeed.formats.foreign_columns import ForeignColumns
from meshfeed.formats.items import Column, Items, ItemsFile
from meshfeed.formats.shard_files import ShardFiles
from meshfeed.formats.tokens import TOKEN_COLUMNS
from meshfeed.store.base import I64, LengthsIndex, Multiples, Pieces, grouped
from meshfeed.store.loss_columns import LOSS_COLUMNS
from meshfeed.store.node_arrays import built_in_parts, joined, key_of_parts

S = TypeVar("S")
T = TypeVar("T")

_SHARDS_OF_PART = 64
_AT_ONCE = 16
_SAMPLED_BYTES = 1 << 12
_NUM_SAMPLED = 8


class Shard(Protocol):
    """A shard, as the index describes it."""

    @property
    def name(self) -> str:
        """Name of its file, relative to the index."""
        ...

    @property
    def num_documents(self) -> int:
        """Number of documents in it."""
        ...


@dataclass(frozen=True, slots=True)
class EvenDocuments:
    """Documents at equal distances in each shard.

    Attributes:
        first: byte of each shard where its first document's tokens begin; int64 [num_shards].
        stride_bytes: from one document to the next.
    """

    first: I64
    stride_bytes: int


class ShardedStore(ForeignColumns):
    """A StreamStore over the shards of a folder: documents follow each other in the order of the index.

    The constructor only stores its arguments. Use everything but the attributes inside `with store:`. A shard
    that is compressed, or remote with hashes in the index, is fetched and checked as a whole before any of
    its bytes are used. All methods raise StoreError.

    The lengths of documents and their positions in the shards come from the index. If it does not have them,
    they are read from the head of every shard, several at a time, once per node, and kept next to the cache.
    A local folder of few shards is read again in every process: that takes milliseconds and leaves no files.
    After that, reading or announcing a range touches only its own bytes.
    """

    not_pickled = ("_files", "_looked", "_known_table")
    kind: ClassVar[str]
    """The format's version in the key under which lengths are kept."""
    format: ClassVar[str]
    """The format's name in `facts`."""

    def __init__(self, folder: Folder, *, column: str | None = None) -> None:
        super().__init__()
        self.path = without_secrets(folder.url)
        self._folder, self._column = folder, column
        self._is_beside = False
        self._forget()

    def _forget(self) -> None:
        self._files = ShardFiles(self.path, self._checked_file, is_remote=self._folder.is_remote)
        self._looked = FileStats()
        self._known_table: Mapping[str, Array] | None = None

    def verify(self) -> Iterator[float]:
        """Check hashes, offsets and sizes, as the files are now, yielding the fraction done, in (0, 1]."""
        with (self._folder.cache or Cache()).anew() as cache:
            store = self._within(replace(self._folder, cache=cache))
            for number in range(len(store.shards)):
                store._verify(number)
                yield (number + 1) / len(store.shards)

    @property
    def is_summed(self) -> bool:
        return all(self._hashes())

    # -- what a format defines ----------------------------------------------------------------------------

    @property
    @abstractmethod
    def shards(self) -> Sequence[Shard]:
        """In the order of their documents."""

    @property
    @abstractmethod
    def _fields(self) -> Sequence[Column]:
        """The columns of an item, in order."""

    @abstractmethod
    def _laid_out(self) -> Items:
        """The layout of items, and which column holds the tokens."""

    @abstractmethod
    def _identity(self) -> bytes:
        """Everything that decides the tokens, except the bytes of the shards."""

    @abstractmethod
    def _content(self, number: int) -> Content | None:
        """How a shard is compressed, and its hashes; None if it is not compressed and has no hashes."""

    @abstractmethod
    def _refuse_size(self, number: int, file: ByteFile) -> None:
        """Raise StoreError if the size of a shard differs from the index."""

    def _within(self, folder: Folder) -> Self:
        """The same dataset in another folder."""
        return type(self)(folder, column=self._column)

    @cached_property
    def _even(self) -> EvenDocuments | None:
        """The positions of documents, if the index has them."""
        return None

    # -- attributes ---------------------------------------------------------------------------------------

    @cached_property
    def _items(self) -> Items:
        return self._laid_out()

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._items.dtype

    @property
    def encodings(self) -> Mapping[str, str]:
        """Name -> encoding of every column."""
        return {field.name: field.encoding for field in self._fields}

    def facts(self) -> dict[str, Any]:
        columns = ", ".join(f"{name}: {encoding}" for name, encoding in self.encodings.items())
        return {"format": self.format, "num_shards": self.shard_ends.size, "columns": columns}

    @property
    def shard_ends(self) -> I64:
        """Documents up to the end of each shard; int64 [num_shards]."""
        return self._shard_ends

    @cached_property
    def _shard_ends(self) -> I64:
        return np.cumsum([shard.num_documents for shard in self.shards], dtype=np.int64)

    @property
    def num_documents(self) -> int:
        """Documents in all shards."""
        return int(self.shard_ends[-1]) if self.shard_ends.size else 0

    @property
    def wants_ahead(self) -> bool:
        """Whether the shards are remote, so that ranges should be announced many steps ahead."""
        return self._folder.is_remote

    @property
    def stats(self) -> FileStats:
        """Cost of reading tokens so far."""
        return self._looked + self._files.stats

    @property
    def fingerprint(self) -> str:
        """Hex digest of the index, the token column, some blocks of the shards, and the use of columns."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return self._as_used(self._digest)

    @cached_property
    def _digest(self) -> str:
        shards = self.shards
        digest = hashlib.blake2b(self._identity(), digest_size=16)
        sampled = np.linspace(0, len(shards) - 1, min(_NUM_SAMPLED, len(shards))).astype(int).tolist()
        for block in _at_once(self._middle, sampled):
            digest.update(block)
        return digest.hexdigest()

    def _hashes(self) -> list[Mapping[str, str]]:
        """The hashes of each shard in the index; none of a shard without."""
        contents = [self._content(number) for number in range(len(self.shards))]
        return [{} if each is None else {**each.stored_hashes, **each.raw_hashes} for each in contents]

    @property
    def kept_in(self) -> Cache:
        return self._folder.cache or Cache()

    def _columns_of_loss(self) -> Mapping[str, Self]:
        if self._is_beside:
            return {}
        others = [field.name for at, field in enumerate(self._fields) if at != self._items.at]
        stores = {name: type(self)(self._folder, column=name) for name in others if name in LOSS_COLUMNS}
        for store in stores.values():
            store._is_beside = True
        return stores

    def _middle(self, number: int) -> bytes:
        file = self._folder.file(self.shards[number].name)
        middle = file.size_bytes // 2
        return file.peek([(middle, middle + _SAMPLED_BYTES)])[0]

    # -- entering and leaving -----------------------------------------------------------------------------

    def acquire(self, stack: contextlib.ExitStack) -> None:
        """Allow reads; the first read of a shard opens it."""
        self._files.open()
        stack.callback(self._files.close)
        super().acquire(stack)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    # -- documents and the stream -------------------------------------------------------------------------

    def read_into(self, out: npt.NDArray[Any], starts: I64, stops: I64) -> None:
        shards, begins, sizes = self._bytes_of(self.documents.pieces(starts, stops))
        places, raw = sizes.cumsum() - sizes, out.view(np.uint8)
        for number, mine in grouped(shards):
            self._files.read_into(number, raw, begins[mine], sizes[mine], places[mine])

    def will_need(self, starts: I64, stops: I64) -> None:
        """Announce ranges of the stream that will be read, each once; waits for lengths at most."""
        shards, begins, sizes = self._bytes_of(self.documents.pieces(*self._ranges(starts, stops)))
        for number, mine in grouped(shards):
            self._files.will_need(number, begins[mine], begins[mine] + sizes[mine])

    def forget_needs(self) -> None:
        self._files.forget_needs()

    def _bytes_of(self, pieces: Pieces) -> tuple[I64, I64, I64]:
        """(shard, first byte in it, bytes) of each piece; int64 [k] each."""
        shards = self.shard_ends.searchsorted(pieces.documents, side="right")
        even, itemsize = self._even, self.dtype.itemsize
        if even is None:
            begins = self._table["begins"][pieces.documents]
        else:
            begins = even.first[shards] + (pieces.documents - self._firsts[shards]) * even.stride_bytes
        return shards, begins + pieces.begin * itemsize, pieces.lengths * itemsize

    @cached_property
    def _firsts(self) -> I64:
        """The first document of each shard; int64 [num_shards]."""
        return np.concatenate(([0], self.shard_ends[:-1]))

    # -- positions and lengths of documents -----------------------------------------------------------------

    @property
    def documents(self) -> LengthsIndex:
        """Where documents begin, from the index or the shards' heads."""
        fixed = self._items.num_tokens
        return LengthsIndex(self._table["starts"] if fixed is None else Multiples(fixed, len(self) + 1))

    @property
    def _table(self) -> Mapping[str, Array]:
        """starts: see LengthsIndex. begins: byte of its shard where each document's tokens begin."""
        # not a cached_property: Python 3.11 would hold its lock while we wait for storage
        if self._known_table is None:
            self._known_table = self._looked_up()
        return self._known_table

    def _looked_up(self) -> Mapping[str, Array]:
        numbers = range(len(self.shards))
        parts = [numbers[at : at + _SHARDS_OF_PART] for at in range(0, len(numbers), _SHARDS_OF_PART)]
        if len(parts) <= 1 and not self._folder.is_remote:
            return _whole(parts, [self._part(part) for part in parts])
        key = key_of_parts(kind=self.kind, version=3, content=self._digest, files=self._versions())
        return built_in_parts(self._folder.kept, key, lambda: parts, self._part, _whole)

    def _versions(self) -> str | None:
        """Digest of sizes and times of local shards.

        Versions of remote ones differ only in the fingerprint.
        """
        if self._folder.is_remote:
            return None
        digest = hashlib.blake2b(digest_size=16)
        for shard in self.shards:
            path = join(self.path, shard.name)
            with typed_errors(path):
                found = os.stat(path)  # noqa: PTH116  (a Path for each of 100,000 shards takes longer)
            digest.update(struct.pack("<qq", found.st_size, found.st_mtime_ns))
        return digest.hexdigest()

    def _part(self, numbers: Sequence[int]) -> Mapping[str, Array]:
        """begins and lengths of all documents of some shards."""
        files = _at_once(self._file, numbers)
        counts = [self.shards[number].num_documents for number in numbers]
        CachedFile.glance(files, [*map(ItemsFile.glanced_bytes, counts)])
        found = _at_once(self._looked_into, [*zip(numbers, files)])
        self._looked = sum((stats for _, _, stats in found), self._looked)
        begins, lengths, _ = zip(*found)
        return {"begins": np.concatenate(begins), "lengths": np.concatenate(lengths)}

    def _looked_into(self, shard: tuple[int, ByteFile]) -> tuple[I64, I64, FileStats]:
        number, file = shard
        self._refuse_size(number, file)
        return *self._places(number, file), file.stats

    # -- for formats --------------------------------------------------------------------------------------

    def _places(self, number: int, file: ByteFile) -> tuple[I64, I64]:
        """(byte where its tokens begin, tokens) of each document of a shard; int64 [num_documents] each."""
        with ItemsFile(file, self.shards[number].num_documents, self._items) as items:
            return items.places()

    def _verify(self, number: int) -> None:
        """Check a shard against everything that its format records."""
        shard = self.shards[number]
        with ItemsFile(self._checked_file(number, whole=True), shard.num_documents, self._items) as items:
            items.verify()

    def _checked_file(self, number: int, *, whole: bool = False) -> ByteFile:
        """A shard's file, whose size matches the index."""
        file = self._file(number, whole=whole)
        self._refuse_size(number, file)
        return file

    def _file(self, number: int, *, whole: bool = False) -> ByteFile:
        """A shard's file. Hashes of local files are checked only with `whole`."""
        content = self._content(number)
        if content is not None and content.codec is None and not self._folder.is_remote and not whole:
            content = None  # read in place
        return self._folder.file(self.shards[number].name, content)

    def _column_of_tokens(self, fit: Sequence[str]) -> int:
        """The given column, "tokens", "input_ids", or the only column that fits."""
        names = [field.name for field in self._fields]
        usual = next((name for name in TOKEN_COLUMNS if name in names), None)
        name = self._column or usual or (fit[0] if len(fit) == 1 else None)
        if name not in names:
            said = ", ".join(f"{field.name} ({field.encoding})" for field in self._fields)
            raise OptionError(
                f"{self.path}: its columns are {said[:500]}; say which holds tokens: "
                f"mf.open(path, column=...)"
            )
        return names.index(name)

    def _first_value(self, items: Items) -> bytes:
        """The tokens' value of the first item; empty without items."""
        for number, shard in enumerate(self.shards):
            if shard.num_documents:
                with ItemsFile(self._checked_file(number), shard.num_documents, items) as file:
                    return file.first()
        return b""


def _at_once(ask: Callable[[S], T], shards: Sequence[S]) -> list[T]:
    """Results of `ask` for some shards, in order, several at a time. Raises the first error in that order."""
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        return list(pool.map(ask, shards))
    finally:
        pool.shutdown(cancel_futures=True)


def _whole(parts: Sequence[Any], arrays: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    starts = np.concatenate(([0], joined(arrays, "lengths").cumsum(dtype=np.int64)))
    return {"starts": starts, "begins": joined(arrays, "begins")}
