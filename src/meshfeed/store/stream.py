"""Documents laid end to end whose lengths are known: what token stores of several formats share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from meshfeed.errors import StoreError

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Multiples:
    """0, step, 2 step, ..., as an array that takes no memory. step: at least 1. size: entries."""

    step: int
    size: int

    def __getitem__(self, places: Any) -> Any:
        """Entries at some places that are there, counted from 0; whole numbers, int64 [n] or one alone."""
        return places * self.step

    def searchsorted(self, values: I64, side: Literal["left", "right"] = "left") -> I64:
        """As of an array."""
        found = -(-values // self.step) if side == "left" else values // self.step + 1
        return found.clip(0, self.size)


@dataclass(frozen=True, eq=False)
class LengthsIndex:
    """Documents back to back as one stream of tokens, by array look-ups.

    Attributes:
        starts: stream offset of each document's first token, then the end; int64 [num_documents + 1].
    """

    starts: I64 | Multiples

    @property
    def num_documents(self) -> int:
        """Documents, empty ones too."""
        return self.starts.size - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.starts[self.starts.size - 1])

    def lengths(self, documents: I64) -> I64:
        """Tokens of each document; int64 [n]."""
        return self.starts[documents + 1] - self.starts[documents]

    def offsets(self, documents: I64) -> I64:
        """Stream offset of each document's first token; int64 [n]."""
        return self.starts[documents]

    def document_starts(self, begins: I64, ends: I64) -> tuple[I64, I64]:
        """Offsets of documents strictly inside each range, int64 [total], and their counts, int64 [m].

        A document without tokens shares its offset with the next and adds none.
        """
        first = self.starts.searchsorted(begins, side="right")
        counts = (self.starts.searchsorted(ends, side="left") - first).clip(0)
        found = self.starts[_runs(first, counts)]
        of_range = np.arange(counts.size).repeat(counts)
        new = np.ones(found.size, np.bool_)
        new[1:] = (of_range[1:] != of_range[:-1]) | (found[1:] != found[:-1])
        return found[new], np.bincount(of_range[new], minlength=counts.size)

    def pieces(self, begins: I64, ends: I64) -> Pieces:
        """The documents that stream ranges go through, range after range."""
        first = self.starts.searchsorted(begins, side="right") - 1
        stop = self.starts.searchsorted(ends, side="left")
        counts = np.where(ends > begins, stop - first, 0)
        documents = _runs(first, counts)
        starts = self.starts[documents]
        begin = np.maximum(begins.repeat(counts) - starts, 0)
        end = np.minimum(ends.repeat(counts), self.starts[documents + 1]) - starts
        some = end > begin
        return Pieces(documents[some], begin[some], end[some])


@dataclass(frozen=True, slots=True)
class Pieces:
    """Some tokens of some documents: begin..end of each; int64 [k] three times, no piece empty."""

    documents: I64
    begin: I64
    end: I64

    @property
    def lengths(self) -> I64:
        """Tokens of each; int64 [k]."""
        return self.end - self.begin

    def take(self, which: I64) -> Pieces:
        """Some of them."""
        return Pieces(self.documents[which], self.begin[which], self.end[which])


class DocumentStream(ABC):
    """Stream look-ups of a store whose documents lie end to end. All methods raise StoreError.

    Attributes:
        path: what messages call it.
    """

    path: str

    @property
    @abstractmethod
    def _documents(self) -> LengthsIndex:
        """Where documents begin."""

    @abstractmethod
    def read_stream(self, starts: I64, stops: I64, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Tokens of the stream's ranges, back to back: [sum(stops - starts)] of the store's dtype.

        starts, stops: int64 [m], stream offsets in tokens, in any order and overlapping at will.
        out: 1-D, contiguous and of exactly that size to read into and return; None for a new array.
        """

    def __len__(self) -> int:
        return self.num_documents

    @property
    def num_documents(self) -> int:
        """Documents, empty ones too."""
        return self._documents.num_documents

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return self._documents.num_tokens

    def lengths(self, documents: I64) -> I64:
        """Tokens of each document; int64 [n] -> int64 [n]."""
        return self._documents.lengths(self._existing(documents))

    def offsets(self, documents: I64) -> I64:
        """Stream offset, in tokens, of each document's first; int64 [n] -> int64 [n]."""
        return self._documents.offsets(self._existing(documents))

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens start..stop of one document; [stop - start] of the store's dtype."""
        at = np.array([document])
        first, length = int(self.offsets(at)[0]), int(self.lengths(at)[0])
        if not 0 <= start <= stop <= length:
            raise StoreError(
                f"{self.path}: tokens {start}..{stop} of document {document} asked for, it has {length}"
            )
        return self.read_stream(np.array([first + start]), np.array([first + stop]))

    def document_starts(self, starts: I64, stops: I64) -> tuple[I64, I64]:
        """Stream offsets o of documents with start < o < stop, range after range, each once, and how many."""
        return self._documents.document_starts(*self._ranges(starts, stops))

    def _existing(self, documents: I64) -> I64:
        return checked_places(self.path, documents, self.num_documents, "document")

    def _ranges(self, starts: I64, stops: I64) -> tuple[I64, I64]:
        return checked_ranges(self.path, self.num_tokens, starts, stops)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"


def _runs(first: I64, counts: I64) -> I64:
    """first 5 9, counts 2 3 -> 5 6 9 10 11."""
    return np.arange(counts.sum()) + (first - counts.cumsum() + counts).repeat(counts)


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
