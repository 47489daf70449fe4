"""The former place of `meshfeed.store.Tokenizer`; warns for one version."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    found = getattr(importlib.import_module("meshfeed.store.tokenizer"), name)
    place = "meshfeed.store" if name == "Tokenizer" else "meshfeed.store.tokenizer"
    warnings.warn(
        f"meshfeed.formats.tokenizer has moved: from {place} import {name}",
        DeprecationWarning,
        stacklevel=2,
    )
    return found
