"""A token store as a page: its facts, document lengths, and the beginnings of some documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from meshfeed.report.lengths import Bin, Lengths
from meshfeed.report.words import counted

_WIDTH, _LEFT, _RIGHT, _ROW = 1100, 170, 110, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What is shown.

    Attributes:
        path: of the store.
        facts: name -> value as text.
        lengths: of its documents.
        texts: (document, its beginning) of some of them.
        verdict: "sound", "broken: ...", or "" without a check.
    """

    path: str
    facts: Mapping[str, str]
    lengths: Lengths
    texts: Sequence[tuple[int, str]]
    verdict: str


def page(picture: Picture) -> str:
    """The whole page: self-contained, no script, no outside request."""
    shell = Template(Path(__file__).with_name("store.html").read_text(encoding="utf-8"))
    figures = picture.lengths.statistics()
    return shell.substitute(
        path=escape(picture.path),
        verdict=_verdict(picture.verdict),
        documents=escape(picture.facts["num_documents"]),
        tokens=escape(picture.facts["num_tokens"]),
        dtype=escape(picture.facts["dtype"]),
        median=_number(figures.get("median", 0)),
        longest=_number(figures.get("max", 0)),
        title=escape(picture.lengths.title),
        chart=_chart(picture.lengths.bins()),
        heads="".join(f"<th>{escape(name)}</th>" for name in figures),
        figures="".join(f"<td>{_number(value)}</td>" for value in figures.values()),
        facts="".join(_fact(name, value) for name, value in picture.facts.items()),
        texts=_texts(picture.texts),
    )


def _fact(name: str, value: str) -> str:
    return f"<tr><th>{escape(name.replace('_', ' '))}</th><td>{escape(value)}</td></tr>"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _verdict(verdict: str) -> str:
    if not verdict:
        return ""
    return f'<p class="verdict {verdict.partition(":")[0]}">{escape(verdict)}</p>'


def _chart(bins: list[Bin]) -> str:
    """A row per bin: its documents, and below that its share of all tokens."""
    most = max((each.documents for each in bins), default=1)
    tokens = max(sum(each.tokens for each in bins), 1)
    room = _WIDTH - _LEFT - _RIGHT
    height = _ROW * max(len(bins), 1) + 8
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="documents by length">']
    for row, each in enumerate(bins):
        top, share = 4 + row * _ROW, each.tokens / tokens
        told = f"{counted(each.documents, 'document')} of {each.span} tokens, {share:.1%} of all tokens"
        wide, part = each.documents / most * room, share * room
        parts.append(
            f"<g><title>{told}</title>"
            f'<text x="{_LEFT - 10}" y="{top + 16}" text-anchor="end">{each.span}</text>'
            f'<rect class="documents" x="{_LEFT}" y="{top}" width="{wide:.1f}" height="14" rx="2"/>'
            f'<rect class="tokens" x="{_LEFT}" y="{top + 15}" width="{part:.1f}" height="6" rx="2"/>'
            f'<text x="{_LEFT + wide + 8:.1f}" y="{top + 12}">{each.documents:,}</text></g>'
        )
    return "".join([*parts, "</svg>"])


def _texts(texts: Sequence[tuple[int, str]]) -> str:
    if not texts:
        return ""
    shown = "".join(f"<h3>document {number:,}</h3><pre>{escape(text)}</pre>" for number, text in texts)
    return f'<h2>How documents begin</h2><div class="panel">{shown}</div>'
