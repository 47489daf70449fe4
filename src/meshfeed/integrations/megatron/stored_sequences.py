"""A store by sequence, as Megatron counts: by the entries of its .idx, not by documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshfeed.arrays import Ints, Longs
from meshfeed.errors import RecipeError, StoreError
from meshfeed.mixture import Store
from meshfeed.store.base import StreamStore
from meshfeed.store.index import Index
from meshfeed.store.indexed import IndexedStore

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredSequences:
    """Where the sequences of a store are in its stream. All methods may raise StoreError.

    Attributes:
        store: of the tokens; it need not be entered.
        index: of the sequences; None if the store has no smaller unit than documents.
    """

    store: StreamStore
    index: Index | None

    @property
    def count(self) -> int:
        """Sequences in the store."""
        return self.store.num_documents if self.index is None else self.index.header.num_sequences

    def lengths(self, sequences: Longs) -> Longs:
        """Tokens of each sequence; int64 [n] -> int64 [n]."""
        if self.index is not None:
            return self.index.lengths_of(sequences)
        with self.store:
            return self.store.lengths(sequences)

    def offsets(self, sequences: Longs) -> Longs:
        """Stream offset of each sequence's first token; int64 [n] -> int64 [n]."""
        if self.index is not None:
            return self.index.pointers_of(sequences, np.zeros_like(sequences)) // self.store.dtype.itemsize
        with self.store:
            return self.store.offsets(sequences)

    def lengths_between(self, begin: int, end: int) -> Ints:
        """Tokens of the sequences begin..end; int32 [end - begin]."""
        lengths = np.empty(end - begin, np.int32)
        for first in range(begin, end, _BLOCK):
            some = self.lengths(np.arange(first, min(first + _BLOCK, end)))
            if some.max() > np.iinfo(np.int32).max:
                raise StoreError(
                    f"{self.store!r}: a document of {some.max()} tokens; Megatron's have 2**31 - 1"
                )
            lengths[first - begin : first - begin + some.size] = some
        return lengths

    def tokens_between(self, begin: int, end: int) -> int:
        """Tokens of the sequences begin..end together."""
        inside = np.array([each for each in (begin, end) if each < self.count], np.int64)
        edges = [*self.offsets(inside).tolist(), self.store.num_tokens, self.store.num_tokens]
        return edges[1] - edges[0]


def sequences_of(store: Store) -> StoredSequences:
    """The sequences of a token store; its documents if it has no smaller unit.

    Raises RecipeError for a store that is not a stream of tokens.
    """
    if not isinstance(store, StreamStore):
        raise RecipeError(f"{store!r} is not a stream of tokens; give a store as mf.open(path) does")
    if not isinstance(store, IndexedStore):
        return StoredSequences(store, None)
    if not store.is_stream:
        raise StoreError(f"{store.path}: its sequences do not fill the .bin in order; write it again")
    return StoredSequences(store, store.index())
