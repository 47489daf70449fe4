"""Two levels: one reader sends to a leader on each node; each leader shares with its node.

It is composed of the other deliveries. The leaders form a broadcast group and each node a share ring. A rank
in both forwards what it receives: data, errors and the end.
"""

from __future__ import annotations

import contextlib

from meshfeed.columns import Columns
from meshfeed.deliver.broadcast import Broadcast
from meshfeed.deliver.delivery import Delivery, EndOfStream
from meshfeed.deliver.share import ShareLeader


class Relay(Delivery):
    """A leader with a node to serve: receives across nodes (or reads) and forwards within its own.

    When its node ends, it leaves the share ring at once. From the other leaders it continues to receive, and
    drops what it receives, until the reader ends.
    """

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
        except Exception as error:
            self._forward(error, num_bytes)
            raise
        if not self._left:
            try:
                self._within.deliver(columns, num_bytes)
            except EndOfStream:
                self._leave()
        return columns

    def fail(self, error: BaseException, num_bytes: int) -> None:
        try:
            self._across.fail(error, num_bytes)
        finally:
            self._forward(error, num_bytes)

    def interrupt(self) -> None:
        self._across.interrupt()
        self._within.interrupt()

    def _forward(self, error: BaseException, num_bytes: int) -> None:
        if self._left:
            return
        # a node that has already ended needs no message
        with contextlib.suppress(EndOfStream, OSError, RuntimeError):
            if isinstance(error, EndOfStream):
                self._leave()
            else:
                self._within.fail(error, num_bytes)

    def _leave(self) -> None:
        self._left = True
        self._within.__exit__(None, None, None)
