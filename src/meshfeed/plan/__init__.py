"""Lengths -> packs: which sequence goes into which microbatch, on which ranks, split how. Pure.

Read it in this order: `types` (what a plan is), `cost` and `policy` (what a user chooses), `groups` (the cp
groups there are), `step` (the entry point). Then its stages: `problem` (the rows and the room of a step),
`choose` with `candidates` (how many microbatches), `fill` by `reach` and `place` (which sequences share a
group), `placement` (on which ranks). Besides: `in_order`; `encoders/` (balance for encoders, too; who
encodes what, and who gets it); `account` (how good a plan is); `split` (context parallelism).
"""

from meshfeed.plan.account import Account, account_of, flops
from meshfeed.plan.cost import CostModel, ModelShape
from meshfeed.plan.encoders import EncoderPlan, EncoderRoute, encoder_routes, plan_encoder
from meshfeed.plan.groups import cp_groups
from meshfeed.plan.in_order import plan_fixed
from meshfeed.plan.policy import Packing
from meshfeed.plan.split import CpSplit, Slices, slices_of
from meshfeed.plan.step import plan_step
from meshfeed.plan.types import Align, Pack, PackShape, StepPlan, packs_of

__all__ = [
    "Account",
    "Align",
    "CostModel",
    "CpSplit",
    "EncoderPlan",
    "EncoderRoute",
    "ModelShape",
    "Pack",
    "PackShape",
    "Packing",
    "Slices",
    "StepPlan",
    "account_of",
    "cp_groups",
    "encoder_routes",
    "flops",
    "packs_of",
    "plan_encoder",
    "plan_fixed",
    "plan_step",
    "slices_of",
]
