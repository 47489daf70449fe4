"""Waits of the training loop as OpenTelemetry spans, inside the spans of the trainer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshfeed.errors import MetricsError
from meshfeed.extras import install
from meshfeed.metrics.sink import Sink
from meshfeed.metrics.stages import STAGE_TABLE, Span

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


class Spans(Sink):
    """Adds spans of the loop's waits to a trace, inside the span that the loop is in.

    A wait is "data_loading.wait". Its children are the stages of the producer during it, "data_loading.read"
    and so on; their attribute "ray.stage" is the stage of Ray Data to which each belongs. Megatron-LM calls
    the group of such spans data_loading, and has none for the batches of an iteration.

    Args:
        tracer_provider: an opentelemetry TracerProvider; None takes the global one.
        least_s: shorter waits get no span, in seconds.

    Raises MetricsError if opentelemetry is missing.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None, *, least_s: float = 0.001) -> None:
        try:
            from opentelemetry import trace
        except ImportError as missing:
            raise MetricsError(f"Spans needs opentelemetry ({missing}): {install('telemetry')}") from missing
        self._trace, self._least_s = trace, least_s
        self._tracer = (tracer_provider or trace.get_tracer_provider()).get_tracer("meshfeed")

    def waited(self, start: float, stop: float, spans: Sequence[Span]) -> None:
        """Add the span of a wait."""
        if stop - start < self._least_s:
            return
        ahead = time.time_ns() - time.monotonic_ns()

        def unix(seconds: float) -> int:
            return round(seconds * 1e9) + ahead

        wait = self._tracer.start_span("data_loading.wait", start_time=unix(start))
        if wait.is_recording():
            inside = self._trace.set_span_in_context(wait)
            for stage, begin, end in spans:
                begin, end = max(begin, start), min(end, stop)
                if begin < end:
                    ray = STAGE_TABLE[stage].ray
                    child = self._tracer.start_span(
                        f"data_loading.{stage}",
                        inside,
                        attributes={} if ray is None else {"ray.stage": ray},
                        start_time=unix(begin),
                    )
                    child.end(unix(end))
        wait.end(unix(stop))
