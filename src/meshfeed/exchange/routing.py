"""Which bytes of which item go where, and their offsets on arrival. Pure.

A *piece* is the part of one row of the plan that one member receives: the keys that are not split, then of
each split key the tokens that the member's ranks hold. Both sides compute the same pieces from the gathered
lengths and the plan. So only their bytes are sent, each member's in the order of its microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from meshfeed.arrays import Bools, Bytes, Longs
from meshfeed.exchange.lengths import LENGTH, REST, SCHEMA, GatheredLengths, MemberReport
from meshfeed.exchange.membership import Membership
from meshfeed.intervals import numbered
from meshfeed.plan import CpSplit, StepPlan
from meshfeed.plan.types import chunk_runs, cuts_packs
from meshfeed.sequence.runs import Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """Pieces, ordered by member, microbatch and position in the pack.

    Attributes:
        item: index of each piece's item in the gathered lengths; int64 [n].
        source, member: its sender and its receiver; int64 [n].
        microbatch: int64 [n].
        start, stop: its token ranges in the item, some of them empty; int64 [n, runs].
        num_bytes: of each; int64 [n].
    """

    item: Longs
    source: Longs
    member: Longs
    microbatch: Longs
    start: Longs
    stop: Longs
    num_bytes: Longs

    def __len__(self) -> int:
        return self.item.size

    @classmethod
    def of(
        cls,
        gathered: GatheredLengths,
        plan: StepPlan,
        membership: Membership,
        split: CpSplit | None,
        member: int,
    ) -> Self:
        """All pieces that one member sends or receives.

        split: how context parallelism splits rows; None leaves them whole.
        """
        served = np.zeros(plan.num_ranks + 1, np.int64)
        served[np.array(membership.served[member]) + 1] = 1
        before = np.cumsum(served)  # ranks below r that the member serves
        wanted = before[plan.first_rank + plan.cp_size] > before[plan.first_rank]
        wanted |= gathered.held_by(member)[plan.sequence]
        rows, members = takers(plan, membership, np.flatnonzero(wanted & (plan.microbatch >= 0)))
        item = plan.sequence[rows].astype(np.int64)
        sources = membership.sources(gathered.holders, gathered.draws.source[item], members)
        kept = np.flatnonzero((sources == member) | (members == member))
        rows, members, item = rows[kept], members[kept], item[kept]
        start, stop = ranges_of(plan, membership, rows, members, split)
        return cls(
            item=item,
            source=sources[kept],
            member=members,
            microbatch=plan.microbatch[rows].astype(np.int64),
            start=start + plan.start[rows, None],
            stop=stop + plan.start[rows, None],
            num_bytes=gathered.rest_bytes[item] + (stop - start).sum(axis=1) * gathered.token_bytes[item],
        )

    @property
    def num_tokens(self) -> Longs:
        """Tokens of each piece; int64 [n]."""
        return (self.stop - self.start).sum(axis=1)

    def sent_by(self, member: int) -> Self:
        return self._only(self.source == member)

    def received_by(self, member: int) -> Self:
        """The pieces that a member receives; on arrival they are ordered by source."""
        return self._only(self.member == member)

    def _only(self, some: Bools) -> Self:
        kept = np.flatnonzero(some)
        return type(self)(**{each.name: getattr(self, each.name)[kept] for each in fields(self)})

    def sizes(self, members: Longs, num_members: int) -> list[int]:
        """Total bytes for each value of `members`: of `source` or `member`."""
        sums = np.zeros(num_members, np.int64)
        np.add.at(sums, members, self.num_bytes)
        return sums.tolist()

    def offsets(self) -> Longs:
        """Byte offset of each piece on arrival; int64 [n]."""
        offset, order = np.empty_like(self.num_bytes), np.argsort(self.source, kind="stable")
        offset[order] = np.cumsum(self.num_bytes[order]) - self.num_bytes[order]
        return offset

    def tokens_at(self, pieces: Longs, first: Longs) -> Longs:
        """Number of tokens in a piece before token `first` of its item, which the piece holds; int64 [n].

        pieces: indices into this shipment; int64 [n].
        """
        start, stop = self.start[pieces], self.stop[pieces]
        sizes = stop - start
        before = np.cumsum(sizes, axis=1) - sizes
        run = ((first[:, None] >= stop) | (sizes == 0)).argmin(axis=1)  # the first that ends after it
        rows = np.arange(pieces.size)
        return before[rows, run] + first - start[rows, run]


_NONE = np.zeros(0, np.int64)
NO_PIECES = Shipment(
    item=_NONE,
    source=_NONE,
    member=_NONE,
    microbatch=_NONE,
    start=_NONE[:, None],
    stop=_NONE[:, None],
    num_bytes=_NONE,
)
"""What a rank that needs no key receives."""


def takers(plan: StepPlan, membership: Membership, rows: Longs) -> tuple[Longs, Longs]:
    """(row, member) for every member that receives some of these rows, by member, microbatch and row."""
    of, index = numbered(plan.cp_size[rows])
    row = rows[of]
    member = membership.member_of_dp_cp[plan.first_rank[row] + index]
    order = np.lexsort((row, plan.microbatch[row], member))
    row, member = row[order], member[order]
    is_first = np.ones(row.size, bool)  # a member that serves several ranks of the group takes a row once
    is_first[1:] = (row[1:] != row[:-1]) | (member[1:] != member[:-1])
    return row[is_first], member[is_first]


def ranges_of(
    plan: StepPlan, membership: Membership, rows: Longs, members: Longs, split: CpSplit | None
) -> tuple[Longs, Longs]:
    """The real tokens of each row that a member's ranks hold: start and stop, int64 [n, runs].

    The same as `plan.slices_of`, for rows of many packs at once.
    """
    lengths = plan.lengths[rows]
    if split is None or (plan.cp_size[rows] == 1).all():
        return np.zeros((rows.size, 1), np.int64), lengths[:, None].copy()
    padded, origin, total = _padding(plan, whole=cuts_packs(split))
    size, first = plan.cp_size[rows].astype(np.int64), plan.first_rank[rows].astype(np.int64)
    start, stop = np.zeros((rows.size, 2), np.int64), np.zeros((rows.size, 2), np.int64)
    table = np.stack([size, first, members])
    number = (size * plan.num_ranks + first) * len(membership.ranks) + members
    _, example, case = np.unique(number, return_index=True, return_inverse=True)
    for at, (cp_size, first_rank, member) in enumerate(table[:, example].T.tolist()):
        some = np.flatnonzero(case == at)
        cp_ranks = [rank - first_rank for rank in membership.served[member]]
        num_chunks, begin, end = chunk_runs(cp_ranks, cp_size, split)
        chunk = (total[rows[some]] // num_chunks)[:, None]
        edge, limit = origin[rows[some]][:, None], padded[rows[some]][:, None]
        start[some, : begin.size] = np.clip(chunk * begin - edge, 0, limit)
        stop[some, : end.size] = np.clip(chunk * end - edge, 0, limit)
    return np.minimum(start, lengths[:, None]), np.minimum(stop, lengths[:, None])


def _padding(plan: StepPlan, *, whole: bool) -> tuple[Longs, Longs, Longs]:
    """Of each row: its padded tokens, its start in the unit that is cut into chunks, and the unit's tokens.

    whole: the unit is a pack, not a row.
    """
    placed = np.flatnonzero(plan.microbatch >= 0)
    order = placed[np.lexsort((placed, plan.first_rank[placed], plan.microbatch[placed]))]
    padded = np.zeros(plan.lengths.size, np.int64)
    origin, total = np.zeros_like(padded), np.zeros_like(padded)
    if not order.size:
        return padded, origin, total
    sizes = plan.align.padded(plan.lengths[order], plan.cp_size[order])
    where = np.stack([plan.microbatch[order], plan.first_rank[order]])
    opens = np.append(True, (where[:, 1:] != where[:, :-1]).any(axis=0))
    pack, starts = np.cumsum(opens) - 1, np.flatnonzero(opens)
    of_pack, groups = np.add.reduceat(sizes, starts), plan.cp_size[order[starts]]
    if plan.shape is None:
        own = -of_pack % plan.align.pack_multiple(groups)
        sizes[np.append(starts[1:], order.size) - 1] += own  # a pack's own padding is its last row's
        of_pack += own
    else:
        of_pack = plan.align.limit(plan.shape.capacity, groups)
    padded[order] = total[order] = sizes
    if whole:
        ends = np.cumsum(sizes)
        base = ends[starts] - sizes[starts]
        origin[order] = ends - sizes - base[pack]
        total[order] = of_pack[pack]
    return padded, origin, total


def write_pieces(
    buffer: Bytes, shipment: Shipment, columns: Sequence[Bytes], report: MemberReport, own: Longs
) -> None:
    """Write what one member sends, receiver by receiver.

    columns, report: its items, see `Given`. own: which of them each piece is of; int64 [n].
    """
    names = sorted({name for schema in report.schemas for name, _, _ in schema.split})
    entry_bytes = np.zeros((len(report.schemas), len(names)), np.int64)
    for row, schema in zip(entry_bytes, report.schemas):
        for (name, _, _), num_bytes in zip(schema.split, schema.entry_bytes):
            row[names.index(name)] = num_bytes
    token_bytes = entry_bytes[report.rows[:, SCHEMA]]
    whole = np.column_stack((report.rows[:, REST], report.rows[:, LENGTH, None] * token_bytes))
    begin, token_bytes = (np.cumsum(whole, axis=0) - whole)[own], token_bytes[own][:, :, None]
    # of each piece the unsplit keys, then of each split key its token ranges
    size = np.zeros((own.size, len(columns), shipment.start.shape[1]), np.int64)
    size[:, 0, 0] = whole[own, 0]
    size[:, 1:] = (shipment.stop - shipment.start)[:, None] * token_bytes
    start = np.repeat(begin[:, :, None], shipment.start.shape[1], axis=2)
    start[:, 1:] += shipment.start[:, None] * token_bytes
    at = (np.cumsum(size) - size.ravel()).reshape(size.shape)
    for k, column in enumerate(columns):
        if not column.size:  # items without unsplit keys
            continue
        Runs(at[:, k].ravel(), start[:, k].ravel(), size[:, k].ravel()).copy(column, buffer)
