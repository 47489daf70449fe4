"""Where steps of about N tokens begin.

A sequence belongs to the step in which its middle lies: step k begins with the first sequence whose middle is
at token k N of the stream or after it. So a step is cut at the boundary nearest to k N, and its tokens differ
from N by at most half a sequence at either end.

The tokens before a position follow from sums. Of each epoch of a source there are the tokens before every
4,096th place, made as far as somebody asks, once per node; whole epochs have their totals; and the draws of
each source before a position are arithmetic. So step 10**6 takes as many look-ups as step 0 once the sums of
the current epochs are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]

BLOCK = 4096
"""Sequences of a sum."""

_TOGETHER = 64
"""Sums that are made at a time. An epoch of no more is summed sooner than its sums are shared."""

_KEPT_TOGETHER = 256  # sums: some 0.1 s of a processor, and 954 entries of 10**9 sequences
_STEADY = 8  # turns of a search after which it halves what is left


class Reached(NamedTuple):
    """A position of the stream, and the tokens before it."""

    position: int
    tokens: int


class EpochSums:
    """Tokens before the draws of each source.

    Args:
        sizes: sequences in an epoch of each source; int64 [num_sources].
        totals: tokens in an epoch of each.
        lengths: (source, epoch, start, stop) -> tokens of the sequences at places of an epoch; int64 [n].
        once: (source, epoch, first block, make) -> the sums that `make` gives, or that another process has
            made of the same blocks.
        edges: the sums that are known, by source and epoch; further ones are added.
    """

    def __init__(
        self,
        sizes: Longs,
        totals: Sequence[int],
        lengths: Callable[[int, int, int, int], Longs],
        once: Callable[[int, int, int, Callable[[], Longs]], Longs],
        edges: dict[tuple[int, int], Longs],
    ) -> None:
        self._sizes, self._totals, self._lengths = sizes.tolist(), totals, lengths
        self._once, self._edges = once, edges

    def before(self, source: int, draws: int) -> int:
        """Tokens of the first `draws` draws of a source."""
        epoch, place = divmod(draws, self._sizes[source])
        if not place:
            return epoch * self._totals[source]
        block, rest = divmod(place, BLOCK)
        tokens = epoch * self._totals[source] + int(self._until(source, epoch, block)[block])
        return tokens + (int(self._lengths(source, epoch, place - rest, place).sum()) if rest else 0)

    def _until(self, source: int, epoch: int, block: int) -> Longs:
        """Tokens of an epoch before each block, up to this one at least; int64."""
        edges = self._edges.get((source, epoch))
        if edges is None:
            edges = np.zeros(1, np.int64)
        while edges.size <= block:
            edges = np.concatenate((edges, edges[-1] + np.cumsum(self._sums(source, epoch, edges.size - 1))))
        self._edges[source, epoch] = edges
        return edges

    def _sums(self, source: int, epoch: int, first: int) -> Longs:
        """Tokens of each block of an epoch from `first` on, of some; int64."""
        blocks = -(-self._sizes[source] // BLOCK)
        stop = min(first + _KEPT_TOGETHER, blocks)

        def made() -> Longs:
            starts = range(first, stop, _TOGETHER)
            return np.concatenate(
                [self._summed(source, epoch, at, min(at + _TOGETHER, stop)) for at in starts]
            )

        return made() if blocks <= _TOGETHER else self._once(source, epoch, first, made)

    def _summed(self, source: int, epoch: int, first: int, stop: int) -> Longs:
        """Tokens of each of some blocks; int64 [stop - first]."""
        lengths = self._lengths(source, epoch, first * BLOCK, min(stop * BLOCK, self._sizes[source]))
        return np.add.reduceat(lengths, np.arange(0, lengths.size, BLOCK))


def cut_at(
    target: int,
    near: Reached,
    tokens_before: Callable[[int], int],
    lengths: Callable[[int, int], Longs],
    *,
    mean: float,
    first: int,
) -> tuple[int, Reached]:
    """The first position whose sequence has its middle at token `target` or after it, and what was reached.

    target: from 1. near: a position with fewer tokens before it. tokens_before: of any position. lengths: of
    the sequences at positions start..stop; int64 [stop - start]. mean: of the lengths to expect, above 0.
    first: where the blocks of the interleaving begin. What was reached is `near` of a later target.
    """
    low = _approached(target, near, tokens_before, mean, first)
    while True:
        sizes = lengths(low.position, low.position + BLOCK)
        ends = low.tokens + np.cumsum(sizes)
        if ends[-1] >= target:
            break
        low = Reached(low.position + BLOCK, int(ends[-1]))
    across = int(np.searchsorted(ends, target))  # the sequence that holds token `target`
    end, size = int(ends[across]), int(sizes[across])
    reached = Reached(low.position + across, end - size)
    return reached.position + (2 * target > 2 * end - size), reached


def _approached(
    target: int, low: Reached, tokens_before: Callable[[int], int], mean: float, first: int
) -> Reached:
    """A position with fewer tokens before it than `target`, about two blocks of sequences from it."""
    last, high, turn = low, None, 0
    while target - low.tokens > 2 * BLOCK * mean and (high is None or high - low.position > BLOCK):
        guess = last.position + int((target - last.tokens) / mean) - BLOCK
        if high is None:  # sequences may be shorter than expected here: double the way
            guess = max(guess, low.position + (BLOCK << turn))
        elif turn > _STEADY or not low.position < guess < high:
            guess = (low.position + high) // 2
        aligned = guess - (guess - first) % BLOCK
        guess = aligned if aligned > low.position else guess
        last, turn = Reached(guess, tokens_before(guess)), turn + 1
        if last.tokens < target:
            low = last
        else:
            high = guess
    return low
