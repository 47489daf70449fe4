"""OpenTelemetry's metrics, as Prometheus gets them."""

from __future__ import annotations

import itertools
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meshfeed as mf
from corpus import recipe_of, write_corpus
from meshfeed.metrics import STAGE_TABLE, StepRecord, StepStats
from meshfeed.sinks import Telemetry
from meshfeed.sinks.boards import scalars

Scraped = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    write_corpus(tmp_path / "text", num_tokens=20_000)
    return str(tmp_path / "text")


@pytest.fixture
def exporter() -> Iterator[tuple[Any, str]]:
    """A meter provider, and the address at which Prometheus would find it."""
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider
    from prometheus_client import start_http_server

    server, thread = start_http_server(0, "127.0.0.1")
    provider = MeterProvider([PrometheusMetricReader()])
    yield provider, f"http://127.0.0.1:{server.server_port}/metrics"
    provider.shutdown()
    server.shutdown()
    server.server_close()
    thread.join()


def scraped(address: str) -> Scraped:
    """(name, labels) -> value of what is meshfeed's."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(address, timeout=600) as page:
        text = page.read().decode()
    return {
        (
            sample.name,
            tuple(sorted((k, v) for k, v in sample.labels.items() if v and "otel" not in k)),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("meshfeed")
    }


def test_prometheus_sees_what_the_stats_say(corpus: str, exporter: tuple[Any, str]) -> None:
    provider, address = exporter
    mixture = mf.Mixture({"code": (mf.open(corpus), 3), "docs": (mf.open(corpus), 1)})
    recipe = mf.Recipe(data=mixture, sequence=mf.Documents(), batch=mf.Batch(sequences=16))
    with mf.Feed(recipe, packing=mf.Packing(capacity=1024), metrics=Telemetry(provider)) as feed:
        steps = [(step, list(step.microbatches)) for step in itertools.islice(feed, 5)]
    seen, who = scraped(address), (("dp", "0"), ("rank", "0"))
    stats = [step.stats for step, _ in steps]
    for kind, key in (("wait", "exposed_wait_s"), ("work", "work_s")):
        for stage in {stage for each in stats for stage in each[key]}:
            ray = STAGE_TABLE[stage].ray
            labels = (*who, *([("ray_stage", ray)] if ray else []), ("stage", stage))
            spent = [each[key][stage] for each in stats if stage in each[key]]
            assert seen[f"meshfeed_{kind}_seconds_sum", labels] == pytest.approx(sum(spent))
            assert seen[f"meshfeed_{kind}_seconds_count", labels] == len(spent)
            up_to = tuple(sorted([*labels, ("le", "0.5")]))
            assert seen[f"meshfeed_{kind}_seconds_bucket", up_to] == sum(each <= 0.5 for each in spent)
    assert {"read", "plan", "build"} <= {dict(labels).get("stage") for _, labels in seen}
    assert seen["meshfeed_read_bytes_total", who] == sum(each["bytes_read"] for each in stats) > 0
    assert seen["meshfeed_opens_total", who] == sum(each["opens"] for each in stats)
    assert seen["meshfeed_padding", who] == stats[-1]["padding"]
    assert seen["meshfeed_imbalance", who] == stats[-1]["max_over_mean"]
    assert seen["meshfeed_steps_total", ()] == 5
    assert seen["meshfeed_tokens_total", ()] == sum(step.tokens for step, _ in steps)
    drawn = stats[-1]["source_drawn"]
    assert seen["meshfeed_source_share", (("source", "docs"),)] == drawn[1] / drawn.sum()
    assert seen["meshfeed_source_asked", (("source", "docs"),)] == 0.25


def test_the_slowest_rank_is_a_gauge_and_a_scalar(corpus: str, exporter: tuple[Any, str]) -> None:
    provider, address = exporter
    with mf.Feed(recipe_of(corpus), transport=mf.Transport(prefetch=0), metrics=Telemetry(provider)) as feed:
        slow = next(step.stats.slowest for step in feed if step.stats.slowest is not None)
    seen = scraped(address)
    assert slow is not None
    assert seen["meshfeed_slowest_rank", ()] == slow.rank == 0
    assert seen["meshfeed_slowest_wait_seconds", ()] == slow.wait_s > 0
    named = scalars(StepRecord(7, 0.0, 100, StepStats(slowest=slow)))
    assert named["meshfeed/slowest/rank"] == 0 and named["meshfeed/slowest/wait_s"] == slow.wait_s
    assert not [name for name in scalars(StepRecord(7, 0.0, 100, StepStats())) if "slowest" in name]


def test_without_a_provider_nothing_is_kept(corpus: str) -> None:
    with mf.Feed(recipe_of(corpus), metrics=Telemetry()) as feed:
        assert [step.index for step in itertools.islice(feed, 3)] == [0, 1, 2]


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(mf.errors.MetricsError, match=r"pip install 'opentelemetry-"):
        Telemetry()
