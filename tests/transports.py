"""Options of a Feed or an Exchange in one flat dict, as tests vary them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import meshfeed as mf

NAMES = {each.name for each in fields(mf.Transport)}


def of(**given: Any) -> dict[str, Any]:
    """The same options, those of a `Transport` in one."""
    transport = {name: value for name, value in given.items() if name in NAMES}
    rest = {name: value for name, value in given.items() if name not in NAMES}
    return {**rest, "transport": mf.Transport(**transport)} if transport else rest
