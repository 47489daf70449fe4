"""Lengths -> packs: which sequence goes into which microbatch, on which ranks, split how. Pure.

Read it in this order: `types` (what a plan is, and what a rank gets of it), `packing` (what a user chooses,
what it costs, and what room it leaves), `step` (the entry points, how many microbatches a step has, and the
ranks of its packs), `fill` (which sequences share a group). Besides: `account` (how good a plan is).
"""

from meshfeed.plan.account import Account, account_of, flops
from meshfeed.plan.packing import CostModel, ModelShape, Packing, cp_groups
from meshfeed.plan.step import plan_fixed, plan_step
from meshfeed.plan.types import Align, CpSplit, Pack, Slices, StepPlan, packs_of, slices_of

__all__ = [
    "Account",
    "Align",
    "CostModel",
    "CpSplit",
    "ModelShape",
    "Pack",
    "Packing",
    "Slices",
    "StepPlan",
    "account_of",
    "cp_groups",
    "flops",
    "packs_of",
    "plan_fixed",
    "plan_step",
    "slices_of",
]
