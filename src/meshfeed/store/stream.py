"""Where documents that lie end to end begin: the arithmetic of stream ranges and documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from meshfeed.store.index import Index

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
        starts: stream offset of each document's first token, then the end; int64 [num_documents + 1], or what
            looks them up.
    """

    starts: I64 | Multiples | Index

    @property
    def num_documents(self) -> int:
        """Documents, empty ones too."""
        return self.starts.size - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.starts[np.array([self.starts.size - 1])][0])

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
        found = self.starts[runs(first, counts)]
        of_range = np.arange(counts.size).repeat(counts)
        new = np.ones(found.size, np.bool_)
        new[1:] = (of_range[1:] != of_range[:-1]) | (found[1:] != found[:-1])
        return found[new], np.bincount(of_range[new], minlength=counts.size)

    def pieces(self, begins: I64, ends: I64) -> Pieces:
        """The documents that stream ranges go through, range after range."""
        first = self.starts.searchsorted(begins, side="right") - 1
        stop = self.starts.searchsorted(ends, side="left")
        counts = np.where(ends > begins, stop - first, 0)
        documents = runs(first, counts)
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


def runs(first: I64, counts: I64) -> I64:
    """Consecutive numbers from each first: 5 9, counts 2 3 -> 5 6 9 10 11."""
    return np.arange(counts.sum()) + (first - counts.cumsum() + counts).repeat(counts)


def grouped(values: I64) -> Iterator[tuple[int, I64]]:
    """Every value with the places where it stands, ascending: 5 7 5 -> (5, [0, 2]), (7, [1])."""
    if not values.size:
        return
    order = values.argsort(kind="stable")
    for places in np.split(order, np.flatnonzero(np.diff(values[order])) + 1):
        yield int(values[places[0]]), places
