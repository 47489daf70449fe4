"""Context-parallel groups: the blocks of ranks that may share a pack."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from meshfeed.errors import PlanError
from meshfeed.plan.types import is_count


def cp_sizes(num_ranks: int, *, powers: bool = False) -> tuple[int, ...]:
    """The cp group sizes that a plan may use on `num_ranks` dp_cp ranks, ascending.

    12 -> (1, 2, 4, 12): multiply by the prime factors of num_ranks, smallest first. Each divides the next, so
    they nest: blocks laid side by side, widest first, are then aligned whatever their number.
    powers: 12 -> (1, 2, 4, 8, 12), powers of two and all ranks: narrower groups for long sequences. The
    number of ranks need not be a multiple of the largest power. Ranks past its last whole block are in no
    group of that size: rank 6 of 7 is in groups of 1 and 7 only, so ranks differ in the keys of
    `feed.cp_groups`. Make process groups with `use_local_synchronization=True`; a loop in which all ranks
    take part would hang.
    Raises PlanError for num_ranks < 1.
    """
    if num_ranks < 1:
        raise PlanError(f"num_ranks={num_ranks}: a step is planned for at least one rank")
    if powers:
        return (*(1 << i for i in range((num_ranks - 1).bit_length())), num_ranks)
    sizes, left, prime = [1], num_ranks, 2
    while left > 1:
        while left % prime == 0:
            sizes.append(sizes[-1] * prime)
            left //= prime
        # a rest beyond the square root is prime
        prime = prime + 1 if (prime + 1) ** 2 <= left else left
    return tuple(sizes)


def check_sizes(sizes: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """The sizes in ascending order, once each.

    Each divides the next, and the first and the last divide num_ranks. If the last is num_ranks, only the
    first must divide it, since no other block is beside that one. Raises PlanError for other sizes.
    """
    ordered = tuple(sorted(set(sizes)))
    if not ordered or not all(map(is_count, ordered)):
        raise PlanError(f"cp_sizes={tuple(sizes)}: give at least one size, each a whole number from 1 on")
    beside = [pair for pair in pairwise(ordered) if pair[1] != num_ranks]
    for size, wider in (*beside, (ordered[0], num_ranks), (ordered[-1], num_ranks)):
        if wider % size:
            raise PlanError(
                f"cp_sizes={tuple(sizes)}: {size} does not divide {wider}; give sizes of which each divides "
                f"the next and the last divides {num_ranks}, or {num_ranks} itself after them"
            )
    return ordered


def cp_groups(num_ranks: int, sizes: Sequence[int] | None = None) -> dict[int, npt.NDArray[np.int64]]:
    """Every cp group of these sizes, so that all are made once, at the start.

    Returns size -> dp_cp ranks of its aligned blocks, int64 [num_ranks // size, size]; sizes ascending. If a
    size does not divide num_ranks, the last ranks are in none of its blocks.
    sizes: those allowed; None for `cp_sizes(num_ranks)`. Plans under `ring_tokens` use powers of two by
    default: `feed.cp_groups` has the groups that a Feed's plans can ask for.
    """
    allowed = cp_sizes(num_ranks) if sizes is None else check_sizes(sizes, num_ranks)
    return {size: np.arange(num_ranks // size * size).reshape(-1, size) for size in allowed}
