"""The TCP connections of a gloo group: hidden from children, and checked for lost peers.

gloo exposes neither its descriptors nor, when a connection breaks, the rank. Forked and executed children
inherit them, which would hide the death of this rank from its peers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
from collections.abc import Generator
from pathlib import Path

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.forks import Private

_HERE = Path("/proc/self/fd")


class Links:
    """Connections that a library opens between the creation of this object and `found`."""

    def __init__(self) -> None:
        self._private = Private()
        self._before = set(_inheritable_sockets())
        self._links: dict[int, tuple[int, int, int]] = {}  # descriptor -> file, this end, the other
        self._member_at: dict[int, int] = {}

    def found(self, num_members: int) -> Longs:
        """Digests of this end of each connection, for the other members; int64 [num_members], padded with
        0."""
        ends = np.zeros(num_members, np.int64)
        for descriptor, file in _inheritable_sockets() - self._before:
            self._private.add(descriptor)
            if (both := _ends_of(descriptor)) is not None:
                self._links[descriptor] = (file, *both)
        here = sorted({here for _, here, _ in self._links.values()})[:num_members]
        ends[: len(here)] = here
        return ends

    def identify(self, ends: Longs) -> None:
        """Map each connection to the member at its other end. ends: what each member `found`; int64 [n,
        n]."""
        theirs = [there for _, _, there in self._links.values()]
        for member, column in np.argwhere(np.isin(ends, theirs)).tolist():
            self._member_at[int(ends[member, column])] = member

    def shut(self) -> None:
        """Close all connections at both ends; their descriptors stay open."""
        for descriptor, (file, *_) in self._links.items():
            with contextlib.suppress(OSError), _borrowed(descriptor) as link:
                if os.fstat(descriptor).st_ino == file:
                    link.shutdown(socket.SHUT_RDWR)

    def lost(self) -> list[int]:
        """Members whose connections are closed."""
        ended = {there for descriptor, (file, _, there) in self._links.items() if _is_over(descriptor, file)}
        return sorted({self._member_at[there] for there in ended if there in self._member_at})


def _inheritable_sockets() -> set[tuple[int, int]]:
    """(descriptor, inode) of this process's sockets that its children would inherit.

    That includes gloo's sockets, but not those of Python and torch's stores.
    """
    found: set[tuple[int, int]] = set()
    with contextlib.suppress(FileNotFoundError):  # a system without /proc
        for entry in _HERE.iterdir():
            with contextlib.suppress(OSError):  # closed in the meantime
                file = os.fstat(descriptor := int(entry.name))
                if stat.S_ISSOCK(file.st_mode) and os.get_inheritable(descriptor):
                    found.add((descriptor, file.st_ino))
    return found


def _ends_of(descriptor: int) -> tuple[int, int] | None:
    """Digests of both ends of a TCP connection; None for any other socket, such as a listening one."""
    try:
        with _borrowed(descriptor) as link:
            if link.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            return _digest(link.family, link.getsockname()), _digest(link.family, link.getpeername())
    except OSError:
        return None


def _digest(family: int, name: tuple[str, int]) -> int:
    address = socket.inet_pton(family, name[0].partition("%")[0])
    digest = hashlib.blake2b(name[1].to_bytes(2, "big") + address, digest_size=8)
    return int.from_bytes(digest.digest(), "big", signed=True)


def _is_over(descriptor: int, file: int) -> bool:
    """Whether a connection was closed, by gloo or by its peer."""
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
    """A socket object for a descriptor, which stays open. Raises OSError if it is not a socket."""
    link = socket.socket(fileno=descriptor)
    try:
        yield link
    finally:
        link.detach()
