"""What each rank sends and receives of the encoders' outputs: those of its tokens, and no others. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Bools, Longs
from meshfeed.errors import PlanError
from meshfeed.intervals import numbered, numbers_in
from meshfeed.multimodal.encoders.assign import EncoderPlan
from meshfeed.plan import StepPlan
from meshfeed.plan.types import CpSplit, check_split, cuts_packs, rows_in_packs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderRoute:
    """One rank's part in one microbatch's exchange of encoder outputs. Equal only to itself.

    A row is the output for one token. A rank encodes its parts one after the other, and sends each row to the
    rank that has its token. Ranks are in the order of the process group.

    Attributes:
        encodes: which entries of the EncoderPlan this rank encodes, in this order; int64 [k].
        encoded_rows: how many rows its encoder makes of them; int64 [1].
        send_rows: which of these it sends, receiver after receiver; int64 [sent].
        send_counts: how many of these each rank receives; int64 [ranks].
        receive_counts: how many rows each rank sends to this one; int64 [ranks].
        receive_rows: which received row each output is, in the order of this rank's tokens; int64 [received].
    """

    encodes: Longs
    encoded_rows: Longs
    send_rows: Longs
    send_counts: Longs
    receive_counts: Longs
    receive_rows: Longs

    def __post_init__(self) -> None:
        for array in (self.encodes, *self.arrays.values()):
            array.flags.writeable = False

    @property
    def arrays(self) -> dict[str, Longs]:
        """The arrays that the exchange needs, by name."""
        return {name: getattr(self, name) for name in ROUTE}


ROUTE = ("encoded_rows", "send_rows", "send_counts", "receive_counts", "receive_rows")
"""Names of the arrays of a route that the exchange needs."""


def encoder_routes(
    made: EncoderPlan,
    plan: StepPlan,
    start: npt.ArrayLike,
    tokens: npt.ArrayLike,
    rank: int,
    *,
    part: npt.ArrayLike | None = None,
    split: CpSplit = "zigzag",
    order: Sequence[int] | None = None,
) -> list[EncoderRoute]:
    """One rank's routes, one for each microbatch: a pure function, which any rank can call for any other.

    Routes agree: what rank a sends to rank b, and in which order, is what b expects from a.

    made: of the plan, by `plan_encoder`.
    start, tokens: the first token of each run of outputs in its sequence, and how many it has: a row of the
        encoder's output is for each; int [runs]. Those of parts that are not near the rank may lack; see
        `EncoderPlan.is_near`.
    rank: the dp_cp rank.
    part: which of the parts each run is of, ascending; int [runs]. None: each part is one run.
    split: how cp groups cut their packs.
    order: the place of each dp_cp rank in the process group of the exchange; None if in order.
    Raises PlanError for another rank, other places, other runs, or an unknown split.
    """
    check_split(split)
    num_microbatches, num_ranks = made.loads.shape
    begins, rows = (np.asarray(each, np.int64).ravel() for each in (start, tokens))
    places = np.arange(num_ranks) if order is None else np.asarray(order, np.int64)
    if not 0 <= rank < num_ranks:
        raise PlanError(f"rank={rank}: the plan is for dp_cp ranks 0 to {num_ranks - 1}")
    if not np.array_equal(np.sort(places), np.arange(num_ranks)):
        raise PlanError(f"order={str(order)[:80]}: give each of 0 to {num_ranks - 1} once, one for each rank")
    num_parts = int(made.part.max(initial=-1)) + 1
    parts = np.arange(rows.size) if part is None else np.asarray(part, np.int64).ravel()
    if not begins.size == rows.size == parts.size or (rows < 0).any():
        raise PlanError(
            f"start of {begins.size}, tokens of {rows.size} and part of {parts.size} runs, from "
            f"{rows.min(initial=0)}: give all for each run, tokens 0 or more"
        )
    is_mine, is_near = made.rank == rank, np.flatnonzero(made.is_near(rank))
    if (np.diff(parts) < 0).any() or not np.isin(made.part[is_near], parts).all():
        raise PlanError(
            f"{rows.size} runs: give them in the order of {num_parts} parts, of each that is near the rank"
        )
    found = _Runs.of(made, plan, is_near, begins, rows, parts, split)
    sent, received = found.take(is_mine[found.entry]), found.take(found.receiver == rank)
    rows = np.bincount(parts, rows, num_parts).astype(np.int64)[made.part]
    routes: list[EncoderRoute] = []
    for microbatch in range(num_microbatches):
        encodes = np.flatnonzero(is_mine & (made.microbatch == microbatch))
        base = np.cumsum(rows[encodes]) - rows[encodes]
        gives = sent.take(made.microbatch[sent.entry] == microbatch)
        gives = gives.take(np.lexsort((gives.first, gives.entry, places[gives.receiver])))
        takes = received.take(made.microbatch[received.entry] == microbatch)
        takes = takes.take(np.lexsort((takes.at, made.row[takes.entry])))
        sender = places[made.rank[takes.entry]]
        arrival = np.lexsort((takes.first, takes.entry, sender))
        arrives = np.empty(takes.count.size, np.int64)
        arrives[arrival] = np.cumsum(takes.count[arrival]) - takes.count[arrival]
        routes.append(
            EncoderRoute(
                encodes=encodes,
                encoded_rows=rows[encodes].sum(keepdims=True),
                send_rows=numbers_in(base[np.searchsorted(encodes, gives.entry)] + gives.first, gives.count),
                send_counts=_sums(places[gives.receiver], gives.count, num_ranks),
                receive_counts=_sums(sender, takes.count, num_ranks),
                receive_rows=numbers_in(arrives, takes.count),
            )
        )
    return routes


def _sums(of: Longs, counts: Longs, size: int) -> Longs:
    return np.bincount(of, counts, size).astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of a part's outputs that one rank has the tokens of.

    Attributes:
        entry: of the EncoderPlan; int64 [k].
        receiver: the dp_cp rank that has the tokens; int64 [k].
        first: the first of them among the part's outputs; int64 [k].
        count: how many; int64 [k].
        at: the first one's place in its row, or in its pack if that is cut as a whole; int64 [k].
    """

    entry: Longs
    receiver: Longs
    first: Longs
    count: Longs
    at: Longs

    def take(self, which: Bools | Longs) -> _Runs:
        return _Runs(*(each[which] for each in (self.entry, self.receiver, self.first, self.count, self.at)))

    @classmethod
    def of(
        cls,
        made: EncoderPlan,
        plan: StepPlan,
        entries: Longs,
        begins: Longs,
        tokens: Longs,
        parts: Longs,
        split: CpSplit,
    ) -> _Runs:
        """Those of some entries: each run is cut where its row ends, and where the cp split cuts."""
        begin_run, end_run = (np.searchsorted(parts, made.part[entries], side) for side in ("left", "right"))
        run, entries = numbers_in(begin_run, end_run - begin_run), entries.repeat(end_run - begin_run)
        outputs = np.cumsum(tokens) - tokens
        earlier = (outputs - outputs[np.searchsorted(parts, parts)])[run]
        row = made.row[entries].astype(np.int64)
        padded, before, whole = (each[row] for each in rows_in_packs(plan))
        offset, cut = (before, whole) if cuts_packs(split) else (0 * before, padded)
        size = made.cp_size[entries].astype(np.int64)
        num_chunks = np.where((split == "zigzag") & (size > 1), 2 * size, size)
        chunk_size = cut // num_chunks
        begin = begins[run] - plan.start[row] + offset
        low = np.maximum(begin, offset)
        high = np.minimum(begin + tokens[run], offset + plan.lengths[row])
        first_chunk = low // chunk_size
        num = np.where(low < high, (high - 1) // chunk_size - first_chunk + 1, 0)
        of, number = numbered(num)
        chunk = first_chunk[of] + number
        at = np.maximum(low[of], chunk * chunk_size[of])
        stop = np.minimum(high[of], (chunk + 1) * chunk_size[of])
        holder = np.minimum(chunk, num_chunks[of] - 1 - chunk) if split == "zigzag" else chunk
        receiver = made.first_rank[entries].astype(np.int64)[of] + holder
        return cls(entries[of], receiver, (earlier - begin)[of] + at, stop - at, at)
