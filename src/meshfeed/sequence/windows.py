"""Windows: equal pieces of the token stream, each predicting its next token.

The documents of a store, one after the other, are a ring of T tokens. An epoch cuts it into T // length
windows, starting at token 0 in epoch 0 and at a token drawn anew in every later one, so that a window's
edge does not always fall at the same place. Every epoch has the same number of windows, and the fewer
than `length` tokens left over are others each time.

Where documents end is known from the index: what depends on it alone (position ids, the loss mask,
cu_seqlens) is computed by each rank and never read or sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt

from meshfeed.errors import RecipeError, StoreError
from meshfeed.order import Draws, key_of
from meshfeed.plan import Slices
from meshfeed.recipe import Recipe, Store
from meshfeed.roles import Field
from meshfeed.sequence.rule import Allocate, Array, Arrays, Columns, Portion
from meshfeed.store import StreamStore

Longs = npt.NDArray[np.int64]

_FIELDS = (
    Field(name="tokens", dtype="int64", stages=("first", "mtp"), split=True),
    Field(name="labels", dtype="int64", stages=("last",), split=True),
    Field(name="loss_mask", dtype="float32", stages=("last",), split=True, stored=False),
    Field(name="position_ids", dtype="int64", split=True, stored=False),
)
_DOCUMENT_FIELDS = (
    Field(name="cu_seqlens", dtype="int32", stored=False),
    Field(name="max_seqlen", dtype="int32", stored=False),
)


@dataclass(frozen=True)
class Windows:
    """Windows of the unshuffled token stream, next token as label.

    The options are those of Megatron's GPTDataset, with document ends taken from the index.

    Attributes:
        length: tokens per window.
        reset_position_ids: count positions from 0 anew at each document.
        reset_attention_mask: give cu_seqlens (and max_seqlen), the document starts in the microbatch's
            rows laid end to end, so that attention stays inside a document.
        eod_mask_loss: no loss on a document's last token, whose label belongs to the next document.

    Fields: tokens, labels, position_ids int64 [rows, length / cp]; loss_mask float32, likewise; with
    reset_attention_mask, cu_seqlens int32 [documents + 1] and max_seqlen int32 [], the same on every cp
    rank. A length that cp cannot split is padded; padding and absent rows have loss_mask 0.
    Raises RecipeError for a length below 1.
    """

    length: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self) -> None:
        if self.length < 1:
            raise RecipeError(f"Windows(length={self.length}): a window has at least one token")

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The fields that these options give."""
        return _FIELDS + (_DOCUMENT_FIELDS if self.reset_attention_mask else ())

    def summary(self) -> str:
        """All options in one line."""
        return repr(self)

    def num_sequences(self, store: Store) -> int:
        """Windows per epoch. Raises StoreError for a store of less than one window and its last label."""
        if not hasattr(store, "read_stream"):
            raise RecipeError(f"Windows cuts a stream of tokens; {store!r} has none")
        num_tokens = cast(StreamStore, store).num_tokens
        if num_tokens < self.length + 1:
            raise StoreError(
                f"{store!r} has {num_tokens} tokens; one window of {self.length} and its last label need "
                f"{self.length + 1}: use a shorter window or more data"
            )
        return num_tokens // self.length

    def lengths(self, recipe: Recipe, draws: Draws) -> Longs:
        """Tokens of each window: all alike; int64 [n]."""
        return np.full(len(draws), self.length, np.int64)

    def valid_tokens(self, recipe: Recipe, draws: Draws) -> Longs:
        """Loss-bearing tokens of each window; int64 [n]."""
        if not self.eod_mask_loss:
            return self.lengths(recipe, draws)
        window, _ = self._document_starts(recipe, draws)
        return self.length - np.bincount(window, minlength=len(draws))

    def num_bytes(self, recipe: Recipe, portion: Portion) -> int:
        """Exact bytes of the one column."""
        tokens = sum(stop - start + 1 for start, stop in self._row(portion.held))
        return tokens * len(portion.draws) * max(store.dtype.itemsize for store in _stores(recipe))

    def announce(self, recipe: Recipe, portion: Portion) -> None:
        """Ask each store to bring the held slices into memory."""
        for s, store in enumerate(_stores(recipe)):
            mine = portion.draws.take(np.flatnonzero(portion.draws.source == s))
            store.will_need(*self._ranges(recipe, s, mine, portion.held))

    def load(self, recipe: Recipe, portion: Portion) -> Columns:
        """The held slices of each window, each with the one token after it; [windows, held tokens]."""
        row = self._row(portion.held)
        width = sum(stop - start + 1 for start, stop in row)
        stores = _stores(recipe)
        tokens = np.empty((len(portion.draws), width), np.result_type(*(store.dtype for store in stores)))
        for s in np.unique(portion.draws.source).tolist():
            mine = np.flatnonzero(portion.draws.source == s)
            ranges = self._ranges(recipe, s, portion.draws.take(mine), portion.held)
            if mine.size == len(tokens):
                stores[s].read_stream(*ranges, out=tokens.reshape(-1))
            else:
                tokens[mine] = stores[s].read_stream(*ranges).reshape(-1, width)
        return {"tokens": tokens}

    def build(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> Arrays:
        """The named fields; see the class for shapes."""
        arrays: Arrays = {}
        for field in self.fields:
            if field.name not in names:
                continue
            if field.stored:
                arrays[field.name] = self._tokens(field, portion, columns, allocate)
            elif field.name == "loss_mask":
                arrays[field.name] = self._split(field, portion, self._loss_mask(recipe, portion), allocate)
            elif field.name == "position_ids":
                arrays[field.name] = self._split(field, portion, self._positions(recipe, portion), allocate)
        if self.reset_attention_mask and {"cu_seqlens", "max_seqlen"} & set(names):
            cu_seqlens = self._cu_seqlens(recipe, portion)
            arrays["cu_seqlens"] = cu_seqlens
            arrays["max_seqlen"] = np.array(np.diff(cu_seqlens).max(initial=0), np.int32)
        return arrays

    # -- geometry: every window of a pack is cut alike, so one row tells all ---------------------------

    def _row(self, slices: Slices) -> list[tuple[int, int]]:
        """The slices of one window without padding: [(start, stop), ...]."""
        first = slices.sequence == 0
        starts, stops = slices.start[first].tolist(), slices.stop[first].tolist()
        clipped = [(start, min(stop, self.length)) for start, stop in zip(starts, stops)]
        return [(start, stop) for start, stop in clipped if start < stop]

    def _shape(self, portion: Portion) -> tuple[int, int]:
        multiple = 2 * portion.pack.cp_size if portion.pack.cp_size > 1 else 1
        padded = -(-self.length // multiple) * multiple
        if len(portion.draws):
            padded = int(portion.pack.padded_lengths[0])
        return portion.rows, padded // portion.pack.cp_size

    def _first_tokens(self, recipe: Recipe, source: int, draws: Draws) -> Longs:
        """Stream offset of each window's first token, all of one source; int64 [n]."""
        shift = np.zeros(len(draws), np.int64)
        for epoch in np.unique(draws.epoch[draws.epoch > 0]).tolist():
            shift[draws.epoch == epoch] = key_of(recipe.seed, source, epoch, self.length) % self.length
        return (draws.index * self.length + shift) % _stores(recipe)[source].num_tokens

    def _ranges(self, recipe: Recipe, source: int, draws: Draws, held: Slices) -> tuple[Longs, Longs]:
        """Stream ranges of the held slices, one more token each, cut in two where they meet the end."""
        row = np.array(self._row(held), np.int64).reshape(-1, 2)
        total = _stores(recipe)[source].num_tokens
        starts = ((self._first_tokens(recipe, source, draws)[:, None] + row[:, 0]) % total).ravel()
        stops = starts + np.tile(row[:, 1] - row[:, 0] + 1, len(draws))
        over = np.flatnonzero(stops > total)
        if over.size:
            tails = stops[over] - total
            stops[over] = total
            starts, stops = np.insert(starts, over + 1, 0), np.insert(stops, over + 1, tails)
        return starts, stops

    # -- fields ---------------------------------------------------------------------------------------

    def _tokens(self, field: Field, portion: Portion, columns: Columns | None, allocate: Allocate) -> Array:
        """tokens, or labels one token on, of the own slices."""
        out = allocate(self._shape(portion), field.dtype)
        k = len(portion.draws)
        if k and columns is not None:
            ahead = 1 if field.name == "labels" else 0
            raw = np.asarray(columns["tokens"])
            offset, to = 0, 0
            held = self._row(portion.held)
            offsets = dict(zip(held, np.cumsum([0, *(b - a + 1 for a, b in held)]).tolist()))
            for start, stop in self._row(portion.own):
                within = next(h for h in held if h[0] <= start and stop <= h[1])
                offset = offsets[within] + start - within[0] + ahead
                out[:k, to : to + stop - start] = raw[:, offset : offset + stop - start]
                to += stop - start
            out[:, to:] = field.pad
        out[k:] = field.pad
        return out

    def _split(self, field: Field, portion: Portion, whole: Array, allocate: Allocate) -> Array:
        """The own slices of a [windows, length] (or [1, length], the same for all) array."""
        out = allocate(self._shape(portion), field.dtype)
        k = len(portion.draws)
        to = 0
        for start, stop in self._row(portion.own):
            out[:k, to : to + stop - start] = whole[:, start:stop]
            to += stop - start
        out[:k, to:] = field.pad
        out[k:] = field.pad
        return out

    def _document_starts(self, recipe: Recipe, draws: Draws) -> tuple[Longs, Longs]:
        """(window, offset in it) of every document start in (0, length]; ascending."""
        windows: list[Longs] = []
        offsets: list[Longs] = []
        for s in np.unique(draws.source).tolist():
            at = np.flatnonzero(draws.source == s)
            store = _stores(recipe)[s]
            first = self._first_tokens(recipe, s, draws.take(at))
            stop = first + self.length + 1
            found, counts = store.document_starts(first, np.minimum(stop, store.num_tokens))
            windows.append(np.repeat(at, counts))
            offsets.append(found - np.repeat(first, counts))
            # A window over the stream's end goes on at token 0, which starts a document.
            over = np.flatnonzero(stop > store.num_tokens)
            tail = stop[over] - store.num_tokens
            found, counts = store.document_starts(np.full(over.size, -1), tail)
            windows.append(np.repeat(at[over], counts))
            offsets.append(found + np.repeat(self.length + 1 - tail, counts))
        window = np.concatenate(windows) if windows else np.zeros(0, np.int64)
        offset = np.concatenate(offsets) if offsets else np.zeros(0, np.int64)
        ascending = np.lexsort((offset, window))
        return window[ascending], offset[ascending]

    def _positions(self, recipe: Recipe, portion: Portion) -> Array:
        positions = np.arange(self.length)[None, :]
        if not (self.reset_position_ids and len(portion.draws)):
            return positions
        # documents [7 7|9 9 9] -> starts [0 0 2 2 2] -> positions [0 1 0 1 2]
        starts = np.zeros((len(portion.draws), self.length), np.int64)
        window, offset = self._document_starts(recipe, portion.draws)
        inside = offset < self.length
        starts[window[inside], offset[inside]] = offset[inside]
        return positions - np.maximum.accumulate(starts, axis=1)

    def _loss_mask(self, recipe: Recipe, portion: Portion) -> Array:
        if not (self.eod_mask_loss and len(portion.draws)):
            return np.ones((1, self.length), np.float32)
        mask = np.ones((len(portion.draws), self.length), np.float32)
        window, offset = self._document_starts(recipe, portion.draws)
        mask[window, offset - 1] = 0
        return mask

    def _cu_seqlens(self, recipe: Recipe, portion: Portion) -> npt.NDArray[np.int32]:
        """Document starts over all rows laid end to end, then the end; int32."""
        rows, width = self._shape(portion)[0], self._shape(portion)[1] * portion.pack.cp_size
        window, offset = self._document_starts(recipe, portion.draws)
        inside = offset < self.length
        starts = np.concatenate((np.arange(rows) * width, window[inside] * width + offset[inside]))
        return np.concatenate((np.sort(starts), [rows * width])).astype(np.int32)


def _stores(recipe: Recipe) -> Sequence[StreamStore]:
    return cast(Sequence[StreamStore], recipe.sources)
