"""The source of each draw: keeps proportions in every prefix, with direct access to any position.

Let w be a source's weight and `w k` its share of the first k draws. A schedule in which every source's
count stays within 1 of its share exists for any weights (Tijdeman 1980), and deadlines find it: draw j of a
source falls in `[floor(j / w), ceil((j + 1) / w))`, and of the draws that may come now, the one with the
earliest deadline comes first (Baruah, Cohen, Plaxton and Varvel 1996). This alone must run from the start.

So the stream is cut into blocks, and the counts of every source at a block's edge are fixed beforehand: the
floor or the ceiling of its share. The edges form a binary tree over time. Each edge takes counts between
those of its two parent edges, so that counts never decrease, and prefers the nearest. Going from rare sources
to frequent ones, the sum of all roundings so far stays within 1, because the others cannot compensate for
more. Inside a block, deadlines decide. Position 10**12 costs about fifty edges and one block, the same as
position 0.

Shares are exact: weights are multiples of 2**-64, and `w k` modulo 1 is one wrapping multiplication.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Ints, Longs
from meshfeed.errors import RecipeError
from meshfeed.intervals import distinct
from meshfeed.native import ARRAY, LONGS, WHOLE, compiled

BLOCK = 4096
"""Draws of a block."""

_END = 2**62
_LEANING = 3 << 42  # the most that the roundings of the rarer sources may sum to: 3/4
_BITS = 44  # of a fraction, so that sums over half a million sources are exact
_SLACK = 1e-9  # weights such as 1/10 are not multiples of 2**-64: deadlines this close are equal

_edge = compiled(
    "mf_edge",
    *(WHOLE, ARRAY, WHOLE, LONGS, LONGS),
    *(WHOLE, LONGS, LONGS, WHOLE, WHOLE),
    *(LONGS, ARRAY, ARRAY),
)
_take_turns = compiled(
    "mf_take_turns",
    *(WHOLE, ARRAY, WHOLE, LONGS, LONGS),
    *(ARRAY, ARRAY),
    *(WHOLE, ARRAY, LONGS, LONGS, LONGS, ARRAY, ARRAY),
)


class _Block(NamedTuple):
    """The draws between two edges.

    Attributes:
        source: of each draw; int32 [BLOCK].
        number: draws of that source before it; int64 [BLOCK].
        place: where the draws of each source are in the block, source after source; int64 [BLOCK].
        first: where those of a source begin in `place`; int64 [num_sources].
    """

    source: Ints
    number: Longs
    place: Longs
    first: Longs


class Interleaving:
    """An endless schedule of draws from sources in proportion.

    After any k draws, a source of weight w has been drawn w k times, plus or minus less than 1.

    A source with less than 2**-64 of the total weight counts as having that share: 2**62 draws need none of
    it.

    Args:
        weights: above 0, in any unit; ints, floats or Fractions.

    Raises RecipeError for no weights, or one that is not positive and finite.
    """

    def __init__(self, weights: Sequence[float | Fraction]) -> None:
        self._words = _words_of(weights)
        self.num_sources = len(self._words)
        self._word = np.array([word % 2**64 for word in self._words], np.uint64)
        self.weights = np.array([word / 2**64 for word in self._words])
        octaves = np.array([(65 - word.bit_length()) // 2 for word in self._words])
        self._rarest_first = [np.flatnonzero(octaves == octave) for octave in distinct(octaves)[::-1]]
        self._groups = np.concatenate(self._rarest_first)
        self._ends = np.cumsum([own.size for own in self._rarest_first])
        self._edge = lru_cache(maxsize=256)(self._make_edge)
        self._block = lru_cache(maxsize=4)(self._make_block)

    def draws(self, start: int, stop: int) -> tuple[Ints, Longs]:
        """Draws start..stop: (source, how many draws of that source came before); int32, int64 [n]."""
        if self.num_sources == 1:
            return np.zeros(stop - start, np.int32), np.arange(start, stop, dtype=np.int64)
        sources, counts = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            made = self._block(block)
            mine = slice(max(start - block * BLOCK, 0), stop - block * BLOCK)
            sources.append(made.source[mine])
            counts.append(made.number[mine])
        return np.concatenate(sources), np.concatenate(counts)

    def counts(self, position: int) -> Longs:
        """Draws of each source among the first `position`; int64 [num_sources]."""
        if self.num_sources == 1:
            return np.array([position], np.int64)
        edge = position // BLOCK * BLOCK
        source, _ = self.draws(edge, position)
        return self._edge(edge) + np.bincount(source, minlength=self.num_sources)

    def positions(self, sources: npt.NDArray[np.integer], counts: Longs) -> Longs:
        """The position of each draw, a source's number `counts`, from 0; int64 [n], -1 from 2**62 on.

        sources: int [n]. A block that holds several of them is made once.
        """
        if self.num_sources == 1:
            return counts.copy()
        found = np.full(counts.size, -1, np.int64)
        together = (
            self._by_block(s, np.flatnonzero(sources == s), counts) for s in distinct(sources).tolist()
        )
        for block, source, mine in heapq.merge(*together, key=itemgetter(0)):
            made = self._block(block)
            nth = counts[mine] - self._edge(block * BLOCK)[source]
            found[mine] = block * BLOCK + made.place[made.first[source] + nth]
        return found

    def _by_block(self, source: int, draws: Longs, counts: Longs) -> Iterator[tuple[int, int, Longs]]:
        """(block, source, those of the draws that are in it), ascending. draws: indices into `counts`."""
        draws = draws[np.argsort(counts[draws], kind="stable")]
        ordered, at = counts[draws], 0
        while at < draws.size and (block := self._block_with(source, int(ordered[at]))) is not None:
            stop = int(ordered.searchsorted(self._edge((block + 1) * BLOCK)[source]))
            yield block, source, draws[at:stop]
            at = stop

    def _block_with(self, source: int, count: int) -> int | None:
        """The block of a source's draw number `count`; None from position 2**62 on."""
        word = self._words[source]
        low = (count << 64) // word // BLOCK  # not before floor(count / w), and before its deadline
        high = min(-(-((count + 1) << 64) // word) // BLOCK + 1, _END // BLOCK)
        if low >= high or self._edge(high * BLOCK)[source] <= count:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._edge(middle * BLOCK)[source] <= count else (low, middle)
        return low

    # -- edges ------------------------------------------------------------------------------------------

    def _share(self, position: int) -> tuple[Longs, Longs]:
        """Each source's share of the first draws: whole part, and fraction in 2**-44; int64 [num_sources]."""
        low, high = np.uint64(position & 0xFFFFFFFF), np.uint64(position >> 32)
        word_low, word_high = self._word & np.uint64(0xFFFFFFFF), self._word >> np.uint64(32)
        carried = word_low * low >> np.uint64(32)
        first, second = word_low * high, word_high * low
        carried += (first & np.uint64(0xFFFFFFFF)) + (second & np.uint64(0xFFFFFFFF))
        whole = word_high * high + (first >> np.uint64(32)) + (second >> np.uint64(32))
        whole += carried >> np.uint64(32)
        fraction = self._word * np.uint64(position) >> np.uint64(64 - _BITS)
        return whole.astype(np.int64), fraction.astype(np.int64)

    def _make_edge(self, position: int) -> Longs:
        """The count of each source at the edge of a block; int64 [num_sources]."""
        if position == 0:
            return np.zeros(self.num_sources, np.int64)
        span, parents = position & -position, None
        if position + span < _END:
            parents = self._edge(position - span), self._edge(position + span)
        made = self._edge_compiled(position, parents)
        return self._edge_of(position, parents) if made is None else made

    def _edge_of(self, position: int, parents: tuple[Longs, Longs] | None) -> Longs:
        """The counts at an edge, from those at its two parent edges."""
        whole, fraction = self._share(position)
        one, tiny = 1 << _BITS, int(_SLACK * (1 << _BITS))
        # Preference to round up: a fraction; below 0 must not be rounded up, `one` or more must be.
        likeness = np.where(fraction <= tiny, -one, fraction)
        likeness = np.where(fraction >= one - tiny, 2 * one, likeness)
        if parents is not None:
            likeness += 4 * one * (parents[0] > whole)
            likeness -= 4 * one * (parents[1] <= whole)
        total = (int(fraction.sum()) + one // 2) >> _BITS
        up = np.zeros(self.num_sources, bool)
        share, placed = 0, 0
        for own in self._rarest_first:
            share += int(fraction[own].sum())
            count = int((likeness[own] >= one // 2).sum())
            count = max(count, -(-(share - _LEANING) >> _BITS) - placed)
            count = min(count, (share + _LEANING >> _BITS) - placed)
            if own is self._rarest_first[-1]:
                count = total - placed
            count = min(max(count, int((likeness[own] >= one).sum())), int((likeness[own] > 0).sum()))
            up[own[np.argsort(-likeness[own], kind="stable")[:count]]] = True
            placed += count
        if placed != total:  # the frequent sources could not compensate
            wrong = np.flatnonzero(up == (placed > total))
            by_likeness = np.argsort(likeness[wrong] if placed > total else -likeness[wrong], kind="stable")
            up[wrong[by_likeness[: abs(placed - total)]]] = placed < total
        return whole + up

    def _edge_compiled(self, position: int, parents: tuple[Longs, Longs] | None) -> Longs | None:
        """The same by the compiled loop; None without it, or if the frequent sources cannot compensate."""
        if _edge is None:
            return None
        num, counts = self.num_sources, np.empty(self.num_sources, np.int64)
        likeness, heap = np.empty(num), np.empty((num, 2))
        missed = _edge(
            *(num, self._word, position, *(parents or (None, None))),
            *(self._ends.size, self._groups, self._ends, _LEANING, int(_SLACK * (1 << _BITS))),
            *(counts, likeness, heap),
        )
        return None if missed else counts

    # -- blocks -----------------------------------------------------------------------------------------

    def _make_block(self, block: int) -> _Block:
        """The draws between two edges, by deadline."""
        edge = block * BLOCK
        held, due = self._edge(edge), self._edge(edge + BLOCK)
        return self._turns_compiled(edge, held, due - held) or self._turns_of(edge, held, due - held)

    def _turns_of(self, edge: int, held: Longs, counts: Longs) -> _Block:
        """The draws of the block from an edge on: `counts` of each source, after `held` before it."""
        whole, fraction = self._share(edge)
        source = np.repeat(np.arange(self.num_sources), counts)
        first = np.cumsum(counts) - counts
        count = np.arange(source.size) - (first - held)[source]
        ahead = (count - whole[source]) - fraction[source] / (1 << _BITS)
        opens = np.floor(ahead / self.weights[source] + _SLACK).clip(0)
        closes = np.ceil((ahead + 1) / self.weights[source] - _SLACK)
        order = np.lexsort((closes, opens))
        chosen = order[_by_dates(opens[order].tolist(), closes[order].tolist())]
        place = np.empty_like(chosen)
        place[chosen] = np.arange(chosen.size)
        return _Block(source[chosen].astype(np.int32), count[chosen], place, first)

    def _turns_compiled(self, edge: int, held: Longs, counts: Longs) -> _Block | None:
        """The same by the compiled loop; None without it."""
        if _take_turns is None:
            return None
        number, place = np.empty((2, BLOCK), np.int64)
        made = _Block(np.empty(BLOCK, np.int32), number, place, np.cumsum(counts) - counts)
        slack, scratch = np.array([_SLACK]), np.empty(3 * BLOCK + 1, np.int64)
        closes, heap = np.empty(BLOCK), np.empty((BLOCK, 2))
        done = _take_turns(
            *(self.num_sources, self._word, edge, held, counts),
            *(self.weights, slack),
            *(BLOCK, made.source, made.number, made.place, scratch, closes, heap),
        )
        return made if done == BLOCK else None


class WholeBatches:
    """An interleaving of runs: every `size` draws, from 0 on, have one source.

    After any k whole runs, a source of weight w has had w k runs, plus or minus less than 1.
    """

    def __init__(self, runs: Interleaving, size: int) -> None:
        self._runs, self._size = runs, size
        self.weights = runs.weights

    def draws(self, start: int, stop: int) -> tuple[Ints, Longs]:
        first = start // self._size
        source, before = self._runs.draws(first, max(-(-stop // self._size), first))
        run, at = np.divmod(np.arange(start, stop), self._size)
        return source[run - first], before[run - first] * self._size + at

    def counts(self, position: int) -> Longs:
        whole, rest = divmod(position, self._size)
        counts = self._runs.counts(whole) * self._size
        if rest:
            counts[self._runs.draws(whole, whole + 1)[0]] += rest
        return counts

    def positions(self, sources: npt.NDArray[np.integer], counts: Longs) -> Longs:
        runs = self._runs.positions(sources, counts // self._size)
        return np.where(runs < 0, -1, runs * self._size + counts % self._size)


def _by_dates(opens: list[float], closes: list[float]) -> list[int]:
    """Schedule unit tasks by earliest deadline first; returns indices into the lists.

    opens: ascending. If no task is open yet, the next to open starts early.
    """
    done: list[int] = []
    ready: list[tuple[float, int]] = []
    came, count = 0, len(opens)
    for now in range(count):
        while came < count and (opens[came] <= now or not ready):
            heapq.heappush(ready, (closes[came], came))
            came += 1
        done.append(heapq.heappop(ready)[1])
    return done


def _words_of(weights: Sequence[float | Fraction]) -> list[int]:
    """Weights as multiples of 2**-64 that sum to 1: the heaviest absorbs the rounding."""
    try:
        exact = [Fraction(weight) for weight in weights]
    except (TypeError, ValueError, OverflowError) as bad:
        raise RecipeError(f"weights {list(weights)!r}: each is a finite number above 0") from bad
    if not exact or min(exact) <= 0:
        raise RecipeError(f"weights {list(weights)!r}: at least one, and each above 0")
    scale = 2**64 / sum(exact)
    words = [max(int(weight * scale), 1) for weight in exact]
    words[max(range(len(words)), key=words.__getitem__)] += 2**64 - sum(words)
    return words
