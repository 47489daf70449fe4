"""What some steps drew of each source, in sequences and tokens. From recipe and index alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import numpy as np

from meshfeed.errors import RecipeError
from meshfeed.intervals import together
from meshfeed.order import (
    Draws,
    drawn_until,
    draws_between,
    draws_of_source,
    places_in_epoch,
    start_of_step,
)
from meshfeed.plan import Slices
from meshfeed.recipe import Recipe
from meshfeed.report.exposure import exposures
from meshfeed.sequence.rows import Rows
from meshfeed.sequence.rule import SequenceRule, epoch_in_order
from meshfeed.sequence.runs import Longs
from meshfeed.sequence.windows import Windows

_TOGETHER = 1 << 20  # draws, or documents, that are looked up together
_MANY = 8  # draws are many from this part of an epoch on


@dataclass(frozen=True, slots=True)
class _Amounts:
    """What is added up: some numbers for each source.

    Attributes:
        num: how many numbers.
        sources: to look at.
        of_draws: those of some draws of a source; int64 [num].
        of_epochs: those of whole epochs of a source; int64 [num]. It raises RecipeError if they are not known
            without a look at each.
    """

    num: int
    sources: Collection[int]
    of_draws: Callable[[int, Draws], Longs]
    of_epochs: Callable[[int, range], Longs]


def drawn_of_sources(recipe: Recipe, until: int) -> tuple[Longs, Longs]:
    """Sequences and tokens that the steps before `until` drew of each source; int64 [num_sources] each.

    Tokens are those of `rule.lengths`, before a packing pads or truncates any. Steps that an amendment skips
    do not count, and a document that it had excluded is a sequence without tokens, except in rows that span
    documents, which keep them. The stores must be entered.

    Rows of one length are counted. Of other sequences, one epoch of each source is looked up, and its last,
    unfinished one; or all, for draws with replacement, a rule with its own order, and where epochs differ.
    Raises RecipeError for excluded documents that cannot be found; see `exposures`.
    """
    rule = cast(SequenceRule, recipe.sequence)

    def of_some(source: int, draws: Draws) -> Longs:
        return np.array([len(draws), rule.lengths(recipe, draws).sum()])

    def of_epochs(source: int, epochs: range) -> Longs:
        of_one = rule.num_sequences(recipe.sources[source]), rule.epoch_tokens(recipe, source).total
        return len(epochs) * np.array(of_one)

    amounts = _Amounts(2, range(len(recipe.sources)), of_some, of_epochs)
    if rule.row_length and (drawn := drawn_until(recipe, until)):
        sums = drawn[0][:, None] * [1, rule.row_length]
    else:
        sums = _summed(recipe, 0, until, amounts)
    sums -= _skipped(recipe, until, amounts)
    for sign, source, _, tokens in _excluded(recipe, until):
        np.add.at(sums[:, 1], source, -sign * tokens)
    return sums[:, 0], sums[:, 1]


def drawn_by_value(recipe: Recipe, until: int, values: Mapping[int, Longs], num_values: int) -> Longs:
    """Tokens that the steps before `until` drew, by source and by a value of the document.

    values: source -> the value of each of its documents, a number below `num_values`; int64 [num_documents].
    Returns int64 [num_sources, num_values]; 0 for other sources. A row counts its inputs, not its last label,
    and no padding: see `drawn_of_sources`, which says what counts, and what it raises.

    All documents are looked up for whole epochs, and the sequences of the last, unfinished epoch of a source,
    some at a time; or all sequences, where `drawn_of_sources` looks them up.
    """
    rule = cast(SequenceRule, recipe.sequence)

    def counted(source: int, documents: Longs, tokens: Longs) -> Longs:
        # as floats, exact: fewer than 2**53 tokens are looked up together
        return np.bincount(values[source][documents], tokens, num_values).astype(np.int64)

    def of_some(source: int, draws: Draws) -> Longs:
        return counted(source, *_documents_of(recipe, source, draws))

    @cache
    def of_store(source: int) -> Longs:
        sums, store = np.zeros(num_values, np.int64), recipe.sources[source]
        for start in range(0, store.num_documents, _TOGETHER):
            documents = np.arange(start, min(start + _TOGETHER, store.num_documents))
            sums += counted(source, documents, store.lengths(documents))
        return sums

    @cache
    def of_epoch(source: int) -> Longs:
        rule.epoch_tokens(recipe, source)  # the same in every epoch, or it raises
        found = (of_some(source, draws) for draws in epoch_in_order(rule, recipe, source))
        return sum(found, np.zeros(num_values, np.int64))

    def of_epochs(source: int, epochs: range) -> Longs:
        if type(rule) is Windows:
            left = recipe.sources[source].documents.pieces(*rule.left_over(recipe, source, epochs))
            return len(epochs) * of_store(source) - counted(source, left.documents, left.lengths)
        if rule.spans_documents:
            raise RecipeError(f"{rule.summary()}: which tokens an epoch leaves out is not known")
        return len(epochs) * of_epoch(source)

    amounts = _Amounts(num_values, values.keys(), of_some, of_epochs)
    sums = _summed(recipe, 0, until, amounts) - _skipped(recipe, until, amounts)
    for sign, source, document, tokens in _excluded(recipe, until):
        for each in set(source.tolist()) & values.keys():
            mine = source == each
            np.add.at(sums[each], values[each][document[mine]], -sign * tokens[mine])
    return sums


def _documents_of(recipe: Recipe, source: int, draws: Draws) -> tuple[Longs, Longs]:
    """Pieces of documents in some draws of a source: which document, and how many tokens; int64 [n] each."""
    rule = cast(SequenceRule, recipe.sequence)
    if not isinstance(rule, Rows):
        return draws.index, rule.lengths(recipe, draws)
    none = np.zeros(1, np.int64)
    inputs = Slices(none.astype(np.int32), none, none + rule.length - 1)  # `ranges` adds a token
    pieces = recipe.sources[source].documents.pieces(*rule.ranges(recipe, source, draws, inputs))
    return pieces.documents, pieces.lengths


def _summed(recipe: Recipe, first_step: int, stop_step: int, amounts: _Amounts) -> Longs:
    """Amounts of some steps, as if no amendment left anything out; int64 [num_sources, num]."""
    sums = np.zeros((len(recipe.sources), amounts.num), np.int64)
    before, after = (drawn_until(recipe, step) for step in (first_step, stop_step))
    if before is None or after is None:
        start, stop = (start_of_step(recipe, step) for step in (first_step, stop_step))
        for at in range(start, stop, _TOGETHER):
            for source, _, draws in draws_between(recipe, at, min(at + _TOGETHER, stop)).by_source():
                if source in amounts.sources:
                    sums[source] += amounts.of_draws(source, draws)
        return sums
    for source in amounts.sources:
        sums[source] += _of_source(recipe, source, int(before[0][source]), int(after[0][source]), amounts)
    return sums


def _of_source(recipe: Recipe, source: int, start: int, stop: int, amounts: _Amounts) -> Longs:
    """Amounts of the draws start..stop of a source; int64 [num]."""
    sums, size = np.zeros(amounts.num, np.int64), recipe.sequence.num_sequences(recipe.sources[source])
    first = min(-(-start // size) * size, stop)  # whole epochs begin here
    last = max(stop // size * size, first)  # and end here
    looked_up = [(start, first), (last, stop)]
    try:
        if first < last:
            if recipe.shuffle == "replacement":
                raise RecipeError("drawn with replacement, epochs differ")
            sums += amounts.of_epochs(source, range(first // size, last // size))
    except RecipeError:
        looked_up.append((first, last))
    for span in looked_up:
        for draws in _draws(recipe, source, *span):
            sums += amounts.of_draws(source, draws)
    return sums


def _draws(recipe: Recipe, source: int, start: int, stop: int) -> Iterator[Draws]:
    """The draws start..stop of a source, some at a time.

    Many draws of one epoch come in the order of the store, where they are looked up far faster.
    """
    rule = cast(SequenceRule, recipe.sequence)
    size = rule.num_sequences(recipe.sources[source])
    epoch = start // size
    are_many = (stop - start) * _MANY >= size and stop <= (epoch + 1) * size
    if not are_many or recipe.shuffle in ("none", "replacement"):
        for at in range(start, stop, _TOGETHER):
            yield draws_of_source(recipe, source, at, min(at + _TOGETHER, stop))
        return
    for draws in epoch_in_order(rule, recipe, source, epoch):
        number = epoch * size + places_in_epoch(recipe, draws)
        yield draws.take(np.flatnonzero((start <= number) & (number < stop)))


def _skipped(recipe: Recipe, until: int, amounts: _Amounts) -> Longs:
    """Amounts of the steps that amendments skip; int64 [num_sources, num]."""
    sums = np.zeros((len(recipe.sources), amounts.num), np.int64)
    skipped = [(first, min(stop, until)) for first, stop in recipe.amendments.skipped if first < until]
    for first, stop in zip(*together(*np.array(skipped, np.int64).reshape(-1, 2).T)):
        sums += _summed(recipe, int(first), int(stop), amounts)
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
