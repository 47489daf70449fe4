"""Windows: equal pieces of the token stream, each predicting its next token.

The concatenated documents of a store form a ring of T tokens. An epoch cuts it into T // length windows,
starting at token 0 in epoch 0 and at a random token in every later epoch, so that windows do not always begin
at the same tokens. Every epoch has the same number of windows; fewer than `length` tokens are left over,
different ones each time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.errors import RecipeError, StoreError
from meshfeed.intervals import numbers_in
from meshfeed.mixture import Store
from meshfeed.order import Draws, key_of
from meshfeed.plan import Slices
from meshfeed.recipe import Recipe
from meshfeed.sequence.rows import NO_STARTS, Rows, Starts
from meshfeed.sequence.rule import FindsDocuments, JoinsShards, Occurrences, TokenRule
from meshfeed.store import StreamStore
from meshfeed.store.base import extents_of


@dataclass(frozen=True)
class Windows(Rows, TokenRule, FindsDocuments, JoinsShards):
    """Windows of the unshuffled token stream, next token as label.

    The stream is a ring: in epochs after the first, the windows begin at another token, and one may continue
    at token 0. The options are those of Megatron's GPTDataset, with document ends taken from the index.

    Attributes:
        length: tokens per window.
        reset_position_ids: restart positions at 0 at each document.
        reset_attention_mask: add cu_seqlens (and max_seqlen), the document starts in the microbatch's
            concatenated rows, so that attention stays inside a document.
        eod_mask_loss: no loss on a document's last token, whose label belongs to the next document.

    Fields: tokens, labels, position_ids int64 [rows, length / cp]; loss_mask float32 of the same shape; with
    reset_attention_mask, cu_seqlens int32 [documents + 1] and max_seqlen int32 [], the same on every cp
    rank. A length that cp cannot split is padded; padding and absent rows have loss_mask 0.
    Raises RecipeError for a length below 1.
    """

    def num_sequences(self, store: Store) -> int:
        """Windows per epoch.

        Raises StoreError for a store smaller than one window and its last label, RecipeError unless it is a
        stream of integers.
        """
        if not isinstance(store, StreamStore):
            raise RecipeError(f"Windows cuts a stream of tokens; {store!r} has none")
        if store.dtype.kind not in "iu":
            raise RecipeError(f"Windows needs integer tokens; {store!r} holds {store.dtype.name}")
        if store.num_tokens < self.length + 1:
            raise StoreError(
                f"{store!r} has {store.num_tokens} tokens; one window of {self.length} and its last label "
                f"need {self.length + 1}: use a shorter window or more data"
            )
        return store.num_tokens // self.length

    def _first_tokens(self, recipe: Recipe, source: int, draws: Draws) -> Longs:
        """Offset of each window's first token in the ring of one source, maybe past its end; int64 [n]."""
        first = draws.index * self.length
        for epoch in set(draws.epoch.tolist()) - {0}:
            key = key_of(recipe.seed, recipe.source_key(source), epoch, self.length)
            first[draws.epoch == epoch] += key % self.length
        return first

    def joints(self, recipe: Recipe, source: int, firsts: Longs) -> tuple[Longs, Longs]:
        """See `JoinsShards`. Epochs begin less than a window apart; the last shard continues at token 0."""
        begins = np.append(0, firsts) * self.length
        return begins, begins + self.length

    def sequences_with(self, recipe: Recipe, source: int, epoch: int, documents: Longs) -> Occurrences:
        """See `FindsDocuments`. A window whose last label alone is a document's holds it, too."""
        store, length = recipe.sources[source], self.length
        total, count = store.num_tokens, self.num_sequences(store)
        begins, sizes = extents_of(store, documents)
        none = np.zeros(1, np.int64)
        first = self._first_tokens(recipe, source, Draws(none.astype(np.int32) + source, none + epoch, none))
        begins = (begins - first) % total
        # The epoch is a line: its windows and the last label. A token of the ring may lie there twice.
        turns = np.array([[-total], [0], [total]])
        on_line = (begins + turns).clip(0), (begins + sizes + turns).clip(None, count * length + 1)
        turn, document = np.nonzero(on_line[0] < on_line[1])
        begin, end = (each[turn, document] for each in on_line)
        low = (begin - 1).clip(0) // length
        counts = ((end - 1) // length).clip(None, count - 1) + 1 - low
        window, of = numbers_in(low, counts), np.arange(counts.size).repeat(counts)
        begin = (begin[of] - window * length).clip(0)
        end = (end[of] - window * length).clip(None, length + 1)
        order = np.lexsort((window, document[of]))
        return Occurrences(document[of][order], window[order], begin[order], end[order])

    def ranges(self, recipe: Recipe, source: int, draws: Draws, cut: Slices) -> tuple[Longs, Longs]:
        """Stream ranges of slices of each window, one more token each, split at the stream's end."""
        total = recipe.sources[source].num_tokens
        first = self._first_tokens(recipe, source, draws)[:, None]
        sizes = np.broadcast_to(cut.sizes + 1, (len(draws), cut.sizes.size))
        return _around((first + cut.start).ravel(), sizes.ravel(), total)[:2]

    def stream_ranges(
        self, recipe: Recipe, source: int, draws: Draws, starts: Longs, lengths: Longs, *, ahead: int
    ) -> tuple[Longs, Longs, Longs]:
        """See `TokenRule`; windows are never split."""
        if ahead:
            return self.bearing_ranges(recipe, source, draws, starts, lengths, ahead=ahead)
        first, sizes = self._first_tokens(recipe, source, draws), np.full(len(draws), self.length)
        return _around(first, sizes, recipe.sources[source].num_tokens)

    def bearing_ranges(
        self, recipe: Recipe, source: int, draws: Draws, starts: Longs, lengths: Longs, *, ahead: int
    ) -> tuple[Longs, Longs, Longs]:
        """See `TokenRule`."""
        documents = self._document_starts(recipe, draws) if self.eod_mask_loss else NO_STARTS
        begins, ends = self._bearing(recipe, draws, documents)
        row = begins // (self.length + 1)
        first = self._first_tokens(recipe, source, draws)[row] + begins - row * (self.length + 1)
        begins, stops, part = _around(first + ahead, ends - begins, recipe.sources[source].num_tokens)
        return begins, stops, row[part]

    def _document_starts(self, recipe: Recipe, draws: Draws) -> Starts:
        """(window, offset in the window) of every document start in (0, length]; ascending."""
        windows: list[Longs] = []
        offsets: list[Longs] = []
        for s, at, of_source in draws.by_source():
            store = recipe.sources[s]
            first = self._first_tokens(recipe, s, of_source) % store.num_tokens
            stop = first + self.length + 1
            found, counts = store.document_starts(first, np.minimum(stop, store.num_tokens))
            windows.append(np.repeat(at, counts))
            offsets.append(found - np.repeat(first, counts))
            over = np.flatnonzero(stop > store.num_tokens)
            if over.size:  # these windows continue at token 0, which starts a document
                tail = stop[over] - store.num_tokens
                found, counts = store.document_starts(np.zeros_like(tail), tail)
                windows += [at[over], np.repeat(at[over], counts)]
                offsets += [self.length + 1 - tail, found + np.repeat(self.length + 1 - tail, counts)]
        window = np.concatenate(windows) if windows else np.zeros(0, np.int64)
        offset = np.concatenate(offsets) if offsets else np.zeros(0, np.int64)
        ascending = np.lexsort((offset, window))
        return window[ascending], offset[ascending]


def _around(starts: Longs, sizes: Longs, total: int) -> tuple[Longs, Longs, Longs]:
    """Ranges of a ring of `total` tokens, split where they pass its end, and the range that each came
    from."""
    starts = starts % total
    stops, of = starts + sizes, np.arange(starts.size)
    if starts.size and stops.max() > total:
        over = np.flatnonzero(stops > total)
        tails = stops[over] - total
        stops[over] = total
        starts, stops = np.insert(starts, over + 1, 0), np.insert(stops, over + 1, tails)
        of = np.insert(of, over + 1, over)
    return starts, stops, of
