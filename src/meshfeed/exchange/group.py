"""The two collectives of an exchange, on any number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllToAllOptions

from meshfeed.deliver import Traffic
from meshfeed.errors import PeerError
from meshfeed.exchange.lengths import Bytes

_SIZE = 8  # bytes of the length in front of each message
_ROOM = 4096
_NO_TIMEOUT = timedelta(days=30)


class Group:
    """The members of an exchange.

    Args:
        process_group: a torch ProcessGroup, or a backend of one, for CPU tensors (gloo); None for a single
            member.
        patience_s: how long to wait for a member; None waits without limit, since a dead one is detected.
        ranks: the members' global ranks, for error messages.

    Attributes:
        traffic: counters of this rank.
    """

    def __init__(
        self,
        process_group: Any = None,
        *,
        patience_s: float | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.traffic = Traffic()
        self._group: Any = process_group
        self._ranks = ranks
        self._closed: Callable[[], Sequence[int]] = list
        self._timeout = _NO_TIMEOUT if patience_s is None else timedelta(seconds=patience_s)
        self._room = _ROOM
        self._kept = {name: np.zeros(0, np.uint8) for name in ("out", "row", "rows")}

    def join(self, process_group: Any, lost: Callable[[], Sequence[int]]) -> None:
        """Use this process group from now on. lost: the global ranks whose connections to it are closed."""
        self._group, self._closed = process_group, lost

    def leave(self) -> None:
        """Stop using the process group."""
        self._group = None

    @property
    def size(self) -> int:
        """Number of members."""
        return 1 if self._group is None else int(self._group.size())

    @property
    def member(self) -> int:
        """This rank's index among the members."""
        return 0 if self._group is None else int(self._group.rank())

    def buffer(self, name: str, num_bytes: int) -> Bytes:
        """A reusable send buffer of this name; results are never in it."""
        if self._kept[name].size < num_bytes:
            self._kept[name] = np.empty(num_bytes * 5 // 4, np.uint8)
        return self._kept[name][:num_bytes]

    def all_gather(self, message: bytes) -> list[Bytes]:
        """Every member's message, in order; one collective unless a message is much longer than before.

        The results own their memory. Raises PeerError if a member is lost.
        """
        if self.size == 1:
            return [np.frombuffer(message, np.uint8)]
        framed = np.frombuffer(len(message).to_bytes(_SIZE, "little") + message, np.uint8)
        rows = self._gather_room(framed)
        sizes = rows[:, :_SIZE].copy().view(np.int64)[:, 0]
        if _SIZE + int(sizes.max()) > self._room:
            # all members see the same sizes, so all enlarge the buffer equally and gather again
            self._room = -(-(_SIZE + int(sizes.max()) * 5 // 4) // _ROOM) * _ROOM
            rows = self._gather_room(framed)
        return [row[_SIZE : _SIZE + size].copy() for row, size in zip(rows, sizes.tolist())]

    def all_to_all(self, outgoing: Bytes, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> Bytes:
        """The bytes that members send to this one, concatenated, in new memory; one collective.

        outgoing: the bytes for each member, concatenated. out_sizes, in_sizes: bytes to and from each member.
        Raises PeerError if a member is lost.
        """
        if self.size == 1:
            return outgoing.copy()
        return self._collective(outgoing, out_sizes, np.empty(sum(in_sizes), np.uint8), in_sizes)

    def _gather_room(self, framed: Bytes) -> Bytes:
        row = self.buffer("row", self._room * self.size).reshape(self.size, self._room)
        row[:, : framed.size] = framed[: self._room]
        # gloo's all-gather is a ring of sequential hops; in its all-to-all all members send at once
        sizes = [self._room] * self.size
        rows = self.buffer("rows", self._room * self.size)
        return self._collective(row.reshape(-1), sizes, rows, sizes).reshape(self.size, self._room)

    def _collective(
        self, outgoing: Bytes, out_sizes: Sequence[int], incoming: Bytes, in_sizes: Sequence[int]
    ) -> Bytes:
        options = AllToAllOptions()
        options.timeout = self._timeout
        sent, got = torch.from_numpy(outgoing), torch.from_numpy(incoming)
        try:
            self._group.alltoall_base(got, sent, list(in_sizes), list(out_sizes), options).wait(self._timeout)
        except (RuntimeError, dist.DistError) as broken:
            raise self._lost(broken) from broken
        self.traffic.messages += 1
        self.traffic.collectives += 1
        self.traffic.num_bytes += outgoing.size + incoming.size - 2 * out_sizes[self.member]
        return incoming

    def _lost(self, broken: Exception) -> PeerError:
        ranks = range(self.size) if self._ranks is None else self._ranks
        here = f"rank {ranks[self.member]} waits for items of"
        if closed := self._closed():
            which = f"rank {closed[0]}" if len(closed) == 1 else f"ranks {list(closed)}"
            return PeerError(
                f"{here} {which}: the connection is closed; it died, or left its loop without closing its "
                f"Exchange (use it in `with`): {broken}",
                closed,
            )
        others = [rank for member, rank in enumerate(ranks) if member != self.member]
        return PeerError(
            f"{here} ranks {others}, and one of them died, hangs, or has left its loop without closing its "
            f"Exchange (use it in `with`): {broken}",
            others,
        )
