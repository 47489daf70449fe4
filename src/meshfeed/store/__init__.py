"""Bytes -> tokens: stores of documents, opened by path."""

from meshfeed.mixture import Store
from meshfeed.store.base import LengthsIndex, StreamStore
from meshfeed.store.dataset import DatasetStore
from meshfeed.store.dataset_writer import DatasetWriter
from meshfeed.store.format import Place, StoreFormat
from meshfeed.store.indexed import IndexedStore
from meshfeed.store.indexed_writer import IndexedWriter, best_dtype
from meshfeed.store.mapped import NUMBERS, Item, Mapped, Refused
from meshfeed.store.mock import Lengths
from meshfeed.store.open import open_store
from meshfeed.store.tokenizer import Tokenizer
from meshfeed.store.views import Resampled, SameEveryEpoch

__all__ = [
    "NUMBERS",
    "DatasetStore",
    "DatasetWriter",
    "IndexedStore",
    "IndexedWriter",
    "Item",
    "Lengths",
    "LengthsIndex",
    "Mapped",
    "Place",
    "Refused",
    "Resampled",
    "SameEveryEpoch",
    "Store",
    "StoreFormat",
    "StreamStore",
    "Tokenizer",
    "best_dtype",
    "open_store",
]
