"""The one seam between reading and training: columns in on the reader, columns out on every rank."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from meshfeed.columns import Columns
from meshfeed.deliver.cause import Cause
from meshfeed.errors import DeliveryError, MeshfeedError
from meshfeed.roles import DeliveryName, Role

if TYPE_CHECKING:
    from meshfeed.deliver.rendezvous import Meeting


class EndOfStream(Exception):
    """The source has closed its feed, or this rank has: nothing more will come. Not an error.

    args: the ranks that ended, where it is not the source.
    """


@dataclass(slots=True)
class Traffic:
    """What a delivery has moved so far on this rank.

    Attributes:
        messages: microbatches sent or received; twice where a rank passes on what it receives.
        collectives: torch.distributed collectives called.
        num_bytes: bytes sent or received, headers included.
    """

    messages: int = 0
    collectives: int = 0
    num_bytes: int = 0


class Delivery(Protocol):
    """How stored columns reach this rank. `with` meets the peers and lets them go again.

    All calls but `interrupt` come from one thread. Columns that `deliver` returns are good until the
    next call.
    """

    @property
    def traffic(self) -> Traffic:
        """Counters of this rank."""
        ...

    def __enter__(self) -> Self:
        """Meet the peers. Raises PeerError naming those that do not come in time."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the peers go; never blocks."""
        ...

    def deliver(self, columns: Columns | None, num_bytes: int) -> Columns:
        """One microbatch. columns: what the reader read, None on the others.

        num_bytes: the size of the columns as the plan has it, equal on all peers; a hint.
        Raises EndOfStream, PeerError (a peer is gone), the reader's own MeshfeedError (it failed),
        TimeoutError (a peer is alive, but patience is over).
        """
        ...

    def fail(self, error: BaseException, num_bytes: int) -> None:
        """On the reader, instead of `deliver`: tell the peers that there will be no data, and why."""
        ...

    def interrupt(self) -> None:
        """From another thread: this rank wants no more. `deliver` raises EndOfStream as soon as it may."""
        ...


class Direct:
    """The rank reads for itself, or needs nothing that is read: nothing moves."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._interrupted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def deliver(self, columns: Columns | None, num_bytes: int) -> Columns:
        """The columns themselves; {} where there are none."""
        if self._interrupted:
            raise EndOfStream
        self.traffic.messages += 1
        return columns or {}

    def fail(self, error: BaseException, num_bytes: int) -> None:
        """Nobody to tell."""

    def interrupt(self) -> None:
        """See Delivery."""
        self._interrupted = True


def tell(delivery: Delivery, error: Exception, rank: int, step: int, num_bytes: int) -> MeshfeedError:
    """Tell the peers, as far as they are there, that `rank` could not read; returns what all are to raise."""
    cause = Cause.of(error)
    who = f"rank {rank} (host {socket.gethostname()}) could not read step {step}"
    named = Cause(cause.kind, f"{who}: {cause.text}", cause.ranks).error().with_traceback(error.__traceback__)
    with contextlib.suppress(EndOfStream, TimeoutError, DeliveryError):
        delivery.fail(named, num_bytes)
    return named


def make_delivery(
    name: DeliveryName,
    role: Role,
    meeting: Meeting | None,
    *,
    num_slots: int,
    patience_s: float | None = None,
) -> Delivery:
    """The delivery that fits a role that needs stored columns.

    meeting: where its peers meet; may be None where it has none. num_slots: microbatches in flight.
    patience_s: how long `deliver` waits for a peer that is alive; None for ever, as on a thread of its own.
    """
    from meshfeed.deliver.broadcast import Broadcast
    from meshfeed.deliver.share import ShareFollower, ShareLeader, can_share
    from meshfeed.deliver.tree import Relay

    if name == "direct" or not role.peers or role.source is None:
        return Direct()
    if meeting is None:
        raise DeliveryError(
            f"rank {role.rank} gets its data by {name!r} and needs a way to meet ranks {role.peers}: call "
            f"torch.distributed.init_process_group first, or pass rendezvous=<torch.distributed.Store>"
        )
    if name in ("share", "tree") and (missing := can_share()):
        raise DeliveryError(f"delivery {name!r}: {missing}; choose 'broadcast' or 'auto'")
    across, within = {"broadcast": (role, None), "share": (None, role)}.get(name, role.levels)
    network = across and Broadcast(across, meeting, patience_s)
    if within is None:
        return network or Direct()
    if not within.reads:
        return ShareFollower(within, meeting, patience_s)
    node = ShareLeader(within, meeting, num_slots, patience_s)
    return Relay(network, node) if network else node
