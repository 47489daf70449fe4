"""The costs of every step: how long the loop waited for each stage, bytes read, balance.

A Feed or an Exchange takes `metrics=`, a sink or several:

    with mf.Feed(recipe, layout, metrics=mf.metrics.RunLog("runs/7")) as feed: ...

`recorder` times the stages that `stages` names, and adds up each step. It hands the sums to `background`,
which passes them to the sinks on its own thread: `RunLog` (lines on disk, which `mf.report.read_run` reads),
`ProfilerRanges` (torch's profiler), those of `mf.sinks`, or another subclass of `Sink`.
"""

from meshfeed.metrics.ranges import ProfilerRanges
from meshfeed.metrics.recorder import Meter, Recorder, StageClock, StepCosts
from meshfeed.metrics.run_log import RunLog
from meshfeed.metrics.sink import RunStart, Sink, StepRecord
from meshfeed.metrics.stages import FOLLOWS, RAY_STAGES, STAGE_TABLE, STAGES, Span, Stage
from meshfeed.metrics.stats import SlowRank, StepStats

__all__ = [
    "FOLLOWS",
    "RAY_STAGES",
    "STAGES",
    "STAGE_TABLE",
    "Meter",
    "ProfilerRanges",
    "Recorder",
    "RunLog",
    "RunStart",
    "Sink",
    "SlowRank",
    "Span",
    "Stage",
    "StageClock",
    "StepCosts",
    "StepRecord",
    "StepStats",
]
