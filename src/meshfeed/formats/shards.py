"""What a format knows of a dataset in many files: its shards, and how documents lie in them."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self, TypeVar

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.errors import OptionError
from meshfeed.files import ByteFile, Content, Folder
from meshfeed.files.url import without_secrets
from meshfeed.formats.items import Column, Items, ItemsFile, Shard
from meshfeed.formats.tokens import TOKEN_COLUMNS

S = TypeVar("S")
T = TypeVar("T")

_AT_ONCE = 16
_SAMPLED_BYTES = 1 << 12
_NUM_SAMPLED = 8


@dataclass(frozen=True, slots=True)
class EvenDocuments:
    """Documents at equal distances in each shard.

    Attributes:
        first: byte of each shard where its first document's tokens begin; int64 [num_shards].
        stride_bytes: from one document to the next.
    """

    first: Longs
    stride_bytes: int


class ShardedDataset(ABC):
    """A dataset in a folder, by its index; nothing is held open. All methods raise StoreError.

    A shard that is compressed, or remote with hashes in the index, is fetched and checked as a whole before
    any of its bytes are used.

    Attributes:
        kind: the format's version in the key under which lengths are kept.
        format: the format's name in `facts`.
        folder: holds the index. column: of the tokens, as given. path: of the folder, for messages.
    """

    kind: ClassVar[str]
    format: ClassVar[str]

    def __init__(self, folder: Folder, *, column: str | None = None) -> None:
        self.folder, self.column, self.path = folder, column, without_secrets(folder.url)

    # -- what a format defines ----------------------------------------------------------------------------

    @property
    @abstractmethod
    def shards(self) -> Sequence[Shard]:
        """In the order of their documents."""

    @property
    @abstractmethod
    def fields(self) -> Sequence[Column]:
        """The columns of an item, in order."""

    @abstractmethod
    def laid_out(self) -> Items:
        """The layout of items, and which column holds the tokens."""

    @abstractmethod
    def identity(self) -> bytes:
        """Everything that decides the tokens, except the bytes of the shards."""

    @abstractmethod
    def content(self, number: int) -> Content | None:
        """How a shard is compressed, and its hashes; None if it is not compressed and has no hashes."""

    @abstractmethod
    def refuse_size(self, number: int, file: ByteFile) -> None:
        """Raise StoreError if the size of a shard differs from the index."""

    def within(self, folder: Folder) -> Self:
        """The same dataset in another folder."""
        return type(self)(folder, column=self.column)

    @cached_property
    def even(self) -> EvenDocuments | None:
        """The positions of documents, if the index has them."""
        return None

    # -- what follows -------------------------------------------------------------------------------------

    @cached_property
    def items(self) -> Items:
        return self.laid_out()

    @cached_property
    def shard_ends(self) -> Longs:
        """Documents up to the end of each shard; int64 [num_shards]."""
        return np.cumsum([shard.num_documents for shard in self.shards], dtype=np.int64)

    @cached_property
    def firsts(self) -> Longs:
        """The first document of each shard; int64 [num_shards]."""
        return np.concatenate(([0], self.shard_ends[:-1]))

    @cached_property
    def digest(self) -> str:
        """Hex digest of the index, the token column, and some blocks of the shards."""
        shards = self.shards
        digest = hashlib.blake2b(self.identity(), digest_size=16)
        sampled = np.linspace(0, len(shards) - 1, min(_NUM_SAMPLED, len(shards))).astype(int).tolist()
        for block in at_once(self._middle, sampled):
            digest.update(block)
        return digest.hexdigest()

    def hashes(self) -> list[Mapping[str, str]]:
        """The hashes of each shard in the index; none of a shard without."""
        contents = [self.content(number) for number in range(len(self.shards))]
        return [{} if each is None else {**each.stored_hashes, **each.raw_hashes} for each in contents]

    def places(self, number: int, file: ByteFile) -> tuple[Longs, Longs]:
        """(byte where its tokens begin, tokens) of each document of a shard; int64 [num_documents] each."""
        with ItemsFile(file, self.shards[number].num_documents, self.items) as items:
            return items.places()

    def verify(self, number: int) -> None:
        """Check a shard against everything that its format records."""
        shard = self.shards[number]
        with ItemsFile(self.checked_file(number, whole=True), shard.num_documents, self.items) as items:
            items.verify()

    def checked_file(self, number: int, *, whole: bool = False) -> ByteFile:
        """A shard's file, whose size matches the index."""
        file = self.file(number, whole=whole)
        self.refuse_size(number, file)
        return file

    def file(self, number: int, *, whole: bool = False) -> ByteFile:
        """A shard's file. Hashes of local files are checked only with `whole`."""
        content = self.content(number)
        if content is not None and content.codec is None and not self.folder.is_remote and not whole:
            content = None  # read in place
        return self.folder.file(self.shards[number].name, content)

    def _middle(self, number: int) -> bytes:
        file = self.folder.file(self.shards[number].name)
        middle = file.size_bytes // 2
        return file.peek([(middle, middle + _SAMPLED_BYTES)])[0]

    def _column_of_tokens(self, fit: Sequence[str]) -> int:
        """The given column, "tokens", "input_ids", or the only column that fits."""
        names = [field.name for field in self.fields]
        usual = next((name for name in TOKEN_COLUMNS if name in names), None)
        name = self.column or usual or (fit[0] if len(fit) == 1 else None)
        if name not in names:
            said = ", ".join(f"{field.name} ({field.encoding})" for field in self.fields)
            raise OptionError(
                f"{self.path}: its columns are {said[:500]}; say which holds tokens: "
                f"mf.open(path, column=...)"
            )
        return names.index(name)

    def _first_value(self, items: Items) -> bytes:
        """The tokens' value of the first item; empty without items."""
        for number, shard in enumerate(self.shards):
            if shard.num_documents:
                with ItemsFile(self.checked_file(number), shard.num_documents, items) as file:
                    return file.first()
        return b""


def at_once(ask: Callable[[S], T], shards: Sequence[S]) -> list[T]:
    """Results of `ask` for some shards, in order, several at a time. Raises the first error in that order."""
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        return list(pool.map(ask, shards))
    finally:
        pool.shutdown(cancel_futures=True)
