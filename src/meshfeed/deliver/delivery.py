"""The interface between reading and training: columns in on the reader, columns out on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from meshfeed.columns import Columns


class EndOfStream(Exception):
    """The source or this rank has closed its feed: no more data follows. Not an error.

    args: the ranks that ended, unless it is the source.
    """


@dataclass(slots=True)
class Traffic:
    """What a delivery has moved so far on this rank.

    Attributes:
        messages: microbatches sent or received; a relay counts both.
        collectives: torch.distributed collectives called.
        num_bytes: bytes sent or received, headers included.
    """

    messages: int = 0
    collectives: int = 0
    num_bytes: int = 0


class Delivery(Protocol):
    """How stored columns reach this rank. `with` connects to the peers and disconnects again.

    All calls except `interrupt` come from one thread. Columns that `deliver` returns are valid until the next
    call.
    """

    @property
    def traffic(self) -> Traffic:
        """Counters of this rank."""
        ...

    def __enter__(self) -> Self:
        """Connect to the peers. Raises PeerError naming those that do not arrive in time."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disconnect; never blocks."""
        ...

    def deliver(self, columns: Columns | None, num_bytes: int) -> Columns:
        """One microbatch. columns: what the reader read, None on the others.

        num_bytes: the planned size of the columns, equal on all peers; a hint.
        Raises EndOfStream, PeerError (a peer is lost), the reader's own MeshfeedError (it failed),
        TimeoutError (a live peer is too slow).
        """
        ...

    def fail(self, error: BaseException, num_bytes: int) -> None:
        """On the reader, instead of `deliver`: send the peers the error that ends the data."""
        ...

    def interrupt(self) -> None:
        """From another thread: stop. `deliver` raises EndOfStream as soon as its peers allow."""
        ...


class Direct:
    """For a rank that reads for itself or needs no stored data: nothing is sent."""

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
        """The columns themselves; {} if there are none."""
        if self._interrupted:
            raise EndOfStream
        self.traffic.messages += 1
        return columns or {}

    def fail(self, error: BaseException, num_bytes: int) -> None:
        """No peers to notify."""

    def interrupt(self) -> None:
        """See Delivery."""
        self._interrupted = True
