"""One collective per microbatch: header and all columns in one buffer.

Every rank computes the buffer size from the plan. Columns of varying shape may exceed it, so the largest
excess so far is added. If a message still does not fit, its header says so, it is sent again in full, and all
ranks remember the excess.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import cast

import numpy as np

from meshfeed.arrays import Columns
from meshfeed.deliver import wire
from meshfeed.deliver.delivery import Delivery, EndOfStream
from meshfeed.deliver.meeting import Meeting
from meshfeed.errors import DeliveryError
from meshfeed.roles import Role

_GRAIN = 4096


class Broadcast(Delivery):
    """Columns from one reader to its peers by gloo's broadcast.

    All ranks end together: an interrupted reader announces the end in its next message. Until then the others
    continue to receive, and drop what they receive. So no collective is left half-done.
    """

    ends_at_once = False

    def __init__(self, role: Role, meeting: Meeting, patience_s: float | None) -> None:
        super().__init__()
        self._role, self._meeting, self._patience_s = role, meeting, patience_s
        self._source = cast(int, role.source)  # a role with peers has one
        self._surplus = 0
        self._buffer = np.zeros(0, np.uint8)

    def _connect(self, stack: contextlib.ExitStack) -> None:
        self._group = self._meeting.group("broadcast", self._role.peers, self._patience_s)
        stack.callback(self._group.close)

    def deliver(self, columns: Columns | None, num_bytes: int) -> Columns:
        if columns is None:
            return self._receive(num_bytes)
        if self.interrupted:
            self._send(wire.end_message(), num_bytes)
            raise EndOfStream
        try:
            message = wire.encode(columns)
        except DeliveryError as error:
            self.fail(error, num_bytes)
            raise
        self._send(message, num_bytes)
        return columns

    def awaited(self) -> Sequence[int]:
        return self._group.awaited()

    def fail(self, error: BaseException, num_bytes: int) -> None:
        self._send(wire.error_message(error), num_bytes)

    def _send(self, message: wire.Message, num_bytes: int) -> None:
        room = self._room(num_bytes)
        buffer = self._buffer_of(max(room, message.num_bytes))
        message.write(buffer)
        self._collective(buffer[:room])
        if message.num_bytes > room:
            self._collective(buffer[: message.num_bytes])
            self._surplus = message.num_bytes - num_bytes - wire.TABLE_ROOM

    def _receive(self, num_bytes: int) -> Columns:
        room = self._room(num_bytes)
        buffer = self._buffer_of(room)[:room]
        self._collective(buffer)
        kind, size = wire.peek(buffer)
        if size > room:
            buffer = self._buffer_of(size)[:size]
            self._collective(buffer)
            self._surplus = size - num_bytes - wire.TABLE_ROOM
        if kind == wire.ERROR:
            raise wire.decode_error(buffer)
        if kind == wire.END:
            raise EndOfStream(self._source)
        return wire.decode(buffer)

    def _room(self, num_bytes: int) -> int:
        return -(-(num_bytes + wire.TABLE_ROOM + self._surplus) // _GRAIN) * _GRAIN

    def _buffer_of(self, size: int) -> wire.Bytes:
        if self._buffer.size < size:
            self._buffer = np.zeros(size, np.uint8)
        return self._buffer

    def _collective(self, buffer: wire.Bytes) -> None:
        self._group.broadcast(buffer, self._source)
        self.traffic.collectives += 1
        self.traffic.num_bytes += buffer.size
