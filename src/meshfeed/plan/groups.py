"""Context-parallel groups: the blocks of ranks that may share a pack."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from meshfeed.errors import PlanError
from meshfeed.plan.types import is_count


def cp_sizes(num_ranks: int) -> tuple[int, ...]:
    """The cp group sizes that a plan may use on `num_ranks` dp_cp ranks, ascending, each a divisor of the
    next.

    12 -> (1, 2, 4, 12): multiply by the prime factors of num_ranks, smallest first. A chain of divisors
    nests: blocks laid side by side, widest first, are then aligned whatever their number.
    Raises PlanError for num_ranks < 1.
    """
    if num_ranks < 1:
        raise PlanError(f"num_ranks={num_ranks}: a step is planned for at least one rank")
    sizes, left, prime = [1], num_ranks, 2
    while left > 1:
        while left % prime == 0:
            sizes.append(sizes[-1] * prime)
            left //= prime
        # what is left after its square root is itself prime
        prime = prime + 1 if (prime + 1) ** 2 <= left else left
    return tuple(sizes)


def check_sizes(sizes: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """The sizes in ascending order, once each.

    Raises PlanError unless each divides the next and the last divides num_ranks.
    """
    ordered = tuple(sorted(set(sizes)))
    if not ordered or not all(map(is_count, ordered)):
        raise PlanError(f"cp_sizes={tuple(sizes)}: give at least one size, each a whole number from 1 on")
    for size, wider in zip(ordered, (*ordered[1:], num_ranks)):
        if wider % size:
            raise PlanError(
                f"cp_sizes={tuple(sizes)}: {size} does not divide {wider}, so blocks would overlap"
            )
    return ordered


def cp_groups(num_ranks: int, sizes: Sequence[int] | None = None) -> dict[int, npt.NDArray[np.int64]]:
    """Every cp group that a plan can ask for, so that all are made once, at the start.

    Returns size -> dp_cp ranks of its aligned blocks, int64 [num_ranks // size, size]; sizes ascending.
    sizes: those allowed; None for `cp_sizes(num_ranks)`.
    """
    allowed = cp_sizes(num_ranks) if sizes is None else check_sizes(sizes, num_ranks)
    return {size: np.arange(num_ranks).reshape(-1, size) for size in allowed}
