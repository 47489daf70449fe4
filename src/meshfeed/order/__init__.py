"""Position -> draw: the order of the training stream as a function. Pure."""

from meshfeed.order.permutation import key_of, permute, unpermute
from meshfeed.order.stream import (
    Draws,
    EpochIndex,
    concatenated,
    draws_between,
    draws_of_step,
    num_positions,
    num_steps,
)

__all__ = [
    "Draws",
    "EpochIndex",
    "concatenated",
    "draws_between",
    "draws_of_step",
    "key_of",
    "num_positions",
    "num_steps",
    "permute",
    "unpermute",
]
