"""Stages of data loading as ranges in a trace of torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch.profiler import record_function

from meshfeed.metrics.sink import Sink

# private: where nobody traces it costs a twentieth of the public one
_range = getattr(cast(Any, torch)._C._profiler, "_RecordFunctionFast", record_function)


class ProfilerRanges(Sink):
    """Names what happens in a trace: "meshfeed.wait" where the loop waits, "meshfeed.read" and so on where
    the producer works.

    The producer has a thread of its own, which torch traces only where it is asked to: with
    `experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)`, or `prefetch=0`.
    """

    def stage(self, name: str) -> AbstractContextManager[Any]:
        """See Sink."""
        return _range(f"meshfeed.{name}")
