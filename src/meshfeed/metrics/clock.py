"""Times the stages of a producer, and splits its consumer's waits by stage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

STAGES = ("start", "plan", "read", "exchange", "deliver", "build", "copy", "verify", "other")
"""All stages: joining the peers, planning and announcing, storage (or a user's iterator), exchanging items,
delivery with its waiting for peers, making fields, copying to the device, comparing replicas, the rest."""


class Span(NamedTuple):
    """An interval of the producer's time, in seconds of `time.monotonic`."""

    stage: str
    start: float
    stop: float


class StageClock:
    """Records when the producer was in which stage.

    Args:
        around: stage name -> a context manager to enter around the stage; None for none.

    Attributes:
        spans: finished stages since the last `take`.
        now: the stage entered last.
    """

    def __init__(self, around: Callable[[str], AbstractContextManager[Any]] | None = None) -> None:
        self.spans: list[Span] = []
        self.now: str | None = None
        self._around = around

    @contextlib.contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Time the body as one stage."""
        start, self.now = time.monotonic(), name
        try:
            if self._around is None:
                yield
            else:
                with self._around(name):
                    yield
        finally:
            self.spans.append(Span(name, start, time.monotonic()))

    def take(self) -> list[Span]:
        """The spans since the last call."""
        taken, self.spans = self.spans, []
        return taken


def work(spans: Iterable[Span]) -> dict[str, float]:
    """Total time of each stage, in seconds."""
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.stage] = seconds.get(span.stage, 0.0) + (span.stop - span.start)
    return seconds


def exposed_wait(start: float, stop: float, spans: Iterable[Span]) -> dict[str, float]:
    """A wait of the consumer, split by the producer's stages during it; seconds.

    Time outside all spans is "other".
    """
    wait: dict[str, float] = {}
    for span in spans:
        shared = min(stop, span.stop) - max(start, span.start)
        if shared > 0:
            wait[span.stage] = wait.get(span.stage, 0.0) + shared
    rest = (stop - start) - sum(wait.values())
    if rest > 0:
        wait["other"] = rest
    return wait
