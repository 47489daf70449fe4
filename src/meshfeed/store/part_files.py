"""The parts of a dataset's documents: images, audio and video, as stored bytes.

Two .bin/.idx pairs next to the tokens, with the same documents:

    parts.bin .idx .sums        uint8: the parts' bytes, unchanged; a part is a sequence
    part_sizes.bin .idx .sums   float64 [parts, 6]: the SIZES of each part; all but the rate are whole

So a plan reads 48 bytes per part, and only the index of `parts`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from meshfeed.parts import KINDS, Parts
from meshfeed.store.base import I64

SIZES = ("kind", "height", "width", "length", "rate", "at")
"""Columns of a part's sizes; see `Parts`."""
FILES = {"bytes": "parts", "sizes": "part_sizes"}
"""The entry "parts" of dataset.json: the prefixes of both pairs."""


def are_sizes(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which rows of stored sizes, float64 [p, 6], can be those of a part; bool [p]."""
    whole = np.delete(rows, SIZES.index("rate"), axis=1)
    right = ((whole >= 0) & (whole == np.floor(whole)) & (whole < 2.0**53)).all(axis=1)
    return right & (rows[:, 0] < len(KINDS)) & (rows[:, SIZES.index("rate")] >= 0)


def rows_of(parts: Parts) -> npt.NDArray[np.float64]:
    """The stored sizes of parts; float64 [p, 6]."""
    return np.stack([np.asarray(getattr(parts, name), np.float64) for name in SIZES], axis=1)


def parts_of(rows: npt.NDArray[np.float64], num_bytes: I64, counts: I64) -> Parts:
    """Parts of stored sizes, float64 [p, 6]; the reverse of `rows_of`.

    num_bytes: of each part; int64 [p]. counts: parts of each sample; int64 [samples].
    """
    whole = np.delete(rows, SIZES.index("rate"), axis=1).astype(np.int64)
    kind, height, width, length, at = whole.T
    rate = rows[:, SIZES.index("rate")]
    return Parts(kind, height, width, length, rate, num_bytes, at, np.append(0, counts.cumsum()))
