"""Documents of a store as a page: their text, with images, audio and video in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from meshfeed.arrays import Array, Bools
from meshfeed.multimodal import MultimodalStore
from meshfeed.multimodal.processor import tokens_of
from meshfeed.parts import KINDS, Parts, Rules
from meshfeed.parts.types import in_pixels
from meshfeed.report.thumbnails import strip, thumbnail
from meshfeed.report.words import counted, escape, short
from meshfeed.store import StreamStore
from meshfeed.store.loss_columns import LABELS, LOSS_MASK, count_bearing

_MOST_TOKENS, _MOST_PARTS = 1024, 24
_TOGETHER = 1 << 18  # documents


class Bearing(str):
    """Text that bears loss, in a document with other text that does not."""


@dataclass(frozen=True, slots=True)
class ShownPart:
    """A part as the page shows it.

    Attributes:
        kind: image, audio or video.
        size: in words.
        num_bytes: as stored.
        tokens: that its rule makes of it; None without a rule, or if the rule refuses it.
        picture: data URL, of some frames of a video; None for audio and what cannot be decoded.
        wrong: why there is no picture, or no tokens.
    """

    kind: str
    size: str
    num_bytes: int
    tokens: int | None
    picture: str | None
    wrong: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShownDocument:
    """A document as the page shows it.

    Attributes:
        number: in the store.
        num_tokens, num_parts: of the whole document.
        num_bearing, num_spans: of its tokens, those that bear loss, and the spans that they make; None where
            no column says which.
        pieces: text, and the numbers of parts in their places.
        parts: the first of them.
        is_cut: whether its text continues.
    """

    number: int
    num_tokens: int
    num_parts: int
    num_bearing: int | None
    num_spans: int
    pieces: tuple[str | int, ...]
    parts: tuple[ShownPart, ...]
    is_cut: bool


def shown_documents(
    store: StreamStore, documents: Sequence[int], decode: Callable[[Sequence[int]], str], rules: Rules
) -> Iterator[ShownDocument]:
    """Some documents, up to 1,024 tokens and 24 parts of each, see `shown_ranges`. The store must be entered.

    decode: tokens -> text. rules: how many tokens a part becomes. Raises StoreError, and errors of `decode`.
    """
    for number in documents:
        chosen = np.array([number])
        parts = store.parts(chosen) if isinstance(store, MultimodalStore) else Parts.none(1)
        size = int(store.lengths(chosen)[0])
        pieces: list[str | int] = []
        bears = bearing(store, number, size)
        ranges = shown_ranges(bears, _MOST_TOKENS)
        for begin, end in ranges:
            pieces += [" … "] if begin else []
            tokens = store.read(number, begin, end)
            for k in np.flatnonzero((begin <= parts.at) & (parts.at < end)).tolist():
                at = int(parts.at[k])
                if at < begin:  # within the part before
                    pieces.append(k)
                    continue
                pieces += [*texts_of(tokens[: at - begin], bears[begin:at], decode), k]
                tokens, begin = tokens[at + 1 - begin :], at + 1
            pieces += texts_of(tokens, bears[begin:end], decode)
        some = np.arange(min(len(parts), _MOST_PARTS))
        data = (
            store.read_parts(np.full(some.size, number), some) if isinstance(store, MultimodalStore) else []
        )
        shown = tuple(_shown(parts.only(k), each, rules) for k, each in enumerate(data))
        num_bearing = int(bears.sum()) if says_loss(store) else None
        is_cut = bool(ranges) and ranges[-1][1] < size
        yield ShownDocument(
            number, size, len(parts), num_bearing, num_spans(bears), tuple(pieces), shown, is_cut
        )


def bearing(store: StreamStore, document: int, stop: int) -> Bools:
    """Which of a document's first tokens labels and loss mask say a model is trained to produce; bool [stop].

    The first token never is. Without these columns all others are, and none is told.
    """
    bears = np.ones(stop, np.bool_)
    found: Mapping[str, Any] = store.columns
    for name in (LABELS, LOSS_MASK):
        if name in found:
            with found[name] as column:
                values = column.read(document, 0, stop)
            bears &= values >= 0 if name == LABELS else values != 0
    if LABELS in found and store.labels_are == "shifted":
        bears = np.append(False, bears)[:stop]  # a token's label is about the next one
    bears[:1] = False
    return bears & says_loss(store)


def says_loss(store: StreamStore) -> bool:
    """Whether a store has labels or a loss mask."""
    return bool({LABELS, LOSS_MASK} & store.columns.keys())


def num_spans(bears: Bools) -> int:
    """How many spans of tokens bear loss, such as answers of a conversation."""
    return int(np.count_nonzero(np.diff(bears, prepend=False) & bears))


def shown_ranges(bears: Bools, most: int) -> list[tuple[int, int]]:
    """Which tokens of a document are shown, at most so many: its first ones; where none of these bears loss,
    half as many, and those where loss begins."""
    begins = np.flatnonzero(bears)
    if bears.size <= most or not begins.size or begins[0] < most:
        return [(0, min(bears.size, most))]
    half = most // 2
    begin = max(half, int(begins[0]) - half // 4)
    return [(0, half), (begin, min(bears.size, begin + half))]


def loss_of(store: StreamStore) -> dict[str, int] | None:
    """How much of a whole store bears loss, as a feed of `Documents` counts it; None where it all does.

    Returns tokens that bear loss, of all tokens, and the documents in which none does. Reads the columns
    once on a node. The store must be entered.
    """
    if not says_loss(store):
        return None
    is_shifted = LABELS in store.columns and store.labels_are == "shifted"
    found, without, first = 0, 0, 0
    for begin in range(0, store.num_documents, _TOGETHER):
        lengths = store.lengths(np.arange(begin, min(begin + _TOGETHER, store.num_documents)))
        stops = first + np.cumsum(lengths)
        starts, first = stops - lengths, int(stops[-1])
        # a document's first token is no label; that of its last one may be no token of it
        counts = count_bearing(store, starts if is_shifted else np.minimum(starts + 1, stops), stops)
        found, without = found + int(counts.sum()), without + int((counts == 0).sum())
    return {"tokens": found, "of": store.num_tokens, "documents_without": without}


def texts_of(tokens: Array, bears: Bools, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text of tokens, cut where loss begins or ends; `Bearing` where they bear it. bears: bool [n]."""
    if not tokens.size:
        return []
    cuts = np.flatnonzero(np.diff(bears)) + 1
    runs = zip(np.split(tokens, cuts), np.split(bears, cuts))
    return [(Bearing if some[0] else str)(decode(each.tolist())) for each, some in runs]


def _shown(part: Parts, data: bytes, rules: Rules) -> ShownPart:
    """part: alone."""
    kind = KINDS[int(part.kind[0])]
    height, width, length = (int(each[0]) for each in (part.height, part.width, part.length))
    tokens, picture, wrong = None, None, list[str]()
    if kind in rules:
        try:
            tokens = int(tokens_of(rules[kind], part)[0])
        except Exception as error:  # a rule may be user code
            wrong.append(f"{type(rules[kind]).__name__}: {str(error).removeprefix('part 0, ')}")
    if kind != "audio":
        try:
            picture = (
                thumbnail(data, height, width) if kind == "image" else strip(data, height, width, length)
            )
        except Exception as error:  # each format has its own
            wrong.append(f"cannot be shown: {error or type(error).__name__}")
    pixels = in_pixels(height, width)
    seconds = f"{length / (part.rate[0] or 1):,.2f} s"
    size = {
        "image": pixels,
        "audio": f"{seconds} at {part.rate[0]:,.0f} Hz",
        "video": f"{pixels}, {counted(length, 'frame')}, {seconds}",
    }[kind]
    return ShownPart(kind, size, len(data), tokens, picture, tuple(wrong))


def page(path: str, documents: Sequence[ShownDocument], num_documents: int, note: str) -> str:
    """The whole page: self-contained, no script, no outside request; all text from the store is escaped.

    path: of the store. num_documents: of the whole store. note: how tokens are counted and text is read.
    """
    shell = Template(Path(__file__).with_name("samples.html").read_text(encoding="utf-8"))
    return shell.substitute(
        path=escape(path),
        shown=f"{len(documents):,}",
        documents=counted(num_documents, "document"),
        parts=f"{sum(len(each.parts) for each in documents):,}",
        wrong=f"{sum(bool(part.wrong) for each in documents for part in each.parts):,}",
        note=escape(note),
        panels="\n".join(map(_panel, documents)),
    )


def _panel(one: ShownDocument) -> str:
    said = [counted(one.num_tokens, "token") + " as stored"]
    if one.num_bearing is not None:
        said += [f"{one.num_bearing:,} bear loss in {counted(one.num_spans, 'span')}"]
    if one.num_parts:
        said += [counted(one.num_parts, "part"), short(sum(part.num_bytes for part in one.parts))]
    if one.num_parts > len(one.parts):
        said[-1] += f" in the {len(one.parts)} shown"
    text = "".join(_mark(one, each) if isinstance(each, int) else _text(each) for each in one.pieces)
    figures = "".join(_figure(one, k) for k in range(len(one.parts)))
    return (
        f'<section class="panel"><h2>Document {one.number:,}</h2><p>{", ".join(said)}</p>'
        f'<div class="text" dir="auto">{text or "<i>empty</i>"}{" …" if one.is_cut else ""}</div>'
        f'<div class="parts">{figures}</div></section>'
    )


def _text(piece: str) -> str:
    shown = escape(piece)
    return f'<span class="loss">{shown}</span>' if isinstance(piece, Bearing) else shown


def _mark(one: ShownDocument, number: int) -> str:
    if number >= len(one.parts):
        return f'<span class="mark">part {number}</span>'
    return f'<a class="mark" href="#d{one.number}p{number}">{one.parts[number].kind} {number}</a>'


def _figure(one: ShownDocument, number: int) -> str:
    part = one.parts[number]
    name = f"{part.kind} {number}"
    facts = [short(part.num_bytes)] + ([] if part.tokens is None else [counted(part.tokens, "token")])
    picture = "" if part.picture is None else f'<img alt="{name}" src="{part.picture}">'
    wrong = "".join(f'<p class="wrong">{escape(why)}</p>' for why in part.wrong)
    return (
        f'<figure id="d{one.number}p{number}">{picture}{wrong}'
        f"<figcaption><b>{name}</b>{part.size}<br>{', '.join(facts)}</figcaption></figure>"
    )
