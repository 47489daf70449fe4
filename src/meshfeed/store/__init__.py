"""Bytes -> tokens: stores of documents, opened by path."""

from meshfeed.store.indexed import IndexedStore
from meshfeed.store.indexed_writer import IndexedWriter, best_dtype
from meshfeed.store.jsonl import JsonlStore
from meshfeed.store.mapped import NUMBERS, Item, Mapped, Refused
from meshfeed.store.mds import MDSStore
from meshfeed.store.mock import Lengths
from meshfeed.store.open import open_store
from meshfeed.store.protocol import Store, StreamStore
from meshfeed.store.views import Resampled, SameEveryEpoch

__all__ = [
    "NUMBERS",
    "IndexedStore",
    "IndexedWriter",
    "Item",
    "JsonlStore",
    "Lengths",
    "MDSStore",
    "Mapped",
    "Refused",
    "Resampled",
    "SameEveryEpoch",
    "Store",
    "StreamStore",
    "best_dtype",
    "open_store",
]
