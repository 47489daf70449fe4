"""What every store of a stream must answer, whatever its format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def check_tokens(store: Any, documents: Sequence[np.ndarray], *, seed: int = 7) -> None:
    """Every question that a sequence rule asks, against the documents themselves."""
    stream = np.concatenate(documents)
    lengths = np.array([document.size for document in documents])
    begins = lengths.cumsum() - lengths
    first = begins[lengths > 0]
    rng = np.random.default_rng(seed)
    assert (store.num_documents, store.num_tokens, store.dtype) == (len(documents), stream.size, stream.dtype)
    with store:
        every = np.arange(len(documents))
        assert np.array_equal(store.lengths(every), lengths)
        assert np.array_equal(store.offsets(every), begins)
        assert np.array_equal(store.read_stream(np.array([0]), np.array([stream.size])), stream)
        for _ in range(20):
            starts = rng.integers(0, stream.size, 9)
            stops = np.minimum(starts + rng.integers(0, 3000, 9), stream.size)
            store.will_need(starts, stops)
            expected = [stream[a:b] for a, b in zip(starts.tolist(), stops.tolist())]
            assert np.array_equal(store.read_stream(starts, stops), np.concatenate(expected))
            found, counts = store.document_starts(starts, stops)
            inside = [first[(first > a) & (first < b)] for a, b in zip(starts.tolist(), stops.tolist())]
            assert np.array_equal(found, np.concatenate(inside)) and counts.tolist() == [
                len(i) for i in inside
            ]
        document = int(rng.choice(np.flatnonzero(lengths)))
        assert np.array_equal(store.read(document, 1, lengths[document]), documents[document][1:])
