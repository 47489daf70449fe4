"""Windows: equal pieces of the token stream, each predicting its next token.

The concatenated documents of a store form a ring of T tokens. An epoch cuts it into T // length windows,
starting at token 0 in epoch 0 and at a random token in every later epoch, so that windows do not always begin
at the same tokens. Every epoch has the same number of windows; fewer than `length` tokens are left over,
different ones each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from meshfeed.batch import check_next, is_past, tokens_given
from meshfeed.columns import Allocate, Columns
from meshfeed.errors import RecipeError, StoreError
from meshfeed.intervals import numbers_in
from meshfeed.mixture import Store
from meshfeed.order import Draws, key_of
from meshfeed.plan import Slices
from meshfeed.recipe import EpochTokens, Recipe
from meshfeed.roles import Field
from meshfeed.sequence.rows import NO_STARTS, Rows, Starts
from meshfeed.sequence.rule import Held, TokenRule
from meshfeed.sequence.runs import Longs, Portion
from meshfeed.sequence.table import FieldTable
from meshfeed.store import StreamStore
from meshfeed.store.base import extents_of
from meshfeed.whole import is_whole, whole


@dataclass(frozen=True)
class Windows(Rows, TokenRule):
    """Windows of the unshuffled token stream, next token as label.

    The options are those of Megatron's GPTDataset, with document ends taken from the index.

    Attributes:
        length: tokens per window.
        reset_position_ids: restart positions at 0 at each document.
        reset_attention_mask: add cu_seqlens (and max_seqlen), the document starts in the microbatch's
            concatenated rows, so that attention stays inside a document.
        eod_mask_loss: no loss on a document's last token, whose label belongs to the next document.
        unit: tokens of the windows that an epoch is shuffled in: `length`, or of pieces of them, the longest
            length; see `then`. Derived.

    Fields: tokens, labels, position_ids int64 [rows, length / cp]; loss_mask float32 of the same shape; with
    reset_attention_mask, cu_seqlens int32 [documents + 1] and max_seqlen int32 [], the same on every cp
    rank. A length that cp cannot split is padded; padding and absent rows have loss_mask 0.
    Raises RecipeError for a length below 1.
    """

    unit: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "unit", self.length)

    def then(
        self, step: int | None = None, length: int | None = None, *, at_tokens: float | None = None
    ) -> StagedWindows:
        """Windows of another length from a step on: `Windows(2048).then(1000, 8192)`.

        Each source goes on at the token that it has reached. An epoch is shuffled in windows of the longest
        length, and shorter ones are the pieces of these, one after the other. So every token comes once in an
        epoch, but for the rest of a longer window that has begun when the length changes. The order of all
        steps depends on the longest length: say it before the job begins.
        at_tokens: instead of a step; the first that begins at or after so many tokens of the stream. Later
        changes are then given by tokens, too.
        Raises RecipeError unless each length divides the longest.
        """
        return StagedWindows(self, ((0, self.length),)).then(step, length, at_tokens=at_tokens)

    def pieces_of(self, unit: int, length: int) -> Windows:
        """Windows of a length, as pieces of those of `unit` tokens that an epoch is shuffled in."""
        made = replace(self, length=length)
        object.__setattr__(made, "unit", unit)
        return made

    def num_sequences(self, store: Store) -> int:
        """Windows per epoch.

        Raises StoreError for a store smaller than one window and its last label, RecipeError unless it is a
        stream of integers.
        """
        if not isinstance(store, StreamStore):
            raise RecipeError(f"Windows cuts a stream of tokens; {store!r} has none")
        if store.dtype.kind not in "iu":
            raise RecipeError(f"Windows needs integer tokens; {store!r} holds {store.dtype.name}")
        num_tokens, unit = store.num_tokens, self.unit
        if num_tokens < unit + 1:
            raise StoreError(
                f"{store!r} has {num_tokens} tokens; one window of {unit} and its last label need "
                f"{unit + 1}: use a shorter window or more data"
            )
        return num_tokens // unit * (unit // self.length)

    def _first_tokens(self, recipe: Recipe, source: int, draws: Draws) -> Longs:
        """Offset of each window's first token in the ring of one source, maybe past its end; int64 [n]."""
        first, unit = draws.index * self.length, self.unit
        seed, key = recipe.seed, recipe.source_key(source)
        for epoch in set(draws.epoch.tolist()) - {0}:
            first[draws.epoch == epoch] += key_of(seed, key, epoch, unit) % unit
        return first

    def left_over(self, recipe: Recipe, source: int, epochs: range) -> tuple[Longs, Longs]:
        """The tokens that the windows of some epochs leave out, less than a window each.

        Last labels do not count. Returns where ranges of the stream begin and end; int64 [k] each.
        """
        total, count = recipe.sources[source].num_tokens, self.num_sequences(recipe.sources[source])
        epoch = np.array(epochs, np.int64)
        after = Draws(np.full(epoch.size, source, np.int32), epoch, np.full_like(epoch, count))
        first = self._first_tokens(recipe, source, after)
        return _around(first, np.full_like(first, total - count * self.length), total)[:2]

    def joints(self, recipe: Recipe, source: int, firsts: Longs) -> tuple[Longs, Longs]:
        """See `SequenceRule`. Epochs begin less than a window apart; the last shard continues at token 0."""
        begins = np.append(0, firsts) * self.length
        return begins, begins + self.unit

    def sequences_with(self, recipe: Recipe, source: int, epoch: int, documents: Longs) -> Held:
        """See `SequenceRule`. A window whose last label alone is a document's holds it, too."""
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
        return Held(document[of][order], window[order], begin[order], end[order])

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


@dataclass(frozen=True, repr=False)
class StagedWindows(TokenRule):
    """Windows whose length changes; see `Windows.then`, which makes it.

    Fields are those of `Windows`, as long as the windows of their step.

    Attributes:
        first: the windows of step 0.
        stages: (first step, tokens of a window) of each length, the first included.
        waiting: (tokens of the stream, tokens of a window) of further lengths; a recipe makes stages of them.
        longest: tokens of a window of a length that is not among these any more, or 0.
    """

    first: Windows
    stages: tuple[tuple[int, int], ...]
    waiting: tuple[tuple[int, int], ...] = ()
    longest: int = 0

    def __post_init__(self) -> None:
        lengths = [length for _, length in (*self.stages, *self.waiting)]
        for length in lengths:
            if not is_whole(length):
                raise RecipeError(f"Windows.then(length={length!r}): at least one token, a whole number")
        for length in lengths:
            if self.unit % length:
                raise RecipeError(
                    f"Windows.then: a window of {length} tokens is no whole part of one of {self.unit}, the "
                    f"longest; give lengths that divide it"
                )
        object.__setattr__(self, "eod_mask_loss", self.first.eod_mask_loss)

    def then(
        self, step: int | None = None, length: int | None = None, *, at_tokens: float | None = None
    ) -> StagedWindows:
        """See `Windows.then`."""
        tokens = tokens_given(step, at_tokens, [at for at, _ in self.waiting], "Windows.then")
        change = whole(length)  # checked when it is made
        if tokens is not None:
            return replace(self, waiting=(*self.waiting, (tokens, change)))
        at = check_next(step, self.stages[-1][0], "Windows.then")
        return replace(self, stages=(*self.stages, (at, change)))

    def __repr__(self) -> str:
        changes = [f".then({step}, {length})" for step, length in self.stages[1:]]
        changes += [f".then(at_tokens={at}, length={length})" for at, length in self.waiting]
        return f"{self.first!r}{''.join(changes)}"

    def summary_until(self, until: int | None) -> str:
        """Without later lengths, but for the longest: the order follows from it."""
        later = "".join(f", {n} from step {step}" for step, n in self.stages[1:] if is_past(step, until))
        return f"{self.first!r} of {self.unit}{later}"

    # -- stages -----------------------------------------------------------------------------------------

    @cached_property
    def unit(self) -> int:
        """The longest length."""
        return max(self.longest, *(length for _, length in (*self.stages, *self.waiting)))

    @property
    def of_stages(self) -> Sequence[Windows]:
        """The windows of each stage."""
        return self._windows

    @cached_property
    def _windows(self) -> Sequence[Windows]:
        return [self.first.pieces_of(self.unit, length) for _, length in self.stages]

    def _of(self, draws: Draws) -> Windows:
        """The windows of some draws of a step."""
        if draws.stage is None:
            raise RecipeError(f"{self!r}: these draws have no stage; draw them by step")
        return self._windows[draws.stage]

    @property
    def row_lengths(self) -> tuple[tuple[int, int], ...]:
        """The stages."""
        return self.stages

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """Windows of each stage in one of the longest."""
        return tuple((step, self.unit // length) for step, length in self.stages)

    @property
    def thresholds(self) -> tuple[tuple[int, int], ...]:
        """Lengths that wait for a step."""
        return self.waiting

    def without_thresholds(self) -> StagedWindows:
        """Before them, with windows in the same order."""
        return replace(self, waiting=(), longest=self.unit)

    # -- as its windows ---------------------------------------------------------------------------------

    @property
    def spans_documents(self) -> bool:
        return True

    @property
    def fields(self) -> tuple[Field, ...]:
        return self.first.fields

    def num_sequences(self, store: Store) -> int:
        """Windows of the longest length in an epoch."""
        return replace(self.first, length=self.unit).num_sequences(store)

    def num_documents(self, store: Store) -> int | None:
        return self.first.num_documents(store)

    def epoch_tokens(self, recipe: Recipe, source: int) -> EpochTokens:
        return EpochTokens(self.num_sequences(recipe.sources[source]) * self.unit, self.unit)

    def without(self, recipe: Recipe, draws: Draws, excluded: Mapping[int, Longs]) -> Draws:
        return self._of(draws).without(recipe, draws, excluded)

    def lengths(self, recipe: Recipe, draws: Draws) -> Longs:
        return self._of(draws).lengths(recipe, draws)

    def valid_tokens(self, recipe: Recipe, draws: Draws, starts: Longs, lengths: Longs) -> Longs:
        return self._of(draws).valid_tokens(recipe, draws, starts, lengths)

    def sequences_with(self, recipe: Recipe, source: int, epoch: int, documents: Longs) -> Held:
        """Raises RecipeError: ask the windows `of_stages`."""
        raise RecipeError(f"{self!r} has windows of several lengths; look for a document by step")

    def stream_ranges(
        self, recipe: Recipe, source: int, draws: Draws, starts: Longs, lengths: Longs, *, ahead: int
    ) -> tuple[Longs, Longs, Longs]:
        return self._of(draws).stream_ranges(recipe, source, draws, starts, lengths, ahead=ahead)

    def bearing_ranges(
        self, recipe: Recipe, source: int, draws: Draws, starts: Longs, lengths: Longs, *, ahead: int
    ) -> tuple[Longs, Longs, Longs]:
        return self._of(draws).bearing_ranges(recipe, source, draws, starts, lengths, ahead=ahead)

    def num_bytes(self, recipe: Recipe, portion: Portion) -> int:
        return self._of(portion.draws).num_bytes(recipe, portion)

    def announce(self, recipe: Recipe, portions: Sequence[Portion]) -> None:
        """Those of a step."""
        if portions:
            self._of(portions[0].draws).announce(recipe, portions)

    def load(self, recipe: Recipe, portion: Portion, allocate: Allocate) -> Columns:
        return self._of(portion.draws).load(recipe, portion, allocate)

    def table(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> FieldTable:
        return self._of(portion.draws).table(recipe, portion, columns, names, allocate)


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
