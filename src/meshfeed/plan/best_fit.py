"""Best-fit-decreasing packing of documents into bins of one capacity."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from meshfeed.errors import PlanError
from meshfeed.plan.types import LongArray


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
    num_bins = 1 if lengths.size else 0
    bins_with = {capacity: [np.arange(num_bins)]}  # bins by the space left in them
    spaces = [capacity]  # those of bins_with, ascending
    done = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist()):
        while length and count:
            tightest = bisect_left(spaces, length)
            if tightest < len(spaces):
                space = spaces.pop(tightest)
                bins = np.concatenate(bins_with.pop(space))
            else:
                bins, space = np.arange(num_bins, num_bins - (-count // (capacity // length))), capacity
                num_bins += bins.size
            # 8 documents of 300 into bins with 1000 left: 3 each into two of them, 2 into a third
            each = space // length
            full, some = divmod(min(count, bins.size * each), each)
            here = full * each + some
            bin_of_ordered[done : done + here] = np.repeat(bins[: full + 1], each)[:here]
            partly = full + (some > 0)
            for left, put in (
                (space - each * length, bins[:full]),
                (space - some * length, bins[full:partly]),
                (space, bins[partly:]),
            ):
                if left and put.size:
                    if left not in bins_with:
                        insort(spaces, left)
                    bins_with.setdefault(left, []).append(put)
            done += here
            count -= here
    bin_of = np.empty_like(bin_of_ordered)
    bin_of[order] = bin_of_ordered
    return bin_of, num_bins
