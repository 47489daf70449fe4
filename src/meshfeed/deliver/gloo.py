"""Gloo's collectives among some ranks, connected through a store and known to no process group of torch's."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.distributed_c10d import Store

from meshfeed.deliver.links import Links

# A rank may rightly wait for a broadcast for as long as its source's trainer is busy elsewhere. A dead peer
# closes its connection and is noticed at once; how long a trainer may wait for data is the Feed's timeout.
_NO_TIMEOUT = timedelta(days=30)


class GlooGroup:
    """Gloo connections of some ranks, apart from the groups that torch.distributed keeps a list of.

    `dist.new_group` calls a group by how many groups this rank is in already, so ranks with different
    pasts never meet, and one made again after it was destroyed meets the addresses of the first.
    """

    def __init__(self, store: Store, rank: int, peers: tuple[int, ...], timeout_s: float) -> None:
        self._peers = peers
        timeout, self._links = timedelta(seconds=timeout_s), Links()
        self._gloo: Any = dist.ProcessGroupGloo(store, peers.index(rank), len(peers), timeout)
        ends = self._gather(torch.from_numpy(self._links.found(len(peers))), timeout)
        self._links.identify(ends.numpy())
        # Who has nothing to say would leave, while another still connects and takes it for dead.
        self._gloo.barrier().wait(timeout)

    def broadcast(self, buffer: torch.Tensor, source: int, timeout_s: float | None) -> None:
        """Fill `buffer` with that of rank `source`. RuntimeError: a peer is gone, or late by `timeout_s`."""
        timeout = _NO_TIMEOUT if timeout_s is None else timedelta(seconds=timeout_s)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = self._peers.index(source), 0, timeout
        self._gloo.broadcast([buffer], options).wait(timeout)

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        """Each peer's row, in the order of peers, however late. RuntimeError: a peer is gone."""
        return self._gather(row, _NO_TIMEOUT)

    def _gather(self, row: torch.Tensor, timeout: timedelta) -> torch.Tensor:
        rows, options = [torch.empty_like(row) for _ in self._peers], AllgatherOptions()
        options.timeout = timeout
        self._gloo.allgather([rows], [row], options).wait(timeout)
        return torch.stack(rows)

    def lost(self) -> list[int]:
        """The ranks whose connections to this one are closed: they died, or left the group before it did."""
        return [self._peers[member] for member in self._links.lost()]

    @property
    def backend(self) -> Any:
        """What torch calls a backend: collectives among the peers, in their order."""
        return self._gloo

    def close(self) -> None:
        """Close the connections, which tells the peers."""
        self._gloo = None
