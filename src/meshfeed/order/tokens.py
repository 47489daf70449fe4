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

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.recipe import Blocks, Recipe, entered, identity_of

BLOCK = 4096
"""Sequences of a sum."""

_TOGETHER = 64
"""Sums that are made at a time. An epoch of no more is summed sooner than its sums are shared."""

_SUMS_VERSION = 1  # of sums that nodes keep: another one where a rule's lengths change
_KEPT_TOGETHER = 256  # sums: some 0.1 s of a processor, and 954 entries of 10**9 sequences
_STEADY = 8  # turns of a search after which it halves what is left


class KnownPosition(NamedTuple):
    """A position of the stream, and the tokens before it."""

    position: int
    tokens: int


class Tokens:
    """Tokens of the sequences of each source, from the index.

    Args:
        recipe: -> whose sources they are.
        sizes: sequences in an epoch of each source; int64 [num_sources].
        draws: (source, epoch, start, stop) -> the sequences at places of an epoch.
        key: (source, epoch) -> the key of its shuffle.
        sums: tokens of an epoch before each block, as far as known; more are added. Streams of one job share
            them, so they are by the content of a source and the key of an epoch's shuffle, never by a number.

    Attributes:
        of_epochs: those of an epoch of each source.
    """

    def __init__(
        self,
        recipe: Callable[[], Recipe],
        sizes: Longs,
        draws: Callable[[int, int, int, int], Any],
        key: Callable[[int, int], int],
        sums: dict[tuple[str, int], Longs],
    ) -> None:
        self._recipe, self._sizes = recipe, sizes.tolist()
        self._draws, self._key, self._known = draws, key, sums
        rule = recipe().sequence
        self.of_epochs = [rule.epoch_tokens(recipe(), source) for source in range(sizes.size)]

    def lengths(self, draws: Any) -> Longs:
        """Tokens of each of some draws; int64 [n]."""
        recipe = self._recipe()
        with entered(recipe):
            return np.asarray(cast(Any, recipe.sequence).lengths(recipe, draws), np.int64)

    def before(self, counts: Longs) -> int:
        """Tokens of the first so many draws of each source. counts: int64 [num_sources]."""
        return sum(self._of_first(source, draws) for source, draws in enumerate(counts.tolist()))

    def _of_first(self, source: int, draws: int) -> int:
        epoch, place = divmod(draws, self._sizes[source])
        tokens = epoch * self.of_epochs[source].total
        if not place:
            return tokens
        block, rest = divmod(place, BLOCK)
        tokens += int(self._until(source, epoch, block)[block])
        return tokens + (int(self._lengths(source, epoch, place - rest, place).sum()) if rest else 0)

    def _until(self, source: int, epoch: int, block: int) -> Longs:
        """Tokens of an epoch before each block, up to this one at least; int64."""
        of = self._recipe().sources[source].fingerprint, self._key(source, epoch)
        edges = self._known.get(of, np.zeros(1, np.int64))
        while edges.size <= block:
            edges = np.concatenate((edges, edges[-1] + np.cumsum(self._sums(source, epoch, edges.size - 1))))
        self._known[of] = edges
        return edges

    def _sums(self, source: int, epoch: int, first: int) -> Longs:
        """Tokens of each block of an epoch from `first` on, of some; int64. Many are made once per node."""
        blocks = -(-self._sizes[source] // BLOCK)
        stop = min(first + _KEPT_TOGETHER, blocks)

        def made() -> Longs:
            starts = range(first, stop, _TOGETHER)
            return np.concatenate(
                [self._summed(source, epoch, at, min(at + _TOGETHER, stop)) for at in starts]
            )

        if blocks <= _TOGETHER:
            return made()
        recipe, shuffle = self._recipe(), self._recipe().shuffle
        return recipe.sources[source].once_per_node(
            made,
            kind="sums of tokens",
            version=_SUMS_VERSION,
            rule=identity_of(recipe.sequence),
            shuffle=shuffle.summary() if isinstance(shuffle, Blocks) else shuffle,
            key=self._key(source, epoch),
            first=first,
        )

    def _summed(self, source: int, epoch: int, first: int, stop: int) -> Longs:
        """Tokens of each of some blocks; int64 [stop - first]."""
        lengths = self._lengths(source, epoch, first * BLOCK, min(stop * BLOCK, self._sizes[source]))
        return np.add.reduceat(lengths, np.arange(0, lengths.size, BLOCK))

    def _lengths(self, source: int, epoch: int, start: int, stop: int) -> Longs:
        return self.lengths(self._draws(source, epoch, start, stop))


def cut_at(
    target: int,
    near: KnownPosition,
    tokens_before: Callable[[int], int],
    lengths: Callable[[int, int], Longs],
    *,
    mean: float,
    first: int,
) -> tuple[int, KnownPosition]:
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
        low = KnownPosition(low.position + BLOCK, int(ends[-1]))
    across = int(np.searchsorted(ends, target))  # the sequence that holds token `target`
    end, size = int(ends[across]), int(sizes[across])
    reached = KnownPosition(low.position + across, end - size)
    return reached.position + (2 * target > 2 * end - size), reached


def _approached(
    target: int, low: KnownPosition, tokens_before: Callable[[int], int], mean: float, first: int
) -> KnownPosition:
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
        last, turn = KnownPosition(guess, tokens_before(guess)), turn + 1
        if last.tokens < target:
            low = last
        else:
            high = guess
    return low
