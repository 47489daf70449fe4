"""Documents laid end to end whose starts are known: what token stores of several formats share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from meshfeed.errors import StoreError

I64 = npt.NDArray[np.int64]


def document_starts_between(bounds: I64, starts: I64, stops: I64) -> tuple[I64, I64]:
    """Offsets o of documents with start < o < stop, range after range, and how many each range has.

    bounds: the distinct offsets of documents, ascending; int64.
    """
    first = np.searchsorted(bounds, starts, side="right")
    counts = np.maximum(np.searchsorted(bounds, stops, side="left") - first, 0)
    places = np.arange(int(counts.sum())) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    return bounds[places], counts


def pieces_of(offsets: I64, starts: I64, stops: I64) -> tuple[I64, I64, I64]:
    """Stream ranges as pieces of documents: (document, tokens skipped, tokens taken), int64 each, in order.

    offsets: where each document starts, and the stream's end; int64 [num_documents + 1].
    """
    some = stops > starts
    starts, stops = starts[some], stops[some]
    first = np.searchsorted(offsets, starts, side="right") - 1
    last = np.searchsorted(offsets, stops, side="left")
    counts = last - first
    which = np.arange(starts.size).repeat(counts)
    document = np.arange(which.size) + (first - counts.cumsum() + counts).repeat(counts)
    begin = np.maximum(offsets[document], starts[which])
    take = np.minimum(offsets[document + 1], stops[which]) - begin
    full = take > 0  # documents without tokens lie between
    return document[full], (begin - offsets[document])[full], take[full]


def checked_ranges(name: str, num_tokens: int, starts: I64, stops: I64) -> tuple[I64, I64]:
    """The ranges as int64. Raises StoreError for one that is not inside the stream."""
    starts, stops = np.asarray(starts, np.int64), np.asarray(stops, np.int64)
    if starts.ndim != 1 or starts.shape != stops.shape:
        raise StoreError(f"{name}: starts {starts.shape} and stops {stops.shape}; both must be [m]")
    outside = (starts < 0) | (stops < starts) | (stops > num_tokens)
    if outside.any():
        i = int(outside.argmax())
        raise StoreError(
            f"{name}: range {i}: tokens {starts[i]}..{stops[i]} asked for, the stream has {num_tokens}"
        )
    return starts, stops


def checked_out(
    name: str, out: npt.NDArray[Any] | None, dtype: np.dtype[Any], total: int
) -> npt.NDArray[Any]:
    """`out`, or a new array for so many tokens. Raises StoreError for one that does not fit."""
    if out is None:
        return np.empty(total, dtype)
    if out.dtype != dtype or out.shape != (total,) or not out.flags.carray:
        raise StoreError(
            f"{name}: out is {out.dtype.name} {out.shape}; it must be a contiguous, writeable {dtype.name} "
            f"({total},)"
        )
    return out


def checked_places(name: str, places: I64, count: int, what: str) -> I64:
    """Places as int64. Raises StoreError for one that is not in [0, count)."""
    places = np.asarray(places, np.int64)
    outside = (places < 0) | (places >= count)
    if outside.any():
        raise StoreError(
            f"{name}: {what} {places[outside.argmax()]} asked for, it has {count}, counted from 0"
        )
    return places
