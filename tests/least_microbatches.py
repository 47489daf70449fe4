"""A number of microbatches that no plan can go below, to judge plans by."""

from __future__ import annotations

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.plan import Packing
from meshfeed.plan.packing import Room


def microbatch_bound(lengths: Longs, packing: Packing, room: Room, *, quantum: int = 1) -> int:
    """The fewest microbatches that any plan needs: by tokens, and by sequences too long to share a group.

    lengths: real tokens of the kept sequences, each at most room.longest; int64 [n].
    The bound L2 of Martello and Toth (1990) on the bins of the widest group: with C the limit and any k <= C
    / 2, those above C - k need a bin each and so do those above C / 2; what the rest needs beyond the space
    left there is more.
    """
    if not lengths.size:
        return 0
    limit, blocks = room.limits[-1], room.num_ranks // room.sizes[-1]
    padded = np.sort(room.align.padded(lengths, room.sizes[0]))
    bins = _two_sided(padded, limit)
    by_tokens = -(-int(padded.sum()) // (packing.capacity * room.num_ranks))
    least = max(-(-bins // blocks), by_tokens, packing.microbatches or 1)
    return -(-least // quantum) * quantum


def _two_sided(sizes: Longs, limit: int) -> int:
    """L2 for sizes in ascending order; int64 [n]."""
    ends = np.concatenate(([0], np.cumsum(sizes)))
    half = int(np.searchsorted(sizes, limit / 2, side="right"))
    k = np.unique(np.concatenate(([0], sizes[:half])))
    big = np.searchsorted(sizes, limit - k, side="right")  # from here on: alone, nothing of size >= k beside
    small = np.searchsorted(sizes, k, side="left")
    need = (ends[half] - ends[small]) - ((big - half) * limit - (ends[big] - ends[half]))
    bound = sizes.size - half + np.maximum(-(-need // limit), 0)
    return max(int(bound.max()), -(-int(ends[-1]) // limit))
