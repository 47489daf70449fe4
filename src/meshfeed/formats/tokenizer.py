"""The former place of `meshfeed.store.Tokenizer`; warns for one version."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    found = getattr(importlib.import_module("meshfeed.store.tokenizer"), name)
    warnings.warn(
        f"meshfeed.formats.tokenizer is now in meshfeed.store: from meshfeed.store import {name}",
        DeprecationWarning,
        stacklevel=2,
    )
    return found
