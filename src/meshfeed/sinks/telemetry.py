"""OpenTelemetry metrics, for Prometheus and other collectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from meshfeed.errors import MetricsError
from meshfeed.extras import install
from meshfeed.metrics.sink import RunStart, Sink, StepRecord
from meshfeed.metrics.stages import STAGE_TABLE

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider

_SECONDS = tuple(10.0**power * digit for power in range(-4, 3) for digit in (1, 2, 5))
_COUNTERS = {
    "bytes_read": ("meshfeed.read", "By", "read from storage"),
    "bytes_fetched": ("meshfeed.fetched", "By", "fetched from remote storage"),
    "delivered_bytes": ("meshfeed.delivered", "By", "sent to peers or received"),
    "opens": ("meshfeed.opens", "{file}", "data files opened"),
    "collectives": ("meshfeed.collectives", "{collective}", "collectives called"),
    "parts_decoded": ("meshfeed.decoded.parts", "{part}", "images, audio and videos decoded"),
    "parts_bad": ("meshfeed.decoded.bad", "{part}", "images, audio and videos that could not be decoded"),
    "bytes_decoded": ("meshfeed.decoded", "By", "their bytes before decoding"),
    "decode_busy_s": ("meshfeed.decode.busy", "s", "seconds that decoding took, over all workers"),
    "decode_cpu_s": ("meshfeed.decode.cpu", "s", "CPU seconds of decoding"),
}
_GAUGES = {
    "queue_depth": ("meshfeed.queue.depth", "reads that were ready when the loop asked for its last step"),
    "padding": ("meshfeed.padding", "share of padding in the global batch"),
    "max_over_mean": ("meshfeed.imbalance", "work of the busiest rank over the mean"),
    "metrics_lost": ("meshfeed.metrics.lost", "steps that some metrics sink has not taken"),
}


class Telemetry(Sink):
    """Histograms of seconds waited and worked by stage, counters of traffic, gauges of balance.

    A stage is told by its name, and by that of Ray Data's stage to which it belongs (`ray_stage`).
    All carry the rank and its data-parallel rank, except steps, tokens, the mixture and the slowest rank:
    these are of the whole job, and only the lowest rank reports them.

    Args:
        meter_provider: an opentelemetry MeterProvider, with its readers and exporters; None takes the global
            one.

    Raises MetricsError if opentelemetry is missing.
    """

    def __init__(self, meter_provider: MeterProvider | None = None) -> None:
        try:
            from opentelemetry import metrics
        except ImportError as missing:
            raise MetricsError(
                f"Telemetry needs opentelemetry ({missing}): {install('telemetry')}"
            ) from missing
        meter = (meter_provider or metrics.get_meter_provider()).get_meter("meshfeed")

        def seconds(name: str, what: str) -> Callable[..., None]:
            made = meter.create_histogram(name, "s", what, explicit_bucket_boundaries_advisory=_SECONDS)
            return made.record

        self._wait = seconds("meshfeed.wait", "a step's seconds that the loop waited, by stage")
        self._work = seconds("meshfeed.work", "a step's seconds that the producer worked, by stage")
        self._counters = {key: meter.create_counter(*about).add for key, about in _COUNTERS.items()}
        self._gauges = {key: meter.create_gauge(name, "", what).set for key, (name, what) in _GAUGES.items()}
        self._steps = meter.create_counter("meshfeed.steps", "{step}", "steps handed out").add
        self._tokens = meter.create_counter("meshfeed.tokens", "{token}", "tokens handed out").add
        self._share = meter.create_gauge("meshfeed.source.share", "", "share of the sequences, by source").set
        self._asked = meter.create_gauge("meshfeed.source.asked", "", "the same by the recipe").set
        self._slowest_rank = meter.create_gauge("meshfeed.slowest.rank", "", "rank that others wait for").set
        self._slowest_wait = meter.create_gauge("meshfeed.slowest.wait", "s", "what it waits a step").set
        self._start: RunStart | None = None

    def take(self, entries: Sequence[RunStart | StepRecord]) -> None:
        """Record the seconds of each step, the sums of counts, and the gauges of the last step."""
        start = next((entry for entry in reversed(entries) if isinstance(entry, RunStart)), self._start)
        records = [entry for entry in entries if isinstance(entry, StepRecord)]
        self._start = start
        if start is None or not records:
            return
        who, last = {"rank": start.rank, "dp": start.coord["dp"]}, records[-1].stats
        of_stage = {
            name: who | {"stage": name} | ({} if stage.ray is None else {"ray_stage": stage.ray})
            for name, stage in STAGE_TABLE.items()
        }
        for stats in (record.stats for record in records):
            for stage, seconds in stats.exposed_wait_s.items():
                self._wait(seconds, of_stage[stage])
            for stage, seconds in stats.work_s.items():
                self._work(seconds, of_stage[stage])
        for key, count in self._counters.items():
            if getattr(last, key) is not None:
                count(sum(getattr(record.stats, key) or 0 for record in records), who)
        for key, report in self._gauges.items():
            if (value := getattr(last, key)) is not None:
                report(value, who)
        if start.is_lowest:
            self._steps(len(records))
            self._tokens(sum(record.tokens for record in records))
            if (slow := last.slowest) is not None:
                self._slowest_rank(slow.rank)
                self._slowest_wait(slow.wait_s)
            if last.source_drawn is not None:
                self._record_mixture(last.source_drawn, last.source_asked, last.source_names or start.sources)

    def _record_mixture(self, drawn: Any, asked: Any, names: Sequence[str]) -> None:
        shares, of_recipe = ((each / drawn.sum()).tolist() for each in (drawn, asked))
        for name, share, wanted in zip(names, shares, of_recipe):
            self._share(share, {"source": name})
            self._asked(wanted, {"source": name})
