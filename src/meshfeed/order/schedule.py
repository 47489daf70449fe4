"""A recipe's schedule: how often each source is drawn, and where that changes or ends.

A new *segment* begins where the amounts of a mixture change, and under batches="per_source" also where the
batch size changes. The draws of every source before a segment follow from the earlier segments, and each
source continues from there: no state is kept, and no sequence is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

import numpy as np

from meshfeed.arrays import Ints, Longs
from meshfeed.errors import RecipeError
from meshfeed.mixture import Amount, Mixture, Part, split_at
from meshfeed.order.interleave import Interleaving, WholeBatches
from meshfeed.recipe import Recipe

_ALONE = Part(0, (Amount(0, 1, "proportion"),))


@dataclass(frozen=True, slots=True)
class Turns:
    """Whose turn it is from a step on: `turns` counts the sources that are drawn.

    total: positions after which all amounts are drawn; None for shares, which never end.
    """

    step: int
    sources: Ints
    turns: Interleaving | WholeBatches
    total: int | None


@dataclass(frozen=True, slots=True)
class Segment(Turns):
    """Positions with one set of amounts: from `start` on, after `drawn` draws of each source."""

    start: int
    drawn: Longs

    def among(self, num_sources: int) -> Segment:
        """The same where further sources come later."""
        return replace(self, drawn=np.pad(self.drawn, (0, num_sources - self.drawn.size)))

    def counts(self, position: int) -> Longs:
        """Draws of each source before a position of the segment; int64 [num_sources]."""
        counts = self.drawn.copy()
        counts[self.sources] += self.turns.counts(position - self.start)
        return counts


def sizes_of(recipe: Recipe) -> Longs:
    """Sequences in an epoch of each source; int64 [num_sources]. Raises RecipeError for a source without."""
    sizes = [recipe.sequence.num_sequences(store) for store in recipe.sources]
    for store, size in zip(recipe.sources, sizes):
        if size < 1:
            raise RecipeError(
                f"{recipe.sequence.summary()} makes no sequence of store {store}; leave it out, or give it "
                f"longer documents"
            )
    return np.array(sizes, np.int64)


def parts_of(recipe: Recipe) -> list[tuple[Part, int]]:
    """What begins a segment, in order: amounts, and sequences of a batch of one source, or 0."""
    per_source = _per_source(recipe)
    parts = split_at(_parts(recipe), {step for step, _ in recipe.batch.stages} if per_source else set())
    return [(part, recipe.batch.size(part.step) if per_source else 0) for part in parts]


def turns_of(recipe: Recipe, sizes: Longs, part: Part, of_batch: int) -> Turns:
    """The turns from a part on. sizes: see `sizes_of`; part, of_batch: see `parts_of`.

    Raises RecipeError for amounts that make no sequence or fill no batch.
    """
    weights = _weights(recipe, sizes, part)
    turns = interleaving_of(tuple(weights.values()))
    whole = WholeBatches(turns, of_batch) if of_batch else turns
    total = None if part.is_endless else int(sum(weights.values())) * (of_batch or 1)
    return Turns(part.step, np.array(list(weights), np.int32), whole, total)


def _parts(recipe: Recipe) -> Sequence[Part]:
    return recipe.data.parts if isinstance(recipe.data, Mixture) else (_ALONE,)


def _per_source(recipe: Recipe) -> bool:
    return isinstance(recipe.data, Mixture) and recipe.data.batches == "per_source"


def _weights(recipe: Recipe, sizes: Longs, part: Part) -> dict[int, Fraction]:
    """Source -> its weight, for those that are drawn; for finite amounts, its sequences or whole batches."""
    weights: dict[int, Fraction] = {}
    for each in part.amounts:
        size = int(sizes[each.source])
        weight = Fraction(each.amount) * (size if each.by in ("repeat", "size") else 1)
        if each.by == "tokens" and weight:
            tokens = recipe.sequence.epoch_tokens(recipe, each.source).total
            if not tokens:
                name = recipe.source_names[each.source]
                raise RecipeError(f"source {name!r} has no tokens to take a share of")
            weight *= Fraction(size, tokens)
        if not part.is_endless:
            weight = Fraction(_whole_count(recipe, size, each, round(weight)))
        if weight:
            weights[each.source] = weight
    if not weights:
        raise RecipeError("no source of the mixture fills a batch; take smaller batches or last='pad'")
    return weights


def _whole_count(recipe: Recipe, size: int, each: Amount, count: int) -> int:
    """Sequences of a source with a finite amount, or the number of batches they make."""
    name, batch = recipe.source_names[each.source], recipe.batch
    if each.amount and not count:
        raise RecipeError(f"source {name!r}: {each.amount} passes over {size} sequences are none")
    if not _per_source(recipe):
        return count
    if len(batch.stages) > 1:
        raise RecipeError(
            'batches="per_source" with amounts that end: give batches of one size, or proportions'
        )
    of_batch = batch.size(0)
    if count % of_batch and batch.last == "keep":
        raise RecipeError(
            f"source {name!r}: {count} sequences do not fill batches of {of_batch}; "
            f"Batch(last='drop') leaves {count % of_batch} out, last='pad' fills the last one"
        )
    return -(-count // of_batch) if batch.last == "pad" else count // of_batch


interleaving_of = lru_cache(maxsize=16)(Interleaving)
"""The interleaving of some amounts; cached, since it caches its blocks."""
