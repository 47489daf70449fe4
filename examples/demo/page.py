"""The demo's page: one self-contained HTML file, drawn in inline SVG, no script and no outside request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from string import Template
from typing import Any

from demo.compare import Comparison, Run
from demo.remote_page import Remote, remote_section
from meshfeed.layout import Layout

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 960, 300, 56, 34, 14


def page(
    facts: Mapping[str, Any],
    corpus: Mapping[str, Any],
    runs: Mapping[str, Run],
    packed: Mapping[str, Run],
    remote: Remote | None,
    found: Comparison,
) -> str:
    """The whole page.

    facts: what losses.json holds. corpus: its counts. runs: "reference", "first" and "then". packed: runs
    over the same documents by packing policy. remote: the runs from remote storage, once they have ended.
    """
    shell = Template(Path(__file__).with_name("page.html").read_text())
    verdict = "The two jobs agree" if found.agree else "The two jobs do NOT agree"
    return shell.substitute(
        verdict=verdict,
        verdict_class="good" if found.agree else "bad",
        first=escape(facts["first"]),
        then=escape(facts["then"]),
        kill_at=facts["kill_at"],
        resumed_at=facts["resumed_at"],
        steps=facts["steps"],
        files=f"{corpus['num_files']:,}",
        tokens=f"{corpus['num_tokens']:,}",
        sequences=f"{found.num_sequences:,}",
        lost=len(found.lost),
        repeated=len(found.repeated),
        redone=found.num_redone,
        difference=f"{found.max_difference:.1e}",
        tolerance=f"{facts['tolerance']:.0e}",
        problems="".join(f"<li>{escape(problem)}</li>" for problem in found.problems[:20]),
        losses=_loss_chart(facts, runs),
        ledger=_ledger_picture(facts, runs, found),
        packed=_packed_table(packed),
        remote="<p>These runs have not ended.</p>" if remote is None else remote_section(remote),
        ranks="".join(
            _ranks_section(facts[name], runs[name], title)
            for name, title in (("first", "Before the kill"), ("then", "After the kill"))
        ),
    )


@dataclass(frozen=True, slots=True)
class Balance:
    """How a packed run went.

    Attributes:
        efficiency: part of all rank time that is work, by the plan; mean over the steps.
        waited_ms: what the loop of the slowest rank waited for planning, in all steps but the first two.
    """

    efficiency: float
    waited_ms: float


def balance_of(run: Run) -> Balance:
    """The balance of a run, from what its ranks wrote."""
    steps = list(zip(*run.costs.values()))
    slowest = [max(lines, key=lambda line: line["seconds"]) for lines in steps]
    return Balance(
        efficiency=fmean(line["efficiency"] for line in slowest),
        waited_ms=sum(line["exposed_wait_s"].get("plan", 0.0) for line in slowest[2:]) * 1e3,
    )


def _packed_table(packed: Mapping[str, Run]) -> str:
    """A bar of each policy's efficiency, and what planning cost the loop."""
    rows: list[str] = []
    for policy, run in packed.items():
        balance = balance_of(run)
        bar = f'<i class="time" style="width:{balance.efficiency * 260:.0f}px"></i>'
        cells = (escape(policy), f"{bar} {balance.efficiency:.1%}", f"{balance.waited_ms:.1f} ms")
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return (
        "<table><thead><tr><th>policy</th><th>rank time that is work, by the plan</th>"
        f"<th>waited for planning</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _loss_chart(facts: Mapping[str, Any], runs: Mapping[str, Run]) -> str:
    """Loss over steps: the reference as a broad band, both runs of the interrupted job on top."""
    steps = facts["steps"]
    values = [loss for run in runs.values() for loss in run.losses.values()]
    low, high = min(values), max(values)
    margin = (high - low or 1.0) * 0.06

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 12) * step / max(steps - 1, 1)

    def y(loss: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high + margin - loss) / (high - low + 2 * margin)

    def line(name: str, kind: str) -> str:
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in sorted(runs[name].losses.items()))
        return f'<polyline class="{kind}" points="{points}"/>'

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="loss over steps">']
    for tick in range(5):
        loss = low + (high - low) * tick / 4
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{y(loss):.1f}" y2="{y(loss):.1f}"/>'
        )
        parts.append(f'<text x="{_LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
    for step in range(0, steps, max(1, steps // 10)):
        parts.append(f'<text x="{x(step):.1f}" y="{_HEIGHT - 12}" text-anchor="middle">{step}</text>')
    killed = max(runs["first"].losses, default=0)
    resumed = facts["resumed_at"]
    parts.append(
        f'<rect class="redone" x="{x(resumed):.1f}" width="{max(x(killed) - x(resumed), 2):.1f}" y="{_TOP}" '
        f'height="{_HEIGHT - _TOP - _BOTTOM}"/>'
    )
    for step, kind, word, anchor, nudge in (
        (killed, "kill", "SIGKILL", "start", 6),
        (resumed, "resume", "resumed", "end", -6),
    ):
        parts.append(f'<path class="{kind}" d="M{x(step):.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
        at = f'x="{x(step) + nudge:.1f}" y="{_TOP + 12}" text-anchor="{anchor}"'
        parts.append(f'<text class="{kind}" {at}>{word}</text>')
    parts += [line("reference", "reference"), line("first", "first"), line("then", "then"), "</svg>"]
    return "".join(parts)


def _ledger_picture(facts: Mapping[str, Any], runs: Mapping[str, Run], found: Comparison) -> str:
    """A square per sequence of every step, coloured by the run that trained on it."""
    wanted, _ = runs["reference"].batches(0, facts["steps"])
    wrong = {step for step, _ in (*found.lost, *found.repeated)}
    tallest = max((sum(batch.values()) for batch in wanted.values()), default=1)
    size, gap = 18, 4
    width, height = facts["steps"] * (size + gap) + 30, tallest * 9 + 24
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="sequences of every step">']
    for step, batch in sorted(wanted.items()):
        kind = "wrong" if step in wrong else "first" if step < facts["resumed_at"] else "then"
        at = 15 + step * (size + gap)
        for row, (source, epoch, index) in enumerate(sorted(batch.elements())):
            parts.append(
                f'<rect class="cell {kind}" x="{at}" y="{row * 9}" width="{size}" height="7" rx="1.5">'
                f"<title>step {step}: source {source}, epoch {epoch}, index {index}</title></rect>"
            )
        if step % 5 == 0:
            parts.append(f'<text x="{at + size / 2}" y="{height - 6}" text-anchor="middle">{step}</text>')
    parts.append("</svg>")
    return "".join(parts)


def _ranks_section(layout_text: str, run: Run, title: str) -> str:
    """Every rank of a run as a card, grouped by data-parallel replica, and its costs in a table."""
    layout = Layout.parse(layout_text)
    handed = dict.fromkeys(run.costs, 0)
    for line in run.ledger:
        handed[line["rank"]] = handed.get(line["rank"], 0) + 1
    replicas: list[str] = []
    for dp in range(layout.dp):
        ranks = [rank for rank in run.costs if layout.coord(rank).dp == dp]
        cards = "".join(_card(layout, rank, run.costs[rank]) for rank in ranks)
        replicas.append(f'<div class="replica"><h4>replica {dp}</h4><div class="cards">{cards}</div></div>')
    rows = "".join(_row(layout, rank, run.costs[rank], handed[rank]) for rank in sorted(run.costs))
    delivery = next((line["delivery"] for lines in run.costs.values() for line in lines), "?")
    return (
        f"<h3>{escape(title)}: {escape(layout_text)}, delivery <em>{escape(delivery)}</em></h3>"
        f'<div class="replicas">{"".join(replicas)}</div>'
        "<table><thead><tr><th>rank</th><th>tp cp dp pp</th><th>opens storage</th><th>sequences</th>"
        "<th>read from storage</th><th>through delivery</th><th>waited for data</th><th>most of it for</th>"
        "</tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )


def _card(layout: Layout, rank: int, lines: Sequence[Mapping[str, Any]]) -> str:
    coord = layout.coord(rank)
    reads = bool(lines) and lines[-1]["reads"]
    place = (
        " ".join(f"{dim}{at}" for dim, at in coord._asdict().items() if getattr(layout, dim) > 1) or "alone"
    )
    kind, says = ("reader", "opens storage") if reads else ("peer", "opens nothing")
    return f'<div class="card {kind}"><b>{rank}</b><span>{place}</span><small>{says}</small></div>'


def _row(layout: Layout, rank: int, lines: Sequence[Mapping[str, Any]], handed: int) -> str:
    waits: dict[str, float] = {}
    for line in lines:
        for stage, seconds in line["exposed_wait_s"].items():
            waits[stage] = waits.get(stage, 0.0) + seconds
    total = sum(waits.values())
    worst = max(waits, key=lambda stage: waits[stage], default="-")
    cells: Iterable[str] = (
        str(rank),
        " ".join(map(str, layout.coord(rank))),
        "yes" if lines and lines[-1]["reads"] else "no",
        f"{handed:,}",
        _bytes(sum(line["bytes_read"] for line in lines)),
        _bytes(sum(line["delivered_bytes"] for line in lines)),
        f"{total * 1e3:,.0f} ms",
        worst,
    )
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _bytes(count: int) -> str:
    return f"{count / 1024:,.1f} KiB" if count else "-"
