"""The costs of every step: how long the loop waited for each stage, bytes read, balance.

A Feed or an Exchange takes `metrics=`, a sink or several:

    with mf.Feed(recipe, layout, metrics=mf.metrics.RunLog("runs/7")) as feed: ...

`recorder` times stages and adds up each step. It hands the sums to `background`, which passes them to the
sinks on its own thread: `RunLog` (lines on disk), `Telemetry` (OpenTelemetry), `ProfilerRanges` (torch's
profiler), `WandB`, `TensorBoard`, or another subclass of `Sink`. `read_run` reads a log; `RunReader` follows
one that grows.
"""

from meshfeed.metrics.boards import TensorBoard, WandB
from meshfeed.metrics.history import (
    DecodeHistory,
    MixtureHistory,
    RankHistory,
    RunHistory,
    RunReader,
    Start,
    read_run,
)
from meshfeed.metrics.ranges import ProfilerRanges
from meshfeed.metrics.recorder import Meter, Recorder, Span, StageClock, StepCosts
from meshfeed.metrics.run_log import RunLog
from meshfeed.metrics.sink import RunStart, Sink, StepRecord
from meshfeed.metrics.stats import STAGES, StepStats
from meshfeed.metrics.telemetry import Telemetry

__all__ = [
    "STAGES",
    "DecodeHistory",
    "Meter",
    "MixtureHistory",
    "ProfilerRanges",
    "RankHistory",
    "Recorder",
    "RunHistory",
    "RunLog",
    "RunReader",
    "RunStart",
    "Sink",
    "Span",
    "StageClock",
    "Start",
    "StepCosts",
    "StepRecord",
    "StepStats",
    "Telemetry",
    "TensorBoard",
    "WandB",
    "read_run",
]
