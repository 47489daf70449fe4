"""What some steps drew of each source, in sequences and tokens. From recipe and index alone."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np

from meshfeed.errors import RecipeError
from meshfeed.order import drawn_until, draws_between, draws_of_source, start_of_step
from meshfeed.recipe import Recipe
from meshfeed.sequence.exposure import exposures
from meshfeed.sequence.rows import Rows
from meshfeed.sequence.rule import SequenceRule
from meshfeed.sequence.runs import Longs

_TOGETHER = 1 << 20  # draws that are looked up together

_Counts = tuple[Longs, Longs]
"""Sequences and tokens of each source; int64 [num_sources] each."""


def drawn_of_sources(recipe: Recipe, until: int) -> _Counts:
    """Sequences and tokens that the steps before `until` drew of each source; int64 [num_sources] each.

    Tokens are those of `rule.lengths`, before a packing pads or truncates any. Steps that an amendment skips
    do not count, and a document that it had excluded is a sequence without tokens, except in rows that span
    documents, which keep them. The stores must be entered.

    Rows of one length are counted. Of other sequences, one epoch of each source is looked up, and its last,
    unfinished one; or all, for draws with replacement, a rule with its own order, and where epochs differ.
    Raises RecipeError for excluded documents that cannot be found; see `exposures`.
    """
    sequences, tokens = _counted(recipe, until)
    for step in sorted({step for first, stop in recipe.amendments.skipped for step in range(first, stop)}):
        if step < until:
            less = _scanned(recipe, step, step + 1)
            sequences, tokens = sequences - less[0], tokens - less[1]
    return sequences, tokens - _excluded(recipe, until)


def _counted(recipe: Recipe, until: int) -> _Counts:
    """As if no amendment left anything out."""
    rule, drawn = cast(SequenceRule, recipe.sequence), drawn_until(recipe, until)
    if drawn is None:
        return _scanned(recipe, 0, until)
    if isinstance(rule, Rows):
        return drawn[0], drawn[0] * rule.length
    sequences, tokens = drawn[0], np.zeros(len(recipe.sources), np.int64)
    for source, count in enumerate(sequences.tolist()):
        size = rule.num_sequences(recipe.sources[source])
        whole = 0 if recipe.shuffle == "replacement" else count // size
        try:
            tokens[source] = whole * rule.epoch_tokens(recipe, source).total if whole else 0
        except RecipeError:  # not known, or not the same in every epoch
            whole = 0
        for start in range(whole * size, count, _TOGETHER):
            draws = draws_of_source(recipe, source, start, min(start + _TOGETHER, count))
            tokens[source] += rule.lengths(recipe, draws).sum()
    return sequences, tokens


def _scanned(recipe: Recipe, first_step: int, stop_step: int) -> _Counts:
    rule = cast(SequenceRule, recipe.sequence)
    start, stop = (start_of_step(recipe, step) for step in (first_step, stop_step))
    sequences, tokens = np.zeros((2, len(recipe.sources)), np.int64)
    for at in range(start, stop, _TOGETHER):
        for source, _, draws in draws_between(recipe, at, min(at + _TOGETHER, stop)).by_source():
            sequences[source] += len(draws)
            tokens[source] += rule.lengths(recipe, draws).sum()
    return sequences, tokens


def _excluded(recipe: Recipe, until: int) -> Longs:
    """Tokens of each source that amendments had excluded when they would have been drawn; int64."""
    lost, gone = np.zeros(len(recipe.sources), np.int64), recipe.amendments.excluded_at(until)
    if gone and not isinstance(recipe.sequence, Rows):  # rows keep them
        sources = np.repeat([*gone], [documents.size for documents in gone.values()])
        documents = np.concatenate([*gone.values()])
        without = replace(recipe.amendments, excluded=())
        for sign, each in ((1, replace(recipe, amendments=without)), (-1, recipe)):
            found = exposures(each, sources, documents, until)
            np.add.at(lost, found.draws.source, sign * (found.end - found.begin))
    return lost
