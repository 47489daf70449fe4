"""Routes of encoder outputs: what each rank sends and receives in a microbatch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshfeed.errors import PlanError
from meshfeed.plan.encoders.assign import EncoderPlan
from meshfeed.plan.types import LongArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderRoute:
    """One rank's part in one microbatch's exchange of encoder outputs. Equal only to itself.

    A row is the output for one token. A rank encodes its parts one after the other, and sends every cp rank
    of a pack all rows of the pack's parts. Ranks are in the order of the process group.

    Attributes:
        encodes: which entries of the EncoderPlan this rank encodes, in this order; int64 [k].
        takes: which entries its pack has tokens of, in the order of the pack; int64 [m].
        send_rows: which of its encoded rows it sends, receiver after receiver; int64 [sent].
        send_counts: how many of these each rank receives; int64 [ranks].
        receive_counts: how many rows each rank sends to this one; int64 [ranks].
        receive_rows: which received row each output of the pack is, part after part; int64 [received].
    """

    encodes: LongArray
    takes: LongArray
    send_rows: LongArray
    send_counts: LongArray
    receive_counts: LongArray
    receive_rows: LongArray

    def __post_init__(self) -> None:
        for array in (self.encodes, self.takes, *self.arrays.values()):
            array.flags.writeable = False

    @property
    def arrays(self) -> dict[str, LongArray]:
        """The arrays that the exchange needs, by name."""
        return {name: getattr(self, name) for name in ROUTE}


ROUTE = ("send_rows", "send_counts", "receive_counts", "receive_rows")
"""Names of the arrays of a route that the exchange needs."""


def encoder_routes(
    made: EncoderPlan, tokens: npt.ArrayLike, rank: int, *, order: Sequence[int] | None = None
) -> list[EncoderRoute]:
    """One rank's routes, one for each microbatch: a pure function, which any rank can call for any other.

    Routes agree: what rank a sends to rank b, and in which order, is what b expects from a.

    tokens: rows that the encoder makes of each part that was given to `plan_encoder`; int [p].
    rank: the dp_cp rank.
    order: the place of each dp_cp rank in the process group of the exchange; None if in order.
    Raises PlanError for another rank, other places, or fewer tokens than parts.
    """
    num_microbatches, num_ranks = made.loads.shape
    rows, places = np.asarray(tokens, np.int64).ravel(), np.arange(num_ranks)
    places = places if order is None else np.asarray(order, np.int64)
    if not 0 <= rank < num_ranks:
        raise PlanError(f"rank={rank}: the plan is for dp_cp ranks 0 to {num_ranks - 1}")
    if not np.array_equal(np.sort(places), np.arange(num_ranks)):
        raise PlanError(f"order={str(order)[:80]}: give each of 0 to {num_ranks - 1} once, one for each rank")
    if rows.size <= made.part.max(initial=-1) or (rows < 0).any():
        raise PlanError(
            f"tokens of {rows.size} parts, from {rows.min(initial=0)}: give a count for each of the "
            f"{made.part.max(initial=-1) + 1} parts, 0 or more"
        )
    rows = rows[made.part]
    by_pack = np.lexsort((made.part, made.row))
    is_mine = made.rank == rank
    is_taken = (made.first_rank <= rank) & (rank < made.first_rank + made.cp_size)
    routes: list[EncoderRoute] = []
    for microbatch in range(num_microbatches):
        now = made.microbatch == microbatch
        encodes, takes = np.flatnonzero(now & is_mine), by_pack[(now & is_taken)[by_pack]]
        begins = np.cumsum(rows[encodes]) - rows[encodes]
        sizes = made.cp_size[encodes].astype(np.int64)
        sent = np.arange(encodes.size).repeat(sizes)  # each part once for every cp rank of its pack
        receiver = places[_ranges(made.first_rank[encodes].astype(np.int64), sizes)]
        in_turn = np.argsort(receiver, kind="stable")
        sent, receiver = sent[in_turn], receiver[in_turn]
        sender = places[made.rank[takes]]
        arrival = np.lexsort((takes, sender))  # the parts of each rank in the order in which it encodes them
        first = np.empty(takes.size, np.int64)
        first[arrival] = np.cumsum(rows[takes][arrival]) - rows[takes][arrival]
        routes.append(
            EncoderRoute(
                encodes=encodes,
                takes=takes,
                send_rows=_ranges(begins[sent], rows[encodes][sent]),
                send_counts=_counts(receiver, rows[encodes][sent], num_ranks),
                receive_counts=_counts(sender, rows[takes], num_ranks),
                receive_rows=_ranges(first, rows[takes]),
            )
        )
    return routes


def _ranges(starts: LongArray, sizes: LongArray) -> LongArray:
    """[5 0], [2 3] -> [5 6 0 1 2]; int64."""
    return np.arange(sizes.sum()) + (starts - np.cumsum(sizes) + sizes).repeat(sizes)


def _counts(rank: LongArray, rows: LongArray, num_ranks: int) -> LongArray:
    """The rows of each rank; int64 [num_ranks]."""
    counts = np.zeros(num_ranks, np.int64)
    np.add.at(counts, rank, rows)
    return counts
