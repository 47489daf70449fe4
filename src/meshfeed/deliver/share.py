"""One reader per node and replica; its peers map the memory it wrote.

The reader (the *leader*) owns a ring of memfd slots. It passes their descriptors to each peer over an
abstract Unix socket. Then it sends a *ticket* per microbatch: which slot, how many bytes. The data are
written once and never cross a socket. A peer returns the ticket when it has built its tensors, which frees
the slot.

Nothing has a name in the file system, so a killed process leaves nothing behind, and its closed socket
reveals its death at once. After connecting, nothing polls: ranks wake each other through the sockets.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import uuid
from collections.abc import Sequence
from typing import cast

import numpy as np

from meshfeed.arrays import Columns
from meshfeed.deliver import wire
from meshfeed.deliver.delivery import Delivery, EndOfStream
from meshfeed.deliver.local import Listener, connect
from meshfeed.deliver.meeting import Meeting
from meshfeed.errors import DeliveryError, PeerError
from meshfeed.files.local.mapping import mapped
from meshfeed.forks import Private
from meshfeed.roles import Role

_TICKET = struct.Struct("<qq")  # microbatch number, bytes; a returned ticket has bytes 0
_BYE, _LOST = -1, -2  # instead of a number: the rank in the second field ends normally, or has died
_MAX_SLOTS = 64  # one message carries at most 253 descriptors, and peers rarely lag by more than a few slots
_GRAIN = 1 << 16


def can_share() -> str | None:
    """Why this machine cannot share memory between ranks; None if it can."""
    try:
        _close(os.memfd_create("meshfeed-probe"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.bind(f"\0meshfeed-probe-{uuid.uuid4().hex}")
    except (AttributeError, OSError) as missing:
        return f"this machine lacks memfd or abstract Unix sockets: {missing}"
    return None


class _Slot:
    """A memfd and its mapping."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.bytes = np.zeros(0, np.uint8)

    def reach(self, num_bytes: int, *, grow: bool) -> wire.Bytes:
        """Map at least `num_bytes` of the slot. grow: enlarge the memfd first; on the leader only."""
        if self.bytes.size < num_bytes:
            if grow:
                os.ftruncate(self.fd, -(-num_bytes // _GRAIN) * _GRAIN)
            # the old mapping stays valid while views of it exist
            self.bytes = mapped(self.fd, write=grow)
        return self.bytes


class ShareLeader(Delivery):
    """The reader's end: writes each microbatch into the next free slot.

    Attributes:
        ended: the rank that its peers are told of when it leaves them: itself, or where its data end.
    """

    def __init__(self, role: Role, meeting: Meeting, num_slots: int, patience_s: float | None) -> None:
        super().__init__()
        self._role, self._meeting, self._patience_s = role, meeting, patience_s
        self._num_slots, self.ended = min(num_slots, _MAX_SLOTS), role.rank
        self._private = Private()
        self._slots: list[_Slot] = []
        self._peers: dict[int, socket.socket] = {}
        self._returned: dict[int, int] = {}
        self._next = self._needed = 0
        self._wake = -1

    def _connect(self, stack: contextlib.ExitStack) -> None:
        for s in range(self._num_slots):
            fd = os.memfd_create(f"meshfeed-{s}")
            stack.callback(_close, fd)
            self._private.add(fd)
            self._slots.append(_Slot(fd))
        self._wake = os.eventfd(0)
        stack.callback(_close, self._wake)
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._selector.register(self._wake, selectors.EVENT_READ)
        with Listener() as listener:
            self._private.add(listener.fileno())
            # before meeting: a follower that has met can then tell a dead leader from a late one
            self._meeting.say(_address_key(self._role.rank), listener.name)
            self._meeting.meet("share", self._role.peers)
            self._accept_all(listener, stack)
        stack.callback(self._leave)

    def _leave(self) -> None:
        for peer in self._peers.values():
            _close_link(peer, self.ended)
        self._peers.clear()
        self._slots.clear()
        self._wake = -1  # another file may soon have this number

    def deliver(self, columns: Columns | None, num_bytes: int) -> Columns:
        columns = columns or {}
        try:
            message = wire.encode(columns)
        except DeliveryError as error:
            self.fail(error, num_bytes)
            raise
        self._send(message)
        return columns

    def fail(self, error: BaseException, num_bytes: int) -> None:
        self._send(wire.error_message(error))

    def awaited(self) -> Sequence[int]:
        return [rank for rank in list(self._peers) if self._returned[rank] < self._needed]

    def interrupt(self) -> None:
        super().interrupt()
        with contextlib.suppress(OSError, ValueError):  # already closed
            os.eventfd_write(self._wake, 1)

    def _accept_all(self, listener: Listener, stack: contextlib.ExitStack) -> None:
        meeting, missing = self._meeting, set(self._role.peers) - {self._role.rank}
        try:
            for rank, peer in listener.accept(missing, meeting.timeout_s, meeting.cancelled.is_set):
                stack.enter_context(peer)
                self._private.add(peer.fileno())
                with contextlib.suppress(OSError):  # it has died; reading its first ticket reports that
                    socket.send_fds(peer, [b"ring"], [slot.fd for slot in self._slots])
                missing.discard(rank)
                self._peers[rank] = peer
                self._returned[rank] = 0
                self._selector.register(peer, selectors.EVENT_READ, rank)
        except TimeoutError as late:
            why = "one of the job's ranks ended" if meeting.cancelled.is_set() else "they did not connect"
            raise PeerError(
                f"rank {self._role.rank} waited up to {meeting.timeout_s:g} s for rank(s) "
                f"{sorted(missing)} to map its memory; {why}",
                sorted(missing),
            ) from late

    def _send(self, message: wire.Message) -> None:
        slot = self._slots[self._next % self._num_slots]
        self._await_tickets(self._next + 1 - self._num_slots)
        message.write(slot.reach(message.num_bytes, grow=True))
        for rank, peer in list(self._peers.items()):
            try:
                peer.send(_TICKET.pack(self._next, message.num_bytes))
            except OSError:
                self._receive(rank)  # finds out whether it ended normally or died
        self._next += 1
        self.traffic.num_bytes += message.num_bytes

    def _await_tickets(self, count: int) -> None:
        """Wait until every peer has returned `count` tickets; handle peers that leave meanwhile."""
        self._needed, timeout = count, 0.0  # read what has arrived even if there is nothing to wait for
        while True:
            ready = self._selector.select(timeout)
            if not ready and timeout:
                raise TimeoutError
            for key, _ in ready:
                if key.data is None:
                    raise EndOfStream
                self._receive(key.data)
            if all(self._returned[rank] >= count for rank in self._peers):
                return
            timeout = self._patience_s

    def _receive(self, rank: int) -> None:
        """Take one ticket back from a peer. Raises PeerError if it has died."""
        peer = self._peers[rank]
        data = _read_ticket(peer)
        number, _ = _TICKET.unpack(data or _TICKET.pack(_LOST, rank))
        if number in (_BYE, _LOST):
            self._selector.unregister(peer)
            del self._peers[rank]
        else:
            self._returned[rank] = number + 1
        if number == _LOST:
            for peer in self._peers.values():
                with contextlib.suppress(OSError):
                    peer.send(_TICKET.pack(_LOST, rank))
            raise PeerError(
                f"rank {rank} died; rank {self._role.rank} was serving it from shared memory", [rank]
            )


class ShareFollower(Delivery):
    """A follower's end: maps the leader's slots and reads them in place."""

    def __init__(self, role: Role, meeting: Meeting, patience_s: float | None) -> None:
        super().__init__()
        self._role, self._meeting, self._patience_s = role, meeting, patience_s
        self._leader = cast(int, role.source)  # a role with peers has one
        self._private = Private()
        self._slots: list[_Slot] = []
        self._held: int | None = None
        self._awaits = False

    def _connect(self, stack: contextlib.ExitStack) -> None:
        rank, leader = self._role.rank, self._leader
        self._meeting.meet("share", self._role.peers)
        name = self._meeting.say(_address_key(leader), "gone")  # "gone": the leader has not written its name
        try:
            link = stack.enter_context(connect(name, rank, self._meeting.timeout_s))
            self._private.add(link.fileno())
            _, fds, flags, _ = socket.recv_fds(link, 16, 250, socket.MSG_CMSG_CLOEXEC)
        except PermissionError as other_user:
            raise PeerError(
                f"rank {rank} cannot map the memory of rank {leader}, the reader of its node: {other_user}; "
                f"start all ranks of a machine as one user, or choose delivery='broadcast'",
                [leader],
            ) from other_user
        except OSError as lost:
            raise PeerError(
                f"rank {rank} cannot reach rank {leader}, the reader of its node: {lost}; are both on one "
                f"machine, and is ranks_per_node right?",
                [leader],
            ) from lost
        for fd in fds:
            stack.callback(_close, fd)
            self._private.add(fd)
        if flags & socket.MSG_CTRUNC:  # with some of the slots it would take one for another
            raise DeliveryError(
                f"rank {rank} got {len(fds)} descriptors of the memory of rank {leader} and can have no "
                f"more; raise its limit of open files, ulimit -n"
            )
        if not fds:
            raise PeerError(f"rank {leader}, the reader of the node of rank {rank}, died", [leader])
        self._slots = [_Slot(fd) for fd in fds]
        link.settimeout(self._patience_s)
        self._link = link
        stack.callback(self._slots.clear)
        stack.callback(_close_link, link, rank)

    def deliver(self, columns: Columns | None, num_bytes: int) -> Columns:
        leader = self._leader
        if self._held is not None:
            with contextlib.suppress(OSError):  # a leader that has ended takes no tickets back
                self._link.send(_TICKET.pack(self._held, 0))
            self._held = None
        self._awaits = True
        data = _read_ticket(self._link)
        self._awaits = False
        if self.interrupted:
            raise EndOfStream
        if not data:
            raise PeerError(
                f"rank {leader} died; it reads for rank {self._role.rank} and for all ranks of "
                f"{self._role.peers}; restart the job",
                [leader],
            )
        number, size = _TICKET.unpack(data)
        if number == _BYE:
            raise EndOfStream(size)
        if number == _LOST:
            raise PeerError(
                f"rank {size} died; rank {leader} noticed, rank {self._role.rank} ends too", [size]
            )
        self._held = number
        buffer = self._slots[number % len(self._slots)].reach(size, grow=False)[:size]
        self.traffic.num_bytes += size
        kind, _ = wire.peek(buffer)
        if kind == wire.ERROR:
            raise wire.decode_error(buffer)
        return wire.decode(buffer)

    def awaited(self) -> Sequence[int]:
        return [self._leader] if self._awaits else ()

    def interrupt(self) -> None:
        super().interrupt()
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RD)


def _address_key(leader: int) -> str:
    """The key under which the peers of a leader find the address of its socket."""
    return f"share/{leader}/socket"


def _read_ticket(link: socket.socket) -> bytes:
    """The next ticket; b"" if the other end is closed. Raises TimeoutError."""
    # Try twice: if the other end closed with unread data, the first call reports a reset, and its last
    # ticket, such as which rank died, can still be read.
    for _ in range(2):
        try:
            return link.recv(_TICKET.size)
        except TimeoutError:
            raise
        except OSError:
            continue
    return b""


def _close_link(link: socket.socket, ended: int) -> None:
    """Send _BYE, then drain what is still in flight: closing with unread data would reset the connection."""
    with contextlib.suppress(OSError):
        link.send(_TICKET.pack(_BYE, ended))
        link.shutdown(socket.SHUT_RD)
        while link.recv(_TICKET.size):
            pass


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)
