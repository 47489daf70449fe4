"""Exchange and delivery of one run, opened and closed together."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NoReturn

from meshfeed.arrays import Columns
from meshfeed.deliver import Delivery, EndOfStream, Group, Meeting
from meshfeed.deliver.meeting import required
from meshfeed.errors import DeliveryError
from meshfeed.exchange.agreement import check_agreement
from meshfeed.exchange.lengths import GatheredLengths, MemberReport
from meshfeed.exchange.membership import Membership
from meshfeed.exchange.steps import gather_reports


class ExchangeDelivery(Delivery):
    """A Delivery that, on the ranks of an exchange's group, first meets the others of the group.

    All of them leave together: an interrupted one announces the end in the next gathering of lengths. So
    no collective is left half-done.

    Attributes:
        traffic: counters of the delivery; those of the exchange are `group.traffic`.
        interrupted: whether `interrupt` was called.
        is_over: whether the group has finished its last collective.
    """

    def __init__(
        self,
        rank: int,
        membership: Membership,
        delivery: Delivery,
        meeting: Meeting | None,
        patience_s: float | None,
    ) -> None:
        super().__init__()
        self.traffic = delivery.traffic
        self._rank, self._membership, self._delivery = rank, membership, delivery
        self._meeting, self._patience_s = meeting, patience_s
        self.is_over = True
        self.group = Group()

    def _connect(self, stack: contextlib.ExitStack) -> None:
        ranks = self._membership.group
        if self._rank in ranks and len(ranks) > 1:
            meeting = required(self._meeting, "exchange", self._rank, ranks)
            self.group = meeting.group("exchange", ranks, self._patience_s)
            stack.callback(self.group.close)
            self.is_over = False
        stack.enter_context(self._delivery)

    def deliver(self, columns: Columns | None, num_bytes: int) -> Columns:
        try:
            return self._delivery.deliver(columns, num_bytes)
        except EndOfStream:
            if self.interrupted and not self.is_over:
                self.leave()
            raise

    def fail(self, error: BaseException, num_bytes: int) -> None:
        with contextlib.suppress(EndOfStream, TimeoutError, DeliveryError):
            self._delivery.fail(error, num_bytes)

    def awaited(self) -> Sequence[int]:
        return self.group.awaited() or self._delivery.awaited()

    def interrupt(self) -> None:
        self.interrupted = True
        self._delivery.interrupt()

    def agree(self, step: int, gathered: GatheredLengths, reports: Sequence[MemberReport]) -> None:
        """Compare a step with the other exchanges. Raises PeerError naming the ranks that differ."""
        check_agreement(self._meeting, self._rank, self._membership, step, gathered, reports)

    def leave(self) -> None:
        """Tell the other ranks of the group that this one ends. Raises EndOfStream."""
        self.is_over = True
        gather_reports(None, self.group)

    def end(self, end: EndOfStream) -> NoReturn:
        """Ranks of the group leave: end the delivery to this rank's peers. Raises EndOfStream."""
        self._delivery.interrupt()
        with contextlib.suppress(EndOfStream):
            self._delivery.deliver({}, 0)
        raise EndOfStream(*(self._membership.group[member] for member in end.args))
