"""Collectives among some ranks on CPU memory, whose errors name the lost ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions
from torch.distributed.distributed_c10d import Store

from meshfeed.arrays import Array, Bytes
from meshfeed.deliver.delivery import Traffic
from meshfeed.deliver.links import Links
from meshfeed.errors import PeerError

# Data may be late: the source's trainer may be busy. A dead peer is detected at once by its closed
# connection, and the Feed's timeout limits how long a trainer waits for data.
_NO_TIMEOUT = timedelta(days=30)
_SIZE = 8  # bytes of the length in front of each gathered message
_ROOM = 4096
_FIRST_ROOM = 1 << 16  # of the first gathering, when nothing is known of the messages
_FIRST_BYTES = 1 << 22  # that it sends at most, however many the members


class Group:
    """The members of an exchange, or of another group of ranks.

    Args:
        process_group: a torch ProcessGroup, or a backend of one, for CPU tensors (gloo); None for a single
            member.
        patience_s: how long to wait for a member; None waits without limit, since a dead one is detected.
        ranks: the members' global ranks, for error messages.
        purpose: what the group is for, for error messages.

    Attributes:
        traffic: counters of this rank.
    """

    def __init__(
        self,
        process_group: Any = None,
        *,
        patience_s: float | None = None,
        ranks: Sequence[int] | None = None,
        purpose: str = "exchange",
    ) -> None:
        self.traffic = Traffic()
        self._group: Any = process_group
        self._ranks = tuple(range(self.size) if ranks is None else ranks)
        self._purpose = purpose
        self._timeout = _NO_TIMEOUT if patience_s is None else timedelta(seconds=patience_s)
        self._links: Links | None = None
        self._awaits = False
        self._room, self._largest = max(_ROOM, min(_FIRST_ROOM, _FIRST_BYTES // self.size)), 0
        self._kept = np.zeros(0, np.uint8)

    @classmethod
    def connect(
        cls,
        store: Store,
        rank: int,
        ranks: tuple[int, ...],
        timeout_s: float,
        *,
        patience_s: float | None = None,
        purpose: str = "exchange",
    ) -> Self:
        """A group with gloo connections of its own, not registered with torch.distributed.

        `dist.new_group` names a group by the number of groups this rank has joined. Ranks with different
        histories therefore never meet, and a group created again after its destruction finds the addresses
        of the first. timeout_s: how long to wait for the others.
        """
        timeout, links = timedelta(seconds=timeout_s), Links()
        gloo: Any = dist.ProcessGroupGloo(store, ranks.index(rank), len(ranks), timeout)
        own, options = torch.from_numpy(links.found(len(ranks))), AllgatherOptions()
        ends, options.timeout = [torch.empty_like(own) for _ in ranks], timeout
        gloo.allgather([ends], [own], options).wait(timeout)
        links.identify(torch.stack(ends).numpy())
        # Without it a rank could finish and leave while another still connects and takes it for dead.
        gloo.barrier().wait(timeout)
        made = cls(gloo, patience_s=patience_s, ranks=ranks, purpose=purpose)
        made._links = links
        return made

    def close(self) -> None:
        """Stop using the connections. Those that the group has made are closed; the peers detect that."""
        if self._awaits and self._links is not None:
            self._links.shut()  # else gloo waits for the collective that this rank no longer waits for
        self._group = None

    def awaited(self) -> Sequence[int]:
        """The other members, while this one waits for them in a collective, or has waited too long."""
        return self._others if self._awaits else ()

    @property
    def size(self) -> int:
        return 1 if self._group is None else int(self._group.size())

    @property
    def member(self) -> int:
        """This rank's index among the members."""
        return 0 if self._group is None else int(self._group.rank())

    def buffer(self, num_bytes: int) -> Bytes:
        """The buffer to send from, reused from step to step; results are never in it."""
        if self._kept.size < num_bytes:
            self._kept = np.empty(num_bytes * 5 // 4, np.uint8)
        return self._kept[:num_bytes]

    def broadcast(self, buffer: Bytes, source: int) -> None:
        """Fill `buffer` with that of rank `source`. Raises PeerError if a member is lost."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self._ranks.index(source), 0
        options.timeout = _NO_TIMEOUT
        with self._naming_lost():
            self._wait(self._group.broadcast([torch.from_numpy(buffer)], options))

    def all_gather(self, message: bytes | Array) -> list[Bytes]:
        """Every member's message, in order; one collective unless one is over twice as long as any before.

        The results own their memory. Raises PeerError if a member is lost.
        """
        content = np.frombuffer(message, np.uint8)
        if self.size == 1:
            return [content.copy()]
        framed = np.concatenate([np.array([content.size]).view(np.uint8), content])
        rows = self._gather_room(framed)
        sizes = rows[:, :_SIZE].copy().view(np.int64)[:, 0]
        longest = _SIZE + int(sizes.max())
        if longest > self._room:  # all members see the same sizes, so all gather again
            self._room = _rounded(longest)
            rows = self._gather_room(framed)
        self._largest = max(self._largest, longest)
        self._room = _rounded(2 * self._largest)
        return [row[_SIZE : _SIZE + size].copy() for row, size in zip(rows, sizes.tolist())]

    def all_to_all(self, outgoing: Bytes, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> Bytes:
        """The bytes that members send to this one, concatenated, in new memory; one collective.

        outgoing: the bytes for each member, concatenated. out_sizes, in_sizes: bytes to and from each member.
        Raises PeerError if a member is lost.
        """
        if self.size == 1:
            return outgoing.copy()
        incoming, options = np.empty(sum(in_sizes), np.uint8), AllToAllOptions()
        options.timeout = _NO_TIMEOUT
        sent, got = torch.from_numpy(outgoing), torch.from_numpy(incoming)
        with self._naming_lost():
            self._wait(self._group.alltoall_base(got, sent, list(in_sizes), list(out_sizes), options))
        self.traffic.collectives += 1
        self.traffic.num_bytes += outgoing.size + incoming.size - 2 * out_sizes[self.member]
        return incoming

    def all_to_many(
        self,
        outgoing: Bytes,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
        receivers: Sequence[Sequence[int]],
    ) -> Bytes:
        """`all_to_all` in which several members get the same bytes, from the one copy in `outgoing`.

        receivers: the members that get each part of `outgoing`. out_sizes: bytes of each part. in_sizes:
        bytes from each of the first members.
        """
        incoming = np.empty(sum(in_sizes), np.uint8)
        sent, got = torch.from_numpy(outgoing), torch.from_numpy(incoming)
        parts, places = sent.split(list(out_sizes)), got.split(list(in_sizes))
        waiting: list[Any] = []
        with self._naming_lost():
            for sender, place in enumerate(places):
                if sender != self.member and place.numel():
                    waiting.append(self._group.recv([place], sender, 0))
            for part, to in zip(parts, receivers):
                for receiver in to if part.numel() else ():
                    if receiver == self.member:
                        places[self.member].copy_(part)
                    else:
                        waiting.append(self._group.send([part], receiver, 0))
                        self.traffic.num_bytes += part.numel()
            for work in waiting:
                self._wait(work)
        self.traffic.collectives += 1
        self.traffic.num_bytes += sum(
            place.numel() for sender, place in enumerate(places) if sender != self.member
        )
        return incoming

    def _gather_room(self, framed: Bytes) -> Bytes:
        row = np.zeros((self.size, self._room), np.uint8)
        row[:, : framed.size] = framed[: self._room]
        # gloo's all-gather is a ring of sequential hops; in its all-to-all all members send at once
        sizes = [self._room] * self.size
        return self.all_to_all(row.reshape(-1), sizes, sizes).reshape(row.shape)

    def lost(self) -> list[int]:
        """The ranks whose connections to this one are closed: they died or left the group first."""
        return [] if self._links is None else [self._ranks[member] for member in self._links.lost()]

    @property
    def _others(self) -> list[int]:
        return [rank for member, rank in enumerate(self._ranks) if member != self.member]

    def _wait(self, work: Any) -> None:
        """Wait for a collective. Raises TimeoutError; the collective goes on.

        gloo has no timeout of its own: there it would close all connections, as if this rank had died.
        """
        began = time.monotonic()
        try:
            work.wait(self._timeout)
        except RuntimeError:
            if time.monotonic() - began < self._timeout.total_seconds():
                raise
            raise TimeoutError from None

    @contextlib.contextmanager
    def _naming_lost(self) -> Generator[None]:
        """Raise PeerError if a collective fails, naming the ranks whose connections are closed."""
        self._awaits = True
        try:
            yield
        except (RuntimeError, dist.DistError) as broken:
            rank, lost = self._ranks[self.member], self.lost()
            ended = "died, or left its loop without closing its Feed or Exchange (use it in `with`)"
            if not lost:
                raise PeerError(
                    f"rank {rank} lost its {self._purpose} group {self._ranks}: {broken}; one of them "
                    f"{ended}",
                    self._others,
                ) from broken
            which = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {lost}"
            raise PeerError(
                f"rank {rank} lost its {self._purpose} group {self._ranks}: the connection to {which} is "
                f"closed ({broken}); it {ended}",
                lost,
            ) from broken
        self._awaits = False


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _ROOM) * _ROOM
