"""Times the stages of a producer, adds up each step's costs, and passes them to the sinks."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from operator import sub
from typing import Any, cast

from meshfeed.deliver import Meeting, Traffic
from meshfeed.errors import MetricsError
from meshfeed.metrics.background import BackgroundSinks
from meshfeed.metrics.sink import RunStart, Sink, StepRecord
from meshfeed.metrics.slowest import Slowest
from meshfeed.metrics.stages import Span, summed
from meshfeed.metrics.stats import SlowRank, StepStats
from meshfeed.sequence.rule import DecodeCosts
from meshfeed.store.base import whole_of

COUNTERS = ("bytes_read", "bytes_fetched", "opens", "collectives", "delivered_bytes")
"""Counters of microbatches that a step's stats sum."""
DECODE_COUNTERS = ("parts_decoded", "bytes_decoded", "decode_busy_s", "decode_cpu_s", "parts_bad")
"""The same, on ranks that decode."""

_NOTHING = contextlib.nullcontext()
_log = logging.getLogger("meshfeed")


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

    def split(self, name: str, seconds: float) -> None:
        """Count the last `seconds` of the last span as another stage."""
        last = self.spans[-1]
        at = max(last.stop - seconds, last.start)
        if at < last.stop:
            self.spans[-1:] = [last._replace(stop=at), Span(name, at, last.stop)]

    def take(self) -> list[Span]:
        """The spans since the last call."""
        taken, self.spans = self.spans, []
        return taken


def work(spans: Iterable[Span]) -> dict[str, float]:
    """Total time of each stage, in seconds."""
    return summed((span.stage, span.stop - span.start) for span in spans)


def exposed_wait(start: float, stop: float, spans: Iterable[Span]) -> dict[str, float]:
    """A wait of the consumer, split by the producer's stages during it; seconds.

    Time outside all spans is "other".
    """
    shared = ((span.stage, min(stop, span.stop) - max(start, span.start)) for span in spans)
    wait = summed((stage, seconds) for stage, seconds in shared if seconds > 0)
    rest = (stop - start) - sum(wait.values())
    if rest > 0:
        wait["other"] = rest
    return wait


class StepCosts:
    """Collects the costs of a step, and adds them up on request.

    Attributes:
        planned: returns the stats that follow from the plan; called once.
        waits: (start, stop, spans of the producer meanwhile) of each wait of the loop.
        queue_depth, metrics_lost, slowest: when the loop receives the step; see `StepStats`.
    """

    def __init__(self, planned: Callable[[], StepStats]) -> None:
        self.planned = cache(planned)
        self.queue_depth, self.metrics_lost = 0, cast(int | None, None)
        self.slowest: SlowRank | None = None
        self.waits: list[tuple[float, float, Sequence[Span]]] = []
        self._counts: dict[str, Any] = dict.fromkeys(COUNTERS, 0)

    def counted(self, counts: Mapping[str, float]) -> None:
        for name, count in counts.items():
            self._counts[name] = self._counts.get(name, 0) + count

    @property
    def stats(self) -> StepStats:
        """The costs so far."""
        waits = list(self.waits)
        return replace(
            self.planned(),
            exposed_wait_s=summed(each for wait in waits for each in exposed_wait(*wait).items()),
            work_s=work(span for _, _, spans in waits for span in spans),
            queue_depth=self.queue_depth,
            metrics_lost=self.metrics_lost,
            slowest=self.slowest,
            **self._counts,
        )


class Meter:
    """Counts data read, decoded and delivered, from one `take` to the next.

    Args:
        sources: the stores that are read.
        decode_costs: of this rank's decoding; None if it decodes nothing.
    """

    def __init__(
        self, sources: Sequence[Any], *traffic: Traffic, decode_costs: DecodeCosts | None = None
    ) -> None:
        read = {id(each): each for each, _ in map(whole_of, sources)}  # several ranges of one store: once
        self._sources, self._traffic, self._decoded = read.values(), traffic, decode_costs
        self._names = COUNTERS if decode_costs is None else COUNTERS + DECODE_COUNTERS
        self._before = self._now()

    def take(self) -> dict[str, float]:
        """The counts since the last call."""
        before, self._before = self._before, self._now()
        return dict(zip(self._names, map(sub, self._before, before)))

    def _now(self) -> tuple[float, ...]:
        bytes_read = bytes_fetched = opens = collectives = delivered_bytes = 0
        for source in self._sources:
            stats = source.stats
            bytes_read += stats.bytes_read
            bytes_fetched += stats.bytes_fetched
            opens += stats.opens
        for traffic in self._traffic:
            collectives += traffic.collectives
            delivered_bytes += traffic.num_bytes
        counts = bytes_read, bytes_fetched, opens, collectives, delivered_bytes
        done = self._decoded
        if done is None:
            return counts
        return *counts, done.parts, done.num_bytes, done.busy_s, done.cpu_s, done.bad


class Recorder:
    """Records the steps of one feed, through all its runs; called on the thread of the training loop.

    Args:
        metrics: the receivers: a sink, several, or None.
        about: first step of a run -> the record of its start.

    Attributes:
        costs: of the step that the loop received last.
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
        self._waiting = [sink.waited for sink in self._sinks if type(sink).waited is not Sink.waited]
        self._about = about
        self._slowest = Slowest()
        self._background: BackgroundSinks | None = None
        self._clocks = (0.0, 0.0)  # unix and monotonic time of the same moment
        self._received: tuple[int, int, float] | None = None  # step, its tokens, unix time
        self.costs = StepCosts(StepStats)

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

    def start(self, step: int, meeting: Meeting | None, *, follows: bool) -> None:
        """A run begins, whose ranks meet there. Raises a sink's error at its first record.

        follows: it goes on from the one before, so sinks are not told of a start.
        """
        self._slowest.meeting = meeting
        if follows and self._background is not None:
            return
        self._clocks = time.time(), time.monotonic()
        if self._background is not None:
            self._background.send(self._about(step))
        elif self._sinks:
            background = BackgroundSinks(self._sinks, self._slowest)
            background.start(self._about(step))
            self._background = background

    def new_costs(self, planned: Callable[[], StepStats]) -> StepCosts:
        """The costs of a step that the producer begins, on its thread. planned: see StepCosts."""
        costs = StepCosts(planned)
        if self._sinks:
            costs.planned()  # here, not on the loop's thread
        return costs

    def step(self, step: int, tokens: int, queue_depth: int, costs: StepCosts, asked: float) -> None:
        """The loop receives a step that it asked for then, whose costs are added until `over`."""
        self.costs = costs
        costs.queue_depth = queue_depth
        if self._background is not None:
            costs.metrics_lost, costs.slowest = self._background.lost, self._slowest.known
            unix, monotonic = self._clocks
            self._received = step, tokens, unix + (asked - monotonic)

    def waited(self, start: float, stop: float, spans: Sequence[Span]) -> None:
        """The loop waited from `start` to `stop` for the current step. spans: of the producer meanwhile."""
        self.costs.waits.append((start, stop, spans))
        if self._waiting:
            self.tell_wait(start, stop, spans)

    def tell_wait(self, start: float, stop: float, spans: Sequence[Span]) -> None:
        """Tell the sinks of a wait. One that fails is told of no further wait."""
        for waited in tuple(self._waiting):
            try:
                waited(start, stop, spans)
            except Exception:  # training continues after any error of a sink
                self._waiting.remove(waited)
                _log.exception("a metrics sink failed in `waited`, and gets no further waits")

    @contextlib.contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Time a stage on the loop's own thread; it counts as waiting."""
        clock = self.new_clock()
        try:
            with clock.stage(name):
                yield
        finally:
            (span,) = clock.take()
            self.waited(span.start, span.stop, [span])

    def over(self) -> None:
        """The step is complete."""
        if self._received is not None and self._background is not None:
            step, tokens, time_s = self._received
            self._background.send(StepRecord(step, time_s, tokens, self.costs.stats))
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
