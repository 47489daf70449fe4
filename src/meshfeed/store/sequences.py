"""A store by sequence, as Megatron counts: the entries of its .idx, whatever documents they make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from meshfeed.errors import RecipeError, StoreError
from meshfeed.mixture import Store
from meshfeed.store.base import StreamStore
from meshfeed.store.index import Index
from meshfeed.store.indexed import IndexedStore

I64 = npt.NDArray[np.int64]

_BLOCK = 1 << 20


class Sequences(Protocol):
    """Where the sequences of a store lie in its stream. All methods may raise StoreError."""

    @property
    def count(self) -> int:
        """Sequences in the store."""
        ...

    def lengths(self, sequences: I64) -> I64:
        """Tokens of each sequence; int64 [n] -> int64 [n]."""
        ...

    def offsets(self, sequences: I64) -> I64:
        """Stream offset of each sequence's first token; int64 [n] -> int64 [n]."""
        ...

    def lengths_between(self, begin: int, end: int) -> npt.NDArray[np.int32]:
        """Tokens of the sequences begin..end; int32 [end - begin]."""
        ...

    def tokens_between(self, begin: int, end: int) -> int:
        """Tokens of the sequences begin..end together."""
        ...


def sequences_of(store: Store) -> Sequences:
    """The sequences of a token store; documents, where it knows no smaller unit.

    Good without entering the store, where that is an `IndexedStore`. Raises RecipeError for what is no
    stream of tokens.
    """
    if isinstance(store, IndexedStore):
        if not store.is_stream:
            raise StoreError(f"{store.path}: its sequences do not fill the .bin in order; write it again")
        return _OfIndex(store, store.index())
    if not isinstance(store, StreamStore):
        raise RecipeError(f"{store!r} is not a stream of tokens; give a store as mf.open(path) does")
    return _OfDocuments(store)


@dataclass(frozen=True, slots=True)
class _OfIndex:
    store: IndexedStore
    index: Index

    @property
    def count(self) -> int:
        return self.store.num_sequences

    def lengths(self, sequences: I64) -> I64:
        return self.index.lengths_of(sequences)

    def offsets(self, sequences: I64) -> I64:
        nothing = np.zeros_like(sequences)
        return self.index.pointers_of(sequences, nothing) // self.store.dtype.itemsize

    def lengths_between(self, begin: int, end: int) -> npt.NDArray[np.int32]:
        lengths = np.empty(end - begin, np.int32)
        for first, stop in _blocks(begin, end):
            lengths[first - begin : stop - begin] = self.index.lengths_of(np.arange(first, stop))
        return lengths

    def tokens_between(self, begin: int, end: int) -> int:
        inside = np.array([each for each in (begin, end) if each < self.count], np.int64)
        edges = [*self.offsets(inside).tolist(), self.store.num_tokens, self.store.num_tokens]
        return edges[1] - edges[0]


@dataclass(frozen=True, slots=True)
class _OfDocuments:
    store: StreamStore

    @property
    def count(self) -> int:
        return self.store.num_documents

    def lengths(self, sequences: I64) -> I64:
        with self.store:
            return self.store.lengths(sequences)

    def offsets(self, sequences: I64) -> I64:
        with self.store:
            return self.store.offsets(sequences)

    def lengths_between(self, begin: int, end: int) -> npt.NDArray[np.int32]:
        lengths = np.empty(end - begin, np.int32)
        for first, stop in _blocks(begin, end):
            some = self.lengths(np.arange(first, stop))
            if some.size and some.max() > np.iinfo(np.int32).max:
                raise StoreError(
                    f"{self.store!r}: a document of {some.max()} tokens; Megatron's have 2**31 - 1"
                )
            lengths[first - begin : stop - begin] = some
        return lengths

    def tokens_between(self, begin: int, end: int) -> int:
        return int(self.lengths_between(begin, end).sum(dtype=np.int64))


def _blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for first in range(begin, end, _BLOCK):
        yield first, min(first + _BLOCK, end)
