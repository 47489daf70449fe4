"""The compiled loops of the loops.c here; see `meshfeed.native`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshfeed import native
from meshfeed.native import ARRAY, WHOLE


def compiled(name: str, *arguments: type[WHOLE | ARRAY]) -> Callable[..., int] | None:
    """A function of it; None if there is no library."""
    return native.compiled(name, *arguments, folder=Path(__file__).parent)
