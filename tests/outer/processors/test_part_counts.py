"""Tokens and patches of parts, against the published processors of transformers."""

from __future__ import annotations

import importlib
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed.errors import RecipeError, StoreError
from meshfeed.parts import KINDS, PLACEHOLDER, PartRule, Parts
from meshfeed.processors import (
    AnyResImages,
    BudgetImages,
    BudgetVideo,
    CroppedImages,
    FixedImages,
    FixedVideo,
    NativeImages,
    NativeVideo,
    PlacedTiles,
    RowImages,
    TiledImages,
    WhisperAudio,
)
from qwen_videos import with_torchvision
from soak import SEED, cases, only_soak

MODELS = "transformers.models"


def images(count: int) -> list[tuple[int, int]]:
    """(height, width): of all magnitudes, up to ten times as long as wide; tiny ones; whole tiles, and half of some."""
    rng = random.Random(SEED)
    drawn: list[tuple[int, int]] = []
    for _ in range(count):
        side, ratio = 10 ** rng.uniform(0.5, 3.7), 10 ** rng.uniform(-1, 1)
        drawn.append((max(1, int(side)), max(1, int(side * ratio))))
    whole = [(tile * i, tile * j) for tile in (28, 336, 384, 448) for i in range(1, 4) for j in range(1, 4)]
    half = [(896, 1008), (1008, 896)]  # of nine tiles of 448
    return [*drawn, (1, 1), (1, 199), (27, 28), *whole, *half]


SIZES = images(cases(500))


def part_of(kind: str, lengths: list[int], rates: list[float], height: int = 0, width: int = 0) -> Parts:
    n = len(lengths)
    side = [np.full(n, s) for s in (height, width)]
    of_kind = np.full(n, KINDS.index(kind))
    return Parts(of_kind, *side, np.array(lengths), np.array(rates), side[0], side[0] * 0, np.arange(n + 1))


def test_native_images_are_qwens() -> None:
    of = importlib.import_module(f"{MODELS}.qwen2_vl.image_processing_pil_qwen2_vl").Qwen2VLImageProcessorPil
    small = {"shortest_edge": 3136, "longest_edge": 100 * 784}
    large = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
    for rule, processor in (
        (NativeImages(), of()),
        (NativeImages(max_pixels=100 * 784), of(size=small)),
        (NativeImages(patch=16, min_pixels=65_536, max_pixels=16_777_216), of(patch_size=16, size=large)),
    ):
        sequences, patches = rule.patches(Parts.of_images(SIZES))
        assert patches.tolist() == [processor.get_number_of_image_patches(*size) for size in SIZES]
        assert (sequences == 1).all()
    # and that count is what it makes
    for size in ((30, 50), (200, 90)):
        grid = of()(images=[np.zeros((*size, 3), np.uint8)], return_tensors="np")["image_grid_thw"]
        assert NativeImages().tokens(Parts.of_images([size])) == grid.prod() // 4


def test_tiled_images_are_internvls() -> None:
    module = importlib.import_module(f"{MODELS}.got_ocr2.image_processing_pil_got_ocr2")
    side = {"height": 448, "width": 448}
    for least, most in ((1, 12), (2, 6), (1, 1)):
        processor = module.GotOcr2ImageProcessorPil(
            size=side, crop_to_patches=True, min_patches=least, max_patches=most
        )
        rule = TiledImages(min_tiles=least, max_tiles=most)
        tiles, patches = rule.patches(Parts.of_images(SIZES))
        assert tiles.tolist() == [processor.get_number_of_image_patches(*size) for size in SIZES]
        assert (patches == 1024).all() and (rule.tokens(Parts.of_images(SIZES)) == 256 * tiles).all()
    made = module.GotOcr2ImageProcessorPil(size=side, crop_to_patches=True)
    for size in ((30, 90), (448, 448), (100, 100)):
        tiles = len(made(images=[np.zeros((*size, 3), np.uint8)], return_tensors="np")["pixel_values"])
        assert TiledImages().patches(Parts.of_images([size]))[0] == tiles


ANY_RESOLUTION = (
    # its encoder's class token is counted, and dropped again
    ("LlavaNext", AnyResImages(), {"patch_size": 14, "num_additional_image_tokens": 1}, 1),
    (
        "LlavaOnevision",
        AnyResImages.onevision(),
        {"num_image_tokens": 729, "vision_aspect_ratio": "anyres_max_9"},
        0,
    ),
)


@pytest.mark.parametrize(("kind", "rule", "options", "dropped"), ANY_RESOLUTION)
def test_any_resolution_is_llavas(
    kind: str, rule: AnyResImages, options: dict[str, Any], dropped: int
) -> None:
    name = {"LlavaNext": "llava_next"}.get(kind, "llava_onevision")
    side = {"height": rule.tile, "width": rule.tile}
    processing = getattr(importlib.import_module(f"{MODELS}.{name}.processing_{name}"), f"{kind}Processor")
    pictures = importlib.import_module(f"{MODELS}.{name}.image_processing_pil_{name}")
    processor: Any = SimpleNamespace(
        image_processor=getattr(pictures, f"{kind}ImageProcessorPil")(size=side, crop_size=side), **options
    )
    for method in ("_get_number_of_features", "_get_unpadded_features"):
        setattr(processor, method, getattr(processing, method).__get__(processor))
    tile = rule.tile
    counted = [processor._get_number_of_features(*size, tile, tile) - dropped for size in SIZES]
    assert rule.tokens(Parts.of_images(SIZES)).tolist() == counted
    for size in ((40, 50), (90, 700)):
        made = processor.image_processor(images=[np.zeros((*size, 3), np.uint8)], return_tensors="np")
        assert rule.patches(Parts.of_images([size]))[0] == made["pixel_values"].shape[1]


def test_fixed_images_are_clips() -> None:
    clip = importlib.import_module(f"{MODELS}.clip.image_processing_pil_clip").CLIPImageProcessorPil
    made = clip(size=336, crop_size=336)(images=[np.zeros((40, 90, 3), np.uint8)], return_tensors="np")
    rows, columns = (side // 14 for side in made["pixel_values"].shape[-2:])
    assert FixedImages().tokens(Parts.of_images([(40, 90), (3, 3)])).tolist() == [rows * columns] * 2
    assert FixedImages(size=896, tokens_per_image=256).tokens(Parts.of_images([(4, 4)])) == 256


def test_audio_is_qwens() -> None:
    extractor = importlib.import_module(
        f"{MODELS}.whisper.feature_extraction_whisper"
    ).WhisperFeatureExtractor()
    module = importlib.import_module(f"{MODELS}.qwen2_audio.processing_qwen2_audio")
    rng = random.Random(SEED)
    lengths = [
        321,
        480,
        481,
        480_000,
        480_001,
        *(rng.randrange(321, 600_000) for _ in range(cases(20, 5_000))),
    ]
    counted: list[int] = []
    processor: Any = SimpleNamespace(feature_extractor=extractor, replace_audio_token=lambda *_, **__: "")
    extractor.fetch_audio = lambda audio: audio
    spectrum = np.zeros((1, 80, 3000), np.float32)  # which is not counted
    extractor._torch_extract_fbank_features = extractor._np_extract_fbank_features = lambda *_: spectrum
    for length in lengths:
        sound = [np.zeros(length, np.float32)]
        made, _ = module.Qwen2AudioProcessor._process_audio(processor, sound, sampling_rate=16_000)
        counted.append(made["num_audio_tokens"][0])
    parts = part_of("audio", lengths, [16_000.0] * len(lengths))
    assert WhisperAudio().tokens(parts).tolist() == counted
    assert (WhisperAudio().patches(parts)[1] == 1500).all()
    # at another rate: as many as after resampling
    assert WhisperAudio().tokens(part_of("audio", [44_100 * 4], [44_100.0])) == 100


@only_soak  # 10,000 videos
def test_video_is_qwens() -> None:
    rng = random.Random(SEED)
    asked = [
        (
            rng.randrange(2, 10 ** rng.randrange(1, 5) + 2),
            rng.choice([1.0, 23.976, 29.97, 30.0, 60.0]),
            rng.randrange(30, 1200),
            rng.randrange(30, 1200),
        )
        for _ in range(10_000)
    ]
    for (length, rate, height, width), expected in zip(asked, with_torchvision(_tokens_of_qwens, asked)):
        video = part_of("video", [length], [rate], height, width)
        for cap, tokens in expected.items():
            assert NativeVideo(max_video_tokens=cap).tokens(video) == tokens


def _tokens_of_qwens(asked: list[tuple[int, float, int, int]]) -> list[dict[int | None, int]]:
    """Tokens of each video, by the cap of all its tokens."""
    module = importlib.import_module(f"{MODELS}.qwen2_vl.video_processing_qwen2_vl")
    metadata = importlib.import_module("transformers.video_utils").VideoMetadata
    made: list[dict[int | None, int]] = []
    for length, rate, height, width in asked:
        of = metadata(total_num_frames=length, fps=rate)
        numbers = module.Qwen2VLVideoProcessor().sample_frames(of, fps=2)
        frames = int((numbers < length).sum())  # rounding may ask for one behind the last, where it fails
        made.append({})
        for cap in (None, 128_000):
            most = 768 * 784
            if cap:
                most = max(min(most, int(cap * 784 * 0.9) * 2 // frames), int(128 * 784 * 1.05))
            rows, columns = module.smart_resize(height, width, 28, 128 * 784, most)
            made[-1][cap] = -(-frames // 2) * (rows // 14) * (columns // 14) // 4
    return made


@pytest.mark.parametrize(
    ("seconds", "rate", "fps", "frames"),
    [(10, 30.0, 2, 20), (10, 60.0, 2, 20), (7.5, 24.0, 2, 14), (7, 24.0, 0.5, 4), (12, 25.0, 4, 48), (999, 25.0, 2, 768)],
)  # fmt: skip
def test_a_video_has_frames_by_its_seconds(seconds: float, rate: float, fps: float, frames: int) -> None:
    """Whatever its own rate; in whole pairs, between the least and the most."""
    rule, video = NativeVideo(fps=fps), part_of("video", [int(seconds * rate)], [rate], 280, 560)
    assert rule.frames(video).tolist() == [frames]
    assert rule.patches(video)[0].tolist() == [frames // 2]


RULES = (
    RowImages(row_end=3, end=4),
    BudgetImages(),
    PlacedTiles(places=((7,) * 4,) * 4, around=8, whole=9, newline=(3,), blank_line=(3, 3)),
    NativeImages(),
    TiledImages(),
    AnyResImages(),
    AnyResImages.onevision(),
    FixedImages(),
    CroppedImages(
        output=5, after=(6,), before=(PLACEHOLDER,), first=(1, PLACEHOLDER), between=(2,), next=(3,)
    ),
    WhisperAudio(),
    NativeVideo(),
    FixedVideo(num_frames=2),
    BudgetVideo(num_frames=2, digits=(1,) * 10, colon=2, space=3),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@settings(max_examples=cases(10, 200))
@given(
    heights=st.lists(st.integers(1, 30_000), min_size=1, max_size=5),
    elongated=st.floats(1, 150),
    length=st.integers(2, 10**7),
)
def test_each_part_has_tokens_and_costs_work(
    rule: PartRule, heights: list[int], elongated: float, length: int
) -> None:
    n = len(heights)
    height = np.array(heights)
    width = np.ceil(height * elongated).astype(np.int64)
    kind = np.full(n, KINDS.index(rule.kind))
    zero = np.zeros(n, np.int64)
    parts = Parts(kind, height, width, zero + length, np.full(n, 24.0), zero, zero, np.arange(n + 1))
    tokens, work = rule.tokens(parts), rule.work(parts)
    assert tokens.dtype == np.int64 and (tokens >= 1).all() and (work > 0).all()
    # of each part alone, and in any order, the same
    last = parts.take(np.array([n - 1]))
    assert rule.tokens(last) == tokens[-1] and rule.work(last) == work[-1]


def test_no_parts() -> None:
    for rule in RULES:
        nothing = Parts.of_images([(3, 4)]).take(np.array([], np.int64))
        assert rule.tokens(nothing).size == rule.work(nothing).size == 0


def test_refusals() -> None:
    for make, message in (
        (lambda: NativeImages(patch=0), r"NativeImages\(patch=0\): a whole number from 1"),
        (lambda: TiledImages(min_tiles=3, max_tiles=2), "min_tiles=3"),
        (lambda: AnyResImages(grids=()), "at least one"),
        (lambda: WhisperAudio(frame_rate=300), "a divisor of sample_rate=16000"),
        (lambda: NativeVideo(fps=0), r"fps=0\): above 0"),
        (lambda: FixedImages(alpha=-1), r"alpha=-1\): 0 or more"),
    ):
        with pytest.raises(RecipeError, match=message):
            make()
    with pytest.raises(StoreError, match=r"part 1, 2001 pixels wide x 10 high: .*crop it"):
        NativeImages().tokens(Parts.of_images([(10, 2000), (10, 2001)]))
    with pytest.raises(StoreError, match=r"a video of 1 frames"):
        NativeVideo().tokens(part_of("video", [1], [30.0], 100, 100))
