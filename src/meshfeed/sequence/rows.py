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

from meshfeed.columns import Allocate, Array, Arrays, Columns, Constant, Stacked
from meshfeed.errors import RecipeError
from meshfeed.order import Draws, concatenated
from meshfeed.plan import Align, Slices
from meshfeed.recipe import Recipe
from meshfeed.roles import Field
from meshfeed.sequence.rule import SequenceRule
from meshfeed.sequence.runs import Longs, Portion, Runs, dtype_of, holding, runs_of
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

    def build(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> Stacked:
        """The named fields of each microbatch; see the class for shapes."""
        shape, k = self._shape(portion), len(portion.draws)
        own, held = _edges(portion.own_row), _edges(portion.held_row)
        in_row, *in_read = _runs_of_row(own, held)
        starts = self._document_starts(recipe, portion.draws) if self._minds_documents else _NO_STARTS
        whole: dict[str, Array] = {}
        fixed = self._fixed(recipe, portion)
        for field in self.fields:
            if field.name not in names or field in _DOCUMENT_FIELDS:
                continue
            if field.name in fixed:
                whole[field.name] = _fixed_rows(field, (portion.rows, shape[1]), own, self.length)
                continue
            out = whole[field.name] = allocate(shape, field.dtype)
            if field.name == "loss_mask":
                mask = self._loss_mask(starts, self._tokens_in(recipe, portion.draws))
                _fill(mask, in_row, out, k, field.pad)
            elif field.name == "position_ids":
                _fill(self._positions(starts, k), in_row, out, k, field.pad)
            elif columns is not None:
                _fill(np.asarray(columns["tokens"]), in_read[field.name == "labels"], out, k, field.pad)
        return Stacked(whole, self._others(starts, portion, names))

    def table(
        self, recipe: Recipe, portion: Portion, columns: Columns | None, names: Sequence[str]
    ) -> FieldTable:
        """The fields for a device, in runs that documents end. For a CPU, `build` fills whole rows sooner."""
        shape, own, starts = self._shape(portion), portion.own_row, _NO_STARTS
        if self._minds_documents:
            starts = self._document_starts(recipe, portion.draws)
        pieces = _pieces_of(starts, own, len(portion.draws), self.length)
        inside = pieces.offset - own.start[pieces.slice]
        at = pieces.row * shape[1] + own.offsets[pieces.slice] + inside
        in_read = _runs_of_row(_edges(own), _edges(portion.held_row))[1].start
        token = pieces.row * width_of(portion.held_row) + in_read[pieces.slice] + inside
        bearing = pieces.size - (pieces.ends if self.eod_mask_loss else 0)
        labels_left = self._tokens_in(recipe, portion.draws)[pieces.row] - 1 - pieces.offset
        position = pieces.offset - (pieces.first if self.reset_position_ids else 0)
        runs = (
            (Runs(at, token, pieces.size), 1, "tokens"),
            (Runs(at, token + 1, pieces.size), 1, "tokens"),
            (Runs(at, np.ones_like(at), np.minimum(bearing, labels_left).clip(0)), 0, None),
            (Runs(at, position, pieces.size), 1, None),
        )
        own_fields = {each.name: each for each in self.fields}
        fields = [RunField(own_fields[each.name], *how) for each, how in zip(_FIELDS, runs)]
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

    def _fixed(self, recipe: Recipe, portion: Portion) -> set[str]:
        """Fields that are the same in every microbatch of whole rows."""
        if len(portion.draws) < portion.rows * len(portion.microbatches):
            return set()
        fixed = set[str]() if self.reset_position_ids else {"position_ids"}
        if (
            not self.eod_mask_loss
            and self._tokens_in(recipe, portion.draws).min(initial=self.length + 1) > self.length
        ):
            fixed.add("loss_mask")
        return fixed

    # -- fields that depend on document ends -----------------------------------------------------------

    @property
    def _minds_documents(self) -> bool:
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss

    def _positions(self, starts: Starts, num_rows: int) -> Array:
        positions = np.arange(self.length)[None, :]
        if not (self.reset_position_ids and num_rows):
            return positions
        # documents [7 7|9 9 9] -> first tokens [0 0 2 2 2] -> positions [0 1 0 1 2]
        first = np.zeros((num_rows, self.length), np.int64)
        row, offset = starts
        inside = offset < self.length
        first[row[inside], offset[inside]] = offset[inside]
        return positions - np.maximum.accumulate(first, axis=1)

    def _loss_mask(self, starts: Starts, tokens: Longs) -> Array:
        """tokens: stored tokens of each row; without a label there is no loss."""
        short = np.flatnonzero(tokens <= self.length)
        if not (short.size or (self.eod_mask_loss and tokens.size)):
            return np.ones((1, self.length), np.float32)
        mask = np.ones((tokens.size, self.length), np.float32)
        mask[short] = np.arange(1, self.length + 1) < tokens[short, None]
        if self.eod_mask_loss:
            row, offset = starts
            mask[row, offset - 1] = 0
        return mask

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
        row, slice, offset: where a piece begins: in which row and own slice, at which token of the row.
        size: its tokens.
        first: where its document starts in the row.
        ends: 1 if a document starts right after it, else 0.
    """

    row: Longs
    slice: Longs
    offset: Longs
    size: Longs
    first: Longs
    ends: Longs


def _pieces_of(starts: Starts, own: Slices, num_rows: int, length: int) -> _Pieces:
    """own: slices of one row, none empty. starts: offsets from 1 to length."""
    row, offset = starts
    holder = holding(own, np.zeros_like(offset), offset)
    inside, num_slices = holder >= 0, own.start.size
    rows = np.concatenate((np.repeat(np.arange(num_rows), num_slices), row[inside]))
    slices = np.concatenate((np.tile(np.arange(num_slices), num_rows), holder[inside]))
    offsets = np.concatenate((np.tile(own.start, num_rows), offset[inside]))
    order = np.lexsort((offsets, slices, rows))
    rows, slices, offsets = rows[order], slices[order], offsets[order]
    is_last = np.append((np.diff(rows) != 0) | (np.diff(slices) != 0), True)[: rows.size]
    stops = np.where(is_last, own.stop[slices], np.roll(offsets, -1))
    # a document starts at each key; so does every row
    keys = np.sort(np.concatenate((np.arange(num_rows) * (length + 1), row * (length + 1) + offset)))
    first = keys[np.searchsorted(keys, rows * (length + 1) + offsets, side="right") - 1] % (length + 1)
    ends = np.isin(rows * (length + 1) + stops, keys).astype(np.int64)
    return _Pieces(rows, slices, offsets, stops - offsets, first, ends)


Edges = tuple[int, ...]
"""The starts of the slices of a row, then their stops."""


def _edges(slices: Slices) -> Edges:
    return *slices.start.tolist(), *slices.stop.tolist()


def _slices(edges: Edges, *, extra: int = 0) -> Slices:
    starts, stops = np.array(edges, np.int64).reshape(2, -1)
    return Slices(np.zeros(starts.size, np.int32), starts, stops + extra)


@lru_cache(maxsize=8)
def _fixed_rows(field: Field, shape: tuple[int, int], own: Edges, length: int) -> Constant:
    """Rows of a field that does not depend on documents: loss everywhere, or positions from 0."""
    out = np.empty(shape, field.dtype)
    whole = np.ones(length) if field.name == "loss_mask" else np.arange(length)
    _fill(whole[None], _runs_of_row(own, own)[0], out, shape[0], field.pad)
    return Constant.of(out)


@lru_cache(maxsize=8)  # the rows of a run are cut alike
def _runs_of_row(own: Edges, held: Edges) -> tuple[Runs, Runs, Runs]:
    """Where a row's own tokens lie in the row; they and their labels, in what was read of it."""
    mine, read = _slices(own), _slices(held, extra=1)
    tokens, labels = (runs_of(mine, read, mine.offsets, ahead=ahead) for ahead in (0, 1))
    return Runs(mine.offsets, mine.start, mine.sizes), tokens, labels


def width_of(cut: Slices) -> int:
    """Tokens held of each row: every slice includes one more token, for its last label."""
    return int((cut.sizes + 1).sum())


def _fill(whole: Array, runs: Runs, out: Array, num_rows: int, pad: float) -> None:
    """Fill the runs of every row, and padding elsewhere.

    whole: [rows, ...] or [1, ...] for the same in each. out: [rows, tokens].
    """
    runs.copy(whole, out[:num_rows])
    out[:num_rows, int(runs.size.sum()) :] = pad
    out[num_rows:] = pad
