"""What `Masked` hides of a document, which part of a row a slice holds, and where special tokens stand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from meshfeed.files import Cache
from meshfeed.store import StreamStore
from meshfeed.store.marks import Marks, marks_of

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Masks:
    """What is hidden of a document.

    Attributes:
        places: the hidden tokens, ascending; int64 [m].
        tokens: what the model sees there, -1 for the token itself; int64 [m].
    """

    places: Longs
    tokens: Longs


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedPiece:
    """What one own slice holds.

    Attributes:
        row: which row.
        at: its place among the tokens of all rows of this rank.
        start, stop: real tokens of the row, the special ones included.
        length: real tokens of the whole row.
        first, last: tokens of the document, from the first up to and without the last.
        raw_at: where these begin among the held tokens.
    """

    row: int
    at: int
    start: int
    stop: int
    length: int
    first: int
    last: int
    raw_at: int


@lru_cache(maxsize=16)
def special_marks(store: StreamStore, tokens: tuple[int, ...]) -> Marks:
    """Where special tokens stand in a store; kept, as it maps a file."""
    return marks_of(store, Cache(), tokens)
