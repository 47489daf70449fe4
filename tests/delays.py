"""Delays that no busy machine can imitate: while a loop waits for its batch, the clock of its process leaps."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Any, cast

import meshfeed.feed.run
import meshfeed.metrics.recorder
import meshfeed.multimodal.decoding
from meshfeed.feed.prefetcher import Prefetcher

LEAP_S = 1000.0
"""How long each delay is by that clock."""


class _Clock:
    """Stands in for the module `time` where waits and work are measured."""

    leapt = 0.0

    time = staticmethod(time.time)

    def monotonic(self) -> float:
        return time.monotonic() + self.leapt

    def thread_time(self) -> float:
        return time.thread_time() + self.leapt

    def process_time(self) -> float:
        return time.process_time() + self.leapt


_CLOCK = _Clock()


def leap() -> None:
    """The clock of this process, which is one of its own, leaps."""
    for module in (meshfeed.metrics.recorder, meshfeed.feed.run, meshfeed.multimodal.decoding):
        module.time = _CLOCK  # type: ignore[attr-defined]
    _CLOCK.leapt += LEAP_S


def delayed(function: Callable[..., Any], at: Container[int]) -> Callable[..., Any]:
    """A function that the producer calls, which takes LEAP_S more at these of its calls. For a process of its own."""
    num_calls, has_news = 0, cast(Any, Prefetcher)._has_news
    waiting: Any = None

    def noting(prefetcher: Prefetcher[Any]) -> bool:
        nonlocal waiting
        waiting = None if (news := has_news(prefetcher)) else prefetcher
        return news

    def late(*given: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls - 1 in at:
            while waiting is None or waiting._queue:  # the loop takes what was made before
                time.sleep(0.001)
            leap()
        return function(*given)

    Prefetcher._has_news = noting  # type: ignore[method-assign]
    return late
