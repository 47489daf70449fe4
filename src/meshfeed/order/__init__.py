"""Position -> draw: the order of the training stream as a function. Pure.

Read it in this order: `permutation` (the shuffle of an epoch), `blocks` (the same by shards), `interleave`
(which source is next), `schedule` (when sources and batch sizes change), `tokens` (where steps of so many
tokens begin), `stream` (all of it: step -> draws), `positions` (its inverse).
"""

from meshfeed.order.interleave import Interleaving
from meshfeed.order.permutation import key_of, permute, philox, rng, unpermute
from meshfeed.order.positions import position_of, positions_of
from meshfeed.order.stream import (
    Draws,
    EpochIndex,
    LeavesOut,
    OwnOrder,
    Places,
    asked_until,
    concatenated,
    cut_off,
    drawn_until,
    draws_between,
    draws_of_source,
    draws_of_step,
    extend,
    has_step,
    is_over_early,
    lanes_of_step,
    num_positions,
    num_steps,
    short_steps,
    start_of_step,
    step_at,
    steps_of,
)

__all__ = [
    "Draws",
    "EpochIndex",
    "Interleaving",
    "LeavesOut",
    "OwnOrder",
    "Places",
    "asked_until",
    "concatenated",
    "cut_off",
    "drawn_until",
    "draws_between",
    "draws_of_source",
    "draws_of_step",
    "extend",
    "has_step",
    "is_over_early",
    "key_of",
    "lanes_of_step",
    "num_positions",
    "num_steps",
    "permute",
    "philox",
    "position_of",
    "positions_of",
    "rng",
    "short_steps",
    "start_of_step",
    "step_at",
    "steps_of",
    "unpermute",
]
