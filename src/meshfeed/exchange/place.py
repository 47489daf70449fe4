"""This rank's place in an exchange: what it gives, what it gets, and which ranks exchange items."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from meshfeed.deliver import levels_of
from meshfeed.errors import RoleError
from meshfeed.exchange.membership import Membership
from meshfeed.feed.place import RankPlace
from meshfeed.roles import DeliveryName, Role, Roles


@dataclass(frozen=True, kw_only=True)
class ExchangePlace(RankPlace):
    """The place of a rank that may have an iterator. owns: whether it has one."""

    owns: bool

    @cached_property
    def delivery(self) -> DeliveryName:
        """The delivery's name; "direct" if each rank that needs items has its own iterator."""
        is_auto = self.options.transport.delivery == "auto"
        return "direct" if is_auto and self.readers is None else super().delivery

    @cached_property
    def roles(self) -> Roles:
        """Every rank's role. Raises RoleError if the readers cannot serve all ranks."""
        try:
            return super().roles
        except RoleError as unserved:
            if self.readers is None:
                raise
            raise RoleError(
                f"readers={sorted(self.readers)} do not serve all ranks: a reader delivers only to its own "
                f"data-parallel rank (under 'share' on its node, under 'dynamic_cp' to its cp rank); name a "
                f"reader for each, whose iterator may be None, or give every rank its own and readers=None"
            ) from unserved

    @cached_property
    def role(self) -> Role:
        """This rank's role. Raises RoleError if it has an iterator that is not used."""
        if self.owns and self.readers is not None and self.rank not in self.readers:
            raise RoleError(
                f"rank {self.rank} has an iterator, but readers={sorted(self.readers)}; name it there, or "
                f"pass None"
            )
        role = super().role
        if self.owns and self.readers is None and not role.reads:
            raise RoleError(
                f"rank {self.rank} has an iterator, but would get its items from rank {role.source} by "
                f"{self.delivery!r}; list the ranks that have one in `readers`, or pass None here"
            )
        return role

    @cached_property
    def membership(self) -> Membership:
        """The exchange that this rank is a member of, or gets its items from."""
        source = self.role.source
        membership = Membership.of(self.layout, self.roles, self.rank if source is None else source)
        if len(membership.ranks) == 1:  # its broadcast is the only collective
            return membership
        across = [levels_of(self.delivery, self.roles[rank])[0] for rank in membership.ranks]
        further = (set(role.peers if role else ()) - {rank} for role, rank in zip(across, membership.ranks))
        return replace(membership, served_directly=tuple(tuple(sorted(ranks)) for ranks in further))

    @cached_property
    def in_group(self) -> bool:
        """Whether this rank takes part in the exchange's collectives."""
        return self.role.reads or self.rank in self.membership.group

    @cached_property
    def wanted(self) -> frozenset[str]:
        """The fields that any rank served by this exchange needs."""
        members = [self.roles[rank] for rank in self.membership.ranks]
        served = {rank for role in members for rank in (role.rank, *role.peers)}
        return frozenset(name for rank in served for name in self.roles[rank].fields)

    @cached_property
    def passed_on(self) -> list[frozenset[str]]:
        """The fields that each rank of the group needs, for itself or for the ranks of its node."""
        found: list[frozenset[str]] = []
        for rank in self.membership.group:
            _, within = levels_of(self.delivery, self.roles[rank])
            ranks = (rank,) if within is None else within.peers
            found.append(frozenset(name for each in ranks for name in self.roles[each].fields))
        return found
