"""Bytes -> tokens: stores of documents, opened by path."""

from meshfeed.store.indexed import IndexedStore, ReadStats
from meshfeed.store.indexed_writer import IndexedWriter, best_dtype
from meshfeed.store.mock import Lengths
from meshfeed.store.open import open_store
from meshfeed.store.protocol import Store, StreamStore

__all__ = [
    "IndexedStore",
    "IndexedWriter",
    "Lengths",
    "ReadStats",
    "Store",
    "StreamStore",
    "best_dtype",
    "open_store",
]
