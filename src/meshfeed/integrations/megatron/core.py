"""Megatron-core's own modules, imported when they are first needed; of whatever version there is."""

from __future__ import annotations

from typing import Any

from meshfeed.integrations.loader import framework


def core(name: str) -> Any:
    """The module megatron.core.NAME. Raises MeshfeedError where Megatron-core, or this part, is missing."""
    return framework(f"megatron.core.{name}", "megatron")
