"""Megatron-core's modules, imported on first use; any installed version."""

from __future__ import annotations

from typing import Any

from meshfeed.integrations.loader import framework


def core(name: str) -> Any:
    """The module megatron.core.NAME. Raises MeshfeedError if Megatron-core lacks it or is not installed."""
    return framework(f"megatron.core.{name}", "megatron")
