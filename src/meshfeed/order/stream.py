"""The stream: position -> (source, epoch, index), and the positions of a step.

Position p counts sequences over all sources and epochs. Step k of a batch of B is positions [k*B, (k+1)*B).
No list is
built and no state is kept: position 10**12 costs the same as position 0. If the amounts of a mixture change,
the draws of a source so far follow from the earlier amounts, and the source continues from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshfeed.errors import RecipeError
from meshfeed.order.schedule import OwnOrder, schedule_of
from meshfeed.recipe import Blocks, Recipe


@dataclass(frozen=True, slots=True)
class EpochIndex:
    """Identifies one sequence of a dataset; everything random in it is keyed by (seed, epoch, index).

    It unpacks as `epoch, index = at`; `idx` is another name for `index`.
    """

    epoch: int
    index: int

    def __iter__(self) -> Iterator[int]:
        return iter((self.epoch, self.index))

    @property
    def idx(self) -> int:
        """The index."""
        return self.index


@dataclass(frozen=True, slots=True)
class Draws:
    """A run of the stream, one array per property.

    Attributes:
        source: index of the store; int32 [n].
        epoch: number of the pass over that store, from 0; int64 [n].
        index: of the sequence in that epoch; int64 [n].
    """

    source: npt.NDArray[np.int32]
    epoch: npt.NDArray[np.int64]
    index: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        for array in (self.source, self.epoch, self.index):
            array.flags.writeable = False

    def __len__(self) -> int:
        return self.index.size

    def between(self, start: int, stop: int) -> Draws:
        """The draws start..stop of this run."""
        return Draws(self.source[start:stop], self.epoch[start:stop], self.index[start:stop])

    def by_source(self) -> list[tuple[int, npt.NDArray[np.int64], Draws]]:
        """(source, places of its draws in this run, these draws), for each that has any, ascending."""
        if (self.source[1:] == self.source[:-1]).all():
            return [(source, np.arange(self.source.size), self) for source in self.source[:1].tolist()]
        found = (
            (source, np.flatnonzero(self.source == source)) for source in np.unique(self.source).tolist()
        )
        return [(source, places, self.take(places)) for source, places in found]

    def take(self, places: npt.NDArray[np.integer]) -> Draws:
        """The draws at some indices of this run."""
        return Draws(self.source[places], self.epoch[places], self.index[places])


def concatenated(runs: Sequence[Draws]) -> Draws:
    """Concatenate runs of draws."""
    if len(runs) == 1:
        return runs[0]
    return Draws(
        np.concatenate([run.source for run in runs]),
        np.concatenate([run.epoch for run in runs]),
        np.concatenate([run.index for run in runs]),
    )


def num_positions(recipe: Recipe) -> int | None:
    """Number of sequences in all steps; None if the stream is endless."""
    return schedule_of(recipe).end


def num_steps(recipe: Recipe) -> int | None:
    """Number of steps, including a short last one; None if the stream is endless."""
    end = num_positions(recipe)
    return None if end is None else recipe.batch.step(end - 1) + 1 if end else 0


def draws_of_step(recipe: Recipe, step: int) -> Draws:
    """The global batch of one step, in order; empty past the end of the stream.

    Depends on the recipe and the step alone. Raises RecipeError for a negative step.
    """
    if step < 0:
        raise RecipeError(f"step {step}: steps count from 0")
    return draws_between(recipe, recipe.batch.position(step), recipe.batch.position(step + 1))


def draws_between(recipe: Recipe, start: int, stop: int) -> Draws:
    """Positions [start, stop) of the stream, cut off at its end.

    Raises RecipeError for positions below 0, or beyond 2**62.
    """
    schedule = schedule_of(recipe)
    if schedule.end is not None:
        start, stop = min(start, schedule.end), min(stop, schedule.end)
    if start < 0 or stop >= 2**62:
        raise RecipeError(f"positions {start}..{stop}: the stream counts them from 0 to 2**62 - 1")
    if isinstance(recipe.sequence, OwnOrder):
        return recipe.sequence.draws_between(recipe, start, stop)
    source, epoch, place = schedule.places(start, stop)
    return Draws(source, epoch, schedule.indices(source, epoch, place))


def lanes_of_step(recipe: Recipe, step: int) -> npt.NDArray[np.int64] | None:
    """The lane of each draw of a step, int64 [n]; None unless the shuffle is by blocks."""
    if not isinstance(recipe.shuffle, Blocks):
        return None
    schedule, (start, stop) = schedule_of(recipe), (recipe.batch.position(k) for k in (step, step + 1))
    if schedule.end is not None:
        start, stop = min(start, schedule.end), min(stop, schedule.end)
    return schedule.places(start, stop)[2] % recipe.shuffle.lanes


def drawn_until(recipe: Recipe, step: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]] | None:
    """Draws of each source before `step`: sequences, int64 [num_sources], and epochs, float64.

    None for a rule with its own order.
    """
    if isinstance(recipe.sequence, OwnOrder):
        return None
    schedule, position = schedule_of(recipe), recipe.batch.position(step)
    drawn = schedule.counts(position if schedule.end is None else min(position, schedule.end))
    return drawn, drawn / schedule.sizes


def asked_at(recipe: Recipe, step: int) -> npt.NDArray[np.float64] | None:
    """The recipe's share of each source in a step; float64 [num_sources]. None for a rule with its own
    order."""
    return (
        None
        if isinstance(recipe.sequence, OwnOrder)
        else schedule_of(recipe).shares(recipe.batch.position(step))
    )


def position_of(recipe: Recipe, source: int, epoch: int, index: int) -> int | None:
    """The position of a sequence in the stream, the inverse of `draws_between`; None if it does not occur.

    Raises RecipeError for a rule with its own order, or draws with replacement.
    """
    if recipe.shuffle == "replacement":
        raise RecipeError(
            "drawn with replacement, a sequence comes at any number of positions; look for it by step"
        )
    if isinstance(recipe.sequence, OwnOrder):
        raise RecipeError(f"{recipe.sequence.summary()} has an order of its own; look for a sequence by step")
    schedule = schedule_of(recipe)
    place = int(schedule.unshuffled(*(np.array([each]) for each in (source, epoch, index)))[0])
    position = schedule.position(source, epoch * int(schedule.sizes[source]) + place)
    return position if position is not None and (schedule.end is None or position < schedule.end) else None
