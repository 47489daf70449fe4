"""Images, audio and video in samples: what an index knows of them, and what they become in a model."""

from meshfeed.parts.types import (
    KINDS,
    PLACEHOLDER,
    Expansion,
    Kind,
    PartRule,
    Parts,
    Repeat,
    Rope,
    Rules,
    Template,
    check_rules,
)

__all__ = [
    "KINDS",
    "PLACEHOLDER",
    "Expansion",
    "Kind",
    "PartRule",
    "Parts",
    "Repeat",
    "Rope",
    "Rules",
    "Template",
    "check_rules",
]
