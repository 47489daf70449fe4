"""Columns that decide which tokens bear loss: `labels`, loss masks, `attention_mask`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from meshfeed.arrays import Longs
from meshfeed.files import Cache
from meshfeed.store.base import DocumentRange, StreamStore, whole_of
from meshfeed.store.kept import kept_by_store
from meshfeed.store.marks import Marks, bearing

LABELS, LOSS_MASK, ATTENTION_MASK = "labels", "loss_mask", "attention_mask"
OTHER_MASKS = ("completion_mask", "assistant_masks", "assistant_mask")
"""Names of a loss mask of 0 and 1 in TRL and transformers."""
MASKS = (LOSS_MASK, ATTENTION_MASK, *OTHER_MASKS)
OF_OTHERS = {
    **dict.fromkeys(
        ("position_ids", "seq_lengths", "seq_start_id"),
        "each document is counted from 0: write each sequence of a packed row as its own",
    ),
    **dict.fromkeys(
        ("weights", "loss_weights", "token_weights", "loss_scale"),
        f"a column that weighs losses is {LOSS_MASK!r}",
    ),
}
"""Names of columns that other trainers use and meshfeed refuses, each with what to do."""
LOSS_COLUMNS = (LABELS, LOSS_MASK, ATTENTION_MASK, *OTHER_MASKS, *OF_OTHERS)
"""Columns by which other systems say what to train on. None is silently ignored."""


def as_used(digest: str, use: str) -> str:
    """A fingerprint: the digest of the content and, unless it is empty, how columns are used."""
    return hashlib.blake2b(f"{digest} {use}".encode(), digest_size=16).hexdigest() if use else digest


def count_bearing(store: StreamStore, starts: Longs, stops: Longs) -> Longs:
    """Values of `labels` and `loss_mask` that bear loss, in stream ranges; int64 [m] twice -> int64 [m].

    A loss mask of 0 bears none, nor does a label below 0. Uses an index of one bit per token, which the
    first call on a node makes from the whole columns. The store has one of the two columns.
    """
    while isinstance(store, DocumentRange):
        starts, stops, store = starts + store.begin, stops + store.begin, store.of
    return _bearing_of(store, store.kept_in or Cache()).count(starts, stops)


def has_weights(store: StreamStore) -> bool:
    """Whether any value that bears loss has another weight than 1; by the same index."""
    whole, _ = whole_of(store)
    return bool(_bearing_of(whole, whole.kept_in or Cache()).others)


@kept_by_store(most=1)
def _bearing_of(store: StreamStore, cache: Cache) -> Marks:
    """The marks of a store's columns; kept, since they map a file."""
    columns: Mapping[str, Any] = store.columns
    return bearing(columns.get(LABELS), columns.get(LOSS_MASK), cache)
