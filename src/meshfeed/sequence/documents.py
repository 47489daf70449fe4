"""Documents: whole documents packed side by side (THD), with attention inside each.

Every field of a pack is [1, tokens of this cp rank]. The stored column holds the group's slices, each
followed by one more token if the document continues. All other fields are computed from lengths alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from meshfeed.columns import Allocate, Array, Arrays, Columns
from meshfeed.errors import RecipeError
from meshfeed.mixture import Store
from meshfeed.order import Draws, concatenated
from meshfeed.plan import Slices
from meshfeed.recipe import Recipe
from meshfeed.roles import Field
from meshfeed.sequence.compact import Compact, RunField
from meshfeed.sequence.packed import PLAN_FIELDS, fields_of_plan, lengths_of_plan, runs_of_plan
from meshfeed.sequence.rule import SequenceRule, TokenRule
from meshfeed.sequence.runs import Longs, Portion, Runs, dtype_of
from meshfeed.store import StreamStore

_FIELDS = (
    Field(name="tokens", dtype="int64", stages=("first", "mtp"), split=True),
    Field(name="labels", dtype="int64", stages=("last",), split=True),
    Field(name="loss_mask", dtype="float32", stages=("last",), split=True, stored=False),
    *PLAN_FIELDS,
)


def document_lengths(recipe: Recipe, draws: Draws) -> Longs:
    """Tokens of the document of each draw; int64 [n]."""
    lengths = np.zeros(len(draws), np.int64)
    for s, mine, of_source in draws.by_source():
        lengths[mine] = recipe.sources[s].lengths(of_source.index)
    return lengths


class DocumentRule(SequenceRule):
    """A rule whose sequences are documents. It reads what `held` says; a rule adds lengths and fields."""

    def num_sequences(self, store: Store) -> int:
        """Documents in the store, including empty ones. Raises RecipeError unless it is a token store."""
        if not isinstance(store, StreamStore):
            raise RecipeError(f"{type(self).__name__} reads a token store; {store!r} is not one")
        return store.num_documents

    def shard_ends(self, store: Store) -> Longs | None:
        """See `Rule`; sequences are documents."""
        return store.shard_ends

    def num_bytes(self, recipe: Recipe, portion: Portion) -> int:
        """Exact bytes of the one column."""
        return int(self.held(recipe, portion).sizes.sum()) * dtype_of(recipe, portion.draws).itemsize

    def announce(self, recipe: Recipe, portions: Sequence[Portion]) -> None:
        """Announce the held slices to each store."""
        if not portions:
            return
        held = [self.held(recipe, portion) for portion in portions]
        before = accumulate((len(portion.draws) for portion in portions), initial=0)
        whole = Slices(
            np.concatenate([slices.sequence + np.int32(first) for slices, first in zip(held, before)]),
            np.concatenate([slices.start for slices in held]),
            np.concatenate([slices.stop for slices in held]),
        )
        draws = concatenated([portion.draws for portion in portions])
        for store, _, starts, stops in self._reads(recipe, draws, whole):
            store.will_need(starts, stops)

    def load(self, recipe: Recipe, portion: Portion, allocate: Allocate) -> Columns:
        """The held tokens of the documents, slice after slice."""
        held = self.held(recipe, portion)
        tokens = allocate((int(held.sizes.sum()),), dtype_of(recipe, portion.draws).name)
        for store, slices, starts, stops in self._reads(recipe, portion.draws, held):
            if len(recipe.sources) == 1:
                store.read_stream(starts, stops, out=tokens)
                break
            size = stops - starts
            runs = Runs(held.offsets[slices], np.cumsum(size) - size, size)
            runs.copy(store.read_stream(starts, stops), tokens)
        return {"tokens": tokens}

    def held(self, recipe: Recipe, portion: Portion) -> Slices:
        """What the portion's group reads, as tokens of its draws; by default the held slices."""
        return portion.read()

    def _first_tokens(self, recipe: Recipe, source: int, draws: Draws) -> Longs:
        """Stream offset of the first token of each draw, all of one source; int64 [n]."""
        return recipe.sources[source].offsets(draws.index)

    def _reads(
        self, recipe: Recipe, draws: Draws, held: Slices
    ) -> Iterator[tuple[StreamStore, Longs, Longs, Longs]]:
        """For each store: (store, its held slices that are not empty, their stream ranges)."""
        source = draws.source[held.sequence]
        for s in np.unique(draws.source).tolist():
            slices = np.flatnonzero((source == s) & (held.sizes > 0))
            if slices.size:
                of, first = np.unique(held.sequence[slices], return_inverse=True)
                begins = self._first_tokens(recipe, s, draws.take(of))[first]
                yield recipe.sources[s], slices, begins + held.start[slices], begins + held.stop[slices]


@dataclass(frozen=True)
class Documents(DocumentRule, TokenRule):
    """A sequence is a document; a microbatch is a pack of them.

    Needs a `Packing`. A document's last token has no label and bears no loss. If the packing splits a
    document, positions restart at 0 in each piece, and a piece's last token still has its label.

    Attributes:
        max_len: keep only this many first tokens of each document; None for all.

    Fields, for t tokens of this cp rank with padding: tokens, labels, position_ids int64 [1, t]; loss_mask
    float32 [1, t]; padding_mask bool [1, t], True for padding; sequence_ids int32 [1, t], the index of each
    token's sequence in the pack, -1 for padding. The same on every cp rank:
    cu_seqlens, cu_seqlens_padded int32 [documents + 1]; max_seqlen int32 [], of the padded lengths.
    A dummy microbatch is one padded sequence without a token. With `Packing(fixed_shapes=True)` a pack ends
    with a dummy, whose position_ids count from 0: cu_seqlens, cu_seqlens_padded int32 [max_sequences + 2].
    Raises RecipeError for max_len below 1.
    """

    max_len: int | None = None

    def __post_init__(self) -> None:
        if self.max_len is not None and self.max_len < 1:
            raise RecipeError(f"Documents(max_len={self.max_len}): at least one token, or None for all")

    @property
    def packed(self) -> bool:
        """Documents differ in length, so they are packed."""
        return True

    @property
    def fields(self) -> tuple[Field, ...]:
        """All fields of a pack."""
        return _FIELDS

    def lengths(self, recipe: Recipe, draws: Draws) -> Longs:
        """Tokens of each document, up to max_len; int64 [n]."""
        lengths = document_lengths(recipe, draws)
        return lengths if self.max_len is None else np.minimum(lengths, self.max_len)

    def valid_tokens(self, recipe: Recipe, draws: Draws, starts: Longs, lengths: Longs) -> Longs:
        """Loss-bearing tokens of each row: all except the last of its document; int64 [n]."""
        ends = starts + lengths == self.lengths(recipe, draws)
        return np.maximum(lengths - ends, 0)

    def stream_ranges(
        self, recipe: Recipe, source: int, draws: Draws, starts: Longs, lengths: Longs, *, ahead: int
    ) -> tuple[Longs, Longs, Longs]:
        first = recipe.sources[source].offsets(draws.index)
        begins = first + starts + ahead
        ends = np.minimum(begins + lengths, first + self.lengths(recipe, draws))
        return begins, np.maximum(ends, begins), np.arange(len(draws))

    def held(self, recipe: Recipe, portion: Portion) -> Slices:
        """The held slices, each followed by one more token if its document continues."""
        return portion.read(extra=1)

    def build(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> list[Arrays]:
        """The named fields of the one pack; see the class."""
        arrays: Arrays = {}
        for field in _FIELDS:
            if field.name not in names or field in PLAN_FIELDS:
                continue
            out = allocate((1, portion.num_tokens), field.dtype)
            out[:] = field.pad
            runs = portion.runs(extra=1, ahead=int(field.name != "tokens"))
            if field.name == "loss_mask":
                runs.fill(1, out[0])  # wherever there is a label
            elif columns is not None:
                runs.copy(np.asarray(columns["tokens"]), out[0])
            arrays[field.name] = out
        return [arrays | fields_of_plan(portion, names, allocate)]

    def compact(
        self, recipe: Recipe, portion: Portion, columns: Columns | None, names: Sequence[str]
    ) -> Compact:
        """See SequenceRule. The column holds this rank's own tokens, and a label after each slice."""
        tokens, labels = portion.runs(extra=1), portion.runs(extra=1, ahead=1)
        sizes = np.maximum(tokens.size, labels.size + 1)
        at = np.cumsum(sizes) - sizes
        runs = {
            "tokens": (Runs(tokens.at, at, tokens.size), 1, "tokens"),
            "labels": (Runs(tokens.at, at + 1, labels.size), 1, "tokens"),
            "loss_mask": (Runs(tokens.at, np.ones_like(at), labels.size), 0, None),
        }
        fields = [field for field in _FIELDS if field.name in names and field.name in runs]
        read: dict[str, Array] = {}
        if columns and any(field.stored for field in fields):
            read["tokens"] = _cut(np.asarray(columns["tokens"]), Runs(at, tokens.start, sizes))
        made = [RunField(field, *runs[field.name]) for field in fields]
        return Compact(
            shape=(1, portion.num_tokens),
            columns=read,
            fields=[*made, *runs_of_plan(portion, names)],
            ready=[lengths_of_plan(portion, names)],
        )


def _cut(read: Array, runs: Runs) -> Array:
    """The runs of what was read, one after the other; the same memory if they are all of it."""
    size = int(runs.size.sum())
    if size == read.size:
        return read
    out = np.empty(size, read.dtype)
    runs.copy(read, out)
    return out
