"""Data of `Masked`: the hidden tokens of a document, and marks of special tokens."""

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
    """The hidden tokens of a document.

    Attributes:
        places: their indices, ascending; int64 [m].
        tokens: what the model sees there, -1 for the token itself; int64 [m].
    """

    places: Longs
    tokens: Longs


@lru_cache(maxsize=16)
def special_marks(store: StreamStore, tokens: tuple[int, ...]) -> Marks:
    """Marks of the special tokens of a store; cached, since they map a file."""
    return marks_of(store, Cache(), tokens)
