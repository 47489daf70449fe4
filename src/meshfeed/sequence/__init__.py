"""Draws and slices -> tensors: sequence rules, and the bytes that each of them reads."""

from meshfeed.columns import Arrays, Columns
from meshfeed.sequence.chat import Chat
from meshfeed.sequence.columns import rule_of
from meshfeed.sequence.documents import DocumentRule, Documents, document_lengths
from meshfeed.sequence.masked import Masked
from meshfeed.sequence.multimodal import Multimodal
from meshfeed.sequence.patches import NativePatches
from meshfeed.sequence.pixels import ImageProcessor, rgb_image
from meshfeed.sequence.processor import PartField, PartSize, Processor
from meshfeed.sequence.rule import SequenceRule, run_by
from meshfeed.sequence.runs import Portion, Runs, WholeStep, portions_of
from meshfeed.sequence.samples import Samples
from meshfeed.sequence.table import PLAN_FIELDS, FieldTable, RunField, fields_of_plan, table_of_pack, widened
from meshfeed.sequence.tiles import AnyResPixels, FixedPixels, TiledPixels
from meshfeed.sequence.whisper import WhisperFeatures
from meshfeed.sequence.windows import StagedWindows, Windows

__all__ = [
    "PLAN_FIELDS",
    "AnyResPixels",
    "Arrays",
    "Chat",
    "Columns",
    "DocumentRule",
    "Documents",
    "FieldTable",
    "FixedPixels",
    "ImageProcessor",
    "Masked",
    "Multimodal",
    "NativePatches",
    "PartField",
    "PartSize",
    "Portion",
    "Processor",
    "RunField",
    "Runs",
    "Samples",
    "SequenceRule",
    "StagedWindows",
    "TiledPixels",
    "WhisperFeatures",
    "WholeStep",
    "Windows",
    "document_lengths",
    "fields_of_plan",
    "portions_of",
    "rgb_image",
    "rule_of",
    "run_by",
    "table_of_pack",
    "widened",
]
