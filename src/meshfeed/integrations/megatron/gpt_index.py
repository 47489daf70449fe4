"""The open arrays of a `MegatronGPT`: of its datasets and of their blend."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshfeed.arrays import Array, Longs
from meshfeed.errors import RecipeError, StoreError
from meshfeed.integrations.megatron.gpt_order import (
    blend_of_sizes,
    blend_of_weights,
    build_index,
    document_range,
    passes_of,
    sizes_of_blend,
)
from meshfeed.integrations.megatron.stored_sequences import sequences_of
from meshfeed.intervals import numbers_in
from meshfeed.mixture import Store
from meshfeed.order import Draws
from meshfeed.store.node_arrays import cached_arrays, key_of_parts

if TYPE_CHECKING:
    from meshfeed.integrations.megatron.gpt import MegatronGPT

Arrays = Mapping[str, Array]

VERSION = 1
"""Version of the arrays; part of every cache key, so that a new version never reads an old cache."""


@dataclass(frozen=True, slots=True)
class SampleRanges:
    """Where samples are in a store: runs of tokens, sample after sample, none empty.

    Attributes:
        row: index of the run's sample among those requested; int64 [m], ascending.
        at: offset of its first token in that sample; int64 [m].
        start: offset of that token in the stream; int64 [m].
        size: tokens; int64 [m].
    """

    row: Longs
    at: Longs
    start: Longs
    size: Longs


class _OnFirstUse:
    """Arrays that the first call opens. Threads may share it."""

    def __init__(self, open: Callable[[], Arrays]) -> None:
        self._open, self._lock = open, threading.Lock()
        self._arrays: Arrays | None = None

    def __call__(self) -> Arrays:
        with self._lock:
            if self._arrays is None:
                self._arrays = self._open()
            return self._arrays


class Dataset:
    """One store as Megatron's GPTDataset of `num_samples` samples; None for one epoch."""

    def __init__(self, rule: MegatronGPT, store: Store, num_samples: int | None, seed: int) -> None:
        self.sequences = sequences_of(store)
        begin, end = document_range(rule.split, rule.part, self.sequences.count)
        tokens = self.sequences.tokens_between(begin, end)
        if tokens < 1:
            raise StoreError(
                f"{store!r}: documents {begin}..{end}, part={rule.part!r} of split={rule.split!r}, hold no "
                f"tokens; choose another split"
            )
        extra = rule.add_extra_token_to_sequence
        drop_last = rule.part != "valid" or rule.drop_last_partial_validation_sequence
        self.passes = passes_of(tokens, rule.length, num_samples, extra=extra, drop_last=drop_last)
        if self.passes.num_samples < 1:
            raise StoreError(
                f"{store!r}: documents {begin}..{end} hold {tokens} tokens; a sample takes "
                f"{rule.length + extra}: use a shorter length, or more data"
            )
        self._store, self._range, self._seed, self._cache = store, (begin, end), seed, rule.index_cache
        self.arrays = _OnFirstUse(self._open)

    def _open(self) -> Arrays:
        begin, end = self._range

        def build() -> Arrays:
            lengths = self.sequences.lengths_between(begin, end)
            if int(lengths.sum(dtype=np.int64)) != self.passes.epoch_tokens:
                raise StoreError(
                    f"{self._store!r}: its lengths and pointers disagree; see `meshfeed inspect --verify`"
                )
            return build_index(self.passes, lengths, begin, self._seed)

        store = self.sequences.store  # whose fingerprint may miss that its files have changed
        own = {"begin": begin, "end": end, "seed": self._seed}
        own |= {"store": store.fingerprint, "files": store.files_version}
        return _opened(self._cache, "dataset", asdict(self.passes) | own, build)

    def order_of(self, indices: Longs) -> Longs:
        """Which sample comes at each index of the dataset; int64 [n]."""
        return self.arrays()["shuffle"][indices].astype(np.int64)

    def tokens_of(self, indices: Longs) -> Longs:
        """Tokens of each sample with its last label: length + extra, except at the very end; int64 [n]."""
        passes = self.passes
        total = passes.num_epochs * passes.epoch_tokens
        if passes.num_samples * passes.length + passes.extra <= total:
            return np.full(indices.size, passes.length + passes.extra)
        starts = self.order_of(indices) * passes.length
        ends = np.minimum(starts + passes.length + passes.extra, total)
        return ends - np.minimum(starts, total - passes.extra)

    def pieces_of(self, indices: Longs) -> SampleRanges:
        """Where the samples at some indices of the dataset are in the store."""
        arrays, order = self.arrays(), self.order_of(indices)
        first, begin = arrays["sample"][order].T.astype(np.int64)
        last, end = arrays["sample"][order + 1].T.astype(np.int64)
        counts = last - first + 1
        stops = np.cumsum(counts)
        row = np.arange(indices.size).repeat(counts)
        documents = arrays["document"][numbers_in(first, counts)].astype(np.int64)
        skip, size = np.zeros(row.size, np.int64), self.sequences.lengths(documents)
        skip[stops - counts] = begin
        size[stops - 1] = end + self.passes.extra
        size -= skip
        running = np.cumsum(size)
        at = running - size - (running - size)[stops - counts].repeat(counts)
        some = np.flatnonzero(size > 0)
        start = self.sequences.offsets(documents[some]) + skip[some]
        return SampleRanges(row[some], at[some], start, size[some])


class Indexes:
    """The datasets of a rule and their blend, each opened on first use.

    weights: of the stores, in their order; None for their sizes.
    """

    def __init__(
        self, rule: MegatronGPT, stores: Sequence[Store], weights: Sequence[float] | None, seed: int
    ) -> None:
        self._samples, self._weights, self._cache = rule.samples, weights, rule.index_cache
        self._surplus = rule.mid_level_dataset_surplus
        self._alone = weights is None and len(stores) == 1
        self._blend = _OnFirstUse(self._open_blend)
        sizes: Sequence[int | None] = [rule.samples if self._alone else None] * len(stores)
        if weights is not None:
            if rule.samples is None:
                raise RecipeError("MegatronGPT(samples=None) and weights: a weighted blend needs samples=")
            sizes = sizes_of_blend(weights, rule.samples, self._surplus)[1]
        self.datasets = [Dataset(rule, store, size, seed) for store, size in zip(stores, sizes)]
        available = sum(dataset.passes.num_samples for dataset in self.datasets)
        self.num_positions: int = available if rule.samples is None else rule.samples
        if weights is None:
            self.num_positions = min(self.num_positions, available)

    def draws_between(self, start: int, stop: int) -> Draws:
        """Positions [start, stop) of the stream: which dataset, and which index of it."""
        if self._alone:
            index = np.arange(start, stop)
            return Draws(np.zeros(index.size, np.int32), np.zeros(index.size, np.int64), index)
        blend = self._blend()
        source = blend["dataset"][start:stop].astype(np.int32)
        return Draws(source, np.zeros(source.size, np.int64), blend["sample"][start:stop].astype(np.int64))

    def open_all(self) -> None:
        """Build or map everything now."""
        if not self._alone:
            self._blend()
        for dataset in self.datasets:
            dataset.arrays()

    def _open_blend(self) -> Arrays:
        weights, samples = self._weights, self._samples
        sizes = [dataset.passes.num_samples for dataset in self.datasets]

        def build() -> Arrays:
            if weights is None or samples is None:
                return blend_of_sizes(sizes, samples)
            given, _ = sizes_of_blend(weights, samples, self._surplus)
            blend = blend_of_weights(weights, sum(given))
            drawn = np.bincount(blend["dataset"], minlength=len(sizes))
            for source in np.flatnonzero(drawn > sizes)[:1].tolist():
                raise RecipeError(
                    f"the blend draws {drawn[source]} samples of source {source}, which has "
                    f"{sizes[source]}; raise mid_level_dataset_surplus={self._surplus}, in Megatron too"
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
