"""Windows, equal pieces of the token stream, and rows, the base of rules for sequences of one length.

Each row predicts its next token. The index gives the ends of documents. Fields that depend only on them
(position ids, the loss mask, cu_seqlens) are computed by each rank and never read or sent.

Windows: the concatenated documents of a store form a ring of T tokens. An epoch cuts it into T // length
windows, starting at token 0 in epoch 0 and at a random token in every later epoch, so that windows do not
always begin at the same tokens. Every epoch has the same number of windows; fewer than `length` tokens are
left over, different ones each time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np

from meshfeed.arrays import Allocate, Array, Arrays, Columns, Longs
from meshfeed.errors import RecipeError, StoreError
from meshfeed.intervals import common, numbers_in, together
from meshfeed.mixture import Store
from meshfeed.order import Draws, LeavesOut, concatenated, key_of
from meshfeed.plan import Align, Slices
from meshfeed.recipe import EpochTokens, Recipe
from meshfeed.roles import Field
from meshfeed.sequence.rule import FindsDocuments, JoinsShards, Occurrences, SequenceRule, TokenRule
from meshfeed.sequence.runs import Edges, Portion, Runs, WithExcluded, dtype_of, runs_of
from meshfeed.sequence.table import PLAN_FIELDS, TOKEN_FIELDS, FieldTable, RunField, table_of
from meshfeed.store import StreamStore
from meshfeed.store.base import extents_of
from meshfeed.whole import is_whole, settle

Starts = tuple[Longs, Longs]
"""Document starts: the row of each, and its offset in that row."""

NO_STARTS: Starts = (np.zeros(0, np.int64), np.zeros(0, np.int64))

# of each store, the excluded documents that were looked up last, and their extents
_found: WeakKeyDictionary[Store, tuple[tuple[Longs, tuple[Longs, Longs]], ...]] = WeakKeyDictionary()
_MOST_FOUND = 4  # two feeds, before and after an amendment

_OF_PACKS = {field.name: field for field in PLAN_FIELDS}
_FIELDS = (*TOKEN_FIELDS, _OF_PACKS["position_ids"])
_DOCUMENT_FIELDS = (_OF_PACKS["cu_seqlens"], _OF_PACKS["max_seqlen"])


@dataclass(frozen=True)
class Rows(SequenceRule, LeavesOut):
    """Options and fields of rows of one length. A rule defines a row by `ranges` and `_document_starts`.

    Attributes:
        length: tokens per row.
        reset_position_ids, reset_attention_mask, eod_mask_loss: see `Windows`.

    Raises RecipeError for a length below 1.
    """

    length: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self) -> None:
        # Exact types: a flag of 1 would change `summary`.
        settle(self)
        name = type(self).__name__
        if not is_whole(self.length):
            raise RecipeError(f"{name}(length={self.length!r}): at least one token, a whole number")
        for option in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if type(getattr(self, option)) is not bool:
                raise RecipeError(f"{name}({option}={getattr(self, option)!r}): choose True or False")

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields for these options."""
        return _FIELDS + (_DOCUMENT_FIELDS if self.reset_attention_mask else ())

    @property
    def keeps_tokens(self) -> bool:
        """Its rows span documents."""
        return True

    @property
    def row_length(self) -> int:
        """Tokens of each row."""
        return self.length

    def num_documents(self, store: Store) -> int:
        """All of a store."""
        return cast(StreamStore, store).num_documents

    def without(self, recipe: Recipe, draws: Draws, excluded: Mapping[int, Longs]) -> Draws:
        """The tokens of excluded documents stay, and bear no loss; nor does a token that predicts one."""
        sources = [source for source, _, _ in draws.by_source() if source in excluded]
        holes = {source: _extents(recipe.sources[source], excluded[source]) for source in sources}
        return WithExcluded(draws.source, draws.epoch, draws.index, holes)

    def epoch_tokens(self, recipe: Recipe, source: int) -> EpochTokens:
        """Every row counts as `length` tokens."""
        return EpochTokens(self.num_sequences(recipe.sources[source]) * self.length, self.length)

    def lengths(self, recipe: Recipe, draws: Draws) -> Longs:
        """Tokens of each row, all equal; int64 [n]."""
        return np.full(len(draws), self.length, np.int64)

    def valid_tokens(self, recipe: Recipe, draws: Draws, starts: Longs, lengths: Longs) -> Longs:
        """Loss-bearing tokens of each row, always whole; int64 [n]."""
        if not (self.eod_mask_loss or isinstance(draws, WithExcluded)):
            return self._predicting(recipe, draws)
        documents = self._document_starts(recipe, draws) if self.eod_mask_loss else NO_STARTS
        begins, ends = self._bearing(recipe, draws, documents)
        before = np.append(0, np.cumsum(ends - begins))
        return np.diff(before[np.searchsorted(begins, np.arange(len(draws) + 1) * (self.length + 1))])

    def num_bytes(self, recipe: Recipe, portion: Portion) -> int:
        """Exact bytes of the one column."""
        itemsize = dtype_of(recipe, portion.draws).itemsize
        return len(portion.draws) * width_of(portion.held_row) * itemsize

    def announce(self, recipe: Recipe, portions: Sequence[Portion]) -> None:
        """Announce the held slices to each store."""
        if not portions:
            return
        cut = portions[0].held_row
        for s, _, draws in concatenated([portion.draws for portion in portions]).by_source():
            recipe.sources[s].will_need(*self.ranges(recipe, s, draws, cut))

    def load(self, recipe: Recipe, portion: Portion, allocate: Allocate) -> Columns:
        """The held slices of each row, each followed by one more token; [rows, held tokens]."""
        cut, width = portion.held_row, width_of(portion.held_row)
        tokens = allocate((len(portion.draws), width), dtype_of(recipe, portion.draws).name)
        if len(recipe.sources) == 1:
            self._read(recipe, 0, portion.draws, cut, tokens)
            return {"tokens": tokens}
        for s, mine, draws in portion.draws.by_source():
            some = np.empty((mine.size, width), recipe.sources[s].dtype)
            self._read(recipe, s, draws, cut, some)
            tokens[mine] = some
        return {"tokens": tokens}

    def table(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> FieldTable:
        """The named fields; see the class. Runs of positions and of the loss mask end where documents do."""
        shape, draws, starts = self._shape(portion), portion.draws, NO_STARTS
        cut = _cut_of(self.fields, (len(draws), shape[1]), self.length, *portion.edges)
        if self._needs_documents:
            starts = self._document_starts(recipe, draws)
        tokens, labels, loss_mask, position_ids = cut.fields
        if self.reset_position_ids and "position_ids" in names:
            position_ids = RunField(position_ids.field, self._positions(starts, cut, len(draws)), 1)
        if "loss_mask" in names and self._masks(recipe, draws):
            begins, ends, _, of = common(*self._bearing(recipe, draws, starts), cut.begins, cut.ends)
            runs = Runs(cut.at[of] + begins - cut.begins[of], np.ones_like(begins), ends - begins)
            loss_mask = RunField(loss_mask.field, runs, 0)
        fields = tokens, labels, loss_mask, position_ids
        return table_of(shape, columns, names, fields, self._others(starts, portion, names))

    # -- defined by the rule ----------------------------------------------------------------------------

    @abstractmethod
    def ranges(self, recipe: Recipe, source: int, draws: Draws, cut: Slices) -> tuple[Longs, Longs]:
        """Stream ranges of slices of each row, one more token each; all draws of one source."""

    @abstractmethod
    def _document_starts(self, recipe: Recipe, draws: Draws) -> Starts:
        """(row, offset in the row) of every document start in (0, length]; ascending."""

    def _tokens_in(self, recipe: Recipe, draws: Draws) -> Longs:
        """Stored tokens of each row, including its last label; int64 [n], all length + 1 here."""
        return np.full(len(draws), self.length + 1)

    def _predicting(self, recipe: Recipe, draws: Draws) -> Longs:
        """Tokens of each row that have a label; int64 [n], all of them here."""
        return np.full(len(draws), self.length)

    def _excluded_ranges(self, recipe: Recipe, draws: Draws) -> tuple[Longs, Longs]:
        """Ranges of tokens without loss, since their document or the next is excluded; ascending, apart."""
        begins, ends = ([np.zeros(0, np.int64)] for _ in range(2))
        for s, at, of_source in draws.by_source():
            if not isinstance(draws, WithExcluded) or s not in draws.holes:
                continue
            hole_begins, hole_ends = draws.holes[s]
            start, stop = self.ranges(recipe, s, of_source, _slices((0, self.length)))
            sizes = stop - start
            held = np.minimum(self._tokens_in(recipe, of_source), self.length + 1)
            place, first = np.cumsum(sizes) - sizes, np.cumsum(held) - held
            of = np.searchsorted(first, place, side="right") - 1  # the row of each range
            row = at[of] * (self.length + 1)
            least = np.searchsorted(hole_ends, start, side="right")
            counts = (np.searchsorted(hole_begins, stop) - least).clip(0)
            hole, piece = numbers_in(least, counts), np.arange(start.size).repeat(counts)
            moved = (row + place - first[of] - start)[piece]
            # the token before a document predicts its first one; a row's last label is no token of it
            begins.append(np.maximum(np.maximum(hole_begins[hole], start[piece]) + moved - 1, row[piece]))
            ends.append(
                np.minimum(np.minimum(hole_ends[hole], stop[piece]) + moved, row[piece] + self.length)
            )
        return together(np.concatenate(begins), np.concatenate(ends))

    def _read(self, recipe: Recipe, source: int, draws: Draws, cut: Slices, out: Array) -> None:
        """Read slices of rows, all of one source; out: [rows, width of the cut], contiguous."""
        recipe.sources[source].read_stream(*self.ranges(recipe, source, draws, cut), out=out.reshape(-1))

    # -- geometry -------------------------------------------------------------------------------------
    # Token i of row r has the number r * (length + 1) + i; a row's last label is in between.

    def _masks(self, recipe: Recipe, draws: Draws) -> bool:
        """Whether some token of a row bears no loss."""
        if self.eod_mask_loss or isinstance(draws, WithExcluded):
            return True
        return bool((self._predicting(recipe, draws) < self.length).any())

    def _bearing(self, recipe: Recipe, draws: Draws, starts: Starts) -> tuple[Longs, Longs]:
        """The loss-bearing tokens of all rows, as ranges of numbers; ascending and apart."""
        rows = np.arange(len(draws)) * (self.length + 1)
        begins, ends = rows, rows + self._predicting(recipe, draws)
        if self.eod_mask_loss:
            # the token before a document predicts its first one; the last label of a row, the next row's
            begins = np.sort(np.concatenate((rows, _numbers(starts, self.length))))
            before = np.append(begins[1:], rows.size * (self.length + 1)) - 1
            ends = np.maximum(np.minimum(before, ends[begins // (self.length + 1)]), begins)
        hole_begins, hole_ends = self._excluded_ranges(recipe, draws)
        if hole_begins.size:
            between = np.append(0, hole_ends), np.append(hole_begins, rows.size * (self.length + 1))
            begins, ends, _, _ = common(begins, ends, *between)
        return begins, ends

    def _positions(self, starts: Starts, cut: _Cut, num_rows: int) -> Runs:
        """Positions that restart where documents do."""
        rows = np.arange(num_rows) * (self.length + 1)
        first = np.sort(np.concatenate((rows, _numbers(starts, self.length))))
        stops = np.append(first[1:], num_rows * (self.length + 1))
        begins, ends, segment, of = common(first, stops, cut.begins, cut.ends)
        return Runs(cut.at[of] + begins - cut.begins[of], begins - first[segment], ends - begins)

    def _shape(self, portion: Portion) -> tuple[int, int]:
        """Rows and tokens per rank of all microbatches of a portion."""
        cp_size, rows = portion.pack.cp_size, portion.rows * len(portion.microbatches)
        if len(portion.draws):
            return rows, int(portion.pack.cu_seqlens_padded[1]) // cp_size
        return rows, int(Align().padded(np.array(self.length), cp_size)) // cp_size

    @property
    def _needs_documents(self) -> bool:
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss

    def _others(self, starts: Starts, portion: Portion, names: Sequence[str]) -> list[Arrays]:
        """cu_seqlens and max_seqlen of each microbatch, where they are named."""
        if not (self.reset_attention_mask and "cu_seqlens" in names):
            return [{} for _ in portion.microbatches]
        ends, longest = self._documents(starts, portion)
        return [{"cu_seqlens": each, "max_seqlen": longest[m, ...]} for m, each in enumerate(ends)]

    def _documents(self, starts: Starts, portion: Portion) -> tuple[list[Array], Array]:
        """For each microbatch, document starts over its rows, then their end; the longest of each; int32."""
        num_microbatches, rows = len(portion.microbatches), portion.rows
        width = self._shape(portion)[1] * portion.pack.cp_size
        row, offset = starts
        inside = offset < self.length
        every_row, ends = np.arange(num_microbatches * rows), np.arange(1, num_microbatches + 1) * rows
        # sorted, the end of a microbatch stands before the start of the next one, the same number
        places = np.concatenate((every_row * width, row[inside] * width + offset[inside], ends * width))
        places.sort()
        first = np.append(0, np.searchsorted(places, ends[:-1] * width) + 1)
        longest = np.maximum.reduceat(places[1:] - places[:-1], first).astype(np.int32)
        places -= ((ends - rows) * width).repeat(np.diff(first, append=places.size))
        made, bounds = places.astype(np.int32), pairwise([*first.tolist(), places.size])
        return [made[start:stop] for start, stop in bounds], longest


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
            key = key_of(recipe.seed, recipe.source_keys[source], epoch, self.length)
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


def _extents(store: Store, documents: Longs) -> tuple[Longs, Longs]:
    """Where documents that are not empty begin and end in their stream; int64 [m] each."""
    kept = _found.get(store, ())
    for of, extents in kept:
        if of is documents:  # an amendment's, the same object in every step
            return extents
    begins, stored = extents_of(cast(StreamStore, store), documents)
    some = stored > 0
    extents = begins[some], (begins + stored)[some]
    _found[store] = ((documents, extents), *kept)[:_MOST_FOUND]
    return extents


def _numbers(starts: Starts, length: int) -> Longs:
    return starts[0] * (length + 1) + starts[1]


@dataclass(frozen=True, slots=True)
class _Cut:
    """What is the same for all rows that are cut alike.

    Attributes:
        begins, ends: the own slices of all rows, as numbers of tokens; int64 [m].
        at: the place of each in the field; int64 [m].
        fields: tokens, labels, loss_mask and position_ids, where no document changes them.
    """

    begins: Longs
    ends: Longs
    at: Longs
    fields: tuple[RunField, RunField, RunField, RunField]


def _slices(edges: Edges, *, extra: int = 0) -> Slices:
    starts, stops = np.array(edges, np.int64).reshape(2, -1)
    return Slices(np.zeros(starts.size, np.int32), starts, stops + extra)


@lru_cache(maxsize=8)  # the rows of a run are cut alike
def _cut_of(fields: tuple[Field, ...], shape: tuple[int, int], length: int, own: Edges, held: Edges) -> _Cut:
    """shape: rows that hold a sequence, and tokens of each field. own, held: slices of one row."""
    mine, read = _slices(own), _slices(held, extra=1)
    numbers = np.arange(shape[0])

    def of_all(one: Longs, step: int) -> Longs:
        return (numbers[:, None] * step + one).ravel()

    width, begins, offset = int(read.sizes.sum()), of_all(mine.start, length + 1), of_all(mine.start, 0)
    at, size = of_all(mine.offsets, shape[1]), of_all(mine.sizes, 0)
    in_read = runs_of(mine, read, mine.offsets)
    tokens, labels = (Runs(at, of_all(each.start, width), of_all(each.size, 0)) for each in in_read)
    named = {each.name: each for each in fields}
    return _Cut(
        begins,
        begins + size,
        at,
        (
            RunField(named["tokens"], tokens, 1, "tokens"),
            RunField(named["labels"], labels, 1, "tokens"),
            RunField(named["loss_mask"], Runs(at, np.ones_like(size), size), 0, is_kept=True),
            RunField(named["position_ids"], Runs(at, offset, size), 1, is_kept=True),
        ),
    )


def width_of(cut: Slices) -> int:
    """Tokens held of each row: every slice includes one more token, for its last label."""
    return int((cut.sizes + 1).sum())


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
