"""Megatron-core's own modules, imported when they are first needed; of whatever version there is."""

from __future__ import annotations

import importlib
from typing import Any

from meshfeed.errors import LayoutError


def core(name: str) -> Any:
    """The module megatron.core.NAME. Raises LayoutError where Megatron-core, or this part, is missing."""
    try:
        return importlib.import_module(f"megatron.core.{name}")
    except ImportError as missing:
        raise LayoutError(
            f"megatron.core.{name} cannot be imported ({missing}): pip install 'meshfeed[megatron]'"
        ) from missing
