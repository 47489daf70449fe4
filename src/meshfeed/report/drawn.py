"""What the steps of a recipe drew of each source, in sequences and tokens. From recipe and index alone."""

from __future__ import annotations

from typing import cast

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.errors import RecipeError
from meshfeed.order import LeavesOut, drawn_until, draws_between, draws_of_source, start_of_step
from meshfeed.recipe import Recipe
from meshfeed.report.exposure import exposures
from meshfeed.sequence.rule import SequenceRule

_TOGETHER = 1 << 20  # draws that are looked up together


def drawn_of_sources(recipe: Recipe, until: int) -> tuple[Longs, Longs]:
    """Sequences and tokens that the steps before `until` drew of each source; int64 [num_sources] each.

    Tokens are those of `rule.lengths`, before a packing pads or truncates any. Steps that an amendment skips
    do not count, and a document that it had excluded is a sequence without tokens, except in rows that span
    documents, which keep them. The stores must be entered.

    Rows of one length are counted. Of other sequences, one epoch of each source is looked up, and its last,
    unfinished one; or all, for a rule with its own order, and where epochs differ. Raises RecipeError for
    excluded documents that cannot be found; see `exposures`.
    """
    sums = np.zeros((len(recipe.sources), 2), np.int64)
    for steps in recipe.given_steps(0, until):
        sums += _drawn(recipe, steps.start, steps.stop)
    gone = recipe.amendments.excluded_at(until)
    if gone and not (isinstance(recipe.sequence, LeavesOut) and recipe.sequence.keeps_tokens):
        sources = np.repeat([*gone], [documents.size for documents in gone.values()])
        found = exposures(recipe, sources, np.concatenate([*gone.values()]), until, with_excluded=True)
        empty = found.excluded
        np.subtract.at(sums[:, 1], found.draws.source[empty], (found.end - found.begin)[empty])
    return sums[:, 0], sums[:, 1]


def _drawn(recipe: Recipe, first_step: int, stop_step: int) -> Longs:
    """Sequences and tokens of some steps, as if no document was excluded; int64 [num_sources, 2]."""
    sums = np.zeros((len(recipe.sources), 2), np.int64)
    before, after = (drawn_until(recipe, step) for step in (first_step, stop_step))
    if before is None or after is None:
        start, stop = (start_of_step(recipe, step) for step in (first_step, stop_step))
        for at in range(start, stop, _TOGETHER):
            draws = draws_between(recipe, at, min(at + _TOGETHER, stop))
            lengths = cast(SequenceRule, recipe.sequence).lengths(recipe, draws)
            np.add.at(sums, draws.source, np.stack((np.ones_like(lengths), lengths), axis=1))
        return sums
    for source, (start, stop) in enumerate(zip(before[0].tolist(), after[0].tolist())):
        sums[source] += stop - start, _tokens(recipe, source, start, stop)
    return sums


def _tokens(recipe: Recipe, source: int, start: int, stop: int) -> int:
    """Tokens of the draws start..stop of a source."""
    rule = cast(SequenceRule, recipe.sequence)
    if rule.row_length is not None:
        return (stop - start) * rule.row_length
    size = rule.num_sequences(recipe.sources[source])
    first = min(-(-start // size) * size, stop)  # whole epochs begin here
    last = max(stop // size * size, first)  # and end here
    of_epoch = _of_epoch(recipe, source) if first < last else None
    tokens, looked_up = 0, [(start, stop)]
    if of_epoch is not None:
        tokens, looked_up = (last - first) // size * of_epoch, [(start, first), (last, stop)]
    for begin, end in looked_up:
        for at in range(begin, end, _TOGETHER):
            draws = draws_of_source(recipe, source, at, min(at + _TOGETHER, end))
            tokens += int(rule.lengths(recipe, draws).sum())
    return tokens


def _of_epoch(recipe: Recipe, source: int) -> int | None:
    """Tokens of every epoch of a source; None if they are not known beforehand."""
    try:
        return recipe.sequence.epoch_tokens(recipe, source).total
    except RecipeError:
        return None
