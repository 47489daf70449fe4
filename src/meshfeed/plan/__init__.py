"""Lengths -> packs: which sequence goes into which microbatch, on which ranks, split how. Pure.

Read it in this order: `types` (what a plan is), `cost` and `policy` (what a user chooses), `groups`,
`oversize`, `step` (the front door), `assign` (stream order), `balance` with `forecast`, `fill` and
`least_loaded` (equal work), `two_costs` with `swap` and `encoders` (encoders, too), `encoder_routes` (where
their output goes), `account` and `loads` (how good it is), `split` (context parallelism).
"""

from meshfeed.plan.account import Account, account_of, flops
from meshfeed.plan.assign import plan_fixed
from meshfeed.plan.cost import CostModel, ModelShape
from meshfeed.plan.encoder_routes import EncoderRoute, encoder_routes
from meshfeed.plan.encoders import EncoderPlan, plan_encoder
from meshfeed.plan.groups import cp_groups
from meshfeed.plan.loads import Load, loads_of
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
    "Load",
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
    "loads_of",
    "packs_of",
    "plan_encoder",
    "plan_fixed",
    "plan_step",
    "slices_of",
]
