"""Masked: documents in rows of one length, some of their tokens hidden; as protein and BERT models learn.

Which tokens are hidden is keyed by (seed, source, epoch, index) and depends on a document's length alone:
every rank computes it for the whole document, takes what its own slices hold of it, and knows beforehand how
many there are. What travels is the held tokens as they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Allocate, Array, Arrays, Columns
from meshfeed.errors import PlanError, RecipeError
from meshfeed.mixture import Store
from meshfeed.order import Draws, philox
from meshfeed.plan import Align, Slices
from meshfeed.recipe import Recipe
from meshfeed.roles import Field
from meshfeed.sequence.packed import holder_of
from meshfeed.sequence.rule import Portion, dtype_of
from meshfeed.store import StreamStore

Longs = npt.NDArray[np.int64]

_TAG = 0x4D41534B  # apart from whatever else may be keyed by the same four numbers
_UNIT = 2.0**-53


@dataclass(frozen=True, slots=True)
class Masks:
    """What is hidden of a document.

    Attributes:
        places: the hidden tokens, ascending; int64 [m].
        tokens: what the model sees there, -1 for the token itself; int64 [m].
    """

    places: Longs
    tokens: Longs


@dataclass(frozen=True)
class Masked:
    """A sequence is a document's first tokens, in a row of `length`.

    Of a document's n tokens, mask_fraction * n, rounded, are hidden, at least 1: the model sees mask_token,
    a random token or the token itself there, and is to tell which it was. Each epoch hides others. What is
    put before, after and behind a document is never hidden.

    Attributes:
        length: tokens of a row.
        vocab_size: random tokens are drawn from [0, vocab_size).
        mask_token: what hides a token.
        mask_fraction: share of a document's tokens that are hidden.
        replace: share of the hidden ones that become mask_token.
        random: share of them that become a random token; the rest stay as they are.
        first_token, last_token: put before and after each document, as [CLS] and [SEP]; None for nothing.
        pad_token: fills the row.

    Fields, t = length / cp: tokens int64 [rows, t]; labels int64 [rows, t], -100 where nothing is hidden;
    loss_mask float32 [rows, t], 1 where something is; padding_mask bool [rows, t], True where there is no
    token; position_ids int64 [rows, t]. A length that cp cannot split is padded.
    Raises RecipeError for values outside these.
    """

    length: int
    _: KW_ONLY
    vocab_size: int
    mask_token: int
    mask_fraction: float = 0.15
    replace: float = 0.8
    random: float = 0.1
    first_token: int | None = None
    last_token: int | None = None
    pad_token: int = 0

    def __post_init__(self) -> None:
        least = {"length": 1, "vocab_size": 1, "mask_token": 0, "pad_token": 0}
        least |= {name: 0 for name in ("first_token", "last_token") if getattr(self, name) is not None}
        for name, lowest in least.items():
            if type(getattr(self, name)) is not int or getattr(self, name) < lowest:
                raise RecipeError(f"Masked({name}={getattr(self, name)!r}): a whole number from {lowest}")
        for name in ("mask_fraction", "replace", "random"):
            share = getattr(self, name)
            if type(share) not in (int, float) or not 0 <= share <= 1:
                raise RecipeError(f"Masked({name}={share!r}): a share from 0 to 1")
            object.__setattr__(self, name, float(share))  # 1 and 1.0 are one rule: one fingerprint
        if self.replace + self.random > 1:
            raise RecipeError(f"Masked(replace={self.replace}, random={self.random}): together at most 1")
        if self._room < 1:
            raise RecipeError(f"Masked(length={self.length}) leaves no token between first and last")

    @property
    def packed(self) -> bool:
        """Documents stand in rows."""
        return False

    @property
    def row_tokens(self) -> int:
        """Every row is padded to this."""
        return self.length

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """All that a row has."""
        return (
            Field(name="tokens", dtype="int64", stages=("first", "mtp"), split=True, pad=self.pad_token),
            Field(name="labels", dtype="int64", stages=("last",), split=True, pad=-100),
            Field(name="loss_mask", dtype="float32", stages=("last",), split=True, stored=False),
            Field(name="padding_mask", dtype="bool", split=True, pad=1, stored=False),
            Field(name="position_ids", dtype="int64", split=True, stored=False),
        )

    def summary(self) -> str:
        """All options in one line."""
        return repr(self)

    def num_sequences(self, store: Store) -> int:
        """Documents in the store, empty ones too. Raises RecipeError for one without whole tokens to read."""
        if not hasattr(store, "read_stream"):
            raise RecipeError(f"Masked reads a token store; {store!r} is none")
        stream = cast(StreamStore, store)
        if stream.dtype.kind not in "iu":
            raise RecipeError(f"Masked hides whole tokens; {store!r} holds {stream.dtype.name}")
        return stream.num_documents

    def shard_ends(self, store: Store) -> Longs | None:
        """Where a store's own shards end, in documents; int64 [num_shards], None where it has none."""
        return getattr(store, "shard_ends", None)

    def lengths(self, recipe: Recipe, draws: Draws) -> Longs:
        """Tokens of each row but the padding; int64 [n]."""
        lengths = np.zeros(len(draws), np.int64)
        for s, store in enumerate(_stores(recipe)):
            mine = np.flatnonzero(draws.source == s)
            lengths[mine] = store.lengths(draws.index[mine])
        return np.minimum(lengths, self._room) + self._num_special

    def valid_tokens(self, recipe: Recipe, draws: Draws, starts: Longs, lengths: Longs) -> Longs:
        """Hidden tokens of each row, always whole; int64 [n]."""
        return self.num_hidden(lengths - self._num_special)

    def num_hidden(self, sizes: Longs) -> Longs:
        """How many of a document's tokens are hidden, by how many are in the row; int64, same shape."""
        hidden = np.floor(sizes * self.mask_fraction + 0.5).astype(np.int64)
        return np.minimum(np.maximum(hidden, int(self.mask_fraction > 0)), sizes)

    def masks(self, size: int, seed: int, source: int, epoch: int, index: int) -> Masks:
        """What is hidden of one document with `size` tokens in its row; the same on every machine."""
        count = int(self.num_hidden(np.array(size)))
        # Raw words: what NumPy makes of them may change from release to release, they do not.
        words = philox(seed, source, epoch, index, _TAG).random_raw(size + 2 * count)
        places = np.sort(np.argsort(words[:size], kind="stable")[:count])
        chance = (words[size : size + count] >> np.uint64(11)) * _UNIT
        others = (words[size + count :] % np.uint64(self.vocab_size)).astype(np.int64)
        seen = np.where(chance < self.replace + self.random, others, -1)
        return Masks(places, np.where(chance < self.replace, self.mask_token, seen))

    def num_bytes(self, recipe: Recipe, portion: Portion) -> int:
        """Exact bytes of the one column."""
        first, stop = self._in_document(portion.held, portion)
        return int((stop - first).sum()) * dtype_of(recipe, portion.draws).itemsize

    def announce(self, recipe: Recipe, portions: Sequence[Portion]) -> None:
        """Ask each store to bring the held slices into memory."""
        for portion in portions:
            for store, _, starts, stops in self._ranges(recipe, portion):
                store.will_need(starts, stops)

    def load(self, recipe: Recipe, portion: Portion, allocate: Allocate) -> Columns:
        """The held tokens of the documents, slice after slice."""
        first, stop = self._in_document(portion.held, portion)
        sizes = stop - first
        ends = np.cumsum(sizes)
        dtype = dtype_of(recipe, portion.draws)
        tokens = allocate((int(sizes.sum()),), dtype.name)
        for store, slices, starts, stops in self._ranges(recipe, portion):
            if len(recipe.sources) == 1:
                store.read_stream(starts, stops, out=tokens)
                break
            read, at = store.read_stream(starts, stops), 0
            for end, size in zip(ends[slices].tolist(), sizes[slices].tolist()):
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
        """The named fields of each microbatch; see the class."""
        cp_size, rows = portion.pack.cp_size, portion.rows * len(portion.microbatches)
        width = int(Align().padded(np.array(self.length), cp_size)) // cp_size
        whole: dict[str, Array] = {}
        for field in self.fields:
            if field.name in names and not (field.stored and columns is None):
                whole[field.name] = allocate((rows, width), field.dtype)
                whole[field.name][:] = field.pad
        flat = {name: array.reshape(-1) for name, array in whole.items()}
        raw = np.asarray(columns["tokens"]) if columns else np.zeros(0, np.int64)
        hides = flat.keys() & {"tokens", "labels", "loss_mask"}
        masks = self._masks_of(recipe, portion) if hides else []
        for piece in self._pieces(portion, width):
            self._fill_plain(piece, flat)
            if hides:
                self._fill_hidden(piece, masks[piece.row], raw, flat)
        made: list[Arrays] = []
        for m in range(len(portion.microbatches)):
            mine = slice(m * portion.rows, (m + 1) * portion.rows)
            made.append({name: array[mine] for name, array in whole.items()})
        return made

    # -- geometry -------------------------------------------------------------------------------------

    @property
    def _num_special(self) -> int:
        return (self.first_token is not None) + (self.last_token is not None)

    @property
    def _room(self) -> int:
        """The most tokens of a document that a row holds."""
        return self.length - self._num_special

    @property
    def _lead(self) -> int:
        """Tokens of a row before its document."""
        return int(self.first_token is not None)

    def _in_document(self, slices: Slices, portion: Portion) -> tuple[Longs, Longs]:
        """What slices of rows hold of their documents: first token, stop; int64 [m] twice."""
        size = (portion.pack.lengths - self._num_special)[slices.sequence]
        return (slices.start - self._lead).clip(0, size), (slices.stop - self._lead).clip(0, size)

    def _ranges(self, recipe: Recipe, portion: Portion) -> Iterator[tuple[Any, Longs, Longs, Longs]]:
        """For each store: (store, which held slices are its, stream ranges of each)."""
        held, draws = portion.held, portion.draws
        first, stop = self._in_document(held, portion)
        for s, store in enumerate(_stores(recipe)):
            slices = np.flatnonzero((draws.source[held.sequence] == s) & (first < stop))
            if slices.size:
                begin = store.offsets(draws.index[held.sequence[slices]])
                yield store, slices, begin + first[slices], begin + stop[slices]

    def _pieces(self, portion: Portion, width: int) -> Iterator[_Piece]:
        own, held, lengths = portion.own, portion.held, portion.pack.lengths
        in_row = np.bincount(own.sequence, own.sizes, lengths.size)
        if ((in_row != width) & (lengths > 0)).any():
            raise PlanError("Masked has rows of one length: choose cp_split='zigzag' or 'contiguous'")
        first, stop = self._in_document(own, portion)
        held_first, held_stop = self._in_document(held, portion)
        held_at = np.cumsum(held_stop - held_first) - (held_stop - held_first)
        row_at, row = 0, -1
        for s, sequence in enumerate(own.sequence.tolist()):
            row_at, row = (row_at if sequence == row else sequence * width), sequence
            h = holder_of(held, sequence, int(own.start[s]))
            start, size = int(own.start[s]), int(lengths[sequence])
            yield _Piece(
                row=sequence,
                at=row_at,
                start=start,
                stop=max(min(int(own.stop[s]), size), start),
                length=size,
                first=int(first[s]),
                last=int(stop[s]),
                raw_at=int(held_at[h] + first[s] - held_first[h]),
            )
            row_at += int(own.stop[s]) - start

    # -- fields ---------------------------------------------------------------------------------------

    def _masks_of(self, recipe: Recipe, portion: Portion) -> list[Masks]:
        draws, sizes = portion.draws, portion.pack.lengths - self._num_special
        rows = zip(sizes.tolist(), draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist())
        return [self.masks(size, recipe.seed, *place) for size, *place in rows]

    def _fill_plain(self, piece: _Piece, flat: dict[str, Array]) -> None:
        """What hiding does not touch."""
        here = slice(piece.at, piece.at + piece.stop - piece.start)
        if "position_ids" in flat:
            flat["position_ids"][here] = np.arange(piece.start, piece.stop)
        if "padding_mask" in flat:
            flat["padding_mask"][here] = False
        if "tokens" in flat:
            last = piece.length - 1
            if self.first_token is not None and piece.start == 0 < piece.stop:
                flat["tokens"][piece.at] = self.first_token
            if self.last_token is not None and piece.start <= last < piece.stop:
                flat["tokens"][piece.at + last - piece.start] = self.last_token

    def _fill_hidden(self, piece: _Piece, masks: Masks, raw: Array, flat: dict[str, Array]) -> None:
        """The document's own tokens, and what is hidden of them."""
        some = slice(*np.searchsorted(masks.places, [piece.first, piece.last]).tolist())
        inside, seen = masks.places[some] - piece.first, masks.tokens[some]
        begin = piece.at + piece.first + self._lead - piece.start
        if "loss_mask" in flat:
            flat["loss_mask"][begin + inside] = 1
        tokens = raw[piece.raw_at : piece.raw_at + piece.last - piece.first]
        if "labels" in flat:
            flat["labels"][begin + inside] = tokens[inside]
        if "tokens" in flat:
            flat["tokens"][begin : begin + tokens.size] = tokens
            flat["tokens"][begin + inside] = np.where(seen < 0, tokens[inside], seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """What one own slice holds.

    Attributes:
        row: which row.
        at: its place among the tokens of all rows of this rank.
        start, stop: real tokens of the row, the special ones included.
        length: real tokens of the whole row.
        first, last: tokens of the document, from the first up to and without the last.
        raw_at: where these begin among the held tokens.
    """

    row: int
    at: int
    start: int
    stop: int
    length: int
    first: int
    last: int
    raw_at: int


def _stores(recipe: Recipe) -> Sequence[Any]:
    return recipe.sources
