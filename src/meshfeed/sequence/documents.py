"""Documents: whole documents packed side by side (THD), with attention inside each.

Every field of a pack is [1, tokens of this cp rank]. The stored column holds the group's slices, each
followed by one more token if the document continues. All other fields are computed from lengths alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Allocate, Array, Arrays, Columns
from meshfeed.errors import RecipeError
from meshfeed.mixture import Store
from meshfeed.order import Draws
from meshfeed.recipe import Recipe
from meshfeed.roles import Field
from meshfeed.sequence.packed import PLAN_FIELDS, Pieces, fields_of_plan, holder_of, real_sizes
from meshfeed.sequence.rule import Portion, dtype_of
from meshfeed.store import StreamStore

Longs = npt.NDArray[np.int64]

_FIELDS = (
    Field(name="tokens", dtype="int64", stages=("first", "mtp"), split=True),
    Field(name="labels", dtype="int64", stages=("last",), split=True),
    Field(name="loss_mask", dtype="float32", stages=("last",), split=True, stored=False),
    *PLAN_FIELDS,
)


@dataclass(frozen=True)
class Documents:
    """A sequence is a document; a microbatch is a pack of them.

    Needs a `Packing`. A document's last token has no label and bears no loss. If the packing splits a
    document, positions restart at 0 in each piece, and a piece's last token still has its label.

    Attributes:
        max_len: keep only this many first tokens of each document; None for all.

    Fields, for t tokens of this cp rank with padding: tokens, labels, position_ids int64 [1, t]; loss_mask
    float32 [1, t]; padding_mask bool [1, t], True for padding; sequence_ids int32 [1, t], the index of each
    token's sequence in the pack, -1 for padding. The same on every cp rank:
    cu_seqlens, cu_seqlens_padded int32 [documents + 1]; max_seqlen int32 [], of the padded lengths.
    A dummy microbatch is one padded sequence without a token.
    Raises RecipeError for max_len below 1.
    """

    max_len: int | None = None

    def __post_init__(self) -> None:
        if self.max_len is not None and self.max_len < 1:
            raise RecipeError(f"Documents(max_len={self.max_len}): at least one token, or None for all")

    @property
    def packed(self) -> bool:
        """Documents differ in length, so they are packed."""
        return True

    @property
    def fields(self) -> tuple[Field, ...]:
        """All fields of a pack."""
        return _FIELDS

    def summary(self) -> str:
        """All options in one line."""
        return repr(self)

    def num_sequences(self, store: Store) -> int:
        """Documents in the store, including empty ones. Raises RecipeError unless it is a token store."""
        if not hasattr(store, "read_stream"):
            raise RecipeError(f"Documents reads a token store; {store!r} is not one")
        return cast(StreamStore, store).num_documents

    def shard_ends(self, store: Store) -> Longs | None:
        """The ends of a store's own shards, in documents; int64 [num_shards], None without shards."""
        return getattr(store, "shard_ends", None)

    def lengths(self, recipe: Recipe, draws: Draws) -> Longs:
        """Tokens of each document, up to max_len; int64 [n]."""
        lengths = np.zeros(len(draws), np.int64)
        for s in np.unique(draws.source).tolist():
            mine = np.flatnonzero(draws.source == s)
            lengths[mine] = _stores(recipe)[s].lengths(draws.index[mine])
        return lengths if self.max_len is None else np.minimum(lengths, self.max_len)

    def valid_tokens(self, recipe: Recipe, draws: Draws, starts: Longs, lengths: Longs) -> Longs:
        """Loss-bearing tokens of each row: all except the last of its document; int64 [n]."""
        ends = starts + lengths == self.lengths(recipe, draws)
        return np.maximum(lengths - ends, 0)

    def stream_ranges(
        self, recipe: Recipe, source: int, draws: Draws, starts: Longs, lengths: Longs, *, ahead: int
    ) -> tuple[Longs, Longs, Longs]:
        """See `RuleOfTokens`."""
        first = _stores(recipe)[source].offsets(draws.index)
        begins = first + starts + ahead
        ends = np.minimum(begins + lengths, first + self.lengths(recipe, draws))
        return begins, np.maximum(ends, begins), np.arange(len(draws))

    def num_bytes(self, recipe: Recipe, portion: Portion) -> int:
        """Exact bytes of the one column."""
        sizes, ahead = self._held_sizes(recipe, portion)
        return int((sizes + ahead).sum()) * dtype_of(recipe, portion.draws).itemsize

    def announce(self, recipe: Recipe, portions: Sequence[Portion]) -> None:
        """Announce the held slices to each store."""
        for portion in portions:
            for store, _, starts, stops in self._ranges(recipe, portion):
                store.will_need(starts, stops)

    def load(self, recipe: Recipe, portion: Portion, allocate: Allocate) -> Columns:
        """The held tokens, slice after slice, each followed by the next token if there is one."""
        sizes, ahead = self._held_sizes(recipe, portion)
        ends = np.cumsum(sizes + ahead)
        tokens = allocate((int(ends[-1]) if ends.size else 0,), dtype_of(recipe, portion.draws).name)
        for store, slices, starts, stops in self._ranges(recipe, portion):
            if len(recipe.sources) == 1:
                store.read_stream(starts, stops, out=tokens)
                break
            read = store.read_stream(starts, stops)
            at = 0
            for end, size in zip(ends[slices].tolist(), (stops - starts).tolist()):
                tokens[end - size : end] = read[at : at + size]
                at += size
        return {"tokens": tokens}

    def build(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> list[Arrays]:
        """The named fields of the one pack; see the class."""
        pieces = Pieces.of(portion)
        arrays: Arrays = {}
        for field in _FIELDS:
            if field.name not in names or field in PLAN_FIELDS:
                continue
            out = allocate((1, pieces.num_tokens), field.dtype)
            out[:] = field.pad
            if field.stored and columns is not None:
                self._fill_stored(recipe, portion, pieces, np.asarray(columns["tokens"]), field, out[0])
            elif field.name == "loss_mask":
                self._fill_loss_mask(recipe, portion, pieces, out[0])
            arrays[field.name] = out
        arrays |= fields_of_plan(portion, pieces, names, allocate)
        return [arrays]

    # -- geometry ---------------------------------------------------------------------------------------

    def _held_sizes(self, recipe: Recipe, portion: Portion) -> tuple[Longs, Longs]:
        """(real tokens of each held slice, 1 if the document continues after it); int64 [m]."""
        held = portion.held
        sizes = real_sizes(held, portion.pack.lengths)
        stop = held.start + sizes
        goes_on = portion.starts[held.sequence] + stop < self.lengths(recipe, portion.draws)[held.sequence]
        return sizes, (goes_on & (sizes > 0)).astype(np.int64)

    def _ranges(self, recipe: Recipe, portion: Portion) -> Iterator[tuple[StreamStore, Longs, Longs, Longs]]:
        """For each store: (store, its held slices, their stream ranges)."""
        held, draws = portion.held, portion.draws
        sizes, ahead = self._held_sizes(recipe, portion)
        for s in np.unique(draws.source).tolist():
            store = _stores(recipe)[s]
            slices = np.flatnonzero((draws.source[held.sequence] == s) & (sizes > 0))
            if slices.size:
                documents = held.sequence[slices]
                starts = (
                    store.offsets(draws.index[documents]) + portion.starts[documents] + held.start[slices]
                )
                yield store, slices, starts, starts + sizes[slices] + ahead[slices]

    def _fill_stored(
        self, recipe: Recipe, portion: Portion, pieces: Pieces, raw: Array, field: Field, out: Array
    ) -> None:
        """Fill tokens, or labels, which are shifted by one token."""
        sizes, ahead = self._held_sizes(recipe, portion)
        held_at = np.cumsum(sizes + ahead) - (sizes + ahead)
        held, last = portion.held, sizes + ahead
        for piece, at, start, size in pieces:
            h = holder_of(held, int(portion.own.sequence[piece]), start)
            first = int(held_at[h]) + start - int(held.start[h]) + (field.name == "labels")
            size = min(size, int(held_at[h]) + int(last[h]) - first)
            out[at : at + size] = raw[first : first + size]

    def _fill_loss_mask(self, recipe: Recipe, portion: Portion, pieces: Pieces, out: Array) -> None:
        ends = portion.starts + portion.pack.lengths == self.lengths(recipe, portion.draws)
        for piece, at, start, size in pieces:
            sequence = portion.own.sequence[piece]
            out[at : at + size] = 1
            if ends[sequence] and start + size == portion.pack.lengths[sequence]:
                out[at + size - 1] = 0


def _stores(recipe: Recipe) -> Sequence[Any]:
    return recipe.sources
