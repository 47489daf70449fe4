"""One reader per node and replica; its peers map what it read.

The reader (the *leader*) owns a ring of memfd slots. It hands their descriptors to each peer over an
abstract unix socket and then sends a *ticket* per microbatch: which slot, how many bytes. The bytes
themselves are written once and never cross a socket. A peer returns the ticket when it has built its
tensors, and the slot is free again.

Nothing of this has a name in a file system, so a killed process leaves nothing behind; a socket that
closes tells at once who has died. Wakeups are the socket's own: once all are connected, nobody polls.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import uuid
from types import TracebackType
from typing import Self

import numpy as np

from meshfeed.columns import Columns
from meshfeed.deliver import wire
from meshfeed.deliver.delivery import EndOfStream, Traffic
from meshfeed.deliver.forks import Private
from meshfeed.deliver.local import Door, connect
from meshfeed.deliver.meeting import Meeting
from meshfeed.errors import DeliveryError, PeerError
from meshfeed.files.mapping import mapped
from meshfeed.roles import Role

_TICKET = struct.Struct("<qq")  # microbatch number, bytes; a returned ticket has bytes 0
_BYE, _LOST = -1, -2  # instead of a number: I leave in peace; the rank in the other place has died
_MOST_SLOTS = 64  # one message carries at most 253 descriptors, and peers rarely lag by more than a few
_GRAIN = 1 << 16


def can_share() -> str | None:
    """Why this machine cannot share memory between ranks; None where it can."""
    try:
        _close(os.memfd_create("meshfeed-probe"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.bind(f"\0meshfeed-probe-{uuid.uuid4().hex}")
    except (AttributeError, OSError) as missing:
        return f"this machine lacks memfd or abstract Unix sockets: {missing}"
    return None


class _Slot:
    """A memfd and its mapping, which grow together."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.bytes = np.zeros(0, np.uint8)

    def reach(self, num_bytes: int, *, grow: bool) -> wire.Bytes:
        """At least so many bytes of the slot, mapped. grow: this is the leader, who sets the size."""
        if self.bytes.size < num_bytes:
            if grow:
                os.ftruncate(self.fd, -(-num_bytes // _GRAIN) * _GRAIN)
            # an earlier mapping lives on for as long as views of it do
            self.bytes = mapped(self.fd, write=grow)
        return self.bytes


class ShareLeader:
    """The reader's end: writes each microbatch into the next free slot."""

    def __init__(self, role: Role, meeting: Meeting, num_slots: int, patience_s: float | None) -> None:
        self.traffic = Traffic()
        self._role, self._meeting, self._patience_s = role, meeting, patience_s
        self._num_slots = min(num_slots, _MOST_SLOTS)
        self._resources, self._private = contextlib.ExitStack(), Private()
        self._slots: list[_Slot] = []
        self._peers: dict[int, socket.socket] = {}
        self._returned: dict[int, int] = {}
        self._next = 0
        self._wake = -1

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for s in range(self._num_slots):
                fd = os.memfd_create(f"meshfeed-{s}")
                stack.callback(_close, fd)
                self._private.add(fd)
                self._slots.append(_Slot(fd))
            self._wake = os.eventfd(0)
            stack.callback(_close, self._wake)
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._selector.register(self._wake, selectors.EVENT_READ)
            with Door() as door:
                self._private.add(door.fileno())
                # before they meet: whoever has met it can tell a leader that died from one that is late
                self._meeting.say(_door_of(self._role.rank), door.name)
                self._meeting.meet("share", self._role.peers)
                self._accept_all(door, stack)
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in self._peers.values():
            _part(peer)
        self._peers.clear()
        self._slots.clear()
        self._wake = -1  # the number may soon be another file's
        self._resources.close()

    def deliver(self, columns: Columns | None, num_bytes: int) -> Columns:
        """See Delivery."""
        if columns is None:
            raise DeliveryError(f"rank {self._role.rank} leads its node and must read, but read nothing")
        try:
            message = wire.encode(columns)
        except DeliveryError as error:
            self.fail(error, num_bytes)
            raise
        self._send(message)
        return columns

    def fail(self, error: BaseException, num_bytes: int) -> None:
        """See Delivery."""
        self._send(wire.error_message(error))

    def interrupt(self) -> None:
        """See Delivery."""
        with contextlib.suppress(OSError, ValueError):  # it has parted already
            os.eventfd_write(self._wake, 1)

    def _accept_all(self, door: Door, stack: contextlib.ExitStack) -> None:
        meeting, missing = self._meeting, set(self._role.peers) - {self._role.rank}
        try:
            for rank, peer in door.accept(missing, meeting.timeout_s, meeting.is_called_off):
                stack.enter_context(peer)
                self._private.add(peer.fileno())
                with contextlib.suppress(OSError):  # it is gone; its first ticket will say so
                    socket.send_fds(peer, [b"ring"], [slot.fd for slot in self._slots])
                missing.discard(rank)
                self._peers[rank] = peer
                self._returned[rank] = 0
                self._selector.register(peer, selectors.EVENT_READ, rank)
        except TimeoutError as late:
            why = "one of the job's ranks ended" if meeting.is_called_off() else "they did not come"
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
                self._receive(rank)  # says why: it left in peace, or it died
        self._next += 1
        self.traffic.messages += 1
        self.traffic.num_bytes += message.num_bytes

    def _await_tickets(self, count: int) -> None:
        """Wait until every peer has returned so many tickets; meanwhile notice who leaves."""
        timeout = 0.0  # look at what has come in, even when nothing has to be waited for
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
        """One ticket back from a peer. Raises PeerError where it has died."""
        peer = self._peers[rank]
        data = _heard(peer)
        number, _ = _TICKET.unpack(data or _TICKET.pack(_LOST, rank))
        if number in (_BYE, _LOST):
            self._selector.unregister(peer)
            del self._peers[rank]
        else:
            self._returned[rank] = number + 1
        if number == _LOST:
            self._tell_lost(rank)
            raise PeerError(
                f"rank {rank} died; rank {self._role.rank} was serving it from shared memory", [rank]
            )

    def _tell_lost(self, rank: int) -> None:
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.send(_TICKET.pack(_LOST, rank))


class ShareFollower:
    """A peer's end: maps the leader's slots and reads them in place."""

    def __init__(self, role: Role, meeting: Meeting, patience_s: float | None) -> None:
        self.traffic = Traffic()
        self._role, self._meeting, self._patience_s = role, meeting, patience_s
        self._resources, self._private = contextlib.ExitStack(), Private()
        self._slots: list[_Slot] = []
        self._interrupted = False
        self._held: int | None = None

    def __enter__(self) -> Self:
        role = self._role
        leader = _source_of(role)
        self._meeting.meet("share", role.peers)
        name = self._meeting.say(_door_of(leader), "gone")
        with contextlib.ExitStack() as stack:
            try:
                link = stack.enter_context(connect(name, role.rank, self._meeting.timeout_s))
                self._private.add(link.fileno())
                _, fds, _, _ = socket.recv_fds(link, 16, 250, socket.MSG_CMSG_CLOEXEC)
            except PermissionError as other_user:
                raise PeerError(
                    f"rank {role.rank} does not map the memory of rank {leader}, the reader of its node: "
                    f"{other_user}; start all ranks of a machine as one user, or choose delivery='broadcast'",
                    [leader],
                ) from other_user
            except OSError as lost:
                raise PeerError(
                    f"rank {role.rank} cannot reach rank {leader}, the reader of its node: {lost}; are both "
                    f"on one machine, and is ranks_per_node right?",
                    [leader],
                ) from lost
            for fd in fds:
                stack.callback(_close, fd)
                self._private.add(fd)
            if not fds:
                raise PeerError(f"rank {leader}, the reader of the node of rank {role.rank}, died", [leader])
            self._slots = [_Slot(fd) for fd in fds]
            link.settimeout(self._patience_s)
            self._link = link
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _part(self._link)
        self._slots.clear()
        self._resources.close()

    def deliver(self, columns: Columns | None, num_bytes: int) -> Columns:
        """See Delivery."""
        leader = _source_of(self._role)
        if self._held is not None:
            with contextlib.suppress(OSError):  # a leader that has left in peace takes no tickets back
                self._link.send(_TICKET.pack(self._held, 0))
            self._held = None
        data = _heard(self._link)
        if self._interrupted:
            raise EndOfStream
        if not data:
            raise PeerError(
                f"rank {leader} died; it reads for rank {self._role.rank} and for all ranks of "
                f"{self._role.peers}; restart the job",
                [leader],
            )
        number, size = _TICKET.unpack(data)
        if number == _BYE:
            raise EndOfStream
        if number == _LOST:
            raise PeerError(
                f"rank {size} died; rank {leader} noticed, rank {self._role.rank} ends too", [size]
            )
        self._held = number
        buffer = self._slots[number % len(self._slots)].reach(size, grow=False)[:size]
        self.traffic.messages += 1
        self.traffic.num_bytes += size
        kind, _ = wire.peek(buffer)
        if kind == wire.ERROR:
            raise wire.decode_error(buffer)
        return wire.decode(buffer)

    def fail(self, error: BaseException, num_bytes: int) -> None:
        """Only a leader reads; nothing to tell."""

    def interrupt(self) -> None:
        """See Delivery."""
        self._interrupted = True
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RD)


def _door_of(leader: int) -> str:
    """The key under which the peers of a leader find the address of its socket."""
    return f"share/{leader}/socket"


def _source_of(role: Role) -> int:
    if role.source is None:
        raise DeliveryError(f"rank {role.rank} has no source; its role takes part in no delivery")
    return role.source


def _heard(link: socket.socket) -> bytes:
    """The next thing that the other end has said; nothing where it is gone. Raises TimeoutError."""
    # Twice: where it closed over something that it had not read, the kernel tells that first, and its last
    # words, such as who has died, are still there.
    for _ in range(2):
        try:
            return link.recv(_TICKET.size)
        except TimeoutError:
            raise
        except OSError:
            continue
    return b""


def _part(link: socket.socket) -> None:
    """Say goodbye and take in what is still under way: unread data would reset the other end."""
    with contextlib.suppress(OSError):
        link.send(_TICKET.pack(_BYE, 0))
        link.shutdown(socket.SHUT_RD)
        while link.recv(_TICKET.size):
            pass


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)
