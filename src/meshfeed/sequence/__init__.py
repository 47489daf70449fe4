"""Draws and slices -> tensors: sequence rules, and the bytes that each of them reads."""

from meshfeed.arrays import Arrays, Columns
from meshfeed.sequence.chat import Chat
from meshfeed.sequence.columns import contents_of
from meshfeed.sequence.documents import DocumentRule, Documents, document_lengths
from meshfeed.sequence.rule import (
    FindsDocuments,
    JoinsShards,
    RuleContents,
    SequenceRule,
    TakesParts,
    decode_costs,
    encoder_of,
    opened,
    run_by,
)
from meshfeed.sequence.runs import Portion, Runs, WholeStep, portions_of
from meshfeed.sequence.table import PLAN_FIELDS, FieldTable, RunField, fields_of_plan, table_of_pack, widened
from meshfeed.sequence.windows import Windows

__all__ = [
    "PLAN_FIELDS",
    "Arrays",
    "Chat",
    "Columns",
    "DocumentRule",
    "Documents",
    "FieldTable",
    "FindsDocuments",
    "JoinsShards",
    "Portion",
    "RuleContents",
    "RunField",
    "Runs",
    "SequenceRule",
    "TakesParts",
    "WholeStep",
    "Windows",
    "contents_of",
    "decode_costs",
    "document_lengths",
    "encoder_of",
    "fields_of_plan",
    "opened",
    "portions_of",
    "run_by",
    "table_of_pack",
    "widened",
]
