"""Shuffling with few shards open: a keyed bijection on [0, n) by shards, lanes and windows.

A shard is a run of consecutive indices. An epoch concatenates the shards in a keyed order to a line of n
indices. The line is cut into lanes of equal length, give or take one index. Position q of the epoch belongs
to lane q mod lanes, and each lane goes along its own part of the line. There, each group of `window`
successive shards is shuffled together, by a keyed bijection of those of their indices that are in this lane.

So a lane has at most `window` shards open and never returns to a finished one. A shard at a boundary of two
lanes is opened by both, so at most lanes - 1 shards of an epoch are opened twice. Positions and indices are
computed directly from each other; only the starts of shards of unequal size are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Longs, Words
from meshfeed.errors import RecipeError
from meshfeed.intervals import distinct
from meshfeed.order.permutation import permute, subkeys, unpermute
from meshfeed.recipe import Blocks


class BlockShuffle:
    """The sequence at each position of an epoch of some sources, shuffled by blocks.

    Args:
        blocks: the options.
        sizes: sequences in an epoch of each source; int64 [num_sources].
        shard_ends: the ends of each source's own shards; int64 [num_shards], or None without shards.

    Raises RecipeError for shard ends that descend, or that do not end at the end of the source.
    """

    def __init__(self, blocks: Blocks, sizes: Longs, shard_ends: Sequence[Longs | None]) -> None:
        self._blocks, self._sizes = blocks, sizes
        self._ends = {s: ends for s, ends in enumerate(shard_ends) if ends is not None}
        for source, ends in self._ends.items():
            _check(source, ends, int(sizes[source]))
        # A step may lie in two epochs of each source.
        self._epoch = lru_cache(maxsize=2 * max(len(self._ends), 1))(self._make_epoch)

    def indices(self, places: Longs, source: npt.NDArray[np.integer], keys: Words) -> Longs:
        """The index at each position; int64 [n].

        source: of each; int [n]. keys: of its epoch; uint64 [n], or [] for one epoch of one source.
        """
        return self._by_shards(places, source, keys, _indices)

    def places(self, indices: Longs, source: npt.NDArray[np.integer], keys: Words) -> Longs:
        """The inverse of `indices`."""
        return self._by_shards(indices, source, keys, _places)

    def _by_shards(self, values: Longs, source: npt.NDArray[np.integer], keys: Words, turn: _Turn) -> Longs:
        if not keys.ndim:
            return turn(values, keys, self._epoch(int(source[0]), int(keys)), self._blocks)
        turned = np.empty_like(values)
        even = ~np.isin(source, list(self._ends))
        if even.any():
            shards = Even.of(self._sizes[source[even]], self._blocks.sequences, keys[even])
            turned[even] = turn(values[even], keys[even], shards, self._blocks)
        for own in self._ends:
            for key in distinct(keys[source == own]):
                mine = (source == own) & (keys == key)
                turned[mine] = turn(values[mine], np.array(key), self._epoch(own, int(key)), self._blocks)
        return turned

    def _make_epoch(self, source: int, key: int) -> Shards:
        if source in self._ends:
            return Uneven.of(self._ends[source], np.array(key, np.uint64))
        return Even.of(self._sizes[source], self._blocks.sequences, np.array(key, np.uint64))


@dataclass(frozen=True, slots=True)
class Even:
    """Shards of `run` indices; the last one has `lack` fewer and is at slot `short`.

    A *slot* is a position in the keyed order of the shards of an epoch on the line. For one epoch, or for a
    different epoch of each index: attributes, arguments and results are int64 [] or [n].

    Attributes:
        size, num_shards: number of indices, and of shards.
    """

    size: Longs
    num_shards: Longs
    run: Longs
    lack: Longs
    short: Longs

    @classmethod
    def of(cls, size: Longs, sequences: int, key: Words) -> Self:
        """size, key: [], or of each of several epochs [n]."""
        run = np.minimum(size, sequences)
        num_shards = -(-size // run)
        short = unpermute(num_shards - 1, size=num_shards, key=key)
        return cls(size, num_shards, run, num_shards * run - size, short)

    def slot(self, at: Longs) -> Longs:
        """The slot of an offset on the line."""
        behind = at >= (self.short + 1) * self.run - self.lack
        return (at + self.lack * behind) // self.run

    def before(self, slot: Longs) -> Longs:
        """The offset on the line at which a slot begins."""
        return slot * self.run - self.lack * (slot > self.short)

    def shard(self, index: Longs) -> Longs:
        return index // self.run

    def first(self, shard: Longs) -> Longs:
        return shard * self.run


@dataclass(frozen=True, slots=True)
class Uneven:
    """The same of shards with indices between `starts`, at offsets between `edges`; of one epoch.

    starts, edges: int64 [num_shards + 1] each.
    """

    starts: Longs
    edges: Longs

    @classmethod
    def of(cls, ends: Longs, key: Words) -> Self:
        """ends: of each shard; int64 [num_shards]. key: of the epoch; uint64 []."""
        starts = np.append(0, ends)
        order = permute(np.arange(ends.size), size=ends.size, key=key)
        return cls(starts, np.append(0, np.cumsum(np.diff(starts)[order])))

    @property
    def size(self) -> Longs:
        return self.starts[-1]

    @property
    def num_shards(self) -> Longs:
        return np.array(self.starts.size - 1)

    def slot(self, at: Longs) -> Longs:
        """Never that of an empty shard."""
        return np.searchsorted(self.edges, at, side="right") - 1

    def before(self, slot: Longs) -> Longs:
        return self.edges[slot]

    def shard(self, index: Longs) -> Longs:
        return np.searchsorted(self.starts, index, side="right") - 1

    def first(self, shard: Longs) -> Longs:
        return self.starts[shard]


Shards = Even | Uneven
_Turn = Callable[[Longs, Words, Shards, Blocks], Longs]


def _indices(places: Longs, key: Words, shards: Shards, blocks: Blocks) -> Longs:
    lane = places % blocks.lanes
    start, _ = lane_of = _lane(lane, shards.size, blocks.lanes)
    at = start + places // blocks.lanes
    low, high = _window(at, lane_of, shards, blocks.window)
    at = low + permute(at - low, size=high - low, key=subkeys(key, low))
    slot = shards.slot(at)
    shard = permute(slot, size=shards.num_shards, key=key)
    return shards.first(shard) + at - shards.before(slot)


def _places(indices: Longs, key: Words, shards: Shards, blocks: Blocks) -> Longs:
    shard = shards.shard(indices)
    slot = unpermute(shard, size=shards.num_shards, key=key)
    at = shards.before(slot) + indices - shards.first(shard)
    short, longer = shards.size // blocks.lanes, shards.size % blocks.lanes
    lane = np.maximum(at // (short + 1), (at - longer) // np.maximum(short, 1))
    start, _ = lane_of = _lane(lane, shards.size, blocks.lanes)
    low, high = _window(at, lane_of, shards, blocks.window)
    at = low + unpermute(at - low, size=high - low, key=subkeys(key, low))
    return (at - start) * blocks.lanes + lane


def _lane(lane: Longs, size: Longs, lanes: int) -> tuple[Longs, Longs]:
    """Start and stop of a lane on the line: the first size % lanes are longer by one; int64 [n]."""
    short, longer = size // lanes, size % lanes
    start = lane * short + np.minimum(lane, longer)
    return start, start + short + (lane < longer)


def _window(at: Longs, lane: tuple[Longs, Longs], shards: Shards, window: int) -> tuple[Longs, Longs]:
    """Start and stop of the window around an offset on the line, inside its lane; int64 [n]."""
    start, stop = lane
    opened, run = shards.slot(start), np.minimum(window, shards.num_shards)
    slot = opened + (shards.slot(at) - opened) // run * run
    low = np.maximum(shards.before(slot), start)
    return low, np.minimum(shards.before(np.minimum(slot + run, shards.num_shards)), stop)


def _check(source: int, ends: Longs, size: int) -> None:
    if not ends.size or ends[0] < 0 or (np.diff(ends) < 0).any():
        raise RecipeError(f"source {source}: shard_ends are cumulative: at least one, and none below another")
    if ends[-1] != size:
        raise RecipeError(f"source {source}: its shards end at {ends[-1]}, and it has {size} sequences")
