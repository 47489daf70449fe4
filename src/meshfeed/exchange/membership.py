"""Which ranks exchange items, and which dp_cp ranks each of them serves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Longs
from meshfeed.errors import RoleError
from meshfeed.layout import Layout
from meshfeed.roles import Roles


@dataclass(frozen=True)
class Membership:
    """The members of one exchange.

    Attributes:
        ranks: their global ranks.
        served: the dp_cp ranks that each member receives items for: its own and those it delivers to. Each
            dp_cp rank is served by one member; all of a member's belong to one data-parallel rank.
        cp: the layout's context-parallel size.
        speakers: the first member of each exchange of the same items, including this one. Different stages
            or tp ranks are in different exchanges.
        served_directly: for each member, further ranks that get what it gets, in the same collectives; ()
            if there are none. They give no items.
    """

    ranks: tuple[int, ...]
    served: tuple[tuple[int, ...], ...]
    cp: int
    speakers: tuple[int, ...] = ()
    served_directly: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def all_of(cls, ranks: Sequence[int], *, cp: int = 1) -> Self:
        """Every dp_cp rank is a member and serves itself. ranks: their global ranks, in that order."""
        return cls(tuple(ranks), tuple((at,) for at in range(len(ranks))), cp)

    @classmethod
    def of(cls, layout: Layout, roles: Roles, rank: int) -> Self:
        """The exchange that a rank, which reads, is a member of.

        Readers that serve the same dp_cp ranks, such as those of several pipeline stages, are in different
        exchanges; each exchange covers all dp_cp ranks. Raises RoleError if readers cannot be matched so.
        """
        coords = layout.coords(roles.ranks)
        dp_cp_rank = coords[:, 2].astype(np.int64) * layout.cp + coords[:, 1]
        served: dict[int, set[int]] = {}
        for source, at in zip(roles.source.tolist(), dp_cp_rank.tolist()):
            served.setdefault(source, set()).add(at)
        served.pop(-1, None)
        readers_of: dict[tuple[int, ...], list[int]] = {}
        for reader in sorted(served):
            readers_of.setdefault(tuple(sorted(served[reader])), []).append(reader)
        groups = sorted(readers_of)
        covered = sorted(at for each in groups for at in each)
        counts = {len(readers) for readers in readers_of.values()}
        if covered != list(range(layout.dp * layout.cp)) or len(counts) > 1:
            raise RoleError(
                f"the ranks that own iterators cannot exchange: they serve the dp_cp ranks {groups} of "
                f"{layout.dp * layout.cp}, each by {sorted(counts)} of them; let the same tp and pp of every "
                f"dp and cp own one, or choose delivery 'broadcast'"
            )
        turn = readers_of[tuple(sorted(served[rank]))].index(rank)
        ranks = tuple(readers_of[each][turn] for each in groups)
        return cls(ranks, tuple(groups), layout.cp, tuple(readers_of[groups[0]]))

    @cached_property
    def group(self) -> tuple[int, ...]:
        """The ranks of the exchange's collectives: the members, then those served directly."""
        return (*self.ranks, *(rank for ranks in self.served_directly for rank in ranks))

    def receivers(self) -> list[list[int]]:
        """For each member, the ranks that get what it gets, as indices into `group`."""
        found, next_index = [[member] for member in range(len(self.ranks))], len(self.ranks)
        for indices, ranks in zip(found, self.served_directly):
            indices += range(next_index, next_index + len(ranks))
            next_index += len(ranks)
        return found

    @cached_property
    def has_copies(self) -> bool:
        """Whether several ranks may give the same items: members of one data-parallel rank, or exchanges."""
        return len(self.speakers) > 1 or bool(self._turns.any())

    def dp_rank(self, member: int) -> int:
        """The data-parallel rank of a member."""
        return self.served[member][0] // self.cp

    def holders(self, owns: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
        """The members that hold the items of each data-parallel rank.

        owns: whether each member has an iterator. Raises RoleError if none has.
        """
        if not any(owns):
            raise RoleError(
                f"none of ranks {self.ranks}, which exchange items, has an iterator; pass one to at least "
                f"one of them, or name the ranks that have one as `readers`"
            )
        held: list[list[int]] = [[] for _ in range(1 + max(map(self.dp_rank, range(len(self.ranks)))))]
        for member, own in enumerate(owns):
            if own:
                held[self.dp_rank(member)].append(member)
        return tuple(map(tuple, held))

    @cached_property
    def member_of_dp_cp(self) -> Longs:
        """The member that serves each dp_cp rank; int64 [num_ranks]."""
        members = np.zeros(sum(map(len, self.served)), np.int64)
        for member, served in enumerate(self.served):
            members[list(served)] = member
        return members

    def sources(
        self, holders: Sequence[tuple[int, ...]], dp_ranks: npt.NDArray[np.integer], members: Longs
    ) -> Longs:
        """The member that sends the items of each of `dp_ranks` to each of `members`; int64, of their shape.

        It is the holder with the same cp rank if every cp rank has one.
        """
        counts = np.array([len(held) for held in holders])
        table = np.zeros((counts.size, counts.max()), np.int64)
        for dp_rank, held in enumerate(holders):
            table[dp_rank, : len(held)] = held
        return table[dp_ranks, self._turns[members] % counts[dp_ranks]]

    @cached_property
    def _turns(self) -> Longs:
        """The place of each member among those of its data-parallel rank; int64 [num_members]."""
        turns, seen = np.zeros(len(self.ranks), np.int64), dict[int, int]()
        for member in range(len(self.ranks)):
            turns[member] = seen.setdefault(self.dp_rank(member), 0)
            seen[self.dp_rank(member)] += 1
        return turns
