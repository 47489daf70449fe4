"""Draws and slices -> tensors: sequence rules, and the bytes that each of them reads."""

from meshfeed.columns import Arrays, Columns
from meshfeed.sequence.chat import Chat
from meshfeed.sequence.columns import rule_of
from meshfeed.sequence.documents import DocumentRule, Documents, document_lengths
from meshfeed.sequence.masked import Masked
from meshfeed.sequence.packed import PLAN_FIELDS, fields_of_plan
from meshfeed.sequence.rule import SequenceRule
from meshfeed.sequence.runs import Portion, portions_of
from meshfeed.sequence.samples import Samples
from meshfeed.sequence.windows import Windows

__all__ = [
    "PLAN_FIELDS",
    "Arrays",
    "Chat",
    "Columns",
    "DocumentRule",
    "Documents",
    "Masked",
    "Portion",
    "Samples",
    "SequenceRule",
    "Windows",
    "document_lengths",
    "fields_of_plan",
    "portions_of",
    "rule_of",
]
