"""Exposure: which steps held some documents. From recipe and index alone, since the order can be inverted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Bools, Longs
from meshfeed.errors import RecipeError
from meshfeed.intervals import among
from meshfeed.order import Draws, LeavesOut, drawn_until, positions_of, start_of_step, steps_of
from meshfeed.recipe import Recipe
from meshfeed.sequence.rule import finder


@dataclass(frozen=True, slots=True)
class Exposures:
    """Sequences that held some documents, one array per property, in the order of the stream; int64 [n].

    Attributes:
        document: index into the documents that were asked for.
        step, place: the step, and which of its sequences.
        draws: the sequences.
        begin, end: the tokens of the sequence that are the document's; see `Occurrences`.
        excluded: bool [n], whether an amendment had excluded the document by then: its tokens bear no loss.
    """

    document: Longs
    step: Longs
    place: Longs
    draws: Draws
    begin: Longs
    end: Longs
    excluded: Bools

    def __len__(self) -> int:
        return self.document.size


def exposures(
    recipe: Recipe,
    sources: npt.NDArray[np.integer],
    documents: Longs,
    until: int,
    *,
    with_excluded: bool = False,
) -> Exposures:
    """The sequences of the steps before `until` that held a token of some documents.

    Not those of steps that an amendment has skipped, nor documents that it had excluded by then, unless
    `with_excluded`. Rows that span documents keep the tokens of these: their sequences are `excluded`.
    sources, documents: index of the store, and of the document in it; [n]. The stores must be entered.

    The time is that of the documents and their epochs, not of the steps; in a mixture, each block of 4,096
    draws that has one of them is made. Memory is about 200 bytes for each sequence.
    Raises RecipeError for a rule with its own order, and a rule whose rows cannot be
    found by document; StoreError for a document that is not there.
    """
    rule, drawn = recipe.sequence, drawn_until(recipe, until)
    if drawn is None:
        raise RecipeError(f"{rule.summary()} has an order of its own; look for a document by step")
    none = np.zeros(0, np.int64)
    found = [(none,) * 6]
    for source in np.unique(sources).tolist():
        mine = np.flatnonzero(sources == source)
        for epoch in range(math.ceil(drawn[1][source])):
            held = finder(recipe).sequences_with(recipe, source, epoch, documents[mine])
            some = np.flatnonzero(held.begin < held.end)
            of_source, of_epoch = np.full_like(some, source), np.full_like(some, epoch)
            where = held.sequence[some], held.begin[some], held.end[some]
            found.append((mine[held.document[some]], of_source, of_epoch, *where))
    document, source, epoch, sequence, begin, end = map(np.concatenate, zip(*found))
    draws = Draws(source.astype(np.int32), epoch, sequence)
    positions = positions_of(recipe, draws, start_of_step(recipe, until))
    order = np.argsort(positions, kind="stable")
    order = order[positions[order] >= 0]
    step, place = steps_of(recipe, positions[order])
    seen, excluded = np.ones(order.size, np.bool_), np.zeros(order.size, np.bool_)
    for first, stop in recipe.amendments.skipped:
        seen &= (step < first) | (stop <= step)
    for first, source, gone in recipe.amendments.excluded:
        mine = np.flatnonzero((step >= first) & (draws.source[order] == source))
        excluded[mine[among(gone, documents[document[order[mine]]])]] = True
    if not (with_excluded or (isinstance(rule, LeavesOut) and rule.keeps_tokens)):
        seen &= ~excluded
    order, step, place, excluded = order[seen], step[seen], place[seen], excluded[seen]
    return Exposures(document[order], step, place, draws.take(order), begin[order], end[order], excluded)
