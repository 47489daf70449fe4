"""Best-fit-decreasing packing of documents into bins of one capacity."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from meshfeed.errors import PlanError
from meshfeed.plan.types import LongArray


class OpenBins:
    """Bins by the space left in them; finds the tightest that fits at once, whatever the number of bins."""

    def __init__(self) -> None:
        self._bins_with: dict[int, list[LongArray]] = {}
        self._spaces = 0  # bit s is set where some bin has s tokens left

    def put(self, bins: LongArray, space: int) -> None:
        """Add bins with this many tokens left; full ones and none at all are forgotten."""
        if space and bins.size:
            self._bins_with.setdefault(space, []).append(bins)
            self._spaces |= 1 << space

    def take_tightest(self, length: int) -> tuple[LongArray, int]:
        """Remove all bins with the least space of at least `length`; returns them and that space, or none
        and 0."""
        fitting = self._spaces >> length
        if not fitting:
            return np.zeros(0, np.int64), 0
        space = length + (fitting & -fitting).bit_length() - 1  # the lowest set bit
        self._spaces ^= 1 << space
        bins = self._bins_with.pop(space)
        return bins[0] if len(bins) == 1 else np.concatenate(bins), space


def best_fit(lengths: npt.NDArray[np.integer], capacity: int) -> tuple[LongArray, int]:
    """Pack documents into as few bins as best-fit-decreasing finds, at most 11/9 of the optimum and then
    some.

    lengths: tokens, 0 or more each; int [n]. capacity: tokens of a bin.
    Returns the bin of each document, int64 [n], and the number of bins.
    Raises PlanError for a document that exceeds the capacity, or a negative length.

    Documents of one length go together, and so do bins with the same space left: of all bins that a length
    fits, those with the least space take `space // length` documents each. That is what best fit does one by
    one, since a bin just used is the tightest that still fits. The work is in the number of (length, space)
    pairs that meet.
    """
    lengths = lengths.astype(np.int64)
    if lengths.size and (lengths.max() > capacity or lengths.min() < 0):
        worst = int(lengths.argmax() if lengths.max() > capacity else lengths.argmin())
        raise PlanError(
            f"document {worst}: {lengths[worst]} tokens do not fit a bin of {capacity}; "
            f"split it or raise the capacity"
        )
    order = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    bin_of_ordered = np.zeros(lengths.size, np.int64)  # documents without tokens stay in bin 0
    open_bins = OpenBins()
    num_bins = 1 if lengths.size else 0
    if num_bins:
        open_bins.put(np.zeros(1, np.int64), capacity)
    done = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist()):
        while length and count:
            bins, space = open_bins.take_tightest(length)
            if not space:
                bins, space = np.arange(num_bins, num_bins - (-count // (capacity // length))), capacity
                num_bins += bins.size
            # 8 documents of 300 into bins with 1000 left: 3 each into two of them, 2 into a third
            each = space // length
            full, some = divmod(min(count, bins.size * each), each)
            here = full * each + some
            bin_of_ordered[done : done + here] = np.repeat(bins[: full + 1], each)[:here]
            open_bins.put(bins[:full], space - each * length)
            if some:
                open_bins.put(bins[full : full + 1], space - some * length)
            open_bins.put(bins[full + (some > 0) :], space)
            done += here
            count -= here
    bin_of = np.empty_like(bin_of_ordered)
    bin_of[order] = bin_of_ordered
    return bin_of, num_bins
