"""What no plan can beat."""

from __future__ import annotations

import numpy as np

from meshfeed.plan.cost import CostModel
from meshfeed.plan.policy import Packing, Room
from meshfeed.plan.types import LongArray


def objective_bound(
    lengths: LongArray, cost: CostModel, room: Room, *, num_microbatches: int, bubble_share: float = 0.0
) -> float:
    """The least objective of any plan for these sequences, in units of load; both objectives obey it.

    lengths: real tokens, int64 [n]. The bubble costs bubble_share times the largest microbatch.
    The greatest of three bounds. *Work*: all of it, shared evenly. *Longest*: the longest sequence on the
    widest group.
    *Count*, which binds where sequences are few or alike: of the k B + 1 heaviest sequences on B = ranks /
    widest blocks, some block of each microbatch holds together k + 1, so the k + 1 lightest of them follow
    each other.
    """
    if not lengths.size:
        return num_microbatches * cost.overhead
    widest = room.sizes[-1]
    loads = np.sort(cost.load(lengths, widest) if not cost.ring_tokens else cost.work(lengths) / widest)[::-1]
    even = float(cost.work(lengths).sum()) / room.num_ranks
    blocks = room.num_ranks // widest
    last = np.arange(0, loads.size, blocks)  # k B for each k
    total = np.concatenate(([0.0], np.cumsum(loads)))
    count = float((total[last + 1] - total[np.maximum(last - np.arange(last.size), 0)]).max())
    total_load = max(even, count)
    top = max(total_load / num_microbatches, float(loads[0]))
    return total_load + bubble_share * top + num_microbatches * cost.overhead


def microbatch_bound(lengths: LongArray, packing: Packing, room: Room, *, quantum: int = 1) -> int:
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


def _two_sided(sizes: LongArray, limit: int) -> int:
    """L2 for sizes in ascending order; int64 [n]."""
    ends = np.concatenate(([0], np.cumsum(sizes)))
    half = int(np.searchsorted(sizes, limit / 2, side="right"))
    k = np.unique(np.concatenate(([0], sizes[:half])))
    big = np.searchsorted(sizes, limit - k, side="right")  # from here on: alone, nothing of size >= k beside
    small = np.searchsorted(sizes, k, side="left")
    need = (ends[half] - ends[small]) - ((big - half) * limit - (ends[big] - ends[half]))
    bound = sizes.size - half + np.maximum(-(-need // limit), 0)
    return max(int(bound.max()), -(-int(ends[-1]) // limit))
