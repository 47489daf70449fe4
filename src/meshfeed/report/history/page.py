"""The page of a run: what its log says, first in a sentence, then in pictures, all of it in one file."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from meshfeed.metrics import RunHistory
from meshfeed.report.history import summary
from meshfeed.report.history.axis import Axis, Rows, axis_of, rows_of
from meshfeed.report.history.cells import heat_of, moments_of
from meshfeed.report.history.packed import listed, packed_integers, packed_seconds
from meshfeed.report.history.series import Job, Series, job_of
from meshfeed.report.history.tables import mixture_table, ranks_table, starts_table
from meshfeed.report.history.waits import FOLLOWS, Waits, sentence, waits_of


def page(history: RunHistory, name: str) -> str:
    """The whole page: self-contained, no outside request, at most about 2 MB however long the run was."""
    waits = waits_of(history)
    rows = rows_of(waits)
    axis = axis_of(history, len(rows))
    job = job_of(history, axis)
    folder = Path(__file__).parent
    shell = Template((folder / "page.html").read_text())
    return shell.substitute(
        name=escape(name),
        when=escape(summary.when(history, waits)),
        mood=summary.mood(waits),
        sentence=escape(sentence(waits)),
        kpis="".join(
            f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd></div>"
            for what, value in summary.kpis(history, waits)
        ),
        mixture=mixture_table(history.mixture),
        traffic=escape(summary.traffic(history)),
        resumes=escape(summary.resumes(history)),
        starts=starts_table(history),
        ranks_title=escape(summary.ranks_title(waits)),
        ranks=ranks_table(history, waits),
        how="<ul>" + "".join(f"<li>{escape(line)}</li>" for line in summary.how(axis, rows)) + "</ul>",
        style=(folder / "page.css").read_text(),
        script="\n".join((folder / name).read_text() for name in ("draw.js", "page.js")),
        data=_json(data_of(history, waits, axis, rows, job)),
    )


def data_of(history: RunHistory, waits: Waits, axis: Axis, rows: Rows, job: Job) -> dict[str, Any]:
    """What the page's script draws, JSON-able. Stages in which nothing ever happened are left out."""
    heat = heat_of(history, axis, rows)
    moments = moments_of(history, axis, rows, heat)
    used = [
        k
        for k in range(len(history.stages))
        if any(rank.wait[:, k].any() or rank.work[:, k].any() for rank in history.ranks.values())
    ]
    return {
        "stages": [history.stages[k] for k in used],
        "follows": sorted(FOLLOWS),
        "axis": {
            "start": axis.start.tolist(),
            "first": axis.first.tolist(),
            "stop": axis.stop.tolist(),
            "moment": moments.step.tolist(),
        },
        "rows": {
            "first": rows.first.tolist(),
            "stop": rows.stop.tolist(),
            "marked": rows.marked.tolist(),
            "alone": rows.alone,
        },
        "starts": [{"step": start.step, "layout": start.layout or ""} for start in history.starts],
        "heat": {
            "total": packed_seconds(heat.total),
            "by_stage": packed_seconds(heat.by_stage[:, :, used]),
            "rank": packed_integers(heat.rank),
            "step": packed_integers(heat.step),
        },
        "moments": {
            "rank": packed_integers(moments.rank),
            "begin": packed_seconds(moments.begin),
            "seconds": packed_seconds(moments.seconds),
            "wait": packed_seconds(moments.wait[:, :, used]),
            "work": packed_seconds(moments.work[:, :, used]),
        },
        "series": {"time": listed(job.time, digits=13)}
        | {
            name: {"mean": listed(series.mean), "extreme": listed(series.extreme)}
            for name in Job.__slots__
            if isinstance(series := getattr(job, name), Series)
        },
        "resolution": summary.resolution(axis, rows),
        "summary": summary.summary_of(history, waits),
    }


def _json(data: dict[str, Any]) -> str:
    """JSON that may stand in a script element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
