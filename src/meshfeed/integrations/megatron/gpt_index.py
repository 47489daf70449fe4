"""The arrays that a `MegatronGPT` has open: of its datasets and of their blend."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from meshfeed.errors import RecipeError, StoreError
from meshfeed.integrations.megatron.gpt_order import (
    Part,
    Passes,
    blend_of_sizes,
    blend_of_weights,
    build_index,
    document_range,
    passes_of,
    sizes_of_blend,
)
from meshfeed.order import Draws
from meshfeed.store.index_cache import cached_arrays, key_of_parts
from meshfeed.store.sequences import Sequences, sequences_of

Longs = npt.NDArray[np.int64]
Arrays = Mapping[str, npt.NDArray[Any]]

VERSION = 1
"""Version of the arrays; part of every cache key, so that a new version never reads an old cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Everything that determines the arrays besides the stores and their weights.

    Attributes: those of `MegatronGPT`, and the recipe's seed.
    """

    length: int
    samples: int | None
    split: str
    part: Part
    extra: bool
    drop_last: bool
    surplus: float
    seed: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """Where samples lie in a store: runs of tokens, sample after sample, none empty.

    Attributes:
        row: which of the samples asked for; int64 [m], ascending.
        at: the place of its first token in that sample; int64 [m].
        start: the place of that token in the stream; int64 [m].
        size: tokens; int64 [m].
    """

    row: Longs
    at: Longs
    start: Longs
    size: Longs


class Dataset:
    """One store as Megatron's GPTDataset."""

    def __init__(self, store: Any, ask: Ask, num_samples: int | None) -> None:
        self.sequences: Sequences = sequences_of(store)
        begin, end = document_range(ask.split, ask.part, self.sequences.count)
        tokens = self.sequences.tokens_between(begin, end) if begin < end else 0
        if tokens < 1:
            raise StoreError(
                f"{store!r}: documents {begin}..{end}, part={ask.part!r} of split={ask.split!r}, hold no "
                f"tokens; choose another split"
            )
        self.passes: Passes = passes_of(
            tokens, ask.length, num_samples, extra=ask.extra, drop_last=ask.drop_last
        )
        if self.passes.num_samples < 1:
            raise StoreError(
                f"{store!r}: documents {begin}..{end} hold {tokens} tokens; a sample takes "
                f"{ask.length + ask.extra}: use a shorter length, or more data"
            )
        self._store, self._ask, self._range = store, ask, (begin, end)
        self._arrays: Arrays | None = None

    def open(self, cache: str | os.PathLike[str] | None) -> None:
        """Build the arrays, or map those in the cache. Raises StoreError."""
        begin, end = self._range
        passes = self.passes

        def build() -> Arrays:
            lengths = self.sequences.lengths_between(begin, end)
            if int(lengths.sum(dtype=np.int64)) != passes.epoch_tokens:
                raise StoreError(
                    f"{self._store!r}: its lengths and pointers disagree; see `meshfeed inspect --verify`"
                )
            return build_index(passes, lengths, begin, self._ask.seed)

        parts = {name: getattr(passes, name) for name in passes.__slots__}
        parts |= {"begin": begin, "end": end, "seed": self._ask.seed, "store": self._store.fingerprint}
        self._arrays = _opened(cache, "dataset", parts, build)

    @property
    def may_be_short(self) -> bool:
        """Whether there are too few tokens to fill the last sample."""
        passes = self.passes
        return passes.num_samples * passes.length + passes.extra > passes.num_epochs * passes.epoch_tokens

    @property
    def is_open(self) -> bool:
        """Whether the arrays are open."""
        return self._arrays is not None

    def order_of(self, indices: Longs) -> Longs:
        """Which sample comes at each index of the dataset; int64 [n]."""
        return self._opened["shuffle"][indices].astype(np.int64)

    def tokens_of(self, indices: Longs) -> Longs:
        """Tokens of each sample with its last label: length + extra, except at the very end; int64 [n]."""
        passes = self.passes
        total = passes.num_epochs * passes.epoch_tokens
        if not self.may_be_short:
            return np.full(indices.size, passes.length + passes.extra)
        starts = self.order_of(indices) * passes.length
        ends = np.minimum(starts + passes.length + passes.extra, total)
        return ends - np.minimum(starts, total - passes.extra)

    def pieces_of(self, indices: Longs) -> Pieces:
        """Where the samples at some indices of the dataset lie in the store."""
        arrays, order = self._opened, self.order_of(indices)
        first, begin = arrays["sample"][order].T.astype(np.int64)
        last, end = arrays["sample"][order + 1].T.astype(np.int64)
        counts = last - first + 1
        stops = np.cumsum(counts)
        row = np.arange(indices.size).repeat(counts)
        documents = arrays["document"][np.arange(row.size) + (first - stops + counts).repeat(counts)]
        documents = documents.astype(np.int64)
        skip, size = np.zeros(row.size, np.int64), self.sequences.lengths(documents)
        skip[stops - counts] = begin
        size[stops - 1] = end + self.passes.extra
        size -= skip
        running = np.cumsum(size)
        at = running - size - (running - size)[stops - counts].repeat(counts)
        some = np.flatnonzero(size > 0)
        start = self.sequences.offsets(documents[some]) + skip[some]
        return Pieces(row[some], at[some], start, size[some])

    @property
    def _opened(self) -> Arrays:
        if self._arrays is None:
            raise StoreError(f"{self._store!r}: its sample index is not open; ask `Indexes.dataset` for it")
        return self._arrays


class Indexes:
    """The datasets and the blend of one recipe, each opened on first use.

    Threads may share it. weights: of the stores, in their order; None for their sizes.
    """

    def __init__(
        self,
        ask: Ask,
        stores: Sequence[Any],
        weights: Sequence[float] | None,
        cache: str | os.PathLike[str] | None,
    ) -> None:
        if weights is not None and len(weights) != len(stores):
            raise RecipeError(f"{len(weights)} weights for {len(stores)} sources; give one for each")
        if weights is not None and ask.samples is None:
            raise RecipeError("MegatronGPT(samples=None) and weights: a weighted blend needs samples=")
        self._ask, self._cache, self._lock = ask, cache, threading.RLock()
        self._weights = weights
        self._alone = weights is None and len(stores) == 1
        self._blend: Arrays | None = None
        sizes: Sequence[int | None] = [ask.samples if self._alone else None] * len(stores)
        if weights is not None and ask.samples is not None:
            sizes = sizes_of_blend(weights, ask.samples, ask.surplus)[1]
        self._datasets = [Dataset(store, ask, size) for store, size in zip(stores, sizes)]
        available = sum(dataset.passes.num_samples for dataset in self._datasets)
        self.num_positions: int = available if ask.samples is None else ask.samples
        if weights is None:
            self.num_positions = min(self.num_positions, available)

    def draws_between(self, start: int, stop: int) -> Draws:
        """Positions [start, stop) of the stream: which dataset, and which index of it."""
        if self._alone:
            index = np.arange(start, stop)
            return Draws(np.zeros(index.size, np.int32), np.zeros(index.size, np.int64), index)
        blend = self._opened_blend()
        source = blend["dataset"][start:stop].astype(np.int32)
        return Draws(source, np.zeros(source.size, np.int64), blend["sample"][start:stop].astype(np.int64))

    def dataset(self, source: int) -> Dataset:
        """A dataset with its arrays."""
        dataset = self._datasets[source]
        if not dataset.is_open:
            with self._lock:
                if not dataset.is_open:
                    dataset.open(self._cache)
        return dataset

    def tokens_of(self, source: int, indices: Longs) -> Longs:
        """Tokens of each sample of a dataset; opens its arrays only if they matter."""
        dataset = self._datasets[source]
        return (self.dataset(source) if dataset.may_be_short else dataset).tokens_of(indices)

    def open_all(self) -> None:
        """Build or map everything now."""
        if not self._alone:
            self._opened_blend()
        for source in range(len(self._datasets)):
            self.dataset(source)

    def _opened_blend(self) -> Arrays:
        if self._blend is None:
            with self._lock:
                if self._blend is None:
                    self._blend = self._open_blend()
        return self._blend

    def _open_blend(self) -> Arrays:
        weights, samples = self._weights, self._ask.samples
        sizes = [dataset.passes.num_samples for dataset in self._datasets]

        def build() -> Arrays:
            if weights is None or samples is None:
                return blend_of_sizes(sizes, samples)
            given, _ = sizes_of_blend(weights, samples, self._ask.surplus)
            blend = blend_of_weights(weights, sum(given))
            drawn = np.bincount(blend["dataset"], minlength=len(sizes))
            for source in np.flatnonzero(drawn > sizes)[:1].tolist():
                raise RecipeError(
                    f"the blend draws {drawn[source]} samples of source {source}, which has "
                    f"{sizes[source]}; raise mid_level_dataset_surplus={self._ask.surplus}, in Megatron too"
                )
            return blend

        parts = {"weights": None if weights is None else list(weights), "sizes": sizes, "samples": samples}
        return _opened(self._cache, "blend", parts, build)


def _opened(
    cache: str | os.PathLike[str] | None, kind: str, parts: Mapping[str, Any], build: Callable[[], Arrays]
) -> Arrays:
    if cache is None:
        return build()
    return cached_arrays(cache, key_of_parts(kind=kind, version=VERSION, **parts), build)
