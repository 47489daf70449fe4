"""Which documents stay, and which of them are set apart, by their hashes alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


def first_of_each(hashes: U64) -> Mask:
    """Whether each document is the first with its hash; uint64 [n, 2] -> bool [n]."""
    # Sorted by hash and then by place, a document is a repetition where it has the hash of the one before.
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    again = (hashes[order[1:]] == hashes[order[:-1]]).all(axis=1)
    keep = np.ones(len(hashes), np.bool_)
    keep[order[1:][again]] = False
    return keep


def set_apart(hashes: U64, share: float) -> Mask:
    """Whether each document is of the validation set; uint64 [n, 2] -> bool [n].

    A function of the document and the share alone, and monotone in the share: a larger set holds the smaller.
    """
    # A float times a power of two is exact, and a share below 1 stays below 2**64.
    return hashes[:, 0] < np.uint64(int(share * 2**64))
