"""The delivery that a rank's role needs."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace

from meshfeed.deliver.broadcast import Broadcast
from meshfeed.deliver.delivery import Delivery, Direct, EndOfStream
from meshfeed.deliver.error_codec import ErrorRecord
from meshfeed.deliver.meeting import Meeting, required
from meshfeed.deliver.relay import Relay
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
    """Its roles across nodes and within its node; None for a level that it is not in."""
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
