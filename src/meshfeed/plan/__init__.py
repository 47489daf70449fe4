"""Lengths -> packs: which sequence goes into which microbatch, on which ranks, split how. Pure."""

from meshfeed.plan.assign import plan_fixed
from meshfeed.plan.split import CpSplit, Slices, slices_of
from meshfeed.plan.types import Align, Pack, StepPlan, packs_of

__all__ = ["Align", "CpSplit", "Pack", "Slices", "StepPlan", "packs_of", "plan_fixed", "slices_of"]
