"""Documents: whole documents packed side by side (THD), with attention inside each.

Every field of a pack is [1, tokens of this cp rank]. The stored column holds the group's slices, each
followed by one more token if the document continues. All other fields are computed from lengths alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshfeed.arrays import Allocate, Columns, Ints, Longs
from meshfeed.errors import RecipeError
from meshfeed.intervals import distinct
from meshfeed.mixture import Store
from meshfeed.order import Draws, LeavesOut
from meshfeed.plan import Slices
from meshfeed.recipe import Recipe
from meshfeed.roles import Field
from meshfeed.sequence.rule import FindsDocuments, JoinsShards, TokenRule
from meshfeed.sequence.runs import Located, Portion, Runs, dtype_of, places_among
from meshfeed.sequence.table import PLAN_FIELDS, TOKEN_FIELDS, FieldTable, RunField, table_of_pack
from meshfeed.store import StreamStore
from meshfeed.store.base import extents_of
from meshfeed.whole import is_whole, settle

Ranges = tuple[Ints, Longs, Longs, Longs]
_FIELDS = (*TOKEN_FIELDS, *PLAN_FIELDS)


def located(recipe: Recipe, draws: Draws) -> Located:
    """Draws of documents, looked up in the index if they have not been."""
    if isinstance(draws, Located):
        return draws
    begins, stored = np.zeros((2, len(draws)), np.int64)
    for s, mine, of_source in draws.by_source():
        begins[mine], stored[mine] = extents_of(recipe.sources[s], of_source.index)
    return Located(draws.source, draws.epoch, draws.index, begins, stored)


def document_lengths(recipe: Recipe, draws: Draws) -> Longs:
    """Tokens of the document of each draw; int64 [n]."""
    return located(recipe, draws).stored


class DocumentRule(FindsDocuments, JoinsShards, LeavesOut):
    """A rule whose sequences are documents. It reads what `held` says; a rule adds lengths and fields."""

    def num_sequences(self, store: Store) -> int:
        """Documents in the store, including empty ones. Raises RecipeError unless it has integer tokens."""
        name = type(self).__name__
        if not isinstance(store, StreamStore):
            raise RecipeError(f"{name} reads a token store; {store!r} is not one")
        if store.dtype.kind not in "iu":
            raise RecipeError(f"{name} needs integer tokens; {store!r} holds {store.dtype.name}")
        return store.num_documents

    def num_documents(self, store: Store) -> int:
        """All of a store."""
        return self.num_sequences(store)

    def shard_ends(self, store: Store) -> Longs | None:
        """See `Rule`; sequences are documents."""
        return store.shard_ends

    def joints(self, recipe: Recipe, source: int, firsts: Longs) -> tuple[Longs, Longs]:
        """See `JoinsShards`. No document belongs to two shards."""
        begins = recipe.sources[source].offsets(firsts)
        return begins, begins

    def num_bytes(self, recipe: Recipe, portion: Portion) -> int:
        """Exact bytes of the one column."""
        _, _, starts, stops = self._ranges(recipe, portion)
        return int((stops - starts).sum()) * dtype_of(recipe, portion.draws).itemsize

    def look_up(self, recipe: Recipe, draws: Draws) -> Located:
        """With the place of each document in its store."""
        return located(recipe, draws)

    def without(self, recipe: Recipe, draws: Draws, excluded: Mapping[int, Longs]) -> Located:
        """Excluded documents are like empty ones of the store."""
        found = self.look_up(recipe, draws)
        stored = found.stored.copy()
        stored[places_among(found, excluded)] = 0
        return replace(found, stored=stored)

    def announce(self, recipe: Recipe, portions: Sequence[Portion]) -> None:
        """Announce the held slices to each store."""
        if not portions:
            return
        found = [self._ranges(recipe, portion) for portion in portions]
        source, _, starts, stops = map(np.concatenate, zip(*found))
        for s in distinct(source).tolist() if len(recipe.sources) > 1 else [0]:
            mine = source == s
            recipe.sources[s].will_need(starts[mine], stops[mine])

    def load(self, recipe: Recipe, portion: Portion, allocate: Allocate) -> Columns:
        """The held tokens of the documents, slice after slice."""
        source, at, starts, stops = self._ranges(recipe, portion)
        size = stops - starts
        tokens = allocate((int(size.sum()),), dtype_of(recipe, portion.draws).name)
        if len(recipe.sources) == 1:
            if size.size:
                recipe.sources[0].read_stream(starts, stops, out=tokens)
            return {"tokens": tokens}
        for s in distinct(source).tolist():
            mine = np.flatnonzero(source == s)
            runs = Runs(at[mine], np.cumsum(size[mine]) - size[mine], size[mine])
            runs.copy(recipe.sources[s].read_stream(starts[mine], stops[mine]), tokens)
        return {"tokens": tokens}

    def held(self, recipe: Recipe, portion: Portion) -> Slices:
        """What the portion's group reads, as tokens of its draws; by default the held slices."""
        return portion.read()

    def _ranges(self, recipe: Recipe, portion: Portion) -> Ranges:
        """The held slices that are not empty: source, offset in what is read, and stream range of each; [m].

        They are the same for the columns of a store.
        """
        if "ranges" not in portion.made:
            held, draws = self.held(recipe, portion), self.look_up(recipe, portion.draws)
            some: Longs = np.flatnonzero(held.sizes)
            of, at = held.sequence[some], held.offsets[some]
            first = draws.begins[of]
            portion.made["ranges"] = draws.source[of], at, first + held.start[some], first + held.stop[some]
        return portion.made["ranges"]


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
        settle(self)
        if self.max_len is not None and not is_whole(self.max_len):
            raise RecipeError(f"Documents(max_len={self.max_len!r}): at least one token, or None for all")

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
        first = located(recipe, draws).begins
        begins = first + starts + ahead
        ends = np.minimum(begins + lengths, first + self.lengths(recipe, draws))
        return begins, np.maximum(ends, begins), np.arange(len(draws))

    def held(self, recipe: Recipe, portion: Portion) -> Slices:
        """The held slices, each followed by one more token if its document continues."""
        return portion.read(extra=1)

    def table(
        self,
        recipe: Recipe,
        portion: Portion,
        columns: Columns | None,
        names: Sequence[str],
        allocate: Allocate,
    ) -> FieldTable:
        """The named fields of the one pack; see the class."""
        tokens, labels = portion.runs_and_labels(extra=1)
        bearing = Runs(labels.at, np.ones_like(labels.at), labels.size)  # wherever there is a label
        runs: dict[str, tuple[Runs, int, str | None]] = {
            "tokens": (tokens, 1, "tokens"),
            "labels": (labels, 1, "tokens"),
            "loss_mask": (bearing, 0, None),
        }
        fields = [RunField(each, *runs[each.name]) for each in self.fields if each.name in runs]
        return table_of_pack(portion, columns, names, fields)
