"""A small GPT, cut by tensor, context and pipeline parallelism.

Every parameter is drawn whole from a generator keyed by its name, and a rank keeps its part: so the model
is the same under every layout.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from parallel import EnterSplit, GatherSequence, Group, LeaveSplit, Place
from torch import nn
from torch.nn import functional as F

import meshfeed as mf


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of the model. heads must divide by tp, and layers be at least pp."""

    vocab: int
    window: int
    width: int = 64
    layers: int = 4
    heads: int = 4


class Part(nn.Module):
    """A module that makes its parameters by name and remembers along which dimension tp cuts them."""

    def __init__(self, name: str, place: Place) -> None:
        super().__init__()
        self.name, self.place = name, place
        self.cuts: dict[str, int | None] = {}

    def make(self, name: str, *shape: int, std: float | None = None, cut: int | None = None) -> nn.Parameter:
        """A parameter: normal with `std`, or ones where None; this rank's part along dimension `cut`."""
        full_name = f"{self.name}.{name}"
        generator = torch.Generator().manual_seed(zlib.crc32(full_name.encode()))
        whole = torch.ones(shape) if std is None else torch.randn(shape, generator=generator) * std
        self.cuts[name] = cut
        if cut is not None:
            whole = whole.chunk(self.place.layout.tp, cut)[self.place.coord.tp].contiguous()
        return nn.Parameter(whole)


class Block(Part):
    """Attention and a two-layer perceptron, heads and hidden units cut by tp, tokens by cp."""

    def __init__(self, name: str, shape: Shape, place: Place) -> None:
        super().__init__(name, place)
        d, std = shape.width, 0.02
        self.heads = shape.heads // place.layout.tp
        self.norm1, self.norm2 = self.make("norm1", d), self.make("norm2", d)
        self.q, self.k, self.v = (self.make(n, d, d, std=std, cut=0) for n in "qkv")
        self.out = self.make("out", d, d, std=std / math.sqrt(2 * shape.layers), cut=1)
        self.up = self.make("up", 4 * d, d, std=std, cut=0)
        self.down = self.make("down", d, 4 * d, std=std / math.sqrt(2 * shape.layers), cut=1)

    def forward(
        self, x: torch.Tensor, position: torch.Tensor, sequence: torch.Tensor, cp: Group
    ) -> torch.Tensor:
        """x: [batch, own tokens, width]. A token sees those of its own sequence up to its own position.

        position, sequence: int64 [batch, own tokens]. cp: the group that shares the tokens of this batch.
        """
        tp = self.place.tp
        h = EnterSplit.apply(F.rms_norm(x, x.shape[-1:], self.norm1), tp)
        q = self._by_head(F.linear(h, self.q))
        k, v = self._by_head(F.linear(h, self.k)), self._by_head(F.linear(h, self.v))
        attend = attend_alone if cp is None else attend_together
        mixed = attend(q, k, v, position, sequence, cp).transpose(1, 2).flatten(2)
        x = x + LeaveSplit.apply(F.linear(mixed, self.out), tp)
        h = EnterSplit.apply(F.rms_norm(x, x.shape[-1:], self.norm2), tp)
        return x + LeaveSplit.apply(F.linear(F.gelu(F.linear(h, self.up)), self.down), tp)

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def attend_alone(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    sequence: torch.Tensor,
    cp: Group,
) -> torch.Tensor:
    """Causal attention within each run of one sequence's tokens. q, k, v: [batch, heads, tokens, width]."""
    runs = torch.unique_consecutive(sequence[0], return_counts=True)[1].tolist()
    pieces = zip(q.split(runs, 2), k.split(runs, 2), v.split(runs, 2))
    return torch.cat([F.scaled_dot_product_attention(*piece, is_causal=True) for piece in pieces], 2)


def attend_together(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    sequence: torch.Tensor,
    cp: Group,
) -> torch.Tensor:
    """The same where the tokens lie on several ranks: everyone's keys, masked by sequence and position."""
    k, v = (GatherSequence.apply(x.transpose(1, 2), cp).transpose(1, 2) for x in (k, v))
    where, whose = GatherSequence.apply(position, cp), GatherSequence.apply(sequence, cp)
    sees = (where[:, None, :] <= position[:, :, None]) & (whose[:, None, :] == sequence[:, :, None])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees[:, None])


class Embedding(Part):
    """Tokens and their places in the window."""

    def __init__(self, shape: Shape, place: Place) -> None:
        super().__init__("embedding", place)
        self.token = self.make("token", shape.vocab, shape.width, std=0.02)
        self.position = self.make("position", shape.window, shape.width, std=0.02)

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """int64 [batch, own tokens] twice -> [batch, own tokens, width]."""
        return F.embedding(tokens, self.token) + F.embedding(position, self.position)


class Head(Part):
    """The loss: summed over tokens that bear it, so that any split adds up to the same."""

    def __init__(self, shape: Shape, place: Place) -> None:
        super().__init__("head", place)
        self.norm = self.make("norm", shape.width)
        self.token = self.make("token", shape.vocab, shape.width, std=0.02)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
        """The sum of token losses under the mask; a scalar."""
        scores = F.linear(F.rms_norm(x, x.shape[-1:], self.norm), self.token)
        losses = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * loss_mask.flatten()).sum()


class Stage(nn.Module):
    """The part of the model that one pipeline rank holds."""

    def __init__(self, shape: Shape, place: Place) -> None:
        super().__init__()
        self.width = shape.width
        pp, at = place.layout.pp, place.coord.pp
        layers = range(shape.layers * at // pp, shape.layers * (at + 1) // pp)
        self.embedding = Embedding(shape, place) if place.is_first else None
        self.blocks = nn.ModuleList(Block(f"block{layer}", shape, place) for layer in layers)
        self.head = Head(shape, place) if place.is_last else None

    def embed(self, microbatch: mf.Microbatch) -> torch.Tensor:
        """What the first stage makes of a microbatch: [batch, own tokens, width]."""
        assert self.embedding is not None
        return self.embedding(microbatch["tokens"], microbatch["position_ids"])

    def parts(self) -> dict[str, tuple[nn.Parameter, int | None]]:
        """Every parameter by its name in the whole model, and the dimension along which tp cuts it."""
        held: dict[str, tuple[nn.Parameter, int | None]] = {}
        for module in self.modules():
            if isinstance(module, Part):
                for name, parameter in module.named_parameters(recurse=False):
                    held[f"{module.name}.{name}"] = (parameter, module.cuts[name])
        return held
