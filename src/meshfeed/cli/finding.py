"""What a look at a machine finds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from meshfeed.report.words import duration


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        topic: what.
        verdict: "ok", "note" (works, but differently), or "bad" (will fail).
        says: what was found, and what follows.
        figures: of it, where there are any: name with unit -> number.
    """

    topic: str
    verdict: Literal["ok", "note", "bad"]
    says: str
    figures: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Times:
    """How long some actions of one kind took, in seconds."""

    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, actions: Iterable[Callable[[], Any]]) -> Times:
        """Do them, one after the other."""
        taken: list[float] = []
        for action in actions:
            began = time.perf_counter()
            action()
            taken.append(time.perf_counter() - began)
        taken.sort()
        return cls(statistics.median(taken), taken[min(len(taken) * 99 // 100, len(taken) - 1)])

    def __str__(self) -> str:
        return f"p50 {duration(self.p50_s)}, p99 {duration(self.p99_s)}"
