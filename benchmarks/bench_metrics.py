"""What metrics cost: CPU time of a step with all of them, over the time of the step; and nothing when off.

A step is eight microbatches of two windows of 4,096 tokens, and a few milliseconds of matrix products for
each: some 50 ms, where language models take a second or more. All metrics are a run log, OpenTelemetry with
the Prometheus exporter and ranges for torch's profiler, which is off. Counted is the CPU time of all threads,
so a busy machine changes little.

The figure comes twice: from what a Feed tells, told again many times to a recorder with sinks and to one
without; and from whole loops, with and without, in turn. The first sees a microsecond, the second whatever
the first does not think of, within the noise of a few per cent.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
from measure import Row, ratio

import meshfeed as mf
from meshfeed.metrics import (
    ProfilerRanges,
    Recorder,
    RunLog,
    RunStart,
    Sink,
    Span,
    StageClock,
    StepCosts,
    StepStats,
)
from meshfeed.sinks import Telemetry
from meshfeed.store import IndexedWriter

MICROBATCHES = 8
ROUNDS = 5
TOLD = 2000  # steps told to a recorder by itself
ONLY_FOR_SINKS = ("background", "run_log", "telemetry", "ranges", "sink")


def measured(short: bool) -> Iterator[Row]:
    """What metrics cost, on and off, and what a run log takes on disk."""
    steps, told_steps = (5, 100) if short else (30, TOLD)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        recipe = recipe_of(Path(scratch) / "corpus")
        loops = {"off": lambda: loop(recipe, steps, None), "on": lambda: loop(recipe, steps, sinks(scratch))}
        took = cpu_in_turn(loops, 1 if short else ROUNDS)
        step_s = statistics.median(wall for _, wall in took["off"]) / steps
        off, on = ([cpu for cpu, _ in took[name]] for name in ("off", "on"))
        cost_s = told(sinks(scratch), told_steps) - told(None, told_steps)
        yield Row(
            name="CPU time of all metrics",
            against="a step of some 50 ms",
            value=cost_s / step_s,
            aim=0.01,
        )
        yield Row(name="CPU time of whole loops with all metrics", against="without", value=ratio(on, off))
        yield Row(name="calls into sinks when off", value=calls_when_off(recipe), unit="calls", aim=0)
        log = Path(scratch) / "log"
        told([RunLog(log)], told_steps)
        written = sum(path.stat().st_size for path in log.rglob("*") if path.is_file())
        yield Row(name="a run log, for each step and rank", value=written / told_steps, unit="bytes")


def sinks(scratch: str) -> list[Sink]:
    """All there are."""
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider

    provider = MeterProvider([PrometheusMetricReader()])
    return [RunLog(tempfile.mkdtemp(dir=scratch)), Telemetry(provider), ProfilerRanges()]


def recipe_of(prefix: Path) -> mf.Recipe:
    """A mixture of two sources over one store."""
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(1000):
            writer.add_document(rng.integers(1, 50_000, 8192).astype(np.uint16))
    sources = {name: (mf.open(prefix), amount) for name, amount in (("code", 0.7), ("docs", 0.3))}
    batch = mf.Batch(sequences=2 * MICROBATCHES)
    return mf.Recipe(data=mf.Mixture(sources), sequence=mf.Windows(4096), batch=batch)


def loop(recipe: mf.Recipe, steps: int, metrics: list[Sink] | None) -> None:
    """Train some steps."""
    weights = torch.rand(512, 512)
    with mf.Feed(recipe, micro_batch_size=2, metrics=metrics) as feed:
        for step in itertools.islice(feed, steps):
            for microbatch in step.microbatches:
                torch.mm(microbatch["tokens"].view(-1)[:512, None] * weights, weights)


def cpu_in_turn(loops: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(CPU, wall) seconds of each loop in each round; the first is not counted."""
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for counted in [False, *([True] * rounds)]:
        for name, run in loops.items():
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            if counted:
                took[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return took


def told(metrics: list[Sink] | None, steps: int) -> float:
    """CPU seconds that a recorder and its sinks take for a step, all stages of it included."""
    layout = mf.Layout()
    planned = StepStats(source_drawn=np.array([70, 30]), source_asked=np.array([0.7, 0.3]))
    recorder = Recorder(metrics, lambda step: RunStart.here(step, layout, 0, "direct", "", ["code", "docs"]))
    began = time.process_time()
    recorder.start(0, None, follows=False)
    for step in range(steps):
        recorder.step(step, 65_536, 2, StepCosts(lambda: planned), time.monotonic())
        tell_step(recorder)
        recorder.over()
        if step % 500 == 499:
            time.sleep(1.2)  # as a loop would: the sinks are told in between, many steps at a time
    recorder.close()
    return (time.process_time() - began) / steps


def tell_step(recorder: Recorder) -> None:
    """What a run tells of a step: its start, each microbatch, its end."""
    for _ in range(MICROBATCHES + 2):
        clock = StageClock(recorder.around)
        for stage in ("plan", "read", "deliver", "build", "copy"):
            with clock.stage(stage):
                pass
        with recorder.around("wait"):
            spans: list[Span] = clock.take()
        recorder.waited(spans[0].start, spans[-1].stop, spans)
        recorder.costs.counted({"bytes_read": 16_384, "opens": 0, "collectives": 0})


def calls_when_off(recipe: mf.Recipe) -> int:
    """Calls, on any thread, of functions that are there for sinks alone, by a Feed without any."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        module = frame.f_globals.get("__name__", "")
        calls += event == "call" and module in {f"meshfeed.metrics.{name}" for name in ONLY_FOR_SINKS}

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        loop(recipe, 5, None)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


if __name__ == "__main__":
    measure.main(__doc__, measured)
