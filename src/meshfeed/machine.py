"""How a machine makes what a recipe describes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from meshfeed.errors import OptionError
from meshfeed.whole import is_whole, settle


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How a rank reads, on the machine that it runs on: `Feed(machine=mf.Machine(workers=8))`.

    No sequence depends on it, so it is not part of a recipe, and ranks may differ in it.

    Attributes:
        workers: processes of each rank that reads, which make the items of each `Mapped` and decode the parts
            of `Multimodal` ahead, as far as these are announced: up to two steps of items, and 256 MiB of
            parts. 0 makes and decodes when a pack is read.
        item_timeout_s: how long a worker may take for one item or part.

    Raises OptionError for other values.
    """

    workers: int = 0
    item_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        settle(self)
        if not is_whole(self.workers, 0):
            raise OptionError(f"Machine(workers={self.workers!r}): give a whole number, 0 or more")
        seconds: Any = self.item_timeout_s
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise OptionError(f"Machine(item_timeout_s={seconds!r}): give seconds, more than 0")
