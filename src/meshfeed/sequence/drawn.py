"""What some steps drew of each source, in sequences and tokens. From recipe and index alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import cast

import numpy as np

from meshfeed.errors import RecipeError
from meshfeed.intervals import together
from meshfeed.order import Draws, drawn_until, draws_between, draws_of_source, start_of_step
from meshfeed.plan import Slices
from meshfeed.recipe import Recipe
from meshfeed.sequence.exposure import exposures
from meshfeed.sequence.rows import Rows
from meshfeed.sequence.rule import SequenceRule, epoch_in_order, of_draws
from meshfeed.sequence.runs import Longs

_TOGETHER = 1 << 20  # draws that are looked up together

_Measure = Callable[[int, Draws], Longs]
"""A source and some of its draws -> amounts that add up; int64 [k]."""


def drawn_of_sources(recipe: Recipe, until: int) -> tuple[Longs, Longs]:
    """Sequences and tokens that the steps before `until` drew of each source; int64 [num_sources] each.

    Tokens are those of `rule.lengths`, before a packing pads or truncates any. Steps that an amendment skips
    do not count, and a document that it had excluded is a sequence without tokens, except in rows that span
    documents, which keep them. The stores must be entered.

    Rows of one length are counted. Of other sequences, one epoch of each source is looked up, and its last,
    unfinished one; or all, for draws with replacement, a rule with its own order, and where epochs differ.
    Raises RecipeError for excluded documents that cannot be found; see `exposures`.
    """
    rule, drawn = cast(SequenceRule, recipe.sequence), drawn_until(recipe, until)

    def measure(source: int, draws: Draws) -> Longs:
        return np.array([len(draws), rule.lengths(recipe, draws).sum()])

    def of_epoch(source: int) -> Longs:
        return np.array([rule.num_sequences(recipe.sources[source]), rule.epoch_tokens(recipe, source).total])

    if drawn is not None and rule.row_lengths:
        sums = _rows(recipe, until)
    else:
        sums = _summed(recipe, until, measure, of_epoch, 2)
    sums -= _skipped(recipe, until, measure, 2)
    for sign, source, _, tokens in _excluded(recipe, until):
        np.add.at(sums[:, 1], source, -sign * tokens)
    return sums[:, 0], sums[:, 1]


def drawn_by_value(recipe: Recipe, until: int, values: Mapping[int, Longs], num_values: int) -> Longs:
    """Tokens that the steps before `until` drew, by source and by a value of the document.

    values: source -> the value of each of its documents, a number below `num_values`; int64 [num_documents].
    Returns int64 [num_sources, num_values]; 0 for other sources. A row counts its inputs, not its last label,
    and no padding: see `drawn_of_sources`, which says what counts, and what it raises.

    Of documents, one epoch is looked up, and the last; of rows that span documents, every one.
    """
    rule = cast(SequenceRule, recipe.sequence)

    def measure(source: int, draws: Draws) -> Longs:
        if source not in values:
            return np.zeros(num_values, np.int64)
        documents, tokens = _documents_of(recipe, source, draws)
        # as floats, exact: fewer than 2**53 tokens are looked up together
        return np.bincount(values[source][documents], tokens, num_values).astype(np.int64)

    def of_epoch(source: int) -> Longs:
        if rule.spans_documents:
            raise RecipeError("rows begin at other tokens in each epoch")
        rule.epoch_tokens(recipe, source)  # the same in every epoch, or it raises
        measured = (measure(source, each) for each in epoch_in_order(rule, recipe, source))
        return sum(measured, np.zeros(num_values, np.int64))

    sums = _summed(recipe, until, measure, of_epoch, num_values)
    sums -= _skipped(recipe, until, measure, num_values)
    for sign, source, document, tokens in _excluded(recipe, until):
        for each in set(source.tolist()) & values.keys():
            mine = source == each
            np.add.at(sums[each], values[each][document[mine]], -sign * tokens[mine])
    return sums


def _rows(recipe: Recipe, until: int) -> Longs:
    """Rows of each source and their tokens, stage by stage; int64 [num_sources, 2]."""
    sums, before = np.zeros((len(recipe.sources), 2), np.int64), np.zeros(len(recipe.sources), np.int64)
    ends = [step for step, _ in recipe.sequence.row_lengths[1:]]
    for (_, length), end in zip(recipe.sequence.row_lengths, [*ends, until]):
        drawn = drawn_until(recipe, min(end, until))
        rows = before if drawn is None else drawn[0]
        sums, before = sums + (rows - before)[:, None] * [1, length], rows
    return sums


def _documents_of(recipe: Recipe, source: int, draws: Draws) -> tuple[Longs, Longs]:
    """Pieces of documents in some draws of a source: which document, and how many tokens; int64 [n] each."""
    rule = of_draws(recipe, draws)
    if not isinstance(rule, Rows):
        return draws.index, rule.lengths(recipe, draws)
    none = np.zeros(1, np.int64)
    inputs = Slices(none.astype(np.int32), none, none + rule.length - 1)  # `ranges` adds a token
    pieces = recipe.sources[source].documents.pieces(*rule.ranges(recipe, source, draws, inputs))
    return pieces.documents, pieces.lengths


def _summed(
    recipe: Recipe, until: int, measure: _Measure, of_epoch: Callable[[int], Longs], num: int
) -> Longs:
    """Amounts of each source, as if no amendment left anything out; int64 [num_sources, num].

    of_epoch: those of an epoch; it raises RecipeError where epochs differ.
    """
    drawn = drawn_until(recipe, until)
    if drawn is None or len(recipe.sequence.pieces) > 1:
        return _scanned(recipe, 0, until, measure, num)
    rule, sums = cast(SequenceRule, recipe.sequence), np.zeros((len(recipe.sources), num), np.int64)
    for source, count in enumerate(drawn[0].tolist()):
        size = rule.num_sequences(recipe.sources[source])
        whole = 0 if recipe.shuffle == "replacement" else count // size
        try:
            sums[source] = whole * of_epoch(source) if whole else 0
        except RecipeError:  # not known, or not the same in every epoch
            whole = 0
        for start in range(whole * size, count, _TOGETHER):
            draws = draws_of_source(recipe, source, start, min(start + _TOGETHER, count))
            sums[source] += measure(source, draws)
    return sums


def _scanned(recipe: Recipe, first_step: int, stop_step: int, measure: _Measure, num: int) -> Longs:
    sums = np.zeros((len(recipe.sources), num), np.int64)
    edges = [step for step, _ in recipe.sequence.pieces if first_step < step < stop_step]
    for steps in pairwise((first_step, *edges, stop_step)):
        start, stop = (start_of_step(recipe, step) for step in steps)
        for at in range(start, stop, _TOGETHER):
            for source, _, draws in draws_between(recipe, at, min(at + _TOGETHER, stop)).by_source():
                sums[source] += measure(source, draws)
    return sums


def _skipped(recipe: Recipe, until: int, measure: _Measure, num: int) -> Longs:
    """Amounts of the steps that amendments skip; int64 [num_sources, num]."""
    sums = np.zeros((len(recipe.sources), num), np.int64)
    skipped = [(first, min(stop, until)) for first, stop in recipe.amendments.skipped if first < until]
    for first, stop in zip(*together(*np.array(skipped, np.int64).reshape(-1, 2).T)):
        sums += _scanned(recipe, int(first), int(stop), measure, num)
    return sums


def _excluded(recipe: Recipe, until: int) -> Iterator[tuple[int, Longs, Longs, Longs]]:
    """What amendments had excluded when it would have been drawn: sign, source, document and tokens of each.

    Twice: all draws of the documents, and with the sign -1 those that were made of them before.
    """
    gone = recipe.amendments.excluded_at(until)
    if not gone or cast(SequenceRule, recipe.sequence).spans_documents:  # rows keep them
        return
    sources = np.repeat([*gone], [documents.size for documents in gone.values()])
    documents = np.concatenate([*gone.values()])
    without = replace(recipe.amendments, excluded=())
    for sign, each in ((1, replace(recipe, amendments=without)), (-1, recipe)):
        found = exposures(each, sources, documents, until)
        yield sign, sources[found.document], documents[found.document], found.end - found.begin
