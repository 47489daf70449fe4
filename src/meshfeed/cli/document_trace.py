"""The documents in a sequence, and the sequences of a document, from the index alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.errors import RecipeError
from meshfeed.intervals import numbers_in
from meshfeed.multimodal import Multimodal, MultimodalStore
from meshfeed.order import Draws
from meshfeed.parts import KINDS
from meshfeed.plan import Slices
from meshfeed.recipe import Recipe
from meshfeed.sequence.rule import FindsDocuments, SequenceRule, TokenRule, finder
from meshfeed.sequence.windows import Rows


@dataclass(frozen=True, slots=True)
class DocumentParts:
    """Parts of documents, one array per property, in the order of the sequence.

    Attributes:
        draw: index of the draw; int64 [n].
        document: index of the document in its source; int64 [n].
        start, stop: the range of its tokens; int64 [n].
        before: tokens of each sequence before its first part that are no document's.
    """

    draw: Longs
    document: Longs
    start: Longs
    stop: Longs
    before: int = 0


def pieces_of(recipe: Recipe, draws: Draws) -> DocumentParts:
    """The documents in some sequences, by the input tokens (the last label does not count).

    The stores must be entered. For a rule over a user's dataset, the document is the whole item.
    """
    rule = cast(SequenceRule, recipe.sequence)
    if not isinstance(rule, Rows):
        lengths = rule.lengths(recipe, draws)
        before, starts, stops = 0, np.zeros_like(lengths), lengths
        if isinstance(rule, FindsDocuments):
            before, starts, stops = rule.parts_of_documents(recipe, draws)
        return DocumentParts(np.arange(len(draws)), draws.index, starts, stops, before)
    found = [_documents_in(recipe, source, draws) for source in np.unique(draws.source).tolist()]
    parts = [np.concatenate(column) for column in zip(*found)] if found else [np.zeros(0, np.int64)] * 4
    order = np.argsort(parts[0], kind="stable")
    draw, document, start, stop = (part[order] for part in parts)
    return DocumentParts(draw, document, start, stop)


def _documents_in(recipe: Recipe, source: int, draws: Draws) -> tuple[Longs, Longs, Longs, Longs]:
    """The arrays of DocumentParts, for the draws of one source."""
    store, places = recipe.sources[source], np.flatnonzero(draws.source == source)
    starts, stops, of = _ranges_in(recipe, source, draws.take(places))
    first = _documents_at(store, starts)
    counts = _documents_at(store, stops - 1) + 1 - first
    documents = numbers_in(first, counts)
    at = store.offsets(documents)
    begins = np.maximum(np.repeat(starts, counts) - at, 0)
    ends = np.minimum(np.repeat(stops, counts) - at, store.lengths(documents))
    some = begins < ends
    return np.repeat(places[of], counts)[some], documents[some], begins[some], ends[some]


def _ranges_in(recipe: Recipe, source: int, draws: Draws) -> tuple[Longs, Longs, Longs]:
    """Stream ranges of the tokens of rows of one source, in order, and the row of each."""
    rule = cast(Rows, recipe.sequence)
    if isinstance(rule, TokenRule):
        whole = np.full(len(draws), rule.length)
        return rule.stream_ranges(recipe, source, draws, np.zeros_like(whole), whole, ahead=0)
    tokens = Slices(np.zeros(1, np.int32), np.zeros(1, np.int64), np.array([rule.length - 1]))
    each = [rule.ranges(recipe, source, draws.take(np.array([i])), tokens) for i in range(len(draws))]
    of = np.repeat(np.arange(len(draws)), [starts.size for starts, _ in each])
    starts, stops = (np.concatenate(column) for column in zip(*each))
    return starts, stops, of


def parts_in(
    recipe: Recipe, source: int, document: int, start: int, stop: int
) -> list[dict[str, Any]] | None:
    """The parts that have any of the tokens start..stop of a document; None for a rule without parts.

    Each is its number in the document, kind, file, and bytes there, as first:stop. Stores must be entered.
    """
    rule, store = recipe.sequence, recipe.sources[source]
    if not isinstance(rule, Multimodal):
        return None
    if not isinstance(store, MultimodalStore):
        return []
    none = np.zeros(1, np.int64)
    whole = rule.expansion(recipe, Draws(none.astype(np.int32) + source, none, none + document))
    places = np.flatnonzero(whole.inside(none + start, none + stop))
    begins, ends = store.part_ranges(np.full_like(places, document), places)
    found = zip(places.tolist(), whole.parts.kind[places].tolist(), begins.tolist(), ends.tolist())
    return [
        {"part": part, "kind": KINDS[kind], "file": store.parts_path, "bytes": f"{begin}:{end}"}
        for part, kind, begin, end in found
    ]


def sequences_with(recipe: Recipe, source: int, document: int, epoch: int) -> Longs:
    """Indices of the sequences of one epoch that contain any token of a document; int64, ascending.

    The stores must be entered. Raises RecipeError for a missing document, or a rule that does not support
    this.
    """
    store = recipe.sources[source]
    if not 0 <= document < store.num_documents:
        raise RecipeError(f"document {document}: {store!r} has {store.num_documents}, counted from 0")
    rule = finder(recipe)
    held = rule.sequences_with(recipe, source, epoch, np.array([document]))
    if isinstance(rule, Rows):  # the last label does not count
        return np.unique(held.sequence[held.begin < rule.length])
    return held.sequence


def _documents_at(store: Any, offsets: Longs) -> Longs:
    """The document that holds each token of a store's stream; int64, the shape of `offsets`."""
    low, high = np.zeros_like(offsets), np.full_like(offsets, store.num_documents)
    while (high - low > 1).any():
        middle = (low + high) // 2
        before = store.offsets(middle) <= offsets
        low, high = np.where(before, middle, low), np.where(before, high, middle)
    return low
