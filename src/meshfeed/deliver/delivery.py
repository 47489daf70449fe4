"""The one seam between reading and training: columns in on the reader, columns out on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from meshfeed.columns import Columns


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
