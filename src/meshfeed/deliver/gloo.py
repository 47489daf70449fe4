"""Gloo collectives among some ranks, connected through a store, outside torch's process groups."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.distributed_c10d import Store

from meshfeed.deliver.links import Links
from meshfeed.errors import PeerError

# A broadcast has no limit of its own: the source's trainer may be busy. A dead peer is detected at once by
# its closed connection, and the Feed's timeout limits how long a trainer waits for data.
_NO_TIMEOUT = timedelta(days=30)


class GlooGroup:
    """Gloo connections among some ranks, not registered with torch.distributed.

    `dist.new_group` names a group by the number of groups this rank has joined. Ranks with different
    histories therefore never meet, and a group created again after its destruction finds the addresses of the
    first.

    Attributes:
        backend: the torch backend: collectives among the peers, in their order.
    """

    def __init__(
        self, store: Store, rank: int, peers: tuple[int, ...], timeout_s: float, purpose: str
    ) -> None:
        self._rank, self._peers, self._purpose = rank, peers, purpose
        timeout, self._links = timedelta(seconds=timeout_s), Links()
        self.backend: Any = dist.ProcessGroupGloo(store, peers.index(rank), len(peers), timeout)
        ends = self._gather(torch.from_numpy(self._links.found(len(peers))), timeout)
        self._links.identify(ends.numpy())
        # Without it a rank could finish and leave while another still connects and takes it for dead.
        self.backend.barrier().wait(timeout)

    def broadcast(self, buffer: torch.Tensor, source: int, timeout_s: float | None) -> None:
        """Fill `buffer` with that of rank `source`. PeerError: a peer is lost or exceeds `timeout_s`."""
        timeout = _NO_TIMEOUT if timeout_s is None else timedelta(seconds=timeout_s)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = self._peers.index(source), 0, timeout
        with self._naming_lost([] if source == self._rank else [source]):
            self.backend.broadcast([buffer], options).wait(timeout)

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        """Each peer's row, in the order of peers; waits without limit. PeerError: a peer is lost."""
        with self._naming_lost([]):
            return self._gather(row, _NO_TIMEOUT)

    def _gather(self, row: torch.Tensor, timeout: timedelta) -> torch.Tensor:
        rows, options = [torch.empty_like(row) for _ in self._peers], AllgatherOptions()
        options.timeout = timeout
        self.backend.allgather([rows], [row], options).wait(timeout)
        return torch.stack(rows)

    @contextlib.contextmanager
    def _naming_lost(self, suspects: Sequence[int]) -> Generator[None]:
        """Raise PeerError if a collective fails. suspects: whom to name if no connection is closed."""
        try:
            yield
        except (RuntimeError, dist.DistError) as broken:
            text = f"rank {self._rank} lost its {self._purpose} group {self._peers}"
            if lost := self.lost():
                which = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {lost}"
                raise PeerError(f"{text}: the connection to {which} is closed ({broken})", lost) from broken
            raise PeerError(f"{text}: {broken}", suspects) from broken

    def lost(self) -> list[int]:
        """The ranks whose connections to this one are closed: they died or left the group first."""
        return [self._peers[member] for member in self._links.lost()]

    def close(self) -> None:
        """Close the connections; the peers detect that."""
        self.backend = None
