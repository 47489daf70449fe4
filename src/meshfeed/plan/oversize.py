"""Sequences longer than any cp group can hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshfeed.errors import PlanError
from meshfeed.plan.policy import Oversize
from meshfeed.plan.types import IntArray, LongArray


@dataclass(frozen=True, slots=True)
class Rows:
    """What a step plans: sequences, or pieces of them, in stream order.

    Attributes:
        lengths: tokens of each row; int64 [n].
        kept: rows that some pack must hold: those with a token that are not dropped; bool [n].
        sequence: the sequence of the batch that a row is of; int32 [n].
        start: the row's first token in that sequence; int64 [n].
        oversize: sequences that were too long; int32 [k].
    """

    lengths: LongArray
    kept: np.ndarray[tuple[int], np.dtype[np.bool_]]
    sequence: IntArray
    start: LongArray
    oversize: IntArray


def rows_of(lengths: LongArray, *, longest: int, policy: Oversize) -> Rows:
    """Deal with sequences of more than `longest` tokens.

    truncate keeps their first `longest` tokens, drop keeps none, split makes equal pieces, as few as will
    fit: 25 tokens with longest = 10 -> 9 + 8 + 8.
    Raises PlanError under "error" where there is one, and for a negative length.
    """
    if lengths.size and lengths.min() < 0:
        raise PlanError(f"sequence {int(lengths.argmin())}: {lengths.min()} tokens; a length is 0 or more")
    too_long = np.flatnonzero(lengths > longest).astype(np.int32)
    if too_long.size and policy == "error":
        first = int(too_long[0])
        raise PlanError(
            f"sequence {first} of the batch: {lengths[first]} tokens > {longest}, the most that capacity x "
            f"the widest cp group holds ({too_long.size} such sequences); "
            f"raise capacity or cp, or set oversize='split', 'truncate' or 'drop' (--oversize)"
        )
    num_pieces = np.ones(lengths.size, np.int64)
    if policy == "split":
        num_pieces = np.maximum(-(-lengths // longest), 1)
    sequence = np.repeat(np.arange(lengths.size), num_pieces)
    piece = np.arange(sequence.size) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    share, longer = np.divmod(lengths, num_pieces)
    # 25 in 3: shares 8 8 8, the first one longer by a token
    start = piece * share[sequence] + np.minimum(piece, longer[sequence])
    rows = share[sequence] + (piece < longer[sequence])
    if policy == "truncate":
        rows = np.minimum(rows, longest)
    kept = (rows > 0) & (rows <= longest)
    return Rows(rows.astype(np.int64), kept, sequence.astype(np.int32), start.astype(np.int64), too_long)
