"""Remote storage in the demo's page: what each rank fetched, and how long the training loop stood still."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from statistics import mean

from demo.compare import Run

LEAST_BYTES_PER_S = 28 << 10
"""That the storage gives, however slow the steps are: enough for several requests within their time limit."""
WARM_UP = 1
"""Steps at a run's start whose waiting is not counted: storage has yet to get ahead of training."""

_TOLD = {
    "local": "corpus on the disk",
    "remote": "meshfeed, remote storage",
    "apart": "every rank for itself, remote storage",
}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 960, 220, 56, 34, 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Three runs of one recipe: "local" from a disk, "remote" and "apart" from remote storage.

    Attributes:
        layout: of all three.
        runs: by name.
        fetched_bytes: what the storage sent to each of the remote runs.
        consumed_bytes: bytes of the tokens that the steps of each used.
        requests, late: of each remote run, and how many of them the storage answered late.
        latency_s, bytes_per_s, late_by: how the storage answers; see the demo's `Manners`.
    """

    layout: str
    runs: Mapping[str, Run]
    fetched_bytes: Mapping[str, int]
    consumed_bytes: Mapping[str, int]
    requests: Mapping[str, int]
    late: Mapping[str, int]
    latency_s: float
    bytes_per_s: float
    late_by: float

    def waits(self, name: str) -> dict[int, float]:
        """step -> seconds that its slowest rank stood still for data."""
        longest: dict[int, float] = {}
        for lines in self.runs[name].costs.values():
            for line in lines:
                waited = sum(line["exposed_wait_s"].values())
                longest[line["step"]] = max(longest.get(line["step"], 0.0), waited)
        return longest

    def exposed_s(self, name: str) -> float:
        """Seconds waited after the first step, all steps together."""
        return sum(waited for step, waited in self.waits(name).items() if step >= WARM_UP)

    def num_steps(self, name: str) -> int:
        """Steps after the first."""
        return max(len(self.waits(name)) - WARM_UP, 1)

    def step_s(self, name: str) -> float:
        """Mean time of a step after the first, of the slowest rank."""
        slowest = [max(line["seconds"] for line in lines) for lines in zip(*self.runs[name].costs.values())]
        return mean(slowest[WARM_UP:])


_TEXT = """<p>Three more runs of one recipe on two processes, {layout}. First from the disk, to see what the
steps take. Then from storage that answers after {latency_ms:.0f} ms, gives all readers together {rate} KiB a
second (1.6 times what those steps take, at least {least}), and answers one request in a hundred
{late_by:.0f} times as slowly. meshfeed knows what comes, fetches it once for the node, ahead, and hedges
slow requests. In the last run every rank reads for itself, as a DataLoader in each process does: both tp
ranks need the same tokens, so storage sends each byte twice. Every run waits for its first
bytes; the shaded step is left out.</p>"""
_LEGEND = """<div class="legend"><span><i style="background:var(--first)"></i>meshfeed</span>
<span><i style="background:var(--then)"></i>every rank for itself</span></div>"""


def remote_section(remote: Remote) -> str:
    """What was run, a table of the three runs, and a chart of what each step waited."""
    text = _TEXT.format(
        layout=escape(remote.layout),
        latency_ms=remote.latency_s * 1e3,
        rate=f"{remote.bytes_per_s / 1024:,.0f}",
        least=f"{LEAST_BYTES_PER_S / 1024:.0f}",
        late_by=remote.late_by,
    )
    longest = max(remote.step_s(name) for name in remote.runs)
    rows: list[str] = []
    for name in remote.runs:
        fetched = remote.fetched_bytes.get(name)
        bar = f'<i class="time" style="width:{remote.step_s(name) / longest * 100:.0f}px"></i>'
        cells = (
            _TOLD[name],
            "-" if fetched is None else f"{fetched / 1024:,.0f} KiB",
            "-" if fetched is None else f"{fetched / remote.consumed_bytes[name]:.2f}",
            "-" if fetched is None else f"{remote.late[name]} of {remote.requests[name]}",
            f"{bar} {remote.step_s(name) * 1e3:,.0f} ms",
            f"{remote.exposed_s(name) / remote.num_steps(name) * 1e3:,.0f} ms",
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return (
        f'{text}<div class="panel">{_chart(remote)}</div>'
        "<table><thead><tr><th>run</th><th>fetched</th><th>per byte used</th><th>late requests</th>"
        "<th>time of a step</th><th>waited, after the first step</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>{_LEGEND}"
    )


def _chart(remote: Remote) -> str:
    """Seconds waited, step by step; a line for each of the remote runs."""
    waits = {name: remote.waits(name) for name in ("remote", "apart")}
    steps = 1 + max(step for run in waits.values() for step in run)
    most = max([waited for run in waits.values() for waited in run.values()] + [1e-3])

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 12) * step / max(steps - 1, 1)

    def y(waited: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - waited / most)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="seconds waited, by step">']
    for tick in range(3):
        at = y(most * tick / 2)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{at:.1f}" y2="{at:.1f}"/>')
        text = f"{most * tick / 2:.1f} s"
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    for step in range(0, steps, max(1, steps // 10)):
        parts.append(f'<text x="{x(step):.1f}" y="{_HEIGHT - 12}" text-anchor="middle">{step}</text>')
    parts.append(
        f'<rect class="redone" x="{x(0):.1f}" width="{x(WARM_UP) - x(0):.1f}" y="{_TOP}" '
        f'height="{_HEIGHT - _TOP - _BOTTOM}"/>'
    )
    for name, kind in (("apart", "then"), ("remote", "first")):
        points = " ".join(f"{x(step):.1f},{y(waited):.1f}" for step, waited in sorted(waits[name].items()))
        parts.append(f'<polyline class="{kind}" points="{points}"/>')
    return "".join([*parts, "</svg>"])
