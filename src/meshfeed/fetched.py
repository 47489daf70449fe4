"""What a recipe fetches where the node's cache is smaller than the corpus. Arithmetic, before the run.

With a cache of L bytes, blocks of B and sequences of w, in the long run:

- Draws from all of a corpus of T bytes find their block gone 1 - L/T of the time, and fetch B + w bytes then.
- Shards of S bytes are read once. Blocks end where shards meet (`cut_by_shards`), so a shard fetches S + w:
  a sequence that it shares with the next one, rounded up to whole checksums. If the shards that are open at a
  time exceed the cache, it is as above, with T the bytes of open shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshfeed.files import Fetching
from meshfeed.files.byte_file import LEAST
from meshfeed.recipe import Blocks, Recipe
from meshfeed.sequence.rule import JoinsShards
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

    def joint_bytes(self, shuffle: Blocks) -> float:
        """What a shard fetches of the next one."""
        of = self.fetching
        is_cut = self.shard_bytes(shuffle) >= of.block_bytes / LEAST
        return self.sequence_bytes + of.check_bytes if is_cut else of.block_bytes

    def open_bytes(self, recipe: Recipe) -> float:
        """What is drawn from at a time."""
        shuffle, total = recipe.shuffle, self.fetching.num_bytes
        if shuffle == "none":
            return self.fetching.block_bytes
        if not isinstance(shuffle, Blocks):
            return total
        shards = shuffle.window * shuffle.lanes
        return min(shards * (self.shard_bytes(shuffle) + self.joint_bytes(shuffle)), total)

    def per_byte(self, recipe: Recipe, limit_bytes: float) -> float:
        """Bytes fetched for each byte read, by its part of the cache."""
        of, shuffle, total = self.fetching, recipe.shuffle, self.fetching.num_bytes
        if limit_bytes >= total or shuffle == "none":
            return 1.0
        gone = max(1 - limit_bytes / self.open_bytes(recipe), 0)
        if not isinstance(shuffle, Blocks):
            return max(gone * (of.block_bytes + self.sequence_bytes) / self.sequence_bytes, 1.0)
        shard, joint = self.shard_bytes(shuffle), self.joint_bytes(shuffle)
        inner = max(shard - joint, self.sequence_bytes)
        block = inner / math.ceil(inner / of.block_bytes)
        again = gone * (block + self.sequence_bytes) / self.sequence_bytes
        return max(1 + joint / shard * (1 - limit_bytes / total), again)


def cut_by_shards(recipe: Recipe) -> None:
    """Let blocks of remote files end where the shards of a shuffle by blocks meet, if the cache is smaller.

    Before stores are entered. A larger cache has blocks of one size, which jobs with other shuffles share.
    Raises StoreError.
    """
    shuffle, rule = recipe.shuffle, recipe.sequence
    if not (isinstance(shuffle, Blocks) and isinstance(rule, JoinsShards)):
        return
    found = list(_fetched(recipe))
    total = sum(of.num_bytes for _, _, of in found)
    for source, store, of in found:
        if of.limit_bytes < total:
            with store:
                firsts = np.arange(shuffle.sequences, rule.num_sequences(store), shuffle.sequences)
                joints = rule.joints(recipe, source, firsts)
            store.cut(*joints)


def fetched_per_byte(recipe: Recipe) -> float:
    """Bytes that a node will fetch for each byte that it reads, about; 1 where that is not known.

    Known are stores that are fetched by blocks, in remote `.bin/.idx` files. Raises StoreError.
    """
    found = [
        _Fetched(fetching, fetching.num_bytes / max(recipe.sequence.num_sequences(store), 1))
        for _, store, fetching in _fetched(recipe)
    ]
    total = sum(source.fetching.num_bytes for source in found)
    if not total:
        return 1.0
    asked = sum(source.open_bytes(recipe) for source in found)
    fetched = 0.0
    for source in found:
        part = source.fetching.limit_bytes * source.open_bytes(recipe) / asked
        fetched += source.fetching.num_bytes * source.per_byte(recipe, part)
    return fetched / total


def _fetched(recipe: Recipe) -> Iterator[tuple[int, StreamStore, Fetching]]:
    """The sources that are fetched by blocks, and how."""
    for source, store in enumerate(recipe.sources):
        fetching = store.fetching if isinstance(store, StreamStore) else None
        if fetching is not None and fetching.num_bytes:
            yield source, store, fetching


def warning_of(recipe: Recipe) -> str | None:
    """What a user should know before a run that fetches more than `MUCH` bytes for each; else None."""
    per_byte = fetched_per_byte(recipe)
    if per_byte <= MUCH:
        return None
    if isinstance(recipe.shuffle, Blocks):
        cure = "larger shards (mf.Blocks(sequences=...)), fewer lanes or a smaller window"
        if (most := max(of.check_bytes for _, _, of in _fetched(recipe))) > 1:
            cure += f", or a .sums of less than {most} bytes each (IndexedWriter(checksum_bytes=...))"
    else:
        cure = "a shuffle by mf.Blocks"
    return (
        f"the node's cache is smaller than the corpus: about {per_byte:.3g} bytes will be fetched for each "
        f"byte that is read; give it a larger limit_bytes, or {cure}"
    )
