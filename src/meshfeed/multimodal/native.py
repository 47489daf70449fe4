"""The compiled loops of the loops.c here; see `meshfeed.native`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from meshfeed import native

compiled = partial(native.compiled, folder=Path(__file__).parent)
"""A function of it; None if there is no library."""
