"""A step's plan as a picture: ranks downward, time to the right, a bar per sequence and per part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from typing import NamedTuple

import numpy as np

from meshfeed.arrays import Floats
from meshfeed.multimodal.encoders import EncoderPlan
from meshfeed.plan import Account, StepPlan
from meshfeed.report.loads import LANGUAGE_MODEL, Load
from meshfeed.report.words import escape

_WIDTH, _LEFT, _MOST_RANKS, _MOST_HEIGHT = 1100, 60, 256, 1400
_DIGIT = 7  # its width in a label
_MOST_RATIO = 3.0  # bars of loads end at this many times the mean


class Bar(NamedTuple):
    """The next work of a group of ranks in a microbatch. load: of each rank."""

    microbatch: int
    first_rank: int
    size: int
    load: float
    style: str
    title: str


def page(
    layout: str,
    step: int,
    plan: StepPlan,
    account: Account,
    encoders: Mapping[str, EncoderPlan],
    loads: Mapping[str, Load],
) -> str:
    """The whole page: self-contained, no script, no outside request.

    encoders: kind of part -> plan of its encoder. loads: of the language model and of these encoders, in
    their order; empty without encoders.
    """
    ranks = min(plan.num_ranks, _MOST_RANKS)
    return _template("plan.html").substitute(
        layout=escape(layout),
        step=step,
        microbatches=plan.num_microbatches,
        ranks=plan.num_ranks,
        tokens=f"{account.tokens:,}",
        padding=f"{account.padding:.2%}",
        efficiency=f"{account.efficiency:.2%}",
        over=f"{account.over_bound:.3f}",
        max_over_mean=f"{account.max_over_mean:.3f}",
        chart=_chart(account.loads, ranks, _sequences(plan, account)),
        left_out="" if plan.num_ranks <= _MOST_RANKS else f"The first {_MOST_RANKS} ranks are drawn.",
        heading=f"<h2>{_heading(LANGUAGE_MODEL)}</h2>\n" if loads else "",
        loads=_loads(plan, encoders, loads, ranks) if loads else "",
    )


def _template(name: str) -> Template:
    return Template(Path(__file__).with_name(name).read_text())


def _chart(loads: Floats, ranks: int, bars: Iterator[Bar]) -> str:
    """Microbatches side by side, as wide as their slowest rank; empty space means the rank is idle.

    loads: of each rank in each microbatch; float64 [num_microbatches, num_ranks]. ranks: how many are drawn.
    """
    height = max(2.0, min(22.0, _MOST_HEIGHT / max(ranks, 1)))
    tops = loads.max(axis=1, initial=0.0)
    scale = (_WIDTH - _LEFT - 10) / max(float(tops.sum()), 1e-9)
    begins = np.concatenate(([0.0], np.cumsum(tops))) * scale + _LEFT
    total = int(ranks * height) + 40
    parts = [f'<svg viewBox="0 0 {_WIDTH} {total}" role="img" aria-label="ranks over time">']
    for m, wide in enumerate(np.diff(begins).tolist()):
        box = f'x="{begins[m]:.1f}" y="4" width="{max(wide, 0):.1f}"'
        parts.append(f'<rect class="microbatch" {box} height="{ranks * height:.1f}"/>')
        if wide >= _DIGIT * len(str(m)):
            middle = begins[m] + wide / 2
            parts.append(f'<text x="{middle:.1f}" y="{total - 16}" text-anchor="middle">{m}</text>')
    parts += _rank_labels(ranks, height)
    filled: dict[tuple[int, int], float] = {}
    for bar in bars:
        if bar.first_rank >= ranks:
            continue
        key, wide = (bar.microbatch, bar.first_rank), bar.load * scale
        at = begins[bar.microbatch] + filled.get(key, 0.0)
        filled[key] = filled.get(key, 0.0) + wide
        parts.append(
            f'<rect class="bar {bar.style}" x="{at:.2f}" y="{4 + bar.first_rank * height + 0.4:.1f}" '
            f'width="{max(wide - 0.3, 0.2):.2f}" height="{max(bar.size * height - 0.8, 0.5):.1f}">'
            f"<title>{bar.title}</title></rect>"
        )
    return "".join([*parts, "</svg>"])


def _rank_labels(ranks: int, height: float) -> list[str]:
    return [
        f'<text x="{_LEFT - 8}" y="{4 + (rank + 0.75) * height:.1f}" text-anchor="end">{rank}</text>'
        for rank in range(0, ranks, max(1, ranks // 16))
    ]


def _sequences(plan: StepPlan, account: Account) -> Iterator[Bar]:
    """A bar per sequence over all ranks of its cp group; its width is its share of the pack's load."""
    work = np.maximum(plan.lengths.astype(float), 1.0)
    of_pack: dict[tuple[int, int], float] = {}
    keys = list(zip(plan.microbatch.tolist(), plan.first_rank.tolist()))
    for key, tokens in zip(keys, work.tolist()):
        of_pack[key] = of_pack.get(key, 0.0) + tokens
    for row, (m, first) in enumerate(keys):
        if m < 0:
            continue
        size = int(plan.cp_size[row])
        load = account.loads[m, first] * work[row] / of_pack[m, first]
        title = (
            f"sequence {plan.sequence[row]}: {plan.lengths[row]:,} tokens on ranks {first} to "
            f"{first + size - 1}, microbatch {m}"
        )
        yield Bar(m, first, size, load, f"cp{min(int(np.log2(size)), 6)}", title)


def _parts(kind: str, plan: StepPlan, encoder: EncoderPlan, style: str) -> Iterator[Bar]:
    """A bar per part on the ranks that encode it; its width is its work."""
    mean = float(encoder.loads.sum()) / max(encoder.loads.size, 1) or 1.0  # of no work, a part is no share
    sequences, first, size = plan.sequence[encoder.row], encoder.rank, np.ones_like(encoder.rank)
    if encoder.encoder == "with sample":
        first, size = encoder.first_rank, encoder.cp_size
    columns = (sequences, encoder.microbatch, first, size, encoder.work)
    for sequence, m, rank, ranks, work in zip(*(each.tolist() for each in columns)):
        where = f"rank {rank}" if ranks == 1 else f"each of ranks {rank} to {rank + ranks - 1}"
        title = (
            f"{escape(kind)} of sequence {sequence}: {work / mean:.1%} of a rank's share of one copy of all "
            f"parts in a microbatch; on {where}, microbatch {m}"
        )
        yield Bar(m, rank, ranks, work, style, title)


def _loads(plan: StepPlan, encoders: Mapping[str, EncoderPlan], loads: Mapping[str, Load], ranks: int) -> str:
    """The section about encoders: the balance of each load, rank by rank, and a chart of each encoder."""
    cards = [
        f'<div class="kpi"><b>{load.max_over_mean:.3f}</b><span>{escape(name)}: busiest over mean rank; '
        f"lower bound {load.bound:.3f}</span></div>"
        for name, load in loads.items()
    ]
    charts = [
        f"<h2>{_heading(name)}</h2>\n<p>Each bar is a part ({escape(kind)}) on the ranks that encode it, as "
        f'wide as the work on it.</p>\n<div class="panel">'
        f"{_chart(loads[name].by_rank, ranks, _parts(kind, plan, encoder, f'load{at}'))}</div>"
        for at, (name, (kind, encoder)) in enumerate(zip(list(loads)[1:], encoders.items()), start=1)
    ]
    key = '<svg viewBox="0 0 16 10"><rect class="load{}" width="16" height="10"/></svg>'
    names = [f"{key.format(at)}{escape(name)}" for at, name in enumerate(loads)]
    return _template("loads.html").substitute(
        cards="\n  ".join(cards),
        charts="\n".join(charts),
        by_rank=_by_rank(loads, ranks),
        legend="\n".join(f"<span>{name}</span>" for name in names),
    )


def _heading(name: str) -> str:
    return escape(name[:1].upper() + name[1:])


def _by_rank(loads: Mapping[str, Load], ranks: int) -> str:
    """A bar per rank and load: its work in the whole step, over the mean of all ranks."""
    ratios = {name: _over_mean(load) for name, load in loads.items()}
    height = max(min(14.0 * len(loads), _MOST_HEIGHT / max(ranks, 1)), 2.0 * len(loads))
    most = min(_MOST_RATIO, max(1.0, *(float(ratio.max(initial=0.0)) for ratio in ratios.values())))
    scale, total = (_WIDTH - _LEFT - 70) / most, int(ranks * height) + 40
    parts = [f'<svg viewBox="0 0 {_WIDTH} {total}" role="img" aria-label="loads of each rank">']
    parts += _rank_labels(ranks, height)
    thick = 0.8 * height / len(loads)
    for at, (name, ratio) in enumerate(ratios.items()):
        for rank, value in enumerate(ratio[:ranks].tolist()):
            y = 4 + (rank + 0.1) * height + at * thick
            parts.append(
                f'<rect class="bar load{at}" x="{_LEFT}" y="{y:.2f}" width="{min(value, most) * scale:.2f}" '
                f'height="{max(thick - 0.4, 0.5):.2f}"><title>{escape(name)} on rank {rank}: {value:.3f} of '
                f"the mean</title></rect>"
            )
            if thick >= 10:
                parts.append(
                    f'<text x="{_WIDTH - 10}" y="{y + thick - 0.5:.1f}" text-anchor="end">{value:.3f}</text>'
                )
    mean = _LEFT + scale
    parts.append(f'<line class="mean" x1="{mean:.1f}" x2="{mean:.1f}" y1="4" y2="{4 + ranks * height:.1f}"/>')
    parts.append(f'<text x="{mean:.1f}" y="{total - 16}" text-anchor="middle">mean</text>')
    return "".join([*parts, "</svg>"])


def _over_mean(load: Load) -> Floats:
    """Load of each rank in the step over the mean; float64 [num_ranks]."""
    of_rank = load.by_rank.sum(axis=0)
    return of_rank / max(float(of_rank.sum()) / max(of_rank.size, 1), 1e-300)
