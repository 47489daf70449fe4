"""Bytes -> tokens: stores of documents, opened by path."""

from meshfeed.mixture import Store
from meshfeed.store.base import LengthsIndex, StreamStore
from meshfeed.store.dataset import DatasetStore
from meshfeed.store.dataset_writer import DatasetWriter
from meshfeed.store.format import Place, StoreFormat
from meshfeed.store.indexed import IndexedStore
from meshfeed.store.indexed_writer import IndexedWriter, best_dtype
from meshfeed.store.mock import Lengths
from meshfeed.store.open import open_store
from meshfeed.store.tokenizer import Tokenizer

__all__ = [
    "DatasetStore",
    "DatasetWriter",
    "IndexedStore",
    "IndexedWriter",
    "Lengths",
    "LengthsIndex",
    "Place",
    "Store",
    "StoreFormat",
    "StreamStore",
    "Tokenizer",
    "best_dtype",
    "open_store",
]
