"""Intervals of whole numbers, as arrays: where each begins, and its size or end. Pure."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Bools, Longs

N = TypeVar("N", bound=np.integer)


def distinct(numbers: npt.NDArray[N]) -> npt.NDArray[N]:
    """The different ones of some whole numbers, ascending.

    Without counts, np.unique imports numpy.ma: 20 ms of every process, 80 where Python may not keep what it
    has compiled.
    """
    return np.unique(numbers, return_counts=True)[0]


def numbers_in(first: npt.NDArray[np.integer], counts: npt.NDArray[np.integer]) -> Longs:
    """The numbers of all intervals: first 5 9, counts 2 3 -> 5 6 9 10 11."""
    return np.arange(counts.sum()) + (first - counts.cumsum() + counts).repeat(counts)


def numbered(counts: npt.NDArray[np.integer]) -> tuple[Longs, Longs]:
    """Of each piece, what it is of, and its number there: 2 1 3 -> 0 0 1 2 2 2 and 0 1 0 0 1 2."""
    of = np.arange(counts.size).repeat(counts)
    return of, np.arange(of.size) - (counts.cumsum() - counts)[of]


def common(begins: Longs, ends: Longs, others: Longs, other_ends: Longs) -> tuple[Longs, Longs, Longs, Longs]:
    """The ranges that two lists of ranges have in common: begins, ends, and in which range of each list.

    Each list is ascending and apart, and counts from 0; int64 [n], [m] -> [k].
    """
    cuts = distinct(np.concatenate((begins, others)))
    one, other = (np.searchsorted(each, cuts, side="right") - 1 for each in (begins, others))
    stops = np.minimum(np.append(ends, 0)[one], np.append(other_ends, 0)[other])  # 0 before the first range
    some = np.flatnonzero(cuts < stops)
    return cuts[some], stops[some], one[some], other[some]


def together(begins: Longs, ends: Longs) -> tuple[Longs, Longs]:
    """What ranges cover together, as ranges that are ascending and apart; int64 [n] -> [m]."""
    order = begins[some := np.flatnonzero(begins < ends)].argsort(kind="stable")
    begins, ends = begins[some][order], ends[some][order]
    reach = np.maximum.accumulate(ends)
    is_new = np.append(True, begins[1:] > reach[:-1])[: begins.size]
    return begins[is_new], reach[np.append(is_new[1:], True)[: begins.size]]


def among(some: Longs, values: Longs) -> Bools:
    """Whether each value is one of some, which are ascending and may be many more; bool [n]."""
    at = np.searchsorted(some, values)
    return np.append(some, -1)[at] == values
