"""Masked: documents in rows of one length with some tokens hidden, for BERT and protein models.

The hidden tokens are keyed by (seed, source, epoch, index) and depend only on a document's length. So every
rank computes them for the whole document, uses those in its own slices, and knows their number beforehand.
Only the stored tokens are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from dataclasses import field as dataclass_field
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Allocate, Array, Arrays, Columns
from meshfeed.errors import PlanError, RecipeError
from meshfeed.mixture import Store
from meshfeed.order import Draws, key_of, philox
from meshfeed.plan import Align, Slices
from meshfeed.recipe import Recipe
from meshfeed.roles import Field
from meshfeed.sequence.masks import MaskedPiece, Masks, special_marks
from meshfeed.sequence.packed import holder_of
from meshfeed.sequence.rule import Portion, dtype_of
from meshfeed.store import StreamStore

Longs = npt.NDArray[np.int64]

_TAG = 0x4D41534B  # separates these keys from others of the same four numbers
_CROP = 0x43524F50
_UNIT = 2.0**-53


@dataclass(frozen=True)
class Masked:
    """A sequence is a document's first tokens, or a random part of it, in a row of `length`.

    Of a document's n tokens, mask_fraction * n, rounded, are hidden, at least 1. There the model sees
    mask_token, a random token or the token itself, and predicts the original. Each epoch hides different
    tokens. first_token, last_token and padding are never hidden.

    With special_tokens, n counts only the other tokens. One bit per token marks the special ones. The bits
    are computed from the whole store once per node, so that the hidden tokens are still known before reading.

    Attributes:
        length: tokens of a row.
        vocab_size: random tokens are drawn from [0, vocab_size).
        mask_token: replaces a hidden token.
        mask_fraction: share of a document's tokens that are hidden.
        replace: share of the hidden tokens that become mask_token.
        random: share of the hidden tokens that become a random token; the rest stay unchanged.
        first_token, last_token: added before and after each document, such as [CLS] and [SEP]; None for
            neither.
        pad_token: fills the row.
        crop: the part of a document longer than the row: its first tokens ("start"), or a run at a random
            position, different in each epoch ("random").
        special_tokens: ids in a document that are never hidden or changed.
        random_tokens: (first, stop), the range of ids for random tokens; None for [0, vocab_size).

    Fields, t = length / cp: tokens int64 [rows, t]; labels int64 [rows, t], -100 except for hidden tokens;
    loss_mask float32 [rows, t], 1 for hidden tokens; padding_mask bool [rows, t], True for padding;
    position_ids int64 [rows, t]. A length that cp cannot split is padded. Raises RecipeError for any other
    value.
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
    crop: Literal["start", "random"] = dataclass_field(default="start", repr=False)
    special_tokens: tuple[int, ...] = dataclass_field(default=(), repr=False)
    random_tokens: tuple[int, int] | None = dataclass_field(default=None, repr=False)

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
        if self.crop not in ("start", "random"):
            raise RecipeError(f"Masked(crop={self.crop!r}): choose 'start' or 'random'")
        given: Any = self.special_tokens
        special: tuple[int, ...] = tuple(given) if isinstance(given, Iterable) else (-1,)
        if any(type(token) is not int or token < 0 for token in special):
            raise RecipeError(f"Masked(special_tokens={given!r}): give a tuple of whole numbers from 0")
        object.__setattr__(self, "special_tokens", tuple(sorted(set(special))))
        first, stop = self._random_range
        if not (type(first) is type(stop) is int and 0 <= first < stop <= self.vocab_size):
            raise RecipeError(
                f"Masked(random_tokens={self.random_tokens!r}): (first, stop) with 0 <= first < stop <= "
                f"vocab_size={self.vocab_size}"
            )
        if self._room < 1:
            raise RecipeError(f"Masked(length={self.length}) leaves no token between first and last")

    @property
    def packed(self) -> bool:
        """Documents are in rows."""
        return False

    @property
    def row_tokens(self) -> int:
        """Every row is padded to this."""
        return self.length

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """All fields of a row."""
        return (
            Field(name="tokens", dtype="int64", stages=("first", "mtp"), split=True, pad=self.pad_token),
            Field(name="labels", dtype="int64", stages=("last",), split=True, pad=-100),
            Field(name="loss_mask", dtype="float32", stages=("last",), split=True, stored=False),
            Field(name="padding_mask", dtype="bool", split=True, pad=1, stored=False),
            Field(name="position_ids", dtype="int64", split=True, stored=False),
        )

    def summary(self) -> str:
        """All options in one line; options added later only if they differ from the default."""
        later = {"crop": "start", "special_tokens": (), "random_tokens": None}
        told = [f", {name}={getattr(self, name)!r}" for name in later if getattr(self, name) != later[name]]
        return f"{repr(self)[:-1]}{''.join(told)})"

    def num_sequences(self, store: Store) -> int:
        """Documents in the store, including empty ones. Raises RecipeError unless it holds integer tokens."""
        if not hasattr(store, "read_stream"):
            raise RecipeError(f"Masked reads a token store; {store!r} is not one")
        stream = cast(StreamStore, store)
        if stream.dtype.kind not in "iu":
            raise RecipeError(f"Masked needs integer tokens; {store!r} holds {stream.dtype.name}")
        return stream.num_documents

    def shard_ends(self, store: Store) -> Longs | None:
        """The ends of a store's own shards, in documents; int64 [num_shards], None without shards."""
        return getattr(store, "shard_ends", None)

    def lengths(self, recipe: Recipe, draws: Draws) -> Longs:
        """Tokens of each row without padding; int64 [n]."""
        lengths = np.zeros(len(draws), np.int64)
        for s, store in enumerate(_stores(recipe)):
            mine = np.flatnonzero(draws.source == s)
            lengths[mine] = store.lengths(draws.index[mine])
        return np.minimum(lengths, self._room) + self._num_special

    def valid_tokens(self, recipe: Recipe, draws: Draws, starts: Longs, lengths: Longs) -> Longs:
        """Hidden tokens of each row, always whole; int64 [n]."""
        sizes = lengths - self._num_special
        candidates = sizes.copy()
        if self.special_tokens:
            for s, mine, begin in self._begins(recipe, draws):
                marks = special_marks(recipe.sources[s], self.special_tokens)
                candidates[mine] -= marks.count(begin, begin + sizes[mine])
        return self.num_hidden(candidates)

    def num_hidden(self, sizes: Longs) -> Longs:
        """Number of hidden tokens for each number of tokens that may be hidden; int64, same shape."""
        hidden = np.floor(sizes * self.mask_fraction + 0.5).astype(np.int64)
        return np.minimum(np.maximum(hidden, int(self.mask_fraction > 0)), sizes)

    def masks(
        self, size: int, seed: int, source: int, epoch: int, index: int, special: Longs | None = None
    ) -> Masks:
        """The hidden tokens of one document with `size` tokens in its row; the same on every machine.

        special: indices of those that are never hidden; int64 [k].
        """
        allowed = np.ones(size, np.bool_)
        allowed[[] if special is None else special] = False
        candidates = np.flatnonzero(allowed)
        count = int(self.num_hidden(np.array(candidates.size)))
        # Raw words are stable; NumPy's distributions may change from release to release.
        words = philox(seed, source, epoch, index, _TAG).random_raw(size + 2 * count)
        places = np.sort(candidates[np.argsort(words[candidates], kind="stable")[:count]])
        chance = (words[size : size + count] >> np.uint64(11)) * _UNIT
        first, stop = self._random_range
        others = first + (words[size + count :] % np.uint64(stop - first)).astype(np.int64)
        seen = np.where(chance < self.replace + self.random, others, -1)
        return Masks(places, np.where(chance < self.replace, self.mask_token, seen))

    def num_bytes(self, recipe: Recipe, portion: Portion) -> int:
        """Exact bytes of the one column."""
        first, stop = self._in_document(portion.held, portion)
        return int((stop - first).sum()) * dtype_of(recipe, portion.draws).itemsize

    def announce(self, recipe: Recipe, portions: Sequence[Portion]) -> None:
        """Announce the held slices to each store."""
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
    def _random_range(self) -> tuple[int, int]:
        return (0, self.vocab_size) if self.random_tokens is None else self.random_tokens

    @property
    def _lead(self) -> int:
        """Tokens of a row before its document."""
        return int(self.first_token is not None)

    def _in_document(self, slices: Slices, portion: Portion) -> tuple[Longs, Longs]:
        """The document tokens in slices of rows: first and stop; int64 [m] each."""
        size = (portion.pack.lengths - self._num_special)[slices.sequence]
        return (slices.start - self._lead).clip(0, size), (slices.stop - self._lead).clip(0, size)

    def _ranges(self, recipe: Recipe, portion: Portion) -> Iterator[tuple[Any, Longs, Longs, Longs]]:
        """For each store: (store, its held slices, their stream ranges)."""
        held, draws = portion.held, portion.draws
        first, stop = self._in_document(held, portion)
        begins = np.zeros(len(draws), np.int64)
        for _, mine, begin in self._begins(recipe, draws):
            begins[mine] = begin
        for s, store in enumerate(_stores(recipe)):
            slices = np.flatnonzero((draws.source[held.sequence] == s) & (first < stop))
            if slices.size:
                begin = begins[held.sequence[slices]]
                yield store, slices, begin + first[slices], begin + stop[slices]

    def _begins(self, recipe: Recipe, draws: Draws) -> Iterator[tuple[int, Longs, Longs]]:
        """For each source: (source, its draws, stream offset of the first token in each row)."""
        for s in np.unique(draws.source).tolist():
            mine, store = np.flatnonzero(draws.source == s), _stores(recipe)[s]
            index = draws.index[mine]
            begin = store.offsets(index)
            if self.crop == "random":
                spare = (store.lengths(index) - self._room).clip(0)
                for at in np.flatnonzero(spare).tolist():
                    key = key_of(recipe.seed, s, int(draws.epoch[mine[at]]), int(index[at]), _CROP)
                    begin[at] += key % (int(spare[at]) + 1)
            yield s, mine, begin

    def _pieces(self, portion: Portion, width: int) -> Iterator[MaskedPiece]:
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
            yield MaskedPiece(
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
        special: list[Longs | None] = [None] * len(draws)
        if self.special_tokens:
            for s, mine, begin in self._begins(recipe, draws):
                marks = special_marks(recipe.sources[s], self.special_tokens)
                for row, at, size in zip(mine.tolist(), begin.tolist(), sizes[mine].tolist()):
                    special[row] = marks.places(at, at + size)
        rows = zip(sizes.tolist(), draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist(), special)
        return [
            self.masks(size, recipe.seed, source, epoch, index, own)
            for size, source, epoch, index, own in rows
        ]

    def _fill_plain(self, piece: MaskedPiece, flat: dict[str, Array]) -> None:
        """Fill the fields that do not depend on hidden tokens."""
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

    def _fill_hidden(self, piece: MaskedPiece, masks: Masks, raw: Array, flat: dict[str, Array]) -> None:
        """Fill the document's tokens and the hidden ones."""
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


def _stores(recipe: Recipe) -> Sequence[Any]:
    return recipe.sources
