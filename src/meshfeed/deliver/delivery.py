"""The interface between reading and training: columns in on the reader, columns out on every rank."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from meshfeed.arrays import Columns


class EndOfStream(Exception):
    """The source or this rank has closed its feed: no more data follows. Not an error.

    args: the ranks that ended, unless it is the source.
    """


@dataclass(slots=True)
class Traffic:
    """What a delivery has moved so far on this rank.

    Attributes:
        collectives: torch.distributed collectives called.
        num_bytes: bytes sent or received, headers included.
    """

    collectives: int = 0
    num_bytes: int = 0


class Delivery(abc.ABC):
    """How stored columns reach this rank. `with` connects to the peers, and disconnects without waiting.

    All calls except `interrupt` come from one thread. Columns that `deliver` returns are valid until the next
    call.

    Attributes:
        traffic: counters of this rank.
        interrupted: whether `interrupt` was called.
        ends_at_once: whether peers need no further message of a rank that was interrupted.
    """

    ends_at_once = True

    def __init__(self) -> None:
        self.traffic, self.interrupted = Traffic(), False
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._connect(stack)
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    @abc.abstractmethod
    def _connect(self, stack: contextlib.ExitStack) -> None:
        """Connect to the peers; the stack disconnects. Raises PeerError naming those that do not arrive."""

    @abc.abstractmethod
    def deliver(self, columns: Columns | None, num_bytes: int) -> Columns:
        """One microbatch. columns: what the reader read, None on the others.

        num_bytes: the planned size of the columns, equal on all peers; a hint.
        Raises EndOfStream, PeerError (a peer is lost), the reader's own MeshfeedError (it failed),
        TimeoutError (a live peer is too slow).
        """

    def fail(self, error: BaseException, num_bytes: int) -> None:  # noqa: B027
        """On the reader, instead of `deliver`: send the peers the error that ends the data."""

    def awaited(self) -> Sequence[int]:
        """From another thread: the ranks that `deliver` waits for, or waited for until its TimeoutError."""
        return ()

    def interrupt(self) -> None:
        """From another thread: stop. `deliver` raises EndOfStream as soon as its peers allow."""
        self.interrupted = True


class Direct(Delivery):
    """For a rank that reads for itself or needs no stored data: nothing is sent."""

    def _connect(self, stack: contextlib.ExitStack) -> None:
        pass

    def deliver(self, columns: Columns | None, num_bytes: int) -> Columns:
        """The columns themselves; {} if there are none."""
        if self.interrupted:
            raise EndOfStream
        return columns or {}
