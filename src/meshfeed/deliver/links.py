"""The TCP connections of a gloo group: kept from children, and asked who at the other end is gone.

gloo names neither its descriptors nor, when one breaks, the rank. It leaves them open to forked and executed
children, where they would hide the death of this rank from its peers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Generator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshfeed.deliver.forks import Private

_HERE = Path("/proc/self/fd")
_END_BYTES = 18  # port, and an address of IPv4 or IPv6


class Links:
    """Connections that a library has opened between the making of this object and `found`."""

    def __init__(self) -> None:
        self._private = Private()
        self._before = set(_inheritable_sockets())
        self._links: dict[int, tuple[int, bytes, bytes]] = {}  # descriptor -> file, this end, the other
        self._member_at: dict[bytes, int] = {}

    def found(self, num_members: int) -> npt.NDArray[np.uint8]:
        """This end of each connection, for the other members; uint8 [num_members x 18]."""
        ends = np.zeros((num_members, _END_BYTES), np.uint8)
        for descriptor, file in _inheritable_sockets() - self._before:
            self._private.add(descriptor)
            if (both := _ends_of(descriptor)) is not None:
                self._links[descriptor] = (file, *both)
        for row, (_, here, _) in zip(ends, self._links.values()):
            row[:] = np.frombuffer(here, np.uint8)
        return ends.reshape(-1)

    def identify(self, ends: npt.NDArray[np.uint8]) -> None:
        """Learn who is at the other end of each. ends: what each member `found`; uint8 [n, n x 18]."""
        for member, row in enumerate(ends):
            for end in row.reshape(-1, _END_BYTES):
                self._member_at[end.tobytes()] = member

    def lost(self) -> list[int]:
        """Members whose connections are closed."""
        ended = {there for descriptor, (file, _, there) in self._links.items() if _is_over(descriptor, file)}
        return sorted({self._member_at[there] for there in ended if there in self._member_at})


def _inheritable_sockets() -> set[tuple[int, int]]:
    """(descriptor, inode) of this process's sockets that its children would get.

    Those of gloo are among them; what Python and torch's stores open is not.
    """
    found: set[tuple[int, int]] = set()
    with contextlib.suppress(FileNotFoundError):  # a system without /proc
        for entry in _HERE.iterdir():
            with contextlib.suppress(OSError):  # closed in the meantime
                file = os.fstat(descriptor := int(entry.name))
                if stat.S_ISSOCK(file.st_mode) and os.get_inheritable(descriptor):
                    found.add((descriptor, file.st_ino))
    return found


def _ends_of(descriptor: int) -> tuple[bytes, bytes] | None:
    """Both ends of a TCP connection as bytes; None for any other socket, such as one that listens."""
    try:
        with _borrowed(descriptor) as link:
            if link.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            return _end(link.family, link.getsockname()), _end(link.family, link.getpeername())
    except OSError:
        return None


def _end(family: int, name: tuple[str, int]) -> bytes:
    address = socket.inet_pton(family, name[0].partition("%")[0])
    return (name[1].to_bytes(2, "big") + address).ljust(_END_BYTES, b"\0")


def _is_over(descriptor: int, file: int) -> bool:
    """Whether a connection was closed, by gloo or at its other end."""
    try:
        with _borrowed(descriptor) as link:
            if os.fstat(link.fileno()).st_ino != file:
                return True
            return link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Generator[socket.socket]:
    """A socket object of another's descriptor, which stays open. Raises OSError where that is no socket."""
    own = os.dup(descriptor)
    try:
        link = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
    with link:
        yield link
