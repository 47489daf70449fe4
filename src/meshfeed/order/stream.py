"""The stream: position -> (source, epoch, index), and the positions of a step.

Position p counts sequences over all epochs. Step k is positions [k*B, (k+1)*B). Nothing is built and
nothing is remembered: position 10**12 costs what position 0 costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshfeed.errors import RecipeError
from meshfeed.order.permutation import key_of, permute
from meshfeed.recipe import Recipe


@dataclass(frozen=True, slots=True)
class EpochIndex:
    """How one sequence is asked for; whatever is random in it is keyed by (seed, epoch, index)."""

    epoch: int
    index: int


@dataclass(frozen=True, slots=True)
class Draws:
    """A run of the stream, one array per property.

    Attributes:
        source: which store; int32 [n].
        epoch: which pass over that store, from 0; int64 [n].
        index: which sequence of that epoch; int64 [n].
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
        """The draws at places start..stop of this run, as far as it goes."""
        return Draws(self.source[start:stop], self.epoch[start:stop], self.index[start:stop])

    def take(self, places: npt.NDArray[np.integer]) -> Draws:
        """The draws at some places of this run."""
        return Draws(self.source[places], self.epoch[places], self.index[places])


def concatenated(runs: Sequence[Draws]) -> Draws:
    """Several runs of draws, one after the other."""
    return Draws(
        np.concatenate([run.source for run in runs]),
        np.concatenate([run.epoch for run in runs]),
        np.concatenate([run.index for run in runs]),
    )


def num_positions(recipe: Recipe) -> int | None:
    """Length of the whole stream; None where it never ends."""
    return None if recipe.epochs is None else recipe.epochs * _epoch_size(recipe)


def num_steps(recipe: Recipe) -> int | None:
    """Number of steps, a short last one included; None where the stream never ends."""
    positions = num_positions(recipe)
    return None if positions is None else -(-positions // recipe.batch.sequences)


def draws_of_step(recipe: Recipe, step: int) -> Draws:
    """The global batch of one step, in order; empty past the end of the stream.

    Depends on the recipe and the step alone. Raises RecipeError for a negative step.
    """
    if step < 0:
        raise RecipeError(f"step {step}: steps count from 0")
    size = recipe.batch.sequences
    return draws_between(recipe, step * size, (step + 1) * size)


def draws_between(recipe: Recipe, start: int, stop: int) -> Draws:
    """Positions [start, stop) of the stream, cut off at its end.

    Raises RecipeError for positions below 0, or beyond 2**63.
    """
    end = num_positions(recipe)
    if end is not None:
        start, stop = min(start, end), min(stop, end)
    if start < 0 or stop >= 2**63:
        raise RecipeError(f"positions {start}..{stop}: the stream counts them from 0 to 2**63 - 1")
    position = np.arange(start, stop, dtype=np.int64)
    size = _epoch_size(recipe)
    epoch, place = position // size, position % size
    index = place
    if recipe.shuffle == "global":
        index = np.empty_like(place)
        for e in np.unique(epoch):  # a step rarely touches more than two
            now = epoch == e
            index[now] = permute(place[now], size=size, key=key_of(recipe.seed, 0, int(e)))
    return Draws(np.zeros(position.size, np.int32), epoch, index)


def _epoch_size(recipe: Recipe) -> int:
    size = recipe.sequence.num_sequences(recipe.data)
    if size < 1:
        raise RecipeError(f"{recipe.sequence.summary()} makes no sequence of store {recipe.data}")
    return size
