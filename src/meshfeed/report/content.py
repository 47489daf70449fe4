"""A digest of all that a store holds, whatever its format: of its tokens, lengths, columns and parts."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import cast

import numpy as np

from meshfeed.multimodal import MultimodalStore
from meshfeed.store import StreamStore

_TOGETHER = 1 << 22  # tokens of long documents are read in pieces of this size
_DOCUMENTS = 1 << 12  # whose lengths, or parts, are looked up together


def add_content(digest: blake2b, store: StreamStore) -> Iterator[float]:
    """Add all that a store holds to a digest, yielding the share done. Raises StoreError."""
    columns = {"tokens": store, **dict(sorted(cast(dict[str, StreamStore], {**store.columns}).items()))}
    with store:
        for done, (name, column) in enumerate(columns.items()):
            digest.update(f"{name} {column.dtype.name} {column.num_documents}".encode())
            yield from ((done + share) / len(columns) for share in _add_column(digest, column))
        if isinstance(store, MultimodalStore):
            _add_parts(digest, store)
    yield 1.0


def _add_column(digest: blake2b, store: StreamStore) -> Iterator[float]:
    for first in range(0, store.num_documents, _DOCUMENTS):
        documents = np.arange(first, min(first + _DOCUMENTS, store.num_documents))
        lengths = store.lengths(documents)
        digest.update(lengths.astype("<i8").tobytes())
        if store.is_stream:
            begin, end = store.offsets(documents[:1]), store.offsets(documents[-1:]) + lengths[-1:]
            for at in range(int(begin[0]), int(end[0]), _TOGETHER):
                stop = np.minimum(at + _TOGETHER, end)
                digest.update(store.read_stream(np.array([at]), stop).tobytes())
        else:
            for document, length in zip(documents.tolist(), lengths.tolist()):
                digest.update(store.read(document, 0, length).tobytes())
        yield (first + documents.size) / store.num_documents


def _add_parts(digest: blake2b, store: MultimodalStore) -> None:
    for document in range(store.num_documents):
        numbers = np.arange(store.parts(np.array([document])).kind.size)
        for data in store.read_parts(np.full_like(numbers, document), numbers):
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
