"""How an object is cut into the blocks that the node's cache fetches, keeps and evicts as a whole.

Blocks have one size, unless a shuffle draws from shards and the cache is smaller than the object. Then a
block that holds the end of one shard and the start of the next would be fetched for each of them. So blocks
end where shards meet: what two shards share, such as the last label of one, is a short block of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.files.byte_file import LEAST
from meshfeed.intervals import distinct, numbered

SHARED = "+"
"""Ends the name of a block that two shards read."""


class Cut(NamedTuple):
    """The blocks of an object.

    Attributes:
        size_bytes: of the object.
        block_bytes: of each block except the last; with `ends`, of the largest.
        ends: of each block, if they differ in size.
        shared: the blocks between shards, which two of them read.
    """

    size_bytes: int
    block_bytes: int
    ends: tuple[int, ...] = ()
    shared: frozenset[int] = frozenset()

    @property
    def edges(self) -> Longs:
        """Where each block begins, then the end of the last; int64 [num_blocks + 1]."""
        if self.ends:
            return np.array([0, *self.ends], np.int64)
        return np.append(np.arange(0, self.size_bytes, self.block_bytes), self.size_bytes)

    def name(self, block: int) -> str:
        return f"{block}{SHARED if block in self.shared else ''}"


def cut_at(joints: tuple[Longs, Longs], size_bytes: int, block_bytes: int, unit_bytes: int) -> Cut:
    """Blocks for shards of which two share the bytes begin..end of each joint; int64 [m] each, ascending.

    block_bytes: the most. unit_bytes: a block is whole ones of these, except the last.
    """
    low, high = joints[0] // unit_bytes * unit_bytes, -(-joints[1] // unit_bytes) * unit_bytes
    if size_bytes < block_bytes // LEAST * (low.size + 1):
        return Cut(size_bytes, block_bytes)
    edges = distinct(np.concatenate((low, high, [0, size_bytes])).clip(0, size_bytes))
    sizes = np.diff(edges)
    # between two edges, blocks of about one size: 0 10, most 4 -> 0 4 8 10
    counts = -(-sizes // block_bytes)
    of, number = numbered(counts)
    begins = edges[of] + number * (-(-sizes // (counts * unit_bytes)) * unit_bytes)[of]
    first, after = begins.searchsorted((low, high))
    of, number = numbered(after - first)
    shared = frozenset((first[of] + number).tolist())
    return Cut(size_bytes, block_bytes, (*begins[1:].tolist(), size_bytes), shared)
