"""Messages between a reading process and its helper: pickled objects over a socket pair."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any


class Channel:
    """One end. Any thread may send, and so may a destructor: a thread of its own does the waiting."""

    def __init__(self, end: socket.socket) -> None:
        self._connection = Connection(end.detach())
        self._outgoing: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Start to send."""
        threading.Thread(target=self._send_all, name="meshfeed-send", daemon=True).start()

    def send(self, *message: Any) -> None:
        """Send a message after those before; it is lost if the other end is gone."""
        self._outgoing.put(ForkingPickler.dumps(message))

    def receive(self) -> Any:
        """The next message. Raises EOFError or OSError once the other end is gone."""
        return self._connection.recv()

    def close(self) -> None:
        """Close this end. Not while another thread receives."""
        self._outgoing.put(None)
        with contextlib.suppress(OSError):
            self._connection.close()

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._outgoing.get()) is not None:
                self._connection.send_bytes(message)
