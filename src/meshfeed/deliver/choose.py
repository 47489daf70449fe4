"""The delivery that a rank's role needs, of one level or of two.

Two levels are composed of the other deliveries: one reader sends to a leader on each node, and each leader
shares with its node. The leaders form a broadcast group and each node a share ring. A rank in both forwards
what it receives: data, errors and the end.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import replace

from meshfeed.arrays import Columns
from meshfeed.deliver.broadcast import Broadcast
from meshfeed.deliver.delivery import Delivery, Direct, EndOfStream
from meshfeed.deliver.error_codec import ErrorRecord
from meshfeed.deliver.meeting import Meeting, required
from meshfeed.deliver.share import ShareFollower, ShareLeader, can_share
from meshfeed.errors import DeliveryError, MeshfeedError
from meshfeed.roles import DeliveryName, Role


def tell(delivery: Delivery, error: Exception, rank: int, step: int, num_bytes: int) -> MeshfeedError:
    """Send the peers the read error of `rank`. Returns the error that every rank raises."""
    record = ErrorRecord.of(error)
    who = f"rank {rank} (host {socket.gethostname()}) could not read step {step}"
    record = replace(record, text=f"{who}: {record.text}", where={**record.where, "rank": rank, "step": step})
    named = record.exception().with_traceback(error.__traceback__)
    with contextlib.suppress(EndOfStream, TimeoutError, DeliveryError):
        delivery.fail(named, num_bytes)
    return named


def levels_of(name: DeliveryName, role: Role) -> tuple[Role | None, Role | None]:
    """A rank's roles across nodes and within its node; None for a level that it is not in."""
    if name == "direct" or not role.peers or role.source is None:
        return None, None
    return {"broadcast": (role, None), "share": (None, role)}.get(name, role.levels)


def make_delivery(
    name: DeliveryName,
    role: Role,
    meeting: Meeting | None,
    *,
    num_slots: int,
    patience_s: float | None = None,
    across_nodes: bool = True,
) -> Delivery:
    """The delivery for a role that needs stored columns.

    meeting: where its peers meet; may be None if it has no peers. num_slots: microbatches in flight.
    patience_s: how long `deliver` waits for a live peer; None waits without limit, as a producer thread does.
    across_nodes: False if the columns reach each node's leader by other means.
    """
    across, within = levels_of(name, role)
    if not across_nodes:
        across = None
    if across is None and within is None:
        return Direct()
    meeting = required(meeting, f"delivery {name!r}", role.rank, role.peers)
    if name in ("share", "tree") and (missing := can_share()):
        raise DeliveryError(f"delivery {name!r}: {missing}; choose 'broadcast' or 'auto'")
    network = across and Broadcast(across, meeting, patience_s)
    if within is None:
        return network or Direct()
    if not within.reads:
        return ShareFollower(within, meeting, patience_s)
    node = ShareLeader(within, meeting, num_slots, patience_s)
    return Relay(network, node) if network else node


class Relay(Delivery):
    """A leader with a node to serve: receives across nodes (or reads) and forwards within its own.

    When its node ends, it leaves the share ring at once. From the other leaders it continues to receive, and
    drops what it receives, until the reader ends.
    """

    ends_at_once = False

    def __init__(self, across: Broadcast, within: ShareLeader) -> None:
        super().__init__()
        self._across, self._within = across, within
        self.traffic = within.traffic = across.traffic
        self._left = False

    def _connect(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(self._across)
        stack.enter_context(self._within)

    def deliver(self, columns: Columns | None, num_bytes: int) -> Columns:
        try:
            columns = self._across.deliver(columns, num_bytes)
        except TimeoutError:
            raise
        except Exception as error:
            self._forward(error, num_bytes)
            raise
        if not self._left:
            try:
                self._within.deliver(columns, num_bytes)
            except EndOfStream:
                self._leave()
        return columns

    def awaited(self) -> Sequence[int]:
        return self._across.awaited() or self._within.awaited()

    def fail(self, error: BaseException, num_bytes: int) -> None:
        try:
            self._across.fail(error, num_bytes)
        finally:
            self._forward(error, num_bytes)

    def interrupt(self) -> None:
        super().interrupt()
        self._across.interrupt()
        self._within.interrupt()

    def _forward(self, error: BaseException, num_bytes: int) -> None:
        if self._left:
            return
        # a node that has already ended needs no message
        with contextlib.suppress(EndOfStream, OSError, RuntimeError):
            if isinstance(error, EndOfStream):
                if error.args:
                    (self._within.ended,) = error.args
                self._leave()
            else:
                self._within.fail(error, num_bytes)

    def _leave(self) -> None:
        self._left = True
        self._within.__exit__(None, None, None)
