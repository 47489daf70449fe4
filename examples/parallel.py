"""What tensor, context and pipeline parallelism send, with its gradients.

Plain torch.distributed calls, so that nothing about the parallelism is hidden from a reader. A group of
one is None, and a collective over it is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import meshfeed as mf

Group = Any


class Place:
    """Where this process stands: its coordinate, its groups, its pipeline neighbours."""

    def __init__(self, layout: mf.Layout, rank: int) -> None:
        self.layout, self.rank, self.coord = layout, rank, layout.coord(rank)
        self.tp = _group(layout.group_of(rank, "tp").tolist())
        self.replicas = _group(layout.group_of(rank, "dp-cp").tolist())
        self.cp: dict[tuple[int, ...], Group] = {}
        self.is_first, self.is_last = self.coord.pp == 0, self.coord.pp == layout.pp - 1
        self.speaks = self.coord[:3] == (0, 0, 0)

    def neighbour(self, ahead: int) -> int:
        """The rank so many pipeline stages ahead, otherwise at the same place."""
        return self.layout.rank_of(self.coord._replace(pp=self.coord.pp + ahead))

    def make_cp_groups(self, feed: mf.Feed) -> None:
        """Every context-parallel group that this rank can be in, once, whichever a microbatch asks for."""
        self.cp = {ranks: _group(list(ranks)) for ranks in feed.cp_groups.values()}


def _group(ranks: list[int]) -> Group:
    return dist.new_group(ranks, use_local_synchronization=True) if len(ranks) > 1 else None


def backward(
    stage: torch.nn.Module, passed: Sequence[tuple[torch.Tensor | None, torch.Tensor]], place: Place
) -> None:
    """Backward through the pipeline, then the sum of the gradients over the replicas.

    passed: for each microbatch, what came from the stage before (None on the first), and what went to the
    next; on the last stage, the loss.
    """
    for received, y in passed:
        if place.is_last:
            y.backward()
        else:
            gradient = torch.empty_like(y)
            dist.recv(gradient, place.neighbour(+1))
            y.backward(gradient)
        if received is not None and received.grad is not None:
            dist.send(received.grad, place.neighbour(-1))
    for parameter in stage.parameters():
        parameter.grad = summed(parameter.grad, place.replicas) if parameter.grad is not None else None


class EnterSplit(torch.autograd.Function):
    """Into a tensor-parallel region: the input is everyone's, its gradient the sum of everyone's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return summed(grads[0], ctx.group), None


class LeaveSplit(torch.autograd.Function):
    """Out of a tensor-parallel region: the output is the sum of everyone's part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class GatherSequence(torch.autograd.Function):
    """Every context-parallel rank's tokens, [batch, tokens, ...], side by side along the tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group, ctx.tokens = group, x.shape[1]
        return gathered(x, group, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.group is None:
            return grads[0], None
        mine = dist.get_rank(ctx.group) * ctx.tokens
        return summed(grads[0], ctx.group)[:, mine : mine + ctx.tokens].contiguous(), None


def summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over a group, as a new tensor."""
    if group is None:
        return x
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def gathered(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """The tensors of a group, side by side along a dimension."""
    if group is None:
        return x
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)
