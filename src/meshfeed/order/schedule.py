"""A recipe's schedule: the source at each position, and the number of its draws before that.

A new *segment* begins where the amounts of a mixture change, and under batches="per_source" also where the
batch size changes. The draws of every source before a segment follow from the earlier segments, and each
source continues from
there: no state is kept, and no sequence is lost.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from meshfeed.errors import RecipeError
from meshfeed.mixture import Amount, Mixture, Part
from meshfeed.order.blocks import BlockShuffle
from meshfeed.order.interleave import Interleaving, WholeBatches
from meshfeed.order.permutation import choose, key_of, permute, unpermute
from meshfeed.recipe import Batch, Blocks, Recipe

if TYPE_CHECKING:
    from meshfeed.order.stream import Draws

Longs = npt.NDArray[np.int64]


_ALONE = Part(0, (Amount(0, 1, "proportion"),))


@dataclass(frozen=True, slots=True)
class _Segment:
    """Positions with one set of amounts: from `start` on, after `drawn` draws of each source."""

    start: int
    sources: npt.NDArray[np.int32]
    turns: Interleaving | WholeBatches
    drawn: Longs


class Schedule:
    """position <-> (source, number of its draws before), for one recipe.

    Attributes:
        sizes: sequences in an epoch of each source; int64 [num_sources].
        end: the number of positions; None if the stream is endless.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._seed, self._names = recipe.seed, recipe.source_names
        if isinstance(recipe.sequence, OwnOrder):
            self.end = self._whole(recipe, recipe.sequence.num_positions(recipe))
            return
        self.sizes = np.array([_epoch_size(recipe, store) for store in recipe.sources], np.int64)
        self._shuffled = recipe.shuffle != "none"
        self._replaces = recipe.shuffle == "replacement"
        self._blocks: BlockShuffle | None = None
        if isinstance(recipe.shuffle, Blocks):
            self._blocks = BlockShuffle(
                recipe.shuffle, self.sizes, [recipe.sequence.shard_ends(store) for store in recipe.sources]
            )
        parts = recipe.data.parts if isinstance(recipe.data, Mixture) else (_ALONE,)
        self._per_source = isinstance(recipe.data, Mixture) and recipe.data.batches == "per_source"
        self._segments: list[_Segment] = []
        drawn = np.zeros(self.sizes.size, np.int64)
        for part in _parts_by_batch(recipe.batch, parts) if self._per_source else parts:
            start = recipe.batch.position(part.step)
            drawn = self.counts(start) if self._segments else drawn
            counts = self._counts(recipe.batch, part)
            sources = np.array(list(counts), np.int32)
            turns = _interleaving(tuple(counts.values()))
            if self._per_source:
                turns = WholeBatches(turns, recipe.batch.size(part.step))
            self._segments.append(_Segment(start, sources, turns, drawn))
        self.end = self._whole(recipe, self._end(recipe, parts[-1]))

    def drawn(self, start: int, stop: int) -> tuple[npt.NDArray[np.int32], Longs]:
        """(source, number of its draws before) at positions start..stop; int32, int64 [n]."""
        if len(self._segments) == 1 and self.sizes.size == 1:
            return np.zeros(stop - start, np.int32), np.arange(start, stop)
        found: list[tuple[npt.NDArray[np.int32], Longs]] = []
        ends = [*(segment.start for segment in self._segments[1:]), stop]
        for segment, end in zip(self._segments, ends):
            first, last = max(start, segment.start), min(end, stop)
            if first < last or not found:
                local, count = segment.turns.draws(first - segment.start, max(last, first) - segment.start)
                source = segment.sources[local]
                found.append((source, count + segment.drawn[source]))
        return np.concatenate([source for source, _ in found]), np.concatenate([count for _, count in found])

    def places(self, start: int, stop: int) -> tuple[npt.NDArray[np.int32], Longs, Longs]:
        """(source, epoch, position in the epoch) at positions start..stop; int32, int64, int64 [n]."""
        source, count = self.drawn(start, stop)
        size = self._sizes_of(source)
        return source, count // size, count % size

    def indices(self, source: npt.NDArray[np.integer], epoch: Longs, place: Longs) -> Longs:
        """The sequence at each position of an epoch; int64 [n]."""
        if not self._shuffled:
            return place
        keys = self._keys(source, epoch)
        if self._blocks is not None:
            return self._blocks.indices(place, source, keys)
        if self._replaces:
            return choose(place, size=self._sizes_of(source), key=keys)
        return permute(place, size=self._sizes_of(source), key=keys)

    def unshuffled(self, source: npt.NDArray[np.integer], epoch: Longs, index: Longs) -> Longs:
        """The inverse of `indices`: the position of each sequence in its epoch; int64 [n]."""
        if not self._shuffled:
            return index
        keys = self._keys(source, epoch)
        if self._blocks is not None:
            return self._blocks.places(index, source, keys)
        return unpermute(index, size=self._sizes_of(source), key=keys)

    def counts(self, position: int) -> Longs:
        """Draws of each source before a position; int64 [num_sources]."""
        segment = [each for each in self._segments if each.start <= position][-1]
        counts = segment.drawn.copy()
        counts[segment.sources] += segment.turns.counts(position - segment.start)
        return counts

    def shares(self, position: int) -> npt.NDArray[np.float64]:
        """The recipe's share of each source at a position; float64 [num_sources]."""
        segment = [each for each in self._segments if each.start <= position][-1]
        shares = np.zeros(self.sizes.size)
        shares[segment.sources] = segment.turns.weights
        return shares

    def position(self, source: int, count: int) -> int | None:
        """The position of a source's draw number `count`, from 0; None if it never occurs."""
        nexts = [*self._segments[1:], None]
        for segment, after in zip(self._segments, nexts):
            if after is not None and count >= after.drawn[source]:
                continue
            local = np.flatnonzero(segment.sources == source)
            if not local.size:
                return None
            found = segment.turns.position(int(local[0]), count - int(segment.drawn[source]))
            return None if found is None else segment.start + found
        return None

    def _sizes_of(self, source: npt.NDArray[np.integer]) -> Longs:
        """Sequences in an epoch of each source; int64 [n], or [] for a single source."""
        return self.sizes[0] if self.sizes.size == 1 else self.sizes[source]

    def _keys(self, source: npt.NDArray[np.integer], epoch: Longs) -> npt.NDArray[np.uint64]:
        """The shuffle's key for an epoch of a source; uint64 [n], or [] for one key for all."""
        if source.size and epoch[0] == epoch[-1] and self.sizes.size == 1:
            return np.array(self._key(0, int(epoch[0])), np.uint64)
        few, which = np.unique(np.stack((source, epoch)), axis=1, return_inverse=True)
        return np.array([self._key(s, e) for s, e in zip(*few.tolist())], np.uint64)[which.ravel()]

    def _key(self, source: int, epoch: int) -> int:
        return key_of(self._seed, _number_of(self._names[source]), epoch)

    def _counts(self, batch: Batch, part: Part) -> dict[int, Fraction]:
        """Source -> its weight, for sources that are drawn; for finite amounts, its sequences or whole
        batches."""
        counts: dict[int, Fraction] = {}
        for each in part.amounts:
            count = Fraction(each.amount) * (
                int(self.sizes[each.source]) if each.by in ("repeat", "size") else 1
            )
            if not part.is_endless:
                count = Fraction(self._whole_count(batch, each, round(count)))
            if count:
                counts[each.source] = count
        if not counts:
            raise RecipeError("no source of the mixture fills a batch; take smaller batches or last='pad'")
        return counts

    def _whole_count(self, batch: Batch, each: Amount, count: int) -> int:
        """Sequences of a source with a finite amount, or the number of batches they make."""
        name, size = self._names[each.source], int(self.sizes[each.source])
        if each.amount and not count:
            raise RecipeError(f"source {name!r}: {each.amount} passes over {size} sequences are none")
        if not self._per_source:
            return count
        if len(batch.stages) > 1:
            raise RecipeError(
                'batches="per_source" with amounts that end: give batches of one size, or proportions'
            )
        if count % batch.sequences and batch.last == "keep":
            raise RecipeError(
                f"source {name!r}: {count} sequences do not fill batches of {batch.sequences}; "
                f"Batch(last='drop') leaves {count % batch.sequences} out, last='pad' fills the last one"
            )
        return -(-count // batch.sequences) if batch.last == "pad" else count // batch.sequences

    def _end(self, recipe: Recipe, last: Part) -> int | None:
        """The position at which all amounts of the recipe are drawn; None if that is never."""
        if recipe.epochs is not None:
            return recipe.epochs * int(self.sizes[0])
        if last.is_endless:
            return None
        total = int(sum(self._counts(recipe.batch, last).values()))
        start = recipe.batch.position(last.step)
        return start + total * (recipe.batch.sequences if self._per_source else 1)

    def _whole(self, recipe: Recipe, end: int | None) -> int | None:
        """The end of the stream, rounded to whole steps if the batch requires it."""
        batch = recipe.batch
        if end is not None and batch.last != "keep":
            step = batch.step(end)
            whole = batch.position(step)
            end = whole if batch.last == "drop" or end == whole else batch.position(step + 1)
        if recipe.steps is None:
            return end
        return batch.position(recipe.steps) if end is None else min(end, batch.position(recipe.steps))


class OwnOrder(ABC):
    """A sequence rule with an order of its own, such as another framework's, instead of the recipe's."""

    @abstractmethod
    def num_positions(self, recipe: Recipe) -> int:
        """Length of the stream."""

    @abstractmethod
    def draws_between(self, recipe: Recipe, start: int, stop: int) -> Draws:
        """Positions [start, stop) of the stream."""


class _Same:
    """A recipe as a cache key, by identity, since an equal recipe may hold other stores."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.recipe is other.recipe

    def __hash__(self) -> int:
        return id(self.recipe)


def schedule_of(recipe: Recipe) -> Schedule:
    """A recipe's schedule; cached, since it asks the stores for their sizes."""
    return _cached_schedule(_Same(recipe))


@lru_cache(maxsize=16)
def _cached_schedule(key: _Same) -> Schedule:
    return Schedule(key.recipe)


def forget() -> None:
    """Clear the caches; for benchmarks that measure a cold start."""
    _cached_schedule.cache_clear()
    _interleaving.cache_clear()


@lru_cache(maxsize=16)
def _interleaving(amounts: tuple[Fraction, ...]) -> Interleaving:
    # shared, since it caches its blocks
    return Interleaving(amounts)


def _parts_by_batch(batch: Batch, parts: Sequence[Part]) -> list[Part]:
    """The parts of a mixture, split where the batch size changes."""
    steps = sorted({step for step, _ in batch.stages} | {part.step for part in parts})
    return [replace([part for part in parts if part.step <= step][-1], step=step) for step in steps]


def _number_of(name: str) -> int:
    """A source's part in the shuffle's key: 0 for a store alone, else a digest of its name; int64."""
    if not name:
        return 0
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def _epoch_size(recipe: Recipe, store: Any) -> int:
    size = recipe.sequence.num_sequences(store)
    if size < 1:
        raise RecipeError(f"{recipe.sequence.summary()} makes no sequence of store {store}")
    return size
