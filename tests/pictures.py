"""Small documents with images and audio, and what a model makes of them; through the real writer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import meshfeed as mf
from meshfeed.multimodal import MultimodalWriter, PartField, Processor
from meshfeed.parts import KINDS, PLACEHOLDER, PartRule, Parts, Repeat, Template
from meshfeed.parts.store import parts_in
from meshfeed.store import DatasetWriter

IMAGE, AUDIO = 9_001, 9_002
"""Placeholders: no text has them."""
CALLS = [0]
"""How often this process decoded."""


@dataclass(frozen=True)
class Pixels(PartRule):
    """A token for each row of an image, `more` too many; none is wider than `widest`."""

    more: int = 0
    widest: int = 9
    kind: Any = "image"
    alpha: float = 3.0

    def tokens(self, parts: Parts) -> np.ndarray:
        for i in np.flatnonzero(parts.width > self.widest)[:1]:
            raise mf.errors.StoreError(f"part {i}, {parts.height[i]} x {parts.width[i]} pixels: too wide")
        return parts.height + self.more

    def patches(self, parts: Parts) -> tuple[np.ndarray, np.ndarray]:
        return np.ones_like(parts.height), parts.height * parts.width


@dataclass(frozen=True)
class Seconds(PartRule):
    """A token for three PCM samples, in windows of two: several in most parts."""

    kind: Any = "audio"
    alpha: float = 2.0

    def tokens(self, parts: Parts) -> np.ndarray:
        return -(-parts.length // 3)

    def patches(self, parts: Parts) -> tuple[np.ndarray, np.ndarray]:
        return -(-parts.length // 2), np.full_like(parts.length, 2)


@dataclass(frozen=True)
class Look(Processor):
    """pixel_values: each pixel, and a random number; image_grid: height and width, on all stages."""

    rule: Pixels = Pixels()
    wide: int = 2

    @property
    def fields(self) -> tuple[PartField, ...]:
        return (
            PartField(name="pixel_values", dtype="float32", shape=(self.wide,)),
            PartField(name="image_grid", dtype="int64", shape=(2,), stages=("all",)),
        )

    def rows(self, parts: Parts) -> Mapping[str, np.ndarray]:
        return {"pixel_values": parts.height * parts.width, "image_grid": np.ones_like(parts.height)}

    def __call__(self, data: bytes, size: Any, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        CALLS[0] += 1
        pixels = np.frombuffer(data, np.uint8)
        if pixels.size != size.height * size.width:
            raise mf.errors.PartError(f"{pixels.size} pixels of {size.height} x {size.width}")
        values = rng.random((pixels.size, self.wide), np.float32)
        values[:, 0] = pixels
        return {"pixel_values": values, "image_grid": np.array([[size.height, size.width]])}

    def blank(self, size: Any, rows: Mapping[str, int]) -> Mapping[str, np.ndarray]:
        return {**super().blank(size, rows), "image_grid": np.array([[size.height, size.width]])}

    def num_tokens(self, made: Mapping[str, np.ndarray]) -> int:
        return int(made["image_grid"][0, 0])


@dataclass(frozen=True)
class LookFirst(Look):
    """As Look, for the first stage alone."""

    @property
    def fields(self) -> tuple[PartField, ...]:
        return tuple(PartField(name=each.name, dtype=each.dtype, shape=each.shape) for each in super().fields)


def striped(height: int, width: int) -> list[Repeat]:
    """An image of that many pixels as outputs in pairs and other tokens, whose ids are those of no uint16."""
    runs, left = [Repeat(70_000)] if height > 1 and width % 2 == 0 else [], height
    left -= len(runs)
    while left:
        runs.append(Repeat(PLACEHOLDER if width % 3 else 70_001, min(left, 2), True))
        left -= min(left, 2)
        if left > 1:
            runs.append(Repeat(70_000 + left))
            left -= 1
    return runs


@dataclass(frozen=True)
class Striped(Pixels):
    """As many tokens as Pixels has, not all of them outputs."""

    def template(self, parts: Parts) -> Template:
        return Template.of(striped(*size) for size in zip(parts.height.tolist(), parts.width.tolist()))


@dataclass(frozen=True)
class LookStriped(LookFirst):
    """As LookFirst, with an output for some rows."""

    rule: Pixels = Striped()

    def num_tokens(self, made: Mapping[str, np.ndarray]) -> int:
        return sum(run.size for run in striped(*made["image_grid"][0].tolist()) if run.is_output)


@dataclass(frozen=True)
class Listen(Processor):
    """waves: the PCM samples."""

    rule: Seconds = Seconds()

    @property
    def fields(self) -> tuple[PartField, ...]:
        return (PartField(name="waves", dtype="int16"),)

    def rows(self, parts: Parts) -> Mapping[str, np.ndarray]:
        return {"waves": parts.length}

    def __call__(self, data: bytes, size: Any, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        return {"waves": np.frombuffer(data, np.int16)}

    def num_tokens(self, made: Mapping[str, np.ndarray]) -> int:
        return -(-made["waves"].size // 3)


def write_pictures(
    folder: Path,
    *,
    count: int = 40,
    seed: int = 0,
    bad: tuple[int, ...] = (),
    mask: bool = False,
    empty: tuple[int, ...] = (),
) -> list[list[int]]:
    """A store of `count` documents with up to three parts; what each becomes, every placeholder repeated.

    bad: documents whose first image lacks a byte. empty: those without text and parts. mask: with a column loss_mask of zeros and ones. Beside it lies `<folder>-flat`, of what they become alone.
    """
    rng = np.random.default_rng(seed)
    flat: list[list[int]] = []
    columns = {"tokens": np.uint16} | ({"loss_mask": np.uint8} if mask else {})
    with (
        MultimodalWriter(folder, columns) as writer,
        DatasetWriter(f"{folder}-flat", columns) as plain,
    ):
        for document in range(count):
            text = rng.integers(0, 9_000, rng.integers(0, 12)).tolist()
            kinds = rng.integers(0, 2, rng.choice([0, 1, 2, 3]) if text else 0).tolist()
            at = sorted(rng.choice(len(text) + len(kinds), len(kinds), replace=False).tolist())
            rows: list[list[Any]] = []
            data: list[bytes] = []
            repeats: list[int] = []
            for kind, place in zip(kinds, at):
                height, width, length = rng.integers(1, 6, 3).tolist()
                text.insert(place, (IMAGE, AUDIO)[kind])
                if kind:
                    data.append(rng.integers(0, 99, length).astype(np.int16).tobytes())
                    rows.append([kind, 0, 0, length, 16e3, len(data[-1]), place])
                else:
                    data.append(bytes(rng.integers(0, 99, height * width).tolist()))
                    if document in bad and 0 not in kinds[: len(rows)]:
                        data[-1] = data[-1][1:]
                    rows.append([kind, height, width, 1, 0, len(data[-1]), place])
                repeats.append(-(-length // 3) if kind else height)
            if document in empty:
                text, rows, data, repeats, at = [], [], [], [], []
            numbers = np.array(rows, float).reshape(-1, 7).T
            whole = [numbers[i].astype(np.int64) for i in (0, 1, 2, 3, 5, 6)]
            parts = Parts(*whole[:4], numbers[4], *whole[4:], np.array([0, len(rows)]))
            bears = {"loss_mask": rng.integers(0, 2, len(text)).astype(np.uint8)} if mask else {}
            writer.add_document(tokens=np.array(text, np.uint16), **bears)
            writer.add_parts(parts, data)
            often = np.ones(len(text), np.int64)
            often[at] = repeats
            flat.append(np.repeat(text, often).tolist())
            bears = {name: column.repeat(often) for name, column in bears.items()}
            plain.add_document(tokens=np.array(flat[-1], np.uint16), **bears)
    return flat


def multimodal(folder: Path | str, *, sequences: int = 10, **options: Any) -> mf.Recipe:
    """The usual recipe over such a store."""
    options = {"image": Look(), "audio": Listen()} | options
    return recipe_over(mf.open(str(folder)), mf.Multimodal(**options), sequences=sequences)


def recipe_over(data: Any, rule: Any, *, sequences: int = 10) -> mf.Recipe:
    """Some sequences a step, always in the same order."""
    return mf.Recipe(data=data, sequence=rule, batch=mf.Batch(sequences=sequences), seed=7)


def expected_parts(
    recipe: mf.Recipe, draws: mf.order.Draws, kind: str
) -> list[tuple[int, int, dict[str, np.ndarray]]]:
    """(sequence, number in its document, what it is decoded to), of all parts of a kind of some draws."""
    processor = recipe.sequence.processors[kind]
    made = []
    for sequence, (s, epoch, index) in enumerate(
        zip(draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist())
    ):
        parts = parts_in(recipe.sources[s], np.array([index]))
        for part in range(len(parts)):
            if KINDS[parts.kind[part]] != kind:
                continue
            (data,) = recipe.sources[s].read_parts(np.array([index]), np.array([part]))
            size = mf.multimodal.PartSize(
                *(getattr(parts, name)[part] for name in ("height", "width", "length", "rate"))
            )
            arrays = processor(
                data, size, mf.order.rng(recipe.seed, epoch, index, part, recipe.source_keys[s])
            )
            made.append((sequence, part, dict(arrays)))
    return made
