"""Jobs over text, images and video on real processes: killed at any point, gone on under other layouts; see chains.py.

Whatever happened, each video and each image of each sequence was handed out once in its step, however ranks share the
encoder's work, and its arrays are bit by bit those of a model that decodes the whole video and copies pixel by pixel.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from qwen_vl import (
    BEGIN,
    END,
    IMAGE,
    QWEN2,
    QWEN3,
    SPELLED,
    VIDEO,
    Document,
    Family,
    Video,
    picture,
    write_documents,
)

import meshfeed as mf
from chains import Held, Job, Life, digest, may_die, run_chain
from corpus import write_corpus
from meshfeed.multimodal import PartSize
from meshfeed.order import draws_of_step
from meshfeed.plan.types import Encoder
from meshfeed.processors import VideoPatches
from observe import assembled
from soak import cases
from videos import all_frames, video

STEPS = 6
FILMS: list[Document] = [
    [7, 8, (48, 64, 16, 10), 9, (60, 90), 3],
    [1, 2, 3, 4],
    [5, (64, 48, 12, 5), 11, (48, 64, 9, 10), 12],
    [(84, 28), *range(1, 9)],
    [4, 5, (48, 48, 9, 2), 6, 7],
    [31, 32, (40, 80, 8, 4), (40, 80, 7, 4), 33],
    [(40, 64, 5, 30)],
]
BROKEN: list[Document] = [[13, (48, 64, 16, 10), 14, (30, 30)], [15, 16, (40, 80, 8, 4)]]
"""Of which nothing can be decoded."""
SOURCES = ("films", "broken", "text")
FIELDS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}

Place = tuple[int, int, int]
"""(source, epoch, index) of a sequence."""


@dataclass(frozen=True)
class Mortal(VideoPatches):
    """In a rank that may die of it."""

    def bytes_of(self, data: bytes, size: PartSize) -> Any:
        may_die()
        return super().bytes_of(data, size)


def family_of(seed: int) -> Family:
    return (QWEN2, QWEN3)[seed % 2]


def recipe_of(folder: Path, seed: int) -> mf.Recipe:
    family = family_of(seed)
    films = Mortal(family.video.rule, mean=family.video.mean, std=family.video.std)
    rule = mf.Multimodal(image=family.image, video=films, positions="mrope", on_bad="blank", max_bad_share=1)
    data = mf.Mixture({name: (mf.open(folder / name), len(name)) for name in SOURCES})
    return mf.Recipe(data=data, sequence=rule, batch=mf.Batch(sequences=6), seed=seed, steps=STEPS)


def packing_of(policy: Any) -> mf.Packing:
    return mf.Packing(capacity=160, policy=policy, align=mf.Align(sequence=2), oversize="error")


# -- the naive model --------------------------------------------------------------------------------------


def frames_of(part: Video, family: Family) -> list[np.ndarray]:
    """The sampled frames, resized and with their values, an even number of them; float32 [3, height, width]."""
    rule, (_, decoded) = family.video.rule, all_frames(video(*part))
    (height,), (width,) = rule.resized(PartSize(*part).as_video())
    mean, std = (torch.tensor(each).view(3, 1, 1) * 255 for each in (family.video.mean, family.video.std))
    frames: list[np.ndarray] = []
    for number in rule.numbers(PartSize(*part)):
        pixels = torch.from_numpy(decoded[number]).permute(2, 0, 1)[None]
        size = (int(height), int(width))
        if pixels.shape[2:] != size:
            pixels = torch.nn.functional.interpolate(pixels, size, mode="bicubic", antialias=True)
        frames.append(((pixels[0].float() - mean) / std).numpy())
    return frames + frames[-1:] * (len(frames) % 2)


def patches_of(frames: list[np.ndarray], side: int) -> list[list[np.ndarray]]:
    """The rows of each two frames: squares of 2 x 2 patches, one after the other; float32 [3 * 2 * side * side]."""
    _, height, width = frames[0].shape
    groups: list[list[np.ndarray]] = []
    for first, second in zip(frames[::2], frames[1::2]):
        rows: list[np.ndarray] = []
        for top in range(0, height, 2 * side):
            for left in range(0, width, 2 * side):
                for y, x in ((0, 0), (0, side), (side, 0), (side, side)):
                    at = slice(top + y, top + y + side), slice(left + x, left + x + side)
                    pair = [frame[channel][at] for channel in range(3) for frame in (first, second)]
                    rows.append(np.concatenate([each.ravel() for each in pair]))
        groups.append(rows)
    return groups


def time_of(part: Video, family: Family, group: int) -> list[int]:
    """The tokens that say when two frames are; none for Qwen2-VL."""
    if family == QWEN2:
        return []
    numbers = family.video.rule.numbers(PartSize(*part))
    numbers += numbers[-1:] * (len(numbers) % 2)
    first, last = numbers[2 * group : 2 * group + 2]
    text = f"{(first / part[3] + last / part[3]) / 2:.1f}"
    return [SPELLED["<"], *(SPELLED[each] for each in text), SPELLED[" seconds>"]]


@cache
def made_of(family: Family, part: tuple[int, int] | Video, is_broken: bool) -> tuple[str, list[int]]:
    """(kind and digest of its arrays, its tokens) of an image or a video. Of one that is broken, all is 0."""
    if len(part) == 2:
        size = PartSize(*part, 1, 0.0)
        arrays: dict[str, Any] = dict(family.image(picture(*part), size, np.random.default_rng()))
        tokens = [IMAGE] * (len(arrays["pixel_values"]) // 4)
    else:
        frames = frames_of(part, family)
        side, groups = family.video.rule.patch, patches_of(frames, family.video.rule.patch)
        _, height, width = frames[0].shape
        grid = np.array([[len(groups), height // side, width // side]])
        arrays = {"pixel_values_videos": np.concatenate(groups), "video_grid_thw": grid}
        tokens = []
        for group, rows in enumerate(groups):
            outputs, times = [VIDEO] * (len(rows) // 4), time_of(part, family, group)
            tokens += [*times, BEGIN, *outputs, END] if times else outputs
    if is_broken:
        pixels = next(name for name in arrays if "grid" not in name)
        arrays[pixels] = np.zeros_like(arrays[pixels])
    return digest(arrays), tokens


@dataclass(frozen=True)
class Wanted:
    """Of a step: how often there are parts of these arrays, and the tokens of each sequence."""

    parts: Counter[str]
    tokens: dict[Place, list[int]]


@cache
def undisturbed(folder: Path, seed: int) -> list[Wanted]:
    recipe, family, steps = recipe_of(folder, seed), family_of(seed), list[Wanted]()
    text = text_of(folder)
    for step in range(STEPS):
        wanted = Wanted(Counter(), {})
        for place in places_of(draws_of_step(recipe, step)):
            name, tokens = recipe.source_names[place[0]], list[int]()
            if name == "text":
                tokens = text[place[2]]
            for each in {"films": FILMS, "broken": BROKEN}.get(name, [[]] * 99)[place[2]]:
                if isinstance(each, int):
                    tokens.append(each)
                else:
                    found, own = made_of(family, each, name == "broken")
                    wanted.parts[found] += 1
                    tokens += [BEGIN, *own, END]
            wanted.tokens[place] = tokens
        steps.append(wanted)
    return steps


@cache
def text_of(folder: Path) -> list[list[int]]:
    with mf.open(folder / "text") as text:
        lengths = text.lengths(np.arange(text.num_documents)).tolist()
        return [text.read(i, 0, n).tolist() for i, n in enumerate(lengths)]


def places_of(draws: mf.order.Draws) -> list[Place]:
    return list(zip(draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist()))


# -- what came --------------------------------------------------------------------------------------------


def parts_of(microbatch: mf.Microbatch) -> Counter[str]:
    """The parts of a microbatch, by the digests of their arrays."""
    found = Counter[str]()
    for pixels, grid in FIELDS.values():
        begin = 0
        for each in microbatch[grid].numpy():
            rows = microbatch[pixels][begin : begin + int(each.prod())].numpy()
            found[digest({pixels: rows, grid: each[None]})] += 1
            begin += len(rows)
        assert begin == len(microbatch[pixels])
    return found


def check(wanted: Wanted, held: Held, life: Life, is_complete: bool) -> None:
    """All that came is wanted; if all of the step came, each part came once: to each rank of a cp group that shares nothing."""
    came = Counter[str]()
    for _, microbatches in held:
        for microbatch in microbatches:
            found = parts_of(microbatch)
            assert found <= wanted.parts, life
            if life.encoder != "with sample" or microbatch.cp_rank == 0:
                came += found
    assert came <= wanted.parts, life
    if is_complete:
        assert came == wanted.parts, life
        assert assembled(m for _, microbatches in held for m in microbatches) == wanted.tokens


# -- the tests --------------------------------------------------------------------------------------------

JOB = Job(recipe_of, packing_of, STEPS, undisturbed, check, get_args(Encoder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("films")
    write_documents(path / "films", FILMS)
    write_documents(path / "broken", BROKEN, broken=True)
    write_corpus(path / "text", num_tokens=60, mean=6)
    return path


@pytest.mark.parametrize("seed", range(2))
def test_what_is_to_come_is_what_a_job_gets_that_nobody_disturbs(folder: Path, seed: int) -> None:
    wanted, seen = undisturbed(folder, seed), Counter[str]()
    for made, expected in zip(
        mf.simulate(recipe_of(folder, seed), mf.Layout(), STEPS, packing=packing_of("balanced")),
        wanted,
        strict=True,
    ):
        (found,) = [sum((parts_of(m) for m in made.microbatches), Counter())]
        assert found == expected.parts
        assert assembled(made.microbatches) == expected.tokens
        seen += found
    assert len(seen) > 8  # films, images, and what is broken


@pytest.mark.parametrize("chain", range(cases(1, 200)))
def test_a_chain_of_kills_and_layouts_loses_repeats_and_changes_no_film(
    folder: Path, tmp_path: Path, chain: int, record_property: Any
) -> None:
    run_chain(JOB, folder, tmp_path, chain, record_property)
