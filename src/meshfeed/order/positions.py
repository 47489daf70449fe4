"""Sequence -> position: the inverse of the stream, for traces and exposure. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Longs
from meshfeed.errors import RecipeError
from meshfeed.order.stream import Draws, OwnOrder, Stream, stream_of
from meshfeed.recipe import Recipe


def position_of(recipe: Recipe, source: int, epoch: int, index: int) -> int | None:
    """The position of a sequence in the stream; None if it does not occur. See `positions_of`."""
    draw = Draws(np.array([source], np.int32), np.array([epoch]), np.array([index]))
    position = int(positions_of(recipe, draw)[0])
    return None if position < 0 else position


def positions_of(recipe: Recipe, draws: Draws, stop: int | None = None) -> Longs:
    """The position of each draw in the stream, the inverse of `draws_between`; int64 [n].

    -1 for a draw that does not occur, or not before position `stop`. Draws of a mixture whose positions
    are far apart cost a block of the interleaving each.
    Raises RecipeError for a rule with its own order.
    """
    if isinstance(recipe.sequence, OwnOrder):
        raise RecipeError(f"{recipe.sequence.summary()} has an order of its own; look for a sequence by step")
    stream = stream_of(recipe)
    stop = stream.end if stop is None else stream.within(stop, stop)[0]
    place = stream.unshuffled(draws.source, draws.epoch, draws.index)
    count = draws.epoch * stream.sizes[draws.source] + place
    some = np.arange(count.size)
    if stop is not None:  # the rest may be blocks away
        some = np.flatnonzero(count < stream.counts(stop)[draws.source])
    found = np.full(count.size, -1, np.int64)
    found[some] = _positions(stream, draws.source[some], count[some])
    return found if stop is None else np.where(found < stop, found, -1)


def _positions(stream: Stream, source: npt.NDArray[np.integer], count: Longs) -> Longs:
    """The position of each source's draw number `count`, from 0; int64 [n], -1 if it never occurs."""
    found = np.full(count.size, -1, np.int64)
    for segment, after in zip(stream.segments, [*stream.segments[1:], None]):
        local = np.full(stream.sizes.size, -1)
        local[segment.sources] = np.arange(segment.sources.size)
        here = (local[source] >= 0) & (count >= segment.drawn[source])
        if after is not None:
            here &= count < segment.counts(after.start)[source]
        some = np.flatnonzero(here)
        own = source[some]
        at = segment.turns.positions(local[own], count[some] - segment.drawn[own])
        found[some] = np.where(at < 0, -1, segment.start + at)
    return found
