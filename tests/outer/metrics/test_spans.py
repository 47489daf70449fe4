"""Waits as OpenTelemetry's spans, and in the stages of Ray Data."""

from __future__ import annotations

import itertools
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import meshfeed as mf
from corpus import recipe_of, write_corpus
from meshfeed.metrics import FOLLOWS, RAY_STAGES, STAGE_TABLE, STAGES, Stage
from meshfeed.sinks import Spans

STEPS, LONG_S = 6, 0.05


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    write_corpus(tmp_path / "text", num_tokens=20_000)
    return str(tmp_path / "text")


def trained(corpus: str, method: str, prefetch: int, provider: Any) -> list[mf.Step]:
    """The steps of a feed that is slow at one method of its rule, each in a span of the trainer."""
    recipe, tracer = recipe_of(corpus), provider.get_tracer("trainer")
    quick = getattr(recipe.sequence, method)

    def slow(*given: Any, **named: Any) -> Any:
        time.sleep(LONG_S)
        return quick(*given, **named)

    object.__setattr__(recipe.sequence, method, slow)
    steps: list[mf.Step] = []
    with mf.Feed(
        recipe, transport=mf.Transport(prefetch=prefetch), metrics=Spans(provider, least_s=0.0)
    ) as feed:
        with tracer.start_as_current_span("megatron.startup.dataloader"):
            loop = iter(feed)
        for _ in range(STEPS):
            with tracer.start_as_current_span("megatron.forward_backward"):
                steps.append(next(loop))
                for _ in steps[-1].microbatches:
                    pass
    return steps


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("method", "stage"), [("load", "read"), ("table", "build")])
def test_a_wait_is_a_span_of_the_trainers_trace(corpus: str, method: str, stage: str, prefetch: int) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    steps = trained(corpus, method, prefetch, provider)
    spans = {span.context.span_id: span for span in exporter.get_finished_spans() if span.context}
    outer = {name for name, span in spans.items() if span.name.startswith("megatron.")}
    waits = {name: span for name, span in spans.items() if span.name == "data_loading.wait"}
    assert len(outer) == 1 + STEPS
    (start,) = [span for span in spans.values() if span.name == "data_loading.start"]
    assert start.parent
    around = waits[start.parent.span_id].parent
    assert around
    assert spans[around.span_id].name == "megatron.startup.dataloader"
    waited = sum(seconds for step in steps for seconds in step.stats.exposed_wait_s.values())
    assert LONG_S <= sum(map(seconds_of, waits.values())) <= waited + 1e-3
    slow = [seconds_of(span) for span in spans.values() if span.name == f"data_loading.{stage}"]
    assert sum(slow) >= (LONG_S * STEPS if prefetch == 0 else LONG_S)
    for span in spans.values():
        if span.name == "data_loading.wait":
            assert span.parent and span.parent.span_id in outer
            assert inside(span, spans[span.parent.span_id])
        elif span.name.startswith("data_loading."):
            assert span.parent and inside(span, waits[span.parent.span_id])
            assert dict(span.attributes or {}).get("ray.stage") == STAGE_TABLE[span.name.split(".")[1]].ray


def seconds_of(span: Any) -> float:
    return (span.end_time - span.start_time) / 1e9


def inside(span: Any, other: Any) -> bool:
    """Within a millisecond, since the two come of different clocks."""
    return other.start_time - 1e6 <= span.start_time <= span.end_time <= other.end_time + 1e6


def test_short_waits_have_no_span_and_a_missing_package_is_named(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Never:
        def get_tracer(self, name: str) -> Any:
            return None  # which starts no span

    with mf.Feed(recipe_of(corpus), metrics=Spans(Never(), least_s=3600.0)) as feed:  # type: ignore[arg-type]
        assert [step.index for step in itertools.islice(feed, 3)] == [0, 1, 2]
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(
        mf.errors.MetricsError, match=r"Spans needs opentelemetry .*pip install 'opentelemetry-"
    ):
        Spans()


def test_waits_in_the_stages_of_ray(corpus: str) -> None:
    with mf.Feed(recipe_of(corpus), transport=mf.Transport(prefetch=0)) as feed:
        for step in itertools.islice(feed, 3):
            list(step.microbatches)
            stats = step.stats
            assert tuple(stats.blocked_s) == RAY_STAGES
            wait = stats.exposed_wait_s
            read = sum(wait.get(name, 0.0) for name in ("plan", "read", "decode"))
            assert stats.blocked_s["production_wait"] == pytest.approx(read)
            assert stats.blocked_s["collate"] == wait["build"] > 0
            others = sum(wait.get(name, 0.0) for name in ("start", "verify", "other"))
            assert sum(stats.blocked_s.values()) == pytest.approx(sum(wait.values()) - others)


def test_the_page_shows_the_table_of_stages() -> None:
    page = (Path(__file__).parents[3] / "docs" / "troubleshooting.md").read_text()
    (lines,) = re.findall(r"^\| stage \| what happens in it \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.M)
    shown = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines.splitlines()]
    assert shown == [[name, each.does, each.ray or "–", each.megatron] for name, each in STAGE_TABLE.items()]
    assert {each.ray for each in STAGE_TABLE.values()} - {None} <= {*RAY_STAGES}
    assert {"deliver", "exchange"} == FOLLOWS
    assert tuple(STAGE_TABLE) == STAGES
    assert Stage(does="nothing").ray is None


def test_a_sink_that_fails_in_a_wait_ends_no_training(corpus: str, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(mf.metrics.Sink):
        told = 0

        def waited(self, start: float, stop: float, spans: Any) -> None:
            self.told += 1
            raise ValueError("of a board that is gone")

    sink, others = Failing(), [0]

    class Counting(mf.metrics.Sink):
        def waited(self, start: float, stop: float, spans: Any) -> None:
            others[0] += 1

    with mf.Feed(recipe_of(corpus), metrics=[sink, Counting()]) as feed:
        steps = [step.index for step, _ in zip(feed, range(STEPS))]
    assert steps == list(range(STEPS))
    assert sink.told == 1 and others[0] > STEPS
    assert ["of a board that is gone" in str(record.exc_info) for record in caplog.records].count(True) == 1
