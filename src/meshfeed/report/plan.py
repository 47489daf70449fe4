"""A step's plan as a picture: ranks downward, time to the right, a bar per sequence."""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template

import numpy as np

from meshfeed.plan import Account, StepPlan

_WIDTH, _LEFT, _MOST_RANKS, _MOST_HEIGHT = 1100, 60, 256, 1400


def page(layout: str, step: int, plan: StepPlan, account: Account) -> str:
    """The whole page: self-contained, no script, no outside request."""
    shell = Template(Path(__file__).with_name("plan.html").read_text())
    return shell.substitute(
        layout=escape(layout),
        step=step,
        microbatches=plan.num_microbatches,
        ranks=plan.num_ranks,
        tokens=f"{account.tokens:,}",
        padding=f"{account.padding:.2%}",
        efficiency=f"{account.efficiency:.2%}",
        over=f"{account.over_bound:.3f}",
        max_over_mean=f"{account.max_over_mean:.3f}",
        chart=_chart(plan, account),
        left_out="" if plan.num_ranks <= _MOST_RANKS else f"The first {_MOST_RANKS} ranks are drawn.",
    )


def _chart(plan: StepPlan, account: Account) -> str:
    """Microbatches side by side, as wide as their slowest rank; empty space means the rank is idle."""
    ranks = min(plan.num_ranks, _MOST_RANKS)
    height = max(2.0, min(22.0, _MOST_HEIGHT / max(ranks, 1)))
    tops = account.loads.max(axis=1, initial=0.0)
    scale = (_WIDTH - _LEFT - 10) / max(float(tops.sum()), 1e-9)
    begins = np.concatenate(([0.0], np.cumsum(tops))) * scale + _LEFT
    total = int(ranks * height) + 40
    parts = [f'<svg viewBox="0 0 {_WIDTH} {total}" role="img" aria-label="ranks over time">']
    for m in range(plan.num_microbatches):
        box = f'x="{begins[m]:.1f}" y="4" width="{max(begins[m + 1] - begins[m], 0):.1f}"'
        parts.append(f'<rect class="microbatch" {box} height="{ranks * height:.1f}"/>')
        middle = (begins[m] + begins[m + 1]) / 2
        parts.append(f'<text x="{middle:.1f}" y="{total - 16}" text-anchor="middle">{m}</text>')
    for rank in range(0, ranks, max(1, ranks // 16)):
        parts.append(
            f'<text x="{_LEFT - 8}" y="{4 + (rank + 0.75) * height:.1f}" text-anchor="end">{rank}</text>'
        )
    parts += _bars(plan, account, begins, scale, height, ranks)
    return "".join([*parts, "</svg>"])


def _bars(
    plan: StepPlan, account: Account, begins: np.ndarray, scale: float, height: float, ranks: int
) -> list[str]:
    """A bar per sequence over all ranks of its cp group; its width is its share of the pack's load."""
    parts: list[str] = []
    filled: dict[tuple[int, int], float] = {}
    work = np.maximum(plan.lengths.astype(float), 1.0)
    of_pack: dict[tuple[int, int], float] = {}
    keys = list(zip(plan.microbatch.tolist(), plan.first_rank.tolist()))
    for key, tokens in zip(keys, work.tolist()):
        of_pack[key] = of_pack.get(key, 0.0) + tokens
    for row, (m, first) in enumerate(keys):
        if m < 0 or first >= ranks:
            continue
        size = int(plan.cp_size[row])
        wide = account.loads[m, first] * scale * work[row] / of_pack[m, first]
        at = begins[m] + filled.get((m, first), 0.0)
        filled[m, first] = filled.get((m, first), 0.0) + wide
        shade = min(int(np.log2(size)), 6)
        parts.append(
            f'<rect class="bar cp{shade}" x="{at:.2f}" y="{4 + first * height + 0.4:.1f}" '
            f'width="{max(wide - 0.3, 0.2):.2f}" height="{max(size * height - 0.8, 0.5):.1f}">'
            f"<title>sequence {plan.sequence[row]}: {plan.lengths[row]:,} tokens on ranks {first} to "
            f"{first + size - 1}, microbatch {m}</title></rect>"
        )
    return parts
