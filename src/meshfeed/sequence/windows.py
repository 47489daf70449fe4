"""Windows: equal pieces of the token stream, each predicting its next token.

The documents of a store, one after the other, are a ring of T tokens. An epoch cuts it into T // length
windows, starting at token 0 in epoch 0 and at a token drawn anew in every later one, so that a window's
edge does not always fall at the same place. Every epoch has the same number of windows, and the fewer
than `length` tokens left over are others each time.

Where documents end is known from the index: what depends on it alone (position ids, the loss mask,
cu_seqlens) is computed by each rank and never read or sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Allocate, Array, Arrays, Columns
from meshfeed.errors import RecipeError, StoreError
from meshfeed.order import Draws, concatenated, key_of
from meshfeed.plan import Align, Slices
from meshfeed.recipe import Recipe, Store
from meshfeed.roles import Field
from meshfeed.sequence.rule import Portion
from meshfeed.store import StreamStore

Longs = npt.NDArray[np.int64]

Starts = tuple[Longs, Longs]
"""Document starts: the window of each, and its offset in that window."""

_NO_STARTS: Starts = (np.zeros(0, np.int64), np.zeros(0, np.int64))

Row = list[tuple[int, int]]
"""Token ranges [start, stop) of one window. Every window of a pack is cut alike, so one row tells all."""

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
        # Exact types: a length of np.int64(8) or a flag of 1 would read differently in `summary`.
        if type(self.length) is not int or self.length < 1:
            raise RecipeError(f"Windows(length={self.length!r}): at least one token, a whole number")
        for option in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if type(getattr(self, option)) is not bool:
                raise RecipeError(f"Windows({option}={getattr(self, option)!r}): choose True or False")

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The fields that these options give."""
        return _FIELDS + (_DOCUMENT_FIELDS if self.reset_attention_mask else ())

    def summary(self) -> str:
        """All options in one line."""
        return repr(self)

    def num_sequences(self, store: Store) -> int:
        """Windows per epoch.

        Raises StoreError for a store of less than one window and its last label, RecipeError for one that
        is no stream of whole numbers.
        """
        if not hasattr(store, "read_stream"):
            raise RecipeError(f"Windows cuts a stream of tokens; {store!r} has none")
        stream = cast(StreamStore, store)
        if stream.dtype.kind not in "iu":
            raise RecipeError(f"Windows gives whole tokens; {store!r} holds {stream.dtype.name}")
        num_tokens = stream.num_tokens
        if num_tokens < self.length + 1:
            raise StoreError(
                f"{store!r} has {num_tokens} tokens; one window of {self.length} and its last label need "
                f"{self.length + 1}: use a shorter window or more data"
            )
        return num_tokens // self.length

    def lengths(self, recipe: Recipe, draws: Draws) -> Longs:
        """Tokens of each window: all alike; int64 [n]."""
        return np.full(len(draws), self.length, np.int64)

    @property
    def packed(self) -> bool:
        """Windows are of one length and stand in rows."""
        return False

    def valid_tokens(self, recipe: Recipe, draws: Draws, starts: Longs, lengths: Longs) -> Longs:
        """Loss-bearing tokens of each window, always whole; int64 [n]."""
        if not self.eod_mask_loss:
            return self.lengths(recipe, draws)
        window, _ = self._document_starts(recipe, draws)
        return self.length - np.bincount(window, minlength=len(draws))

    def num_bytes(self, recipe: Recipe, portion: Portion) -> int:
        """Exact bytes of the one column."""
        itemsize = max(store.dtype.itemsize for store in _stores(recipe))
        return len(portion.draws) * _width(self._row(portion.held)) * itemsize

    def announce(self, recipe: Recipe, portions: Sequence[Portion]) -> None:
        """Ask each store to bring the held slices into memory."""
        if not portions:
            return
        row = self._row(portions[0].held)
        draws = concatenated([portion.draws for portion in portions])
        for s, store in enumerate(_stores(recipe)):
            mine = draws.take(np.flatnonzero(draws.source == s))
            store.will_need(*self._ranges(recipe, s, mine, row))

    def load(self, recipe: Recipe, portion: Portion, allocate: Allocate) -> Columns:
        """The held slices of each window, each with the one token after it; [windows, held tokens]."""
        stores, row = _stores(recipe), self._row(portion.held)
        dtype = np.result_type(*(store.dtype for store in stores))
        tokens = allocate((len(portion.draws), _width(row)), dtype.name)
        if len(stores) == 1:
            stores[0].read_stream(*self._ranges(recipe, 0, portion.draws, row), out=tokens.reshape(-1))
            return {"tokens": tokens}
        for s in np.unique(portion.draws.source).tolist():
            mine = np.flatnonzero(portion.draws.source == s)
            ranges = self._ranges(recipe, s, portion.draws.take(mine), row)
            tokens[mine] = stores[s].read_stream(*ranges).reshape(-1, _width(row))
        return {"tokens": tokens}

    def build(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> list[Arrays]:
        """The named fields of each microbatch; see the class for shapes."""
        shape, k = self._shape(portion), len(portion.draws)
        own, held = self._row(portion.own), self._row(portion.held)
        starts = self._document_starts(recipe, portion.draws) if self._minds_documents else _NO_STARTS
        whole: dict[str, Array] = {}
        for field in self.fields:
            if field.name not in names or field in _DOCUMENT_FIELDS:
                continue
            out = whole[field.name] = allocate(shape, field.dtype)
            if field.name == "loss_mask":
                _cut(self._loss_mask(starts, k), own, 0, out, k, field.pad)
            elif field.name == "position_ids":
                _cut(self._positions(starts, k), own, 0, out, k, field.pad)
            elif columns is not None:
                raw, ahead = np.asarray(columns["tokens"]), int(field.name == "labels")
                _cut(raw, _places(own, held), ahead, out, k, field.pad)
        made: list[Arrays] = []
        for m in range(len(portion.microbatches)):
            rows = slice(m * portion.rows, (m + 1) * portion.rows)
            made.append({name: array[rows] for name, array in whole.items()})
        if self.reset_attention_mask and "cu_seqlens" in names:
            width = shape[1] * portion.pack.cp_size
            for arrays, cu_seqlens in zip(made, self._cu_seqlens(starts, portion, width)):
                arrays["cu_seqlens"] = cu_seqlens
                arrays["max_seqlen"] = np.array(np.diff(cu_seqlens).max(initial=0), np.int32)
        return made

    # -- geometry -------------------------------------------------------------------------------------

    def _row(self, slices: Slices) -> Row:
        """The slices of one window, without padding."""
        if not slices.start.size:
            return []
        per_window = slices.start.size // (int(slices.sequence[-1]) + 1)
        starts, stops = slices.start[:per_window].tolist(), slices.stop[:per_window].tolist()
        return [(start, min(stop, self.length)) for start, stop in zip(starts, stops) if start < self.length]

    def _shape(self, portion: Portion) -> tuple[int, int]:
        """Rows and tokens per rank of all microbatches of a portion."""
        cp_size, rows = portion.pack.cp_size, portion.rows * len(portion.microbatches)
        if len(portion.draws):
            return rows, int(portion.pack.cu_seqlens_padded[1]) // cp_size
        return rows, int(Align().padded(np.array(self.length), cp_size)) // cp_size

    def _first_tokens(self, recipe: Recipe, source: int, draws: Draws) -> Longs:
        """Stream offset of each window's first token, all of one source; int64 [n]."""
        first = draws.index * self.length
        for epoch in set(draws.epoch.tolist()) - {0}:
            first[draws.epoch == epoch] += key_of(recipe.seed, source, epoch, self.length) % self.length
        return first % _stores(recipe)[source].num_tokens

    def _ranges(self, recipe: Recipe, source: int, draws: Draws, row: Row) -> tuple[Longs, Longs]:
        """Stream ranges of slices of each window, one more token each, cut in two at the stream's end."""
        starts_in, stops_in = np.array(row, np.int64).reshape(-1, 2).T
        total = _stores(recipe)[source].num_tokens
        first = self._first_tokens(recipe, source, draws)[:, None]
        starts = (first + starts_in) % total
        starts, stops = starts.ravel(), (starts + (stops_in - starts_in + 1)).ravel()
        if starts.size and stops.max() > total:
            over = np.flatnonzero(stops > total)
            tails = stops[over] - total
            stops[over] = total
            starts, stops = np.insert(starts, over + 1, 0), np.insert(stops, over + 1, tails)
        return starts, stops

    # -- what document ends decide ---------------------------------------------------------------------

    @property
    def _minds_documents(self) -> bool:
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss

    def _document_starts(self, recipe: Recipe, draws: Draws) -> Starts:
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
            over = np.flatnonzero(stop > store.num_tokens)
            if over.size:  # these windows go on at token 0, which starts a document
                tail = stop[over] - store.num_tokens
                found, counts = store.document_starts(np.zeros_like(tail), tail)
                windows += [at[over], np.repeat(at[over], counts)]
                offsets += [self.length + 1 - tail, found + np.repeat(self.length + 1 - tail, counts)]
        window = np.concatenate(windows) if windows else np.zeros(0, np.int64)
        offset = np.concatenate(offsets) if offsets else np.zeros(0, np.int64)
        ascending = np.lexsort((offset, window))
        return window[ascending], offset[ascending]

    def _positions(self, starts: Starts, num_windows: int) -> Array:
        positions = np.arange(self.length)[None, :]
        if not (self.reset_position_ids and num_windows):
            return positions
        # documents [7 7|9 9 9] -> first tokens [0 0 2 2 2] -> positions [0 1 0 1 2]
        first = np.zeros((num_windows, self.length), np.int64)
        window, offset = starts
        inside = offset < self.length
        first[window[inside], offset[inside]] = offset[inside]
        return positions - np.maximum.accumulate(first, axis=1)

    def _loss_mask(self, starts: Starts, num_windows: int) -> Array:
        if not (self.eod_mask_loss and num_windows):
            return np.ones((1, self.length), np.float32)
        mask = np.ones((num_windows, self.length), np.float32)
        window, offset = starts
        mask[window, offset - 1] = 0
        return mask

    def _cu_seqlens(self, starts: Starts, portion: Portion, width: int) -> Iterator[Array]:
        """For each microbatch, document starts over its rows laid end to end, then their end; int32."""
        num_microbatches, rows = len(portion.microbatches), portion.rows
        window, offset = starts
        inside = offset < self.length
        places = np.arange(num_microbatches * rows) * width
        places = np.sort(np.concatenate((places, window[inside] * width + offset[inside])))
        ends = np.arange(num_microbatches + 1) * rows * width
        for end, mine in zip(ends[1:], np.split(places, np.searchsorted(places, ends[1:-1]))):
            yield (np.append(mine, end) - (end - rows * width)).astype(np.int32)


def _width(row: Row) -> int:
    """Tokens held of each window: every slice brings the one after it, for its last label."""
    return sum(stop - start + 1 for start, stop in row)


def _places(own: Row, held: Row) -> Row:
    """Where the own slices lie among the held ones as `load` lays them out; each is inside one of them."""
    places: Row = []
    for start, stop in own:
        at = 0
        for held_start, held_stop in held:
            if held_start <= start and stop <= held_stop:
                places.append((at + start - held_start, at + stop - held_start))
            at += held_stop - held_start + 1
    return places


def _cut(whole: Array, row: Row, ahead: int, out: Array, num_windows: int, pad: float) -> None:
    """The slices of every window, side by side, shifted by `ahead`; padding where there is nothing.

    whole: [windows, ...] or [1, ...] for the same in each. out: [rows, tokens].
    """
    to = 0
    for start, stop in row:
        out[:num_windows, to : to + stop - start] = whole[:, start + ahead : stop + ahead]
        to += stop - start
    if to < out.shape[1]:
        out[:num_windows, to:] = pad
    if num_windows < out.shape[0]:
        out[num_windows:] = pad


def _stores(recipe: Recipe) -> Sequence[StreamStore]:
    return cast(Sequence[StreamStore], recipe.sources)
