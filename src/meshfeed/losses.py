"""Losses by source, for the loops of users."""

from __future__ import annotations

import torch

from meshfeed.errors import OptionError
from meshfeed.feed.batch import Microbatch


def loss_by_source(token_losses: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
    """The loss of each source in a microbatch of a Feed, as sums that add up over microbatches and ranks.

    Add those of a step's microbatches, and those of the dp and cp ranks by one all-reduce; then the first
    column divided by the second is the mean loss of each source, and the second adds up to
    `step.valid_tokens`. Ranks of a tp group have the same sums. Nothing is sent here, and no device is waited
    for.

    token_losses: float, of each token of this rank, before the loss mask: of the shape of the field
        "loss_mask". A loss where the mask is 0 does not matter, not even NaN.
    Returns the sums of loss x mask and the number of tokens with a mask other than 0; float64
    [len(step.sources), 2], on the device of the losses and without a gradient.
    Raises OptionError for losses of another shape, for the microbatch of a stage or rule without a loss_mask,
    and of an Exchange.
    """
    source, num = microbatch.source, len(microbatch.sources)
    if microbatch.is_dummy:  # perhaps without a row, and then without a tensor
        return token_losses.new_zeros(num, 2, dtype=torch.float64)
    for name in ("loss_mask", "sequence_ids")[: 1 + microbatch.is_pack]:
        if not isinstance(microbatch.fields.get(name), torch.Tensor):
            has = ", ".join(microbatch.fields) or "no field"
            raise OptionError(
                f"loss_by_source needs the tensor {name!r}, and this microbatch has only {has}; call it on "
                f"the stage with the loss, of a rule with this field"
            )
    mask: torch.Tensor = microbatch["loss_mask"]
    if token_losses.shape != mask.shape:
        raise OptionError(
            f"loss_by_source: losses of shape {list(token_losses.shape)}, where loss_mask has "
            f"{list(mask.shape)}; give one for each token, as by losses.view_as(microbatch['loss_mask'])"
        )
    with torch.no_grad():
        if microbatch.is_pack:
            of_token = source[microbatch["sequence_ids"].long()]  # padding, -1, bears no loss
        else:
            of_token = source.view(-1, *[1] * (mask.ndim - 1))
        bears = mask != 0
        losses = torch.where(bears, token_losses.double() * mask, 0.0)
        both = torch.stack((losses, bears.double()), dim=-1).flatten(0, -2)
        # what bears no loss is added to a row more: to leave it out, its number would have to be known
        rows = torch.where(bears, of_token, num).flatten()
        return both.new_zeros(num + 1, 2).index_add_(0, rows, both)[:num]
