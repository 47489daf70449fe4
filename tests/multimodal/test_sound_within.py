"""Videos whose sound stands among their tokens: outputs of two kinds in one stretch, each counted alone, on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
from meshfeed.arrays import Longs
from meshfeed.errors import RecipeError
from meshfeed.multimodal import MultimodalWriter, PartField, Processor
from meshfeed.parts import KINDS, PLACEHOLDER, PartRule, Parts, Repeat, Template
from meshfeed.testing import assert_rule
from soak import SEED, cases

AUDIO, VIDEO = KINDS.index("audio"), KINDS.index("video")
BEGIN, HEARD, END, SEEN = 50, 51, 52, 9  # ids; SEEN is the placeholder


def woven(frames: int, beats: int) -> list[Repeat]:
    """Two frames, three beats, two frames, and so on."""
    runs = [Repeat(BEGIN)]
    while frames or beats:
        for size, run in ((min(frames, 2), Repeat(PLACEHOLDER)), (min(beats, 3), Repeat(HEARD, kind=AUDIO))):
            runs += [run._replace(size=size, is_output=True)] if size else []
        frames, beats = max(frames - 2, 0), max(beats - 3, 0)
    return [*runs, Repeat(END)]


@dataclass(frozen=True)
class Frames(PartRule):
    """A token for each frame."""

    kind = "video"
    alpha = 2.0
    weaves: bool = True

    def tokens(self, parts: Parts) -> Longs:
        return parts.length

    def patches(self, parts: Parts) -> tuple[Longs, Longs]:
        return parts.length, np.ones_like(parts.length)

    def with_sound(self, parts: Parts, sounds: Longs) -> Template | None:
        if not self.weaves:
            return None
        return Template.of(woven(*each) for each in zip(parts.length.tolist(), sounds.tolist()))


@dataclass(frozen=True)
class Beats(Frames):
    """A token for each sample."""

    kind = "audio"


@dataclass(frozen=True)
class InGrids(Frames):
    """Each frame is a grid."""

    def grid(self, parts: Parts) -> tuple[Longs, Longs]:
        return np.ones_like(parts.length), np.ones_like(parts.length)


@dataclass(frozen=True)
class InARow(Beats):
    """All samples are one."""

    def grid(self, parts: Parts) -> tuple[Longs, Longs]:
        return np.ones_like(parts.length), parts.length


@dataclass(frozen=True)
class Rows(Processor):
    """A row for each token: the stored byte, and the row's number."""

    rule: PartRule

    @property
    def fields(self) -> tuple[PartField, ...]:
        return (PartField(name=f"{self.rule.kind}_rows", dtype="int64", shape=(2,)),)

    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        return {self.fields[0].name: parts.length}

    def __call__(self, data: bytes, size: Any, rng: np.random.Generator) -> Mapping[str, Any]:
        made = np.stack((np.full(size.length, data[0]), np.arange(size.length)), axis=1)
        return {self.fields[0].name: made}

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        return len(made[self.fields[0].name])


def written(folder: Path) -> list[list[tuple[int, int, Any]]]:
    """(token, kind or -1, row of its output) of each token of each document."""
    rng, documents = np.random.default_rng(SEED), list[list[tuple[int, int, Any]]]()
    with MultimodalWriter(folder, {"tokens": np.uint16}) as writer:
        for d in range(40):
            text, rows, data, made = (
                list[int](),
                list[list[int]](),
                list[bytes](),
                list[tuple[int, int, Any]](),
            )
            for k in range(rng.integers(0, 3)):
                own = (100 + int(rng.integers(0, 9)),) * int(rng.integers(0, 3))
                text, made = [*text, *own], [*made, *((each, -1, None) for each in own)]
                which, frames, beats = (
                    int(rng.integers(0, 3)),
                    int(rng.integers(1, 7)),
                    int(rng.integers(1, 9)),
                )
                stored = (5 * d + k) % 251
                if which == 0:  # sound alone
                    runs, owns = [Repeat(PLACEHOLDER, beats, True, AUDIO)], HEARD
                else:
                    runs, owns = (
                        [Repeat(PLACEHOLDER, frames, True)] if which == 1 else woven(frames, beats),
                        SEEN,
                    )
                    rows.append([VIDEO, frames, 1, len(text)])
                if which != 1:
                    rows.append([AUDIO, beats, int(which == 0), len(text)])
                data += [bytes([stored])] * rows[-1][2] if which != 2 else [bytes([stored]), b""]
                done = {AUDIO: 0, VIDEO: 0}
                for run in runs:
                    kind = (VIDEO if run.kind < 0 else run.kind) if run.is_output else -1
                    for _ in range(run.size):
                        row = None if kind < 0 else [stored, done[kind]]
                        done[kind] = done.get(kind, 0) + 1
                        made.append((owns if run.id == PLACEHOLDER else run.id, kind, row))
                text.append(owns)
            text, made = [*text, 7], [*made, (7, -1, None)]
            kind, length, num_bytes, at = np.array(rows, np.int64).reshape(-1, 4).T
            nothing = 0 * kind
            writer.add_document(tokens=np.array(text, np.uint16))
            writer.add_parts(
                Parts(
                    kind,
                    nothing,
                    nothing,
                    length,
                    np.ones(kind.size),
                    num_bytes,
                    at,
                    np.array([0, len(rows)]),
                ),
                data,
            )
            documents.append(made)
    return documents


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[tuple[int, int, Any]]]]:
    path = tmp_path_factory.mktemp("within") / "store"
    return path, written(path)


def recipe_of(folder: Path, video: Frames = Frames()) -> mf.Recipe:
    rule = mf.Multimodal(video=Rows(video), audio=Rows(Beats()))
    return mf.Recipe(data=mf.open(folder), sequence=rule, batch=mf.Batch(sequences=8))


def received(ranks: list[Any], at: int, kind: str) -> torch.Tensor:
    """Rows of a kind that the rank at a place receives, by the fields of all ranks."""
    sent = [
        fields[f"{kind}_rows"][fields[f"{kind}_send_rows"]].split(fields[f"{kind}_send_counts"].tolist())[at]
        for fields in ranks
    ]
    return torch.cat(sent)[ranks[at][f"{kind}_receive_rows"]]


@pytest.mark.parametrize("encoder", ["with sample", "group", "balanced"])
@pytest.mark.parametrize("layout", ["dp2", "cp2-dp2", "cp4"])
@pytest.mark.parametrize("oversize", ["truncate", "split"])
def test_outputs_of_both_kinds_are_where_their_tokens_are(
    stored: tuple[Path, Any], layout: str, encoder: Any, oversize: Any
) -> None:
    folder, documents = stored
    shape, seen = mf.Layout.parse(layout), {AUDIO: 0, VIDEO: 0}
    packing = mf.Packing(capacity=24, oversize=oversize)
    steps = list(mf.simulate(recipe_of(folder), shape, cases(3, 12), packing=packing, encoder=encoder))
    of = {(made.batch.step, made.rank): made.microbatches for made in steps}
    valid = dict[int, float]()
    for made in steps:
        group = sorted(shape.group_of(made.rank, "dp-cp").tolist())
        for number, m in enumerate(made.microbatches):
            ranks = [of[made.batch.step, rank][number] for rank in group]
            starts, draws = m._portion.starts, m.draws
            for name, kind in (("audio", AUDIO), ("video", VIDEO)):
                rows = (
                    m[f"{name}_rows"]
                    if encoder == "with sample"
                    else received(ranks, group.index(made.rank), name)
                )
                if encoder != "with sample":
                    assert int(m[f"{name}_encoded_rows"]) == len(m[f"{name}_rows"])
                index = m[f"{name}_index"][0]
                for i, at in enumerate(index.tolist()):
                    if m["padding_mask"][0, i]:
                        assert at == -1
                        continue
                    sequence = int(m["sequence_ids"][0, i])
                    token, of_kind, row = documents[int(draws.index[sequence])][
                        int(m["position_ids"][0, i]) + int(starts[sequence])
                    ]
                    assert int(m["tokens"][0, i]) == token and (at >= 0) == (of_kind == kind)
                    if at >= 0:
                        assert rows[at].tolist() == row
                        seen[kind] += 1
            valid[made.batch.step] = valid.get(made.batch.step, 0) + float(m["loss_mask"].sum())
        wanted = [len(documents[i]) for i in made.batch.draws.index.tolist()]
        assert made.batch.lengths.tolist() == wanted
        if made.rank == shape.world_size - 1:
            assert valid[made.batch.step] == made.batch.valid_tokens
    assert min(seen.values()) > 50


def test_it_keeps_the_laws_of_rules(stored: tuple[Path, Any]) -> None:
    recipe = recipe_of(stored[0])
    assert_rule(recipe.sequence, recipe.sources[0])


def test_a_rule_that_does_not_place_sound_is_named(stored: tuple[Path, Any]) -> None:
    with pytest.raises(
        RecipeError, match=r"document \d+, part \d: Frames.*sound among its tokens.*--sound-track behind"
    ):
        list(
            mf.simulate(
                recipe_of(stored[0], Frames(weaves=False)),
                mf.Layout(),
                2,
                packing=mf.Packing(capacity=24, oversize="truncate"),
            )
        )


def test_a_rule_without_positions_of_sound_among_tokens_is_named(stored: tuple[Path, Any]) -> None:
    rule = mf.Multimodal(video=Rows(InGrids()), audio=Rows(InARow()), positions="mrope")
    recipe = replace(recipe_of(stored[0]), sequence=rule)
    with pytest.raises(
        RecipeError, match=r"document \d+, part \d: InGrids.*no rope, which positions='mrope'"
    ):
        list(mf.simulate(recipe, mf.Layout(), 2, packing=mf.Packing(capacity=24, oversize="truncate")))
