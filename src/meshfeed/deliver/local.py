"""Connections between ranks on one machine that run as the same user.

Any user may connect to an abstract Unix socket, or listen at a name that has become free. So both ends ask
the kernel for the peer's user before they read a byte or accept a descriptor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import time
import uuid
from collections.abc import Callable, Collection, Generator
from typing import Self

_HELLO = struct.Struct("<q")  # rank
_CHECK_EVERY_S = 0.5  # how often `accept` asks whether to stop

_log = logging.getLogger("meshfeed")


class Listener:
    """Accepts connections from ranks on this machine.

    Connections from other users are closed before anything is read. A connection that sends nothing does not
    delay the others.

    Attributes:
        name: the argument of `connect`. It is unique, so no other job and no earlier run of this one uses it.
    """

    def __init__(self) -> None:
        self.name = f"meshfeed-{uuid.uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._warned = False

    def __enter__(self) -> Self:
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(socket.SOMAXCONN)
        self._socket.setblocking(False)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(
        self, ranks: Collection[int], timeout_s: float, is_over: Callable[[], bool]
    ) -> Generator[tuple[int, socket.socket]]:
        """Each of these ranks and its connection, in order of arrival; the caller closes them.

        is_over: polled; whether to stop waiting. Raises TimeoutError then, and after `timeout_s`.
        """
        missing, deadline = set(ranks), time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            unidentified = selector.get_map().values()
            stack.callback(lambda: [key.data.close() for key in unidentified if key.data])
            selector.register(self._socket, selectors.EVENT_READ)
            while missing:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or is_over():
                    raise TimeoutError
                for key, _ in selector.select(min(left_s, _CHECK_EVERY_S)):
                    if key.data is None:
                        if (link := self._accept_own_user()) is not None:
                            selector.register(link, selectors.EVENT_READ, link)
                        continue
                    link = selector.unregister(key.data).data
                    if (rank := _rank_of(link)) not in missing:
                        link.close()
                        continue
                    missing.remove(rank)
                    link.setblocking(True)
                    yield rank, link

    def _accept_own_user(self) -> socket.socket | None:
        """The next connection; None if it belongs to another user or is already closed."""
        try:
            link, _ = self._socket.accept()
        except BlockingIOError:
            return None
        user = user_of(link)
        if user == os.geteuid():
            link.setblocking(False)
            return link
        link.close()
        if not self._warned:
            self._warned = True
            _log.warning(
                "a process of user %d connected to the shared memory of a rank of user %d and was refused; "
                "if it is a rank of this job, start all ranks of a machine as one user",
                user,
                os.geteuid(),
            )
        return None


def connect(name: str, rank: int, timeout_s: float) -> socket.socket:
    """Connect to a `Listener` and send this rank.

    Raises OSError; PermissionError if the listener belongs to another user.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # With a Python timeout, connecting fails at once when the queue of connections is full; with the
        # socket's own timeout it waits.
        seconds = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6) or 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        try:
            link.connect(f"\0{name}")
        except BlockingIOError as late:
            raise TimeoutError(f"its queue of connections was full for {timeout_s:g} s") from late
        if (user := user_of(link)) != os.geteuid():
            raise PermissionError(f"it runs as user {user}, this rank as user {os.geteuid()}")
        link.settimeout(timeout_s)
        link.send(_HELLO.pack(rank))
    except BaseException:
        link.close()
        raise
    return link


def user_of(link: socket.socket) -> int:
    """The user id of the process at the other end, from the kernel."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]


def _rank_of(link: socket.socket) -> int | None:
    """The rank that a connection sent; None if it sent anything else or was closed."""
    try:
        hello = link.recv(_HELLO.size + 1)
    except OSError:
        return None
    return _HELLO.unpack(hello)[0] if len(hello) == _HELLO.size else None
