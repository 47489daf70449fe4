"""The tables of a run's page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

import numpy as np

from meshfeed.metrics import STAGE_TABLE
from meshfeed.report.history.decoding import STAGE, RankDecoding
from meshfeed.report.history.waits import Waits, stragglers
from meshfeed.report.reader import MixtureHistory, RunHistory
from meshfeed.report.words import duration, escape, short

_MOST_RANKS, _MOST_SOURCES = 32, 40
_TEXT = ' class="text"'
_TEXTS = frozenset(
    {
        *("place", "host", "hosts", "layout", "delivery", "recipe", "UTC"),
        *("what happens in it", "Ray Data's stage", "Megatron-LM's timer"),
    }
)
_DECODE_HEAD = ("rank", "host", "waits a step", "parts", "parts/s", "bytes/s", "workers", "busy", "of a core")
_BALANCE = """<section id="balance">
<h2>Padding and imbalance</h2>
<p>Padding is the part of all tokens of a step that carries nothing; imbalance is the work of the busiest rank
over the mean, as planned: 1 is even.</p>
<div class="two"><div class="panel"><h3>Padding</h3><div class="chart" id="chart-padding"></div></div>
<div class="panel"><h3>Imbalance</h3><div class="chart" id="chart-imbalance"></div></div></div>
</section>

"""
_MIXTURE_HEAD = ("source", "", "realised", "asked", "sequences", "off by")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], marked: Sequence[bool] | None = None) -> str:
    """A table of cells as HTML, some rows of which are marked."""
    kinds = [_TEXT if word in _TEXTS else "" for word in head]
    columns = "".join(f'<th scope="col"{of}>{escape(word)}</th>' for of, word in zip(kinds, head))
    body = "".join(
        f'<tr class="{"marked" if is_marked else ""}">'
        f"{''.join(f'<td{of}>{cell}</td>' for of, cell in zip(kinds, cells))}</tr>"
        for cells, is_marked in zip(rows, marked or [False] * len(rows))
    )
    return f"<table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>"


def ranks_table(history: RunHistory, waits: Waits) -> str:
    """The ranks that waited longest: their coordinates, hosts and waits by stage."""
    apart, per_step = stragglers(waits), waits.per_step
    order = np.lexsort((waits.ranks, -per_step.sum(axis=1), ~apart))[:_MOST_RANKS]
    used = [k for k in range(len(waits.stages)) if waits.wait[:, k].any()]
    head = ["rank", "place", "host", "steps", *(waits.stages[k] for k in used), "longest", "of its time"]
    rows = list[list[str]]()
    for row in order.tolist():
        rank = history.ranks[int(waits.ranks[row])]
        place = " ".join(f"{name}{at}" for name, at in rank.coord.items())
        seconds = float(waits.seconds[row])
        share = f"{min(float(waits.wait[row].sum()) / seconds, 1.0):.1%}" if seconds > 0 else "–"
        cells = [
            f"{waits.ranks[row]:,}",
            escape(place),
            escape(rank.host),
            f"{waits.num_steps[row]:,}",
            *(duration(float(per_step[row, k])) for k in used),
            duration(float(waits.longest[row].max(initial=0.0))),
            share,
        ]
        rows.append(cells)
    return table(head, rows, apart[order].tolist())


def stages_table(used: Iterable[str]) -> str:
    """What happens in each stage, and what Ray Data and Megatron-LM call it."""
    known = {name: STAGE_TABLE[name] for name in used}
    rows = [[name, stage.does, stage.ray or "–", stage.megatron] for name, stage in known.items()]
    return table(("stage", "what happens in it", "Ray Data's stage", "Megatron-LM's timer"), rows)


def decoding_section(history: RunHistory, waits: Waits, decoded: Mapping[int, RankDecoding]) -> str:
    """The section about decoding: the place of a chart, and the ranks that waited longest for it."""
    waited = dict(zip(waits.ranks.tolist(), waits.per_step[:, waits.stages.index(STAGE)].tolist()))
    rows = [
        [
            f"{rank:,}",
            escape(history.ranks[rank].host),
            duration(waited[rank]),
            f"{done.parts:,}",
            f"{done.parts_per_s:,.3g}",
            f"{short(done.bytes_per_s)}/s",
            f"{done.workers:,}",
            f"{done.busy:.0%}",
            f"{done.of_a_core:.0%}",
        ]
        for rank, done in sorted(decoded.items(), key=lambda each: -waited[each[0]])[:_MOST_RANKS]
    ]
    return (
        '<section id="decoding">\n<h2>Decoding</h2>\n'
        "<p>Images, audio and video decoded, on the ranks that read; without workers, by the thread that "
        "reads. Busy is the share of the time in which a worker decoded; of a core, its CPU time then.</p>\n"
        '<div class="panel"><div class="chart" id="chart-decoding"></div></div>\n'
        f'<div class="panel scroll">{table(_DECODE_HEAD, rows)}</div>\n</section>\n\n'
    )


def starts_table(history: RunHistory) -> str:
    """Every start: time, first step, layout."""
    rows = list[list[str]]()
    for number, start in enumerate(history.starts):
        hosts = start.hosts[0] if len(start.hosts) == 1 else f"{len(start.hosts):,} hosts"
        before = history.starts[number - 1] if number else start
        layout = escape(start.layout or "–")
        cells = [
            f"{number + 1}",
            f"{datetime.fromtimestamp(start.time, UTC):%Y-%m-%d %H:%M:%S}",
            f"{start.step:,}",
            f"<b>{layout}</b>" if start.layout != before.layout else layout,
            f"{start.world_size:,}",
            escape(start.delivery),
            escape(hosts),
            escape((start.fingerprint or "–")[:12]),
        ]
        rows.append(cells)
    return table(("start", "UTC", "from step", "layout", "ranks", "delivery", "hosts", "recipe"), rows)


def balance_section(history: RunHistory) -> str:
    """The section about packs: the places of two charts; nothing for rows, which have neither."""
    return _BALANCE if any(np.isfinite(rank.padding).any() for rank in history.ranks.values()) else ""


def mixture_table(mixture: MixtureHistory | None) -> str:
    """Draws of each source and the recipe's share: a bar for each, with a tick at its target."""
    if mixture is None or not mixture.steps.size:
        return "<p>The run drew from a single source.</p>"
    drawn, asked = mixture.drawn[-1].astype(np.float64), mixture.asked[-1]
    total = max(float(drawn.sum()), 1.0)
    order = np.argsort(-asked, kind="stable")
    shown = order[:_MOST_SOURCES]
    highest = max(float(drawn.max(initial=0.0)), float(asked.max(initial=0.0)), 1.0)
    rows = list[list[str]]()
    for source in shown.tolist():
        bar = (
            f'<div class="share"><span style="width:{drawn[source] / highest:.2%}"></span>'
            f'<b style="left:{asked[source] / highest:.2%}"></b></div>'
        )
        cells = [
            escape(mixture.names[source] or "–"),
            bar,
            f"{drawn[source] / total:.3%}",
            f"{asked[source] / total:.3%}",
            f"{drawn[source]:,.0f}",
            f"{drawn[source] - asked[source]:+.2f}",
        ]
        rows.append(cells)
    rest = "" if len(order) <= len(shown) else f" The {len(shown)} largest of {len(order):,} sources."
    far = float(np.abs(drawn - asked).max(initial=0.0))
    return (
        f"<p>A bar is what was drawn, a tick what the recipe asked for, as shares of the sequences. An "
        f"amount by tokens is shown as the share of sequences that it makes. The source furthest off is "
        f"{far:.2f} sequences from its share.{rest}</p>"
        f'<div class="panel scroll">{table(_MIXTURE_HEAD, rows)}</div>'
    )
