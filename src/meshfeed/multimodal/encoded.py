"""Encoder outputs, sent to the ranks whose tokens need them; and their gradients, sent back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshfeed.errors import OptionError
from meshfeed.multimodal.encoders import ROUTE
from meshfeed.parts import KINDS, Kind


def exchange_encoded(
    encoded: torch.Tensor,
    microbatch: Mapping[str, Any],
    kind: Kind = "image",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The encoder's outputs for this rank's tokens, whichever ranks have encoded them; differentiable.

    Every rank of `Feed.encoder_ranks` calls it once for each microbatch and kind, in the same order, those
    without parts too. Use what it returns in the loss on every rank, even if it has no row: `backward` is an
    exchange as well. For a frozen encoder, call both under `torch.no_grad()` on all ranks: nothing is sent
    back.

    encoded: what the encoder made of this rank's fields of the microbatch, a row for each token of its
        parts; [tokens encoded here, ...], of the same dtype and row shape on every rank.
    microbatch: with the fields `<kind>_encoded_rows`, `_send_rows`, `_send_counts`, `_receive_counts`,
        `_receive_rows` of `mf.Feed(encoder="group")` or "balanced"; see `EncoderRoute`. Counts are read on
        the host.
    group: of the ranks of `Feed.encoder_ranks`; None for the default group. One rank exchanges nothing.
    Returns [tokens of this rank that are of parts, ...], in their order: what `<kind>_index` counts in.
    Raises OptionError for another number of rows or ranks; KeyError if the microbatch has no such fields.
    """
    route: dict[str, torch.Tensor] = {name: microbatch[f"{kind}_{name}"] for name in ROUTE}
    send, receive = route["send_counts"].tolist(), route["receive_counts"].tolist()
    rows = int(route["encoded_rows"])
    if len(encoded) != rows:
        raise OptionError(
            f"exchange_encoded: {len(encoded)} rows, where the {kind} parts of this rank have {rows} tokens; "
            f"pass a row for each"
        )
    sent = encoded.index_select(0, route["send_rows"])
    if len(send) > 1:
        size = dist.get_world_size(group)
        if size != len(send):
            raise OptionError(
                f"exchange_encoded: a group of {size} ranks, where {len(send)} share the {kind} parts; "
                f"pass the group of Feed.encoder_ranks"
            )
        # wherever there is a backward pass, every rank takes part in it, also one whose encoder has none
        takes_part = encoded.new_empty(0, requires_grad=torch.is_grad_enabled())
        sent = _Exchanged.apply(sent, takes_part, send, receive, group)
    return sent.index_select(0, route["receive_rows"])


class EncoderExchange(torch.nn.Module):
    """`exchange_encoded` for a model that a framework's loop calls without the microbatch.

    The model calls it once for each kind in every forward pass, between encoder and language model. Before
    that, `expect` tells it the microbatch: `FeedTrainer` does so by itself. Without one that is shared, such
    as between steps, it returns what it is given. Generation from a shared batch, as with the Trainer's
    predict_with_generate, exchanges where it encodes; with beams, which repeat pixels, it raises OptionError.

    group: of the ranks of `Feed.encoder_ranks`; None for the default group. Make it one that nothing else
        uses: DDP sends gradients while the exchange goes backward, not in the same order on every rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group
        self.routes: Mapping[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the group, which cannot be copied or pickled."""
        return {**self.__dict__, "group": None, "routes": {}}

    def expect(self, microbatch: Mapping[str, Any]) -> None:
        """The microbatch of the next forward pass, or its `encoder_routes`; empty where nothing is shared."""
        self.routes = encoder_routes_of(microbatch)

    def shares(self, kind: Kind) -> bool:
        """Whether the next forward pass exchanges outputs of a kind."""
        return f"{kind}_{ROUTE[0]}" in self.routes

    def forward(self, encoded: torch.Tensor, kind: Kind = "image") -> torch.Tensor:
        """The outputs for this rank's tokens. Arguments, result and errors as of `exchange_encoded`."""
        return exchange_encoded(encoded, self.routes, kind, self.group) if self.shares(kind) else encoded


def encoder_routes_of(microbatch: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a microbatch that an exchange needs; empty where ranks share no encoder's work."""
    names = (f"{kind}_{name}" for kind in KINDS for name in ROUTE)
    return {name: microbatch[name] for name in names if name in microbatch}


class _Exchanged(torch.autograd.Function):
    """Rows to each rank, and rows from each; gradients go the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        takes_part: torch.Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = send, receive, group
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None, None


def _all_to_all(
    rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=group)
    return received
