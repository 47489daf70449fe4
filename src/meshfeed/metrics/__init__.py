"""The costs of every step: how long the loop waited for each stage, bytes read, balance.

A Feed or an Exchange takes `metrics=`, a sink or several:

    with mf.Feed(recipe, layout, metrics=mf.metrics.RunLog("runs/7")) as feed: ...

`recorder` times the stages that `stages` names, and adds up each step. It hands the sums to `background`,
which passes them to the sinks on its own thread: `RunLog` (lines on disk), `Telemetry` and `Spans`
(OpenTelemetry), `ProfilerRanges` (torch's profiler), `WandB`, `TensorBoard`, or another subclass of `Sink`.
`read_run` reads a log; `RunReader` follows one that grows.
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
from meshfeed.metrics.recorder import Meter, Recorder, StageClock, StepCosts
from meshfeed.metrics.run_log import RunLog
from meshfeed.metrics.sink import RunStart, Sink, StepRecord
from meshfeed.metrics.spans import Spans
from meshfeed.metrics.stages import FOLLOWS, RAY_STAGES, STAGE_TABLE, STAGES, Span, Stage
from meshfeed.metrics.stats import SlowRank, StepStats
from meshfeed.metrics.telemetry import Telemetry

__all__ = [
    "FOLLOWS",
    "RAY_STAGES",
    "STAGES",
    "STAGE_TABLE",
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
    "SlowRank",
    "Span",
    "Spans",
    "Stage",
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
