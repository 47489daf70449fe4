"""Who exchanges with whom, and for which places each of them takes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from meshfeed.errors import RoleError
from meshfeed.layout import Layout
from meshfeed.roles import Roles


@dataclass(frozen=True, slots=True)
class Membership:
    """The members of one exchange.

    Attributes:
        ranks: their global ranks.
        served: the dp_cp ranks that each takes for: itself and those that get theirs from it. Each dp_cp
            rank is served by one member, all of a member's are of one data-parallel rank.
        cp: the layout's context-parallel size.
        speakers: the first member of each exchange of the same items, this one's among them: those of
            several stages or tp ranks are not in one.
    """

    ranks: tuple[int, ...]
    served: tuple[tuple[int, ...], ...]
    cp: int
    speakers: tuple[int, ...] = ()

    @classmethod
    def all_of(cls, ranks: Sequence[int], *, cp: int = 1) -> Self:
        """Every dp_cp rank is a member and takes for itself. ranks: their global ranks, in that order."""
        return cls(tuple(ranks), tuple((at,) for at in range(len(ranks))), cp)

    @classmethod
    def of(cls, layout: Layout, roles: Roles, rank: int) -> Self | None:
        """The exchange that a rank is a member of; None where it gets its items from another.

        Readers that serve the same places (those of several pipeline stages, say) are in exchanges of their
        own, and each exchange covers all places. Raises RoleError where readers cannot be matched so.
        """
        if not roles[rank].reads:
            return None
        coords = layout.coords(roles.ranks)
        place = coords[:, 2].astype(np.int64) * layout.cp + coords[:, 1]
        served: dict[int, set[int]] = {}
        for source, at in zip(roles.source.tolist(), place.tolist()):
            served.setdefault(source, set()).add(at)
        served.pop(-1, None)
        readers_of: dict[tuple[int, ...], list[int]] = {}
        for reader in sorted(served):
            readers_of.setdefault(tuple(sorted(served[reader])), []).append(reader)
        places = sorted(readers_of)
        covered = sorted(at for each in places for at in each)
        counts = {len(readers) for readers in readers_of.values()}
        if covered != list(range(layout.dp * layout.cp)) or len(counts) > 1:
            raise RoleError(
                f"the ranks that own iterators cannot exchange: they serve the places {places} of "
                f"{layout.dp * layout.cp}, each by {sorted(counts)} of them; let the same tp and pp of every "
                f"dp and cp own one, or choose delivery 'broadcast'"
            )
        turn = readers_of[tuple(sorted(served[rank]))].index(rank)
        ranks = tuple(readers_of[each][turn] for each in places)
        return cls(ranks, tuple(places), layout.cp, tuple(readers_of[places[0]]))

    def dp_rank(self, member: int) -> int:
        """The data-parallel rank that a member is of."""
        return self.served[member][0] // self.cp

    def holders(self, owns: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
        """The members that hold the items of each data-parallel rank.

        owns: whether each member has an iterator. Raises RoleError where none has.
        """
        if not any(owns):
            raise RoleError(
                f"none of ranks {self.ranks}, which exchange items, has an iterator; pass one to at least "
                f"one of them, or name the ranks that have one as `owners`"
            )
        held: list[list[int]] = [[] for _ in range(1 + max(map(self.dp_rank, range(len(self.ranks)))))]
        for member, own in enumerate(owns):
            if own:
                held[self.dp_rank(member)].append(member)
        return tuple(map(tuple, held))

    def member_of_place(self) -> npt.NDArray[np.int64]:
        """The member that takes for each dp_cp rank; int64 [num_ranks]."""
        members = np.zeros(sum(map(len, self.served)), np.int64)
        for member, served in enumerate(self.served):
            members[list(served)] = member
        return members

    def sources(
        self,
        holders: Sequence[tuple[int, ...]],
        dp_ranks: npt.NDArray[np.integer],
        members: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """Who sends the items of some data-parallel ranks to some members; int64, the shape of both.

        The holder of the same cp, where there is one for each.
        """
        counts = np.array([len(held) for held in holders])
        table = np.zeros((counts.size, max(counts.max(initial=1), 1)), np.int64)
        for dp_rank, held in enumerate(holders):
            table[dp_rank, : len(held)] = held
        turns, seen = np.zeros(len(self.ranks), np.int64), dict[int, int]()
        for member in range(len(self.ranks)):
            turns[member] = seen.setdefault(self.dp_rank(member), 0)
            seen[self.dp_rank(member)] += 1
        return table[dp_ranks, turns[members] % np.maximum(counts, 1)[dp_ranks]]
