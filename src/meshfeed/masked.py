"""Masked: documents in rows of one length with some tokens hidden, for BERT and protein models.

The hidden tokens are keyed by (seed, source, epoch, index), the source by its name, and depend only on a
document's length. So every rank computes them for the whole document, uses those in its own slices, and knows
their number beforehand. Only the stored tokens are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from meshfeed.arrays import Allocate, Array, Columns, Longs
from meshfeed.errors import RecipeError
from meshfeed.files import Cache
from meshfeed.order import Draws, key_of, philox
from meshfeed.plan import Align, Slices
from meshfeed.recipe import Recipe
from meshfeed.roles import Field
from meshfeed.sequence.documents import DocumentRule, document_lengths
from meshfeed.sequence.runs import Located, Portion, Runs, holding, runs_of
from meshfeed.sequence.table import FieldTable, RunField, table_of
from meshfeed.store import StreamStore
from meshfeed.store.kept import kept_by_store
from meshfeed.store.marks import Marks, marks_of
from meshfeed.whole import is_whole, settle, whole

_TAG = 0x4D41534B  # separates these keys from others of the same four numbers
_CROP = 0x43524F50
_UNIT = 2.0**-53


@dataclass(frozen=True, slots=True)
class Masks:
    """The hidden tokens of a document.

    Attributes:
        places: their indices, ascending; int64 [m].
        tokens: what the model sees there, -1 for the token itself; int64 [m].
    """

    places: Longs
    tokens: Longs


@dataclass(frozen=True)
class Masked(DocumentRule):
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
    crop: Literal["start", "random"] = "start"
    special_tokens: tuple[int, ...] = ()
    random_tokens: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        settle(self)
        least = {"length": 1, "vocab_size": 1, "mask_token": 0, "pad_token": 0}
        least |= {name: 0 for name in ("first_token", "last_token") if getattr(self, name) is not None}
        for name, lowest in least.items():
            if not is_whole(getattr(self, name), lowest):
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
        special = tuple(map(whole, special))
        if not all(is_whole(token, 0) for token in special):
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
    def row_tokens(self) -> int:
        """Every row is padded to this."""
        return self.length

    @property
    def fields(self) -> tuple[Field, ...]:
        """All fields of a row."""
        return _fields(self.pad_token)

    def look_up(self, recipe: Recipe, draws: Draws) -> Located:
        """With the place of the part of each document that goes into its row."""
        whole = super().look_up(recipe, draws)
        if whole is draws or self.crop == "start":
            return whole
        spare = (whole.stored - self._room).clip(0)
        skipped = np.zeros_like(spare)
        for at in np.flatnonzero(spare).tolist():
            place = recipe.source_keys[draws.source[at]], int(draws.epoch[at]), int(draws.index[at])
            skipped[at] = key_of(recipe.seed, *place, _CROP) % (int(spare[at]) + 1)
        return replace(whole, begins=whole.begins + skipped, stored=whole.stored - skipped)

    def lengths(self, recipe: Recipe, draws: Draws) -> Longs:
        """Tokens of each row without padding; int64 [n]."""
        return np.minimum(document_lengths(recipe, draws), self._room) + self._num_special

    def parts_of_documents(self, recipe: Recipe, draws: Draws) -> tuple[int, Longs, Longs]:
        """See `FindsDocuments`: what the row holds of each, behind first_token."""
        begins, starts = self.look_up(recipe, draws).begins, np.zeros(len(draws), np.int64)
        for s, mine, of_source in draws.by_source():
            starts[mine] = begins[mine] - recipe.sources[s].offsets(of_source.index)
        sizes = self.lengths(recipe, draws) - self._num_special
        return int(self.first_token is not None), starts, starts + sizes

    def valid_tokens(self, recipe: Recipe, draws: Draws, starts: Longs, lengths: Longs) -> Longs:
        """Hidden tokens of each row, always whole; int64 [n]."""
        sizes = lengths - self._num_special
        candidates = sizes.copy()
        if self.special_tokens:
            begins = self.look_up(recipe, draws).begins
            for s, mine, _ in draws.by_source():
                marks = _special_marks(recipe.sources[s], self.special_tokens)
                candidates[mine] -= marks.count(begins[mine], begins[mine] + sizes[mine])
        return self.num_hidden(candidates)

    def num_hidden(self, sizes: Longs) -> Longs:
        """Number of hidden tokens for each number of tokens that may be hidden; int64, same shape."""
        hidden = np.floor(sizes * self.mask_fraction + 0.5).astype(np.int64)
        return np.minimum(np.maximum(hidden, int(self.mask_fraction > 0)), sizes)

    def masks(
        self, size: int, seed: int, key: int, epoch: int, index: int, special: Longs | None = None
    ) -> Masks:
        """The hidden tokens of one document with `size` tokens in its row; the same on every machine.

        key: of the source, see `Recipe.source_keys`. special: indices of those that are never hidden; int64
        [k].
        """
        allowed = np.ones(size, np.bool_)
        allowed[[] if special is None else special] = False
        candidates = np.flatnonzero(allowed)
        count = int(self.num_hidden(np.array(candidates.size)))
        # Raw words are stable; NumPy's distributions may change from release to release.
        words = philox(seed, key, epoch, index, _TAG).random_raw(size + 2 * count)
        places = np.sort(candidates[np.argsort(words[candidates], kind="stable")[:count]])
        chance = (words[size : size + count] >> np.uint64(11)) * _UNIT
        first, stop = self._random_range
        others = first + (words[size + count :] % np.uint64(stop - first)).astype(np.int64)
        seen = np.where(chance < self.replace + self.random, others, -1)
        return Masks(places, np.where(chance < self.replace, self.mask_token, seen))

    def table(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> FieldTable:
        """The named fields; see the class."""
        cp_size, rows = portion.pack.cp_size, portion.rows * len(portion.microbatches)
        width = int(Align().padded(np.array(self.length), cp_size)) // cp_size
        real, at = portion.ranges(portion.own), self._places(portion, width)
        runs: dict[str, tuple[Runs, int, str | None]] = {
            "padding_mask": (Runs(at, np.zeros_like(at), real.sizes), 0, None),
            "position_ids": (Runs(at, real.start, real.sizes), 1, None),
        }
        raw = np.asarray(columns["tokens"]) if columns else None
        read = dict[str, Array]()
        if not {"tokens", "labels", "loss_mask"}.isdisjoint(names):
            own, hidden, seen = self._hidden(recipe, portion, at)
            one = np.ones_like(hidden.at)
            runs["labels"] = hidden, 1, "tokens"
            runs["loss_mask"] = Runs(hidden.at, one, one), 0, None
            if raw is not None:
                read["tokens"] = raw
            if raw is not None and "tokens" in names:
                read["seen"] = self._seen(raw, hidden.start, seen)
                runs["tokens"] = self._with_ends(portion, own, at, raw.size), 1, "seen"
        fields = [RunField(each, *runs[each.name]) for each in self.fields if each.name in runs]
        return table_of((rows, width), read, names, fields, [{} for _ in portion.microbatches])

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

    def _in_document(self, slices: Slices, portion: Portion) -> Slices:
        """The document tokens in slices of rows."""
        size = (portion.pack.lengths - self._num_special)[slices.sequence]
        lead = int(self.first_token is not None)
        return Slices(
            slices.sequence, (slices.start - lead).clip(0, size), (slices.stop - lead).clip(0, size)
        )

    def held(self, recipe: Recipe, portion: Portion) -> Slices:
        """The document tokens of the held slices."""
        return self._in_document(portion.held, portion)

    def _places(self, portion: Portion, width: int) -> Longs:
        """Offset of each own slice among the tokens of all rows of this rank; int64 [m]."""
        own, before = portion.own, portion.own.offsets
        return before - before[np.searchsorted(own.sequence, own.sequence)] + own.sequence * width

    # -- fields ---------------------------------------------------------------------------------------

    def _masks_of(self, recipe: Recipe, portion: Portion) -> list[Masks]:
        draws, sizes = portion.draws, portion.pack.lengths - self._num_special
        special: list[Longs | None] = [None] * len(draws)
        begins = self.look_up(recipe, draws).begins
        for s, mine, _ in draws.by_source() if self.special_tokens else ():
            marks = _special_marks(recipe.sources[s], self.special_tokens)
            for row, at, size in zip(mine.tolist(), begins[mine].tolist(), sizes[mine].tolist()):
                special[row] = marks.places(at, at + size)
        rows = zip(sizes.tolist(), draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist(), special)
        return [
            self.masks(size, recipe.seed, recipe.source_keys[source], epoch, index, own)
            for size, source, epoch, index, own in rows
        ]

    def _hidden(self, recipe: Recipe, portion: Portion, at: Longs) -> tuple[Runs, Runs, Longs]:
        """The own tokens of documents, the hidden ones among them, and what is seen there; -1 for the token.

        at: offset of each own slice in the field. Runs are of what was read.
        """
        own = self._in_document(portion.own, portion)
        some = np.flatnonzero(own.sizes)
        # a slice that begins with first_token has it before the document's tokens
        at = (at + np.maximum(int(self.first_token is not None) - portion.own.start, 0))[some]
        own = Slices(own.sequence[some], own.start[some], own.stop[some])
        runs, _ = runs_of(own, self.held(recipe, portion), at)
        masks = self._masks_of(recipe, portion)
        row = np.repeat(np.arange(len(masks)), [each.places.size for each in masks])
        place = np.concatenate([each.places for each in masks] or [own.start[:0]])
        seen = np.concatenate([each.tokens for each in masks] or [own.start[:0]])
        found = holding(own, row, place)
        here, slot = found >= 0, found[found >= 0]
        place = place[here] - own.start[slot]
        return runs, Runs(runs.at[slot] + place, runs.start[slot] + place, np.ones_like(place)), seen[here]

    def _seen(self, read: Array, hidden: Longs, seen: Longs) -> Array:
        """What was read as the model sees it, then first_token and last_token."""
        ends = [self.first_token or 0, self.last_token or 0]
        most = max(self.vocab_size - 1, self.mask_token, *ends)
        made = np.append(read, ends).astype(np.result_type(read.dtype, np.min_scalar_type(most)))
        made[hidden[seen >= 0]] = seen[seen >= 0]
        return made

    def _with_ends(self, portion: Portion, own: Runs, at: Longs, num_read: int) -> Runs:
        """The own tokens of documents, and first_token and last_token of the rows, in what `_seen` makes."""
        own_slices, real, runs = portion.own, portion.ranges(portion.own), [own]
        last = portion.pack.lengths[own_slices.sequence] - 1
        ends = (self.first_token, 0 * last), (self.last_token, last)
        for start, (token, place) in enumerate(ends, num_read):
            if token is not None:
                there = (at + place - real.start)[(real.start <= place) & (place < real.stop)]
                runs.append(Runs(there, np.full_like(there, start), np.ones_like(there)))
        merged = Runs(*(np.concatenate([getattr(e, n) for e in runs]) for n in ("at", "start", "size")))
        order = np.argsort(merged.at, kind="stable")
        return Runs(merged.at[order], merged.start[order], merged.size[order])


@lru_cache
def _fields(pad_token: int) -> tuple[Field, ...]:
    return (
        Field(name="tokens", dtype="int64", stages=("first", "mtp"), split=True, pad=pad_token),
        Field(name="labels", dtype="int64", stages=("last",), split=True, pad=-100),
        Field(name="loss_mask", dtype="float32", stages=("last",), split=True, stored=False),
        Field(name="padding_mask", dtype="bool", split=True, pad=1, stored=False),
        Field(name="position_ids", dtype="int64", split=True, stored=False),
    )


@kept_by_store(most=4)
def _special_marks(store: StreamStore, tokens: tuple[int, ...]) -> Marks:
    """Marks of the special tokens of a store; cached, since they map a file."""
    return marks_of(store, store.kept_in or Cache(), tokens)
