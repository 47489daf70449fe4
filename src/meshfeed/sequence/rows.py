"""Rows: the common base of rules for sequences of one length, each predicting its next token.

The index gives the ends of documents. Fields that depend only on them (position ids, the loss mask,
cu_seqlens) are computed by each rank and never read or sent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshfeed.columns import Allocate, Array, Arrays, Columns
from meshfeed.errors import RecipeError
from meshfeed.order import Draws, concatenated
from meshfeed.plan import Align, Slices
from meshfeed.recipe import EpochTokens, Recipe
from meshfeed.roles import Field
from meshfeed.sequence.rule import Held, SequenceRule
from meshfeed.sequence.runs import Longs, Portion, Runs, dtype_of, runs_of
from meshfeed.sequence.table import FieldTable, RunField, table_of

Starts = tuple[Longs, Longs]
"""Document starts: the row of each, and its offset in that row."""

_NO_STARTS: Starts = (np.zeros(0, np.int64), np.zeros(0, np.int64))

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
class Rows(SequenceRule):
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
        # Exact types: a length of np.int64(8) or a flag of 1 would change `summary`.
        name = type(self).__name__
        if type(self.length) is not int or self.length < 1:
            raise RecipeError(f"{name}(length={self.length!r}): at least one token, a whole number")
        for option in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if type(getattr(self, option)) is not bool:
                raise RecipeError(f"{name}({option}={getattr(self, option)!r}): choose True or False")

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields for these options."""
        return _FIELDS + (_DOCUMENT_FIELDS if self.reset_attention_mask else ())

    def epoch_tokens(self, recipe: Recipe, source: int) -> EpochTokens:
        """Every row counts as `length` tokens."""
        return EpochTokens(self.num_sequences(recipe.sources[source]) * self.length, self.length)

    def lengths(self, recipe: Recipe, draws: Draws) -> Longs:
        """Tokens of each row, all equal; int64 [n]."""
        return np.full(len(draws), self.length, np.int64)

    def valid_tokens(self, recipe: Recipe, draws: Draws, starts: Longs, lengths: Longs) -> Longs:
        """Loss-bearing tokens of each row, always whole; int64 [n]."""
        tokens = self._tokens_in(recipe, draws)
        valid = np.minimum(tokens - 1, self.length).clip(0)
        if not self.eod_mask_loss:
            return valid
        row, offset = self._document_starts(recipe, draws)
        return valid - np.bincount(row[offset <= valid[row]], minlength=len(draws))

    def sequences_with(self, recipe: Recipe, source: int, epoch: int, documents: Longs) -> Held:
        """Raises RecipeError: only the rule knows which rows a document is in."""
        raise RecipeError(f"{self.summary()} cannot find the sequences of a document; look for it by step")

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
        shape, draws, starts = self._shape(portion), portion.draws, _NO_STARTS
        cut = _cut_of(self.fields, (len(draws), shape[1]), _edges(portion.own_row), _edges(portion.held_row))
        if self._minds_documents:
            starts = self._document_starts(recipe, draws)
        tokens, labels, loss_mask, position_ids = cut.fields
        pieces = cut.pieces
        moves = self.reset_position_ids and "position_ids" in names
        masks = self.eod_mask_loss and "loss_mask" in names
        if moves or masks:
            pieces = _pieces_of(starts, cut.pieces, len(draws), self.length)
        if moves:
            position_ids = RunField(position_ids.field, Runs(pieces.at, pieces.position, pieces.size), 1)
        stored = self._tokens_in(recipe, draws)
        if masks or stored.min(initial=self.length + 1) <= self.length:
            bearing = pieces.size - pieces.ends if masks else pieces.size
            bearing = np.minimum(bearing, stored[pieces.row] - 1 - pieces.offset).clip(0)
            loss_mask = RunField(loss_mask.field, Runs(pieces.at, np.ones_like(bearing), bearing), 0)
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

    def _read(self, recipe: Recipe, source: int, draws: Draws, cut: Slices, out: Array) -> None:
        """Read slices of rows, all of one source; out: [rows, width of the cut], contiguous."""
        recipe.sources[source].read_stream(*self.ranges(recipe, source, draws, cut), out=out.reshape(-1))

    # -- geometry -------------------------------------------------------------------------------------

    def _shape(self, portion: Portion) -> tuple[int, int]:
        """Rows and tokens per rank of all microbatches of a portion."""
        cp_size, rows = portion.pack.cp_size, portion.rows * len(portion.microbatches)
        if len(portion.draws):
            return rows, int(portion.pack.cu_seqlens_padded[1]) // cp_size
        return rows, int(Align().padded(np.array(self.length), cp_size)) // cp_size

    @property
    def _minds_documents(self) -> bool:
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss

    def _others(self, starts: Starts, portion: Portion, names: Sequence[str]) -> list[Arrays]:
        """cu_seqlens and max_seqlen of each microbatch, where they are named."""
        if not (self.reset_attention_mask and "cu_seqlens" in names):
            return [{} for _ in portion.microbatches]
        return [
            {"cu_seqlens": each, "max_seqlen": np.array(np.diff(each).max(initial=0), np.int32)}
            for each in self._cu_seqlens(starts, portion)
        ]

    def _cu_seqlens(self, starts: Starts, portion: Portion) -> Iterator[Array]:
        """For each microbatch, document starts over its concatenated rows, then their end; int32."""
        num_microbatches, rows = len(portion.microbatches), portion.rows
        width = self._shape(portion)[1] * portion.pack.cp_size
        row, offset = starts
        inside = offset < self.length
        places = np.arange(num_microbatches * rows) * width
        places = np.sort(np.concatenate((places, row[inside] * width + offset[inside])))
        ends = np.arange(num_microbatches + 1) * rows * width
        for end, mine in zip(ends[1:], np.split(places, np.searchsorted(places, ends[1:-1]))):
            yield (np.append(mine, end) - (end - rows * width)).astype(np.int32)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The own slices of every row, cut where documents start; int64 [n] each, in the order of the field.

    Attributes:
        row, offset: where a piece begins: in which row, at which of its tokens.
        at, size: its place in the field, and its tokens.
        position: how far its first token is from the start of its document, or of the row.
        ends: 1 if a document starts right after it, else 0.
    """

    row: Longs
    offset: Longs
    at: Longs
    size: Longs
    position: Longs
    ends: Longs


def _pieces_of(starts: Starts, slices: _Pieces, num_rows: int, length: int) -> _Pieces:
    """slices: of all rows, uncut. starts: offsets from 1 to length."""
    # one ascending number for each token of each row, and for the end of the row
    rows, documents = np.arange(num_rows) * (length + 1), starts[0] * (length + 1) + starts[1]
    begins = slices.row * (length + 1) + slices.offset
    stops = begins + slices.size
    cuts = np.sort(np.concatenate((begins, documents)))
    of = np.searchsorted(begins, cuts, side="right") - 1
    stop = np.minimum(np.append(cuts[1:], cuts[-1:] + length), stops[of]) if begins.size else cuts
    inside = np.flatnonzero((cuts < stop) & (of >= 0))
    cuts, stop, of = cuts[inside], stop[inside], of[inside]
    first = np.sort(np.concatenate((rows, documents)))
    position = cuts - first[np.searchsorted(first, cuts, side="right") - 1]
    after = np.searchsorted(documents, stop)
    ends = np.append(documents, -1)[after] == stop
    row, offset = np.divmod(cuts, length + 1)
    return _Pieces(
        row, offset, slices.at[of] + cuts - begins[of], stop - cuts, position, ends.astype(np.int64)
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """What is the same for all rows that are cut alike.

    Attributes:
        pieces: the own slices.
        fields: tokens, labels, loss_mask and position_ids, where no document changes them.
    """

    pieces: _Pieces
    fields: tuple[RunField, RunField, RunField, RunField]


Edges = tuple[int, ...]
"""The starts of the slices of a row, then their stops."""


def _edges(slices: Slices) -> Edges:
    return *slices.start.tolist(), *slices.stop.tolist()


def _slices(edges: Edges, *, extra: int = 0) -> Slices:
    starts, stops = np.array(edges, np.int64).reshape(2, -1)
    return Slices(np.zeros(starts.size, np.int32), starts, stops + extra)


@lru_cache(maxsize=8)  # the rows of a run are cut alike
def _cut_of(fields: tuple[Field, ...], shape: tuple[int, int], own: Edges, held: Edges) -> _Cut:
    """shape: rows that hold a sequence, and tokens of each field. own, held: slices of one row."""
    mine, read = _slices(own), _slices(held, extra=1)
    numbers = np.arange(shape[0])

    def of_all(one: Longs, step: int) -> Longs:
        return (numbers[:, None] * step + one).ravel()

    width, none = int(read.sizes.sum()), np.zeros(shape[0] * mine.start.size, np.int64)
    row, offset = of_all(0 * mine.start, 1), of_all(mine.start, 0)
    at, size = of_all(mine.offsets, shape[1]), of_all(mine.sizes, 0)
    in_read = [runs_of(mine, read, mine.offsets, ahead=ahead) for ahead in (0, 1)]
    tokens, labels = (Runs(at, of_all(each.start, width), of_all(each.size, 0)) for each in in_read)
    named = {each.name: each for each in fields}
    return _Cut(
        _Pieces(row, offset, at, size, offset, none),
        (
            RunField(named["tokens"], tokens, 1, "tokens"),
            RunField(named["labels"], labels, 1, "tokens"),
            RunField(named["loss_mask"], Runs(at, none + 1, size), 0, is_kept=True),
            RunField(named["position_ids"], Runs(at, offset, size), 1, is_kept=True),
        ),
    )


def width_of(cut: Slices) -> int:
    """Tokens held of each row: every slice includes one more token, for its last label."""
    return int((cut.sizes + 1).sum())
