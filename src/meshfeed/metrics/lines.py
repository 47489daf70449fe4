"""The lines of a run log: one JSON object where a run starts, then one JSON array for each step.

A start names the columns of the arrays that follow it, so a reader does not depend on the version. The draws
of a mixture are also a JSON object. Every line ends in a newline; a line without one is incomplete.
"""

from __future__ import annotations

import json
from typing import Any

from meshfeed.metrics.clock import STAGES
from meshfeed.metrics.sink import RunStart, StepRecord

COUNTED = ("queue_depth", "bytes_read", "bytes_fetched", "delivered_bytes", "opens", "collectives")
COLUMNS = (
    "step",
    "time",
    *(f"wait_{stage}" for stage in STAGES),
    *(f"work_{stage}" for stage in STAGES),
    *COUNTED,
    "tokens",
    "padding",
    "imbalance",
)


def file_name(rank: int) -> str:
    """The file of a rank, inside the folder of its run."""
    return f"rank-{rank:06d}.jsonl"


def line_of(entry: RunStart | StepRecord) -> str:
    """A start or a step as a line."""
    return _line_of_start(entry) if isinstance(entry, RunStart) else _line_of_step(entry)


def mixture_line(record: StepRecord) -> str:
    """Draws of each source until the end of a step, and the recipe's shares in that step."""
    drawn, asked = (record.stats[name].tolist() for name in ("source_drawn", "source_asked"))
    told = {"step": record.step, "drawn": drawn, "asked": asked}
    return _line({"mixture": told})


def _line_of_start(start: RunStart) -> str:
    told = {
        "version": 1,
        "meshfeed": start.meshfeed,
        "time": round(start.time_s, 6),
        "host": start.host,
        "pid": start.pid,
        "rank": start.rank,
        "world_size": start.world_size,
        "layout": start.layout,
        "coord": dict(start.coord),
        "delivery": start.delivery,
        "fingerprint": start.fingerprint,
        "step": start.step,
        "sources": start.sources,
        "stages": STAGES,
        "columns": COLUMNS,
    }
    return _line({"start": told})


def _line_of_step(record: StepRecord) -> str:
    stats = record.stats
    wait, work = stats.exposed_wait_s, stats.work_s
    numbers = (
        record.step,
        round(record.time_s, 6),
        *(_seconds(wait.get(stage)) for stage in STAGES),
        *(_seconds(work.get(stage)) for stage in STAGES),
        *(getattr(stats, name) for name in COUNTED),
        record.tokens,
        _share(stats.padding),
        _share(stats.max_over_mean),
    )
    return _line(numbers)


def _line(told: Any) -> str:
    return json.dumps(told, separators=(",", ":"), allow_nan=False) + "\n"


def _seconds(seconds: float | None) -> float:
    return round(seconds, 6) if seconds else 0


def _share(share: float | None) -> float | None:
    return None if share is None else round(share, 6)
