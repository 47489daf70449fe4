"""How much a recipe fetches where the node's cache is smaller than the corpus. Arithmetic, before the run.

With a cache of L bytes, blocks of B and sequences of w, in the long run:

- Draws from all of a corpus of T bytes find their block gone 1 - L/T of the time, and fetch B + w bytes then.
- Shards of S bytes are read once, and fetch S + B: the blocks at their ends hold parts of other shards. If
  the shards that are open at a time exceed the cache, it is as above, with T the bytes of open shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from meshfeed.files import Fetching
from meshfeed.recipe import Blocks, Recipe
from meshfeed.sequence.rule import SequenceRule
from meshfeed.store import StreamStore

MUCH = 1.2
"""Bytes fetched for each byte read that a user should know of."""


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A source that is fetched block by block. sequence_bytes: of its mean sequence."""

    fetching: Fetching
    sequence_bytes: float

    def shard_bytes(self, shuffle: Blocks) -> float:
        return min(shuffle.sequences * self.sequence_bytes, self.fetching.num_bytes)

    def open_bytes(self, recipe: Recipe) -> float:
        """What is drawn from at a time."""
        shuffle, total = recipe.shuffle, self.fetching.num_bytes
        if shuffle == "none":
            return self.fetching.block_bytes
        if not isinstance(shuffle, Blocks):
            return total
        shards = shuffle.window * shuffle.lanes
        return min(shards * (self.shard_bytes(shuffle) + self.fetching.block_bytes), total)

    def per_byte(self, recipe: Recipe, limit_bytes: float) -> float:
        """Bytes fetched for each byte read, by its part of the cache."""
        of, total = self.fetching, self.fetching.num_bytes
        if limit_bytes >= total or recipe.shuffle == "none":
            return 1.0
        gone = max(1 - limit_bytes / self.open_bytes(recipe), 0)
        again = gone * (of.block_bytes + self.sequence_bytes) / self.sequence_bytes
        joints = 1.0
        if isinstance(recipe.shuffle, Blocks):
            joints += of.block_bytes / self.shard_bytes(recipe.shuffle) * (1 - limit_bytes / total)
        return max(joints, again)


def fetched_per_byte(recipe: Recipe) -> float:
    """Bytes that a node will fetch for each byte that it reads, about; 1 where that is not known.

    Known are stores that are fetched by blocks, in remote `.bin/.idx` files. Raises StoreError.
    """
    found: list[_Fetched] = []
    for store in recipe.sources:
        fetching = store.fetching if isinstance(store, StreamStore) else None
        if fetching is not None and fetching.num_bytes:
            count = max(cast(SequenceRule, recipe.sequence).num_sequences(store), 1)
            found.append(_Fetched(fetching, fetching.num_bytes / count))
    total = sum(source.fetching.num_bytes for source in found)
    if not total:
        return 1.0
    asked = sum(source.open_bytes(recipe) for source in found)
    fetched = 0.0
    for source in found:
        part = source.fetching.limit_bytes * source.open_bytes(recipe) / asked
        fetched += source.fetching.num_bytes * source.per_byte(recipe, part)
    return fetched / total


def warning_of(recipe: Recipe) -> str | None:
    """What a user should know before a run that fetches more than `MUCH` bytes for each; else None."""
    per_byte = fetched_per_byte(recipe)
    if per_byte <= MUCH:
        return None
    if isinstance(recipe.shuffle, Blocks):
        cure = "larger shards (mf.Blocks(sequences=...)), fewer lanes or a smaller window, or smaller blocks"
    else:
        cure = "a shuffle by mf.Blocks"
    return (
        f"the node's cache is smaller than the corpus: about {per_byte:.3g} bytes will be fetched for each "
        f"byte that is read; give it a larger limit_bytes, or {cure}"
    )
