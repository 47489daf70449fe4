"""Adds up each step's costs in its stats, and passes them to the sinks once the step is over."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from meshfeed.errors import MetricsError
from meshfeed.metrics.background import BackgroundSinks
from meshfeed.metrics.clock import Span, StageClock
from meshfeed.metrics.sink import RunStart, Sink, StepRecord
from meshfeed.metrics.stats import StepCosts, StepStats

_NOTHING = contextlib.nullcontext()


class Recorder:
    """Records the steps of one feed, through all its runs; called on the thread of the training loop.

    Args:
        metrics: the receivers: a sink, several, or None.
        about: a run's first step -> the record of its start.
    """

    def __init__(self, metrics: Sink | Sequence[Sink] | None, about: Callable[[int], RunStart]) -> None:
        given: Any = metrics
        alone = isinstance(given, str) or not isinstance(given, Sequence | None)
        self._sinks = cast(list[Sink], [given] if alone else list(given or ()))
        if strange := [sink for sink in self._sinks if not isinstance(sink, Sink)]:
            raise MetricsError(
                f"metrics={strange[0]!r} is not a sink; give mf.metrics.RunLog(folder), or another"
            )
        self._ranges = [sink.stage for sink in self._sinks if type(sink).stage is not Sink.stage]
        self._about = about
        self._background: BackgroundSinks | None = None
        self._clocks = (0.0, 0.0)  # unix and monotonic, at one moment
        self._received: tuple[int, int, float] | None = None  # step, its tokens, unix time
        self._costs = StepCosts(StepStats())

    def around(self, name: str) -> AbstractContextManager[Any]:
        """The sinks' context managers for a stage."""
        if len(self._ranges) < 2:
            return self._ranges[0](name) if self._ranges else _NOTHING
        with contextlib.ExitStack() as stack:
            for stage in self._ranges:
                stack.enter_context(stage(name))
            return stack.pop_all()

    def new_clock(self) -> StageClock:
        """A clock whose stages the sinks see."""
        return StageClock(self.around if self._ranges else None)

    def start(self, step: int) -> None:
        """A run begins. Raises a sink's error at its first record."""
        self._clocks = time.time(), time.monotonic()
        if self._background is not None:
            self._background.send(self._about(step))
        elif self._sinks:
            background = BackgroundSinks(self._sinks)
            background.start(self._about(step))
            self._background = background

    def step(self, step: int, tokens: int, queue_depth: int, costs: StepCosts) -> None:
        """The loop receives a step, whose costs are added until `over`."""
        self._costs = costs
        if self._background is None:
            costs.begin(queue_depth, None)
        else:
            costs.begin(queue_depth, self._background.lost)
            unix, monotonic = self._clocks
            self._received = step, tokens, unix + (time.monotonic() - monotonic)

    def waited(self, start: float, stop: float, spans: Sequence[Span]) -> None:
        """The loop asked for something at `start` and got it at `stop`. spans: how it was made."""
        self._costs.waited(start, stop, spans)

    @contextlib.contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Time a stage on the loop's own thread, which counts as waiting."""
        clock = self.new_clock()
        try:
            with clock.stage(name):
                yield
        finally:
            (span,) = clock.take()
            self.waited(span.start, span.stop, [span])

    def counted(self, counts: Mapping[str, int]) -> None:
        """Add counters."""
        self._costs.counted(counts)

    def over(self) -> None:
        """The step is complete."""
        if self._received is not None and self._background is not None:
            step, tokens, time_s = self._received
            self._background.send(StepRecord(step, time_s, tokens, self._costs.stats))
        self._received = None

    def close(self, during: BaseException | None = None) -> None:
        """Pass on the rest. Raises MetricsError if a sink has missed anything.

        during: an error that is being raised; it gets a note instead.
        """
        background, self._background = self._background, None
        try:
            if background is not None:
                background.close()
        except MetricsError as lost:
            if during is None:
                raise
            during.add_note(str(lost))
