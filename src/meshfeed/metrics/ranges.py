"""Stages of data loading as ranges in a trace of torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch.profiler import record_function

from meshfeed.metrics.sink import Sink

# private: without tracing it costs a twentieth of the public one
_range = getattr(cast(Any, torch)._C._profiler, "_RecordFunctionFast", record_function)


class ProfilerRanges(Sink):
    """Adds ranges to a trace: "meshfeed.wait" for waits of the loop, "meshfeed.read" and so on for stages.

    Decoding is in "meshfeed.read". torch traces the producer's own thread only with
    `experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)`, or with
    `prefetch=0`.
    """

    def stage(self, name: str) -> AbstractContextManager[Any]:
        return _range(f"meshfeed.{name}")
