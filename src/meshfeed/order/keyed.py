"""Random numbers keyed by sequence: the same on every rank, in every worker, after any resume."""

from __future__ import annotations

import struct

import numpy as np

from meshfeed.errors import RecipeError
from meshfeed.order.permutation import key_of


def rng(seed: int, epoch: int, index: int, *more: int) -> np.random.Generator:
    """A NumPy generator for one sequence of one epoch; it does not read or change global state.

    seed: the dataset's own. more: distinguishes several generators of one sequence, such as (0,) and (1,).
    Equal arguments give equal numbers in any process, as long as NumPy does not change its generators'
    methods. Raises RecipeError for integers that do not fit in 64 bits.
    """
    return np.random.Generator(philox(seed, epoch, index, *more))


def philox(*parts: int) -> np.random.Philox:
    """The bit generator behind `rng`: its raw words are the same under every NumPy."""
    try:
        return np.random.Philox(key=key_of(*parts))
    except struct.error as bad:
        raise RecipeError(f"rng{parts}: give whole numbers that fit in 64 bits ({bad})") from bad
