"""What every step costs: how long the loop waited for which stage, what was read, how balanced it was.

A Feed or an Exchange takes `metrics=`, a sink or several:

    with mf.Feed(recipe, layout, metrics=mf.metrics.RunLog("runs/7")) as feed: ...

`clock` times stages and `meter` counts; `recorder` sums both up in each step's stats, and `courier` tells the
sinks on a thread of its own: `RunLog` (lines on disk), `Telemetry` (OpenTelemetry), `ProfilerRanges` (torch's
profiler), or what else derives from `Sink`. `read_run` reads a log back; `RunReader` one that grows.
"""

from meshfeed.metrics.clock import STAGES, Span, StageClock, exposed_wait, work
from meshfeed.metrics.history import MixtureHistory, RankHistory, RunHistory, RunReader, Start, read_run
from meshfeed.metrics.meter import Meter
from meshfeed.metrics.ranges import ProfilerRanges
from meshfeed.metrics.recorder import Recorder
from meshfeed.metrics.run_log import RunLog
from meshfeed.metrics.sink import RunStart, Sink, StepRecord, package_version
from meshfeed.metrics.telemetry import Telemetry

__all__ = [
    "STAGES",
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
    "StepRecord",
    "Telemetry",
    "exposed_wait",
    "package_version",
    "read_run",
    "work",
]
