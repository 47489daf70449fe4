"""Connections between the ranks of one machine, for processes of one user.

Any user may connect to an abstract unix socket, and any may listen at a name that has become free. So both
ends ask the kernel who is at the other one, before they read a byte or trust a descriptor.
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
from collections import deque
from collections.abc import Callable, Collection, Generator
from types import TracebackType
from typing import Self

_HELLO = struct.Struct("<q")  # rank
_LOOK_EVERY_S = 0.5  # for what ends the waiting from outside
_MOST_SILENT = 256  # connections of this user that have not said which rank they are

_log = logging.getLogger("meshfeed")


class Door:
    """Where ranks of this machine connect to one of them.

    Strangers are closed before anything is read. Nobody who connects, of any user, keeps another waiting.

    Attributes:
        name: what `connect` takes. Nobody else can have it: other jobs, and this one's earlier lives, never
            meet it.
    """

    def __init__(self) -> None:
        self.name = f"meshfeed-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._warned = False

    def __enter__(self) -> Self:
        try:
            self._listener.bind(f"\0{self.name}")
            self._listener.listen(socket.SOMAXCONN)
            self._listener.setblocking(False)
        except OSError:
            self._listener.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    def fileno(self) -> int:
        """The listening descriptor."""
        return self._listener.fileno()

    def accept(
        self, ranks: Collection[int], timeout_s: float, is_over: Callable[[], bool]
    ) -> Generator[tuple[int, socket.socket]]:
        """Each of these ranks and its connection, as they come; the caller closes them.

        is_over: asked now and then, whether to stop waiting. Raises TimeoutError then, and after `timeout_s`.
        """
        missing, deadline = set(ranks), time.monotonic() + timeout_s
        silent: deque[socket.socket] = deque()
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            stack.callback(lambda: [link.close() for link in silent])
            selector.register(self._listener, selectors.EVENT_READ)
            while missing:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or is_over():
                    raise TimeoutError
                for key, _ in selector.select(min(left_s, _LOOK_EVERY_S)):
                    if key.fileobj is self._listener:
                        if (link := self._welcome()) is not None:
                            silent.append(link)
                            selector.register(link, selectors.EVENT_READ, link)
                        if len(silent) > _MOST_SILENT:
                            selector.unregister(silent[0])
                            silent.popleft().close()
                    elif key.data in silent:
                        selector.unregister(key.data)
                        silent.remove(key.data)
                        rank = _introduced(key.data)
                        if rank not in missing:
                            key.data.close()
                            continue
                        missing.discard(rank)
                        key.data.setblocking(True)
                        yield rank, key.data

    def _welcome(self) -> socket.socket | None:
        """The next connection, where it is of this user."""
        try:
            link, _ = self._listener.accept()
        except BlockingIOError:
            return None  # it is gone already
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
    """A connection to a `Door`, once it has been told which rank this is.

    Raises OSError, PermissionError where a process of another user has the door.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # With a timeout of Python's, connecting fails at once where strangers fill the queue of connections;
        # with the socket's own, it waits its turn.
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
    """The user of the process at the other end, as the kernel knows it."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]


def _introduced(link: socket.socket) -> int | None:
    """The rank that a connection says it is; None where it says nothing that makes sense, or is gone."""
    try:
        hello = link.recv(_HELLO.size + 1)
    except OSError:
        return None
    return _HELLO.unpack(hello)[0] if len(hello) == _HELLO.size else None
