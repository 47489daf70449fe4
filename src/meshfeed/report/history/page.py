"""The page of a run: its log in one sentence, then in pictures, all in one file."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from meshfeed.metrics import FOLLOWS, STAGE_TABLE
from meshfeed.report.history import summary
from meshfeed.report.history.decoding import decoded_of
from meshfeed.report.history.grid import Grid
from meshfeed.report.history.starvation import starvation_of
from meshfeed.report.history.tables import (
    balance_section,
    decoding_section,
    mixture_table,
    ranks_table,
    stages_table,
    starts_table,
)
from meshfeed.report.history.waits import Waits, stragglers, waits_of
from meshfeed.report.reader import RunHistory
from meshfeed.report.words import escape


def page(history: RunHistory, name: str) -> str:
    """The whole page: self-contained, no outside request, at most about 3 MB for a run of any length."""
    waits, grid, decoded = waits_of(history), Grid(history), decoded_of(history)
    folder = Path(__file__).parent
    data = json.dumps(data_of(history, waits, grid), separators=(",", ":"), allow_nan=False)
    shell = Template((folder / "page.html").read_text())
    return shell.substitute(
        name=escape(name),
        when=escape(summary.when(history, waits)),
        mood=summary.mood(waits),
        sentence="<br>".join(map(escape, summary.says(waits, decoded, starvation_of(history)))),
        kpis="".join(
            f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd></div>"
            for what, value in summary.kpis(history, waits)
        ),
        decoding=decoding_section(history, waits, decoded) if decoded else "",
        mixture=mixture_table(history.mixture),
        balance=balance_section(history),
        traffic=escape(summary.traffic(history)),
        resumes=escape(summary.resumes(history)),
        starts=starts_table(history),
        ranks=ranks_table(history, waits),
        stages=stages_table(stage for stage in history.stages if stage in STAGE_TABLE),
        resolution=escape(summary.resolution(grid)),
        style=(folder / "page.css").read_text(),
        script="\n".join((folder / name).read_text() for name in ("draw.js", "page.js")),
        data=data.replace("<", "\\u003c"),  # safe inside a script element
    )


def data_of(history: RunHistory, waits: Waits, grid: Grid) -> dict[str, Any]:
    """The data for the page's script, JSON-able. Stages without any time are left out."""
    used = [
        k
        for k in range(len(history.stages))
        if any(rank.wait[:, k].any() or rank.work[:, k].any() for rank in history.ranks.values())
    ]
    heat = grid.heat(used)
    moments = grid.moments(heat, used)
    marked = stragglers(waits)
    return {
        "stages": [history.stages[k] for k in used],
        "follows": sorted(FOLLOWS),
        "axis": {name: getattr(grid, name).tolist() for name in ("start", "first", "stop")}
        | {"moment": moments.pop("step").tolist()},
        "rows": {
            "first": grid.ranks[grid.rows].tolist(),
            "stop": (grid.ranks[grid.row_stop - 1] + 1).tolist(),
            "marked": [bool(marked[a:b].any()) for a, b in zip(grid.rows, grid.row_stop)],
        },
        "starts": [
            {"step": start.step, "layout": start.layout or "a layout of its own"} for start in history.starts
        ],
        "heat": {name: packed(values) for name, values in heat.items()},
        "moments": {name: packed(values) for name, values in moments.items()},
        "series": grid.series(),
        "summary": summary.summary_of(history, waits),
    }


def packed(values: np.ndarray) -> str:
    """An array as text: base64 of little-endian 32-bit floats."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()
