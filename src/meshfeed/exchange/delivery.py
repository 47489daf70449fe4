"""Exchange and delivery of one run, opened and closed together."""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType
from typing import NoReturn, Self

import numpy as np

from meshfeed.columns import Columns
from meshfeed.deliver import Delivery, EndOfStream, Meeting, Traffic
from meshfeed.errors import DeliveryError
from meshfeed.exchange.agreement import Agreement
from meshfeed.exchange.group import Group
from meshfeed.exchange.items import Given
from meshfeed.exchange.lengths import END, Report
from meshfeed.exchange.membership import Membership
from meshfeed.exchange.steps import gather_reports


class ExchangeDelivery:
    """A Delivery that, on a member of an exchange, first meets the other members.

    All members leave together: an interrupted member announces the end in the next gathering of lengths. So
    no collective is left half-done.
    """

    def __init__(
        self,
        rank: int,
        membership: Membership,
        delivery: Delivery,
        meeting: Meeting | None,
        patience_s: float | None,
    ) -> None:
        self._rank, self._membership, self._delivery = rank, membership, delivery
        self._meeting, self._patience_s = meeting, patience_s
        self._resources = contextlib.ExitStack()
        self._interrupted = threading.Event()
        self._is_over = True
        self.agreement = Agreement(rank, membership, None)
        self.group = Group(patience_s=patience_s, ranks=membership.ranks)

    @property
    def traffic(self) -> Traffic:
        """Counters of the delivery; those of the exchange are `group.traffic`."""
        return self._delivery.traffic

    @property
    def interrupted(self) -> bool:
        """Whether `interrupt` was called."""
        return self._interrupted.is_set()

    def __enter__(self) -> Self:
        ranks = self._membership.ranks
        with contextlib.ExitStack() as stack:
            if self._rank in ranks and len(ranks) > 1:
                if self._meeting is None:
                    raise DeliveryError(
                        f"rank {self._rank} exchanges items with ranks {ranks} and needs a way to meet them: "
                        f"call torch.distributed.init_process_group first, or pass "
                        f"rendezvous=<torch.distributed.Store>"
                    )
                joined = self._meeting.gloo_group("exchange", ranks)
                stack.callback(joined.close)
                stack.callback(self.group.leave)
                self.group.join(joined.backend, joined.lost)
                self._is_over = False
            self.agreement = Agreement(self._rank, self._membership, self._meeting)
            stack.enter_context(self._delivery)
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def deliver(self, columns: Columns | None, num_bytes: int) -> Columns:
        """See Delivery."""
        try:
            return self._delivery.deliver(columns, num_bytes)
        except EndOfStream:
            if self.interrupted and not self._is_over:
                self.leave()
            raise

    def fail(self, error: BaseException, num_bytes: int) -> None:
        """See Delivery."""
        with contextlib.suppress(EndOfStream, TimeoutError, DeliveryError):
            self._delivery.fail(error, num_bytes)

    def interrupt(self) -> None:
        """See Delivery."""
        self._interrupted.set()
        self._delivery.interrupt()

    def over(self) -> None:
        """Record that the members have finished their last collective."""
        self._is_over = True

    def leave(self) -> None:
        """Tell the other members that this one ends. Raises EndOfStream."""
        self.over()
        gather_reports(Given(Report(status=END, rows=np.zeros((0, 4), np.int64)), ()), self.group)

    def end(self, end: EndOfStream) -> NoReturn:
        """Members leave: end the delivery to the peers that this rank serves. Raises EndOfStream."""
        self._delivery.interrupt()
        with contextlib.suppress(EndOfStream):
            self._delivery.deliver({}, 0)
        raise EndOfStream(*(self._membership.ranks[member] for member in end.args))
