"""Random numbers by place: the same on every rank, in every worker, after any resume."""

from __future__ import annotations

import struct

import numpy as np

from meshfeed.errors import RecipeError
from meshfeed.order.permutation import key_of


def rng(seed: int, epoch: int, index: int, *more: int) -> np.random.Generator:
    """A NumPy generator of its own for one sequence of one epoch; no global state is read or changed.

    seed: the dataset's own. more: tells several generators of one sequence apart, such as (0,) and (1,).
    Equal arguments give equal numbers in any process, as far as NumPy keeps its generators' methods as they
    are from release to release. Raises RecipeError for what does not fit 64 bits.
    """
    return np.random.Generator(philox(seed, epoch, index, *more))


def philox(*parts: int) -> np.random.Philox:
    """The bit generator behind `rng`: its raw words are the same under every NumPy."""
    try:
        return np.random.Philox(key=key_of(*parts))
    except struct.error as bad:
        raise RecipeError(f"rng{parts}: whole numbers that fit 64 bits ({bad})") from bad
