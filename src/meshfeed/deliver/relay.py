"""Two levels: one reader sends to a leader on each node, each leader shares with its node.

A rank's part is made of the other deliveries. The leaders are a broadcast group, each node a share ring,
and only who is in both does anything of its own: pass on what comes, data, errors and the end alike.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Self

from meshfeed.columns import Columns
from meshfeed.deliver.broadcast import Broadcast
from meshfeed.deliver.delivery import EndOfStream
from meshfeed.deliver.share import ShareLeader


class Relay:
    """A leader with a node to serve: hears across the nodes (or reads), tells within its own.

    It leaves both in the way of each: its node hears of the end at once, while from the other leaders it
    goes on receiving, and dropping, until the reader ends.
    """

    def __init__(self, across: Broadcast, within: ShareLeader) -> None:
        self._across, self._within = across, within
        self.traffic = within.traffic = across.traffic
        self._parted = False
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._across)
            stack.enter_context(self._within)
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def deliver(self, columns: Columns | None, num_bytes: int) -> Columns:
        """See Delivery."""
        try:
            columns = self._across.deliver(columns, num_bytes)
        except Exception as error:
            self._pass_on(error, num_bytes)
            raise
        if not self._parted:
            try:
                self._within.deliver(columns, num_bytes)
            except EndOfStream:
                self._part()
        return columns

    def fail(self, error: BaseException, num_bytes: int) -> None:
        """See Delivery."""
        try:
            self._across.fail(error, num_bytes)
        finally:
            self._pass_on(error, num_bytes)

    def interrupt(self) -> None:
        """See Delivery."""
        self._across.interrupt()
        self._within.interrupt()

    def _pass_on(self, error: BaseException, num_bytes: int) -> None:
        if self._parted:
            return
        # A node that has gone its own way in the meantime needs no news.
        with contextlib.suppress(EndOfStream, OSError, RuntimeError):
            if isinstance(error, EndOfStream):
                self._part()
            else:
                self._within.fail(error, num_bytes)

    def _part(self) -> None:
        self._parted = True
        self._within.__exit__(None, None, None)
