"""Documents with images and videos for models of Qwen's vision family, and what transformers makes of them."""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

import meshfeed as mf
from meshfeed.multimodal import MultimodalWriter, PartSize
from meshfeed.parts import KINDS, Parts
from meshfeed.processors import NativeImages, NativePatches, NativeVideo, TimedVideo, VideoPatches
from videos import video

IMAGE, BEGIN, END, VIDEO = 100, 101, 102, 103
"""The placeholder of an image, the tokens that stand around a part, and the placeholder of a video."""
PATCHES = NativePatches(NativeImages(min_pixels=28 * 28, max_pixels=84 * 84))
FRAMES = VideoPatches(NativeVideo(min_pixels=28 * 28, max_pixels=56 * 84))
TIMED = VideoPatches(replace(FRAMES.rule, tokens_per_second=2))
"""For Qwen2-VL, and for Qwen2.5-VL."""

Video = tuple[int, int, int, float]
Document = Sequence[int | tuple[int, int] | Video]
"""Tokens of text below IMAGE, images as (height, width), videos as (height, width, frames, rate)."""


def picture(height: int, width: int) -> bytes:
    """A PNG whose pixels follow from its size."""
    pixels = np.random.default_rng((height, width)).integers(0, 256, (3, 4, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).resize((width, height)).save(stream, "PNG")
    return stream.getvalue()


def stored(part: tuple[int, int] | Video) -> bytes:
    """An image or a video whose pixels follow from its size."""
    return picture(*part) if len(part) == 2 else video(*part)


def write_documents(folder: Path, documents: Sequence[Document], *, broken: bool = False) -> Any:
    """A store of documents. broken: nothing of their parts can be decoded."""
    with MultimodalWriter(folder, {"tokens": np.uint16}) as writer:
        for document in documents:
            parts = [each for each in document if isinstance(each, tuple)]
            text = [
                t for each in document for t in ([each] if isinstance(each, int) else [BEGIN, pad(each), END])
            ]
            data = [b"no picture" if broken else stored(each) for each in parts]
            height, width, frames = (
                np.array([(*each, 1)[axis] for each in parts], np.int64) for axis in range(3)
            )
            writer.add_document(tokens=np.array(text, np.uint16))
            writer.add_parts(
                Parts(
                    kind=np.array(
                        [KINDS.index("image" if len(each) == 2 else "video") for each in parts], np.int64
                    ),
                    height=height,
                    width=width,
                    length=frames,
                    rate=np.array([each[3] if len(each) == 4 else 0 for each in parts], np.float64),
                    num_bytes=np.array([len(each) for each in data], np.int64),
                    at=np.flatnonzero(np.isin(text, (IMAGE, VIDEO))),
                    starts=np.array([0, len(parts)]),
                ),
                data,
            )
    return mf.open(folder)


def pad(part: tuple[int, int] | Video) -> int:
    """The placeholder of a part."""
    return IMAGE if len(part) == 2 else VIDEO


def grid_of(height: Any, width: Any, *length: Any) -> tuple[int, int, int]:
    """The grid of an image or a video, resized by transformers."""
    module = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    rule = FRAMES.rule if length else PATCHES.rule
    resized = module.smart_resize(height, width, 28, rule.min_pixels, rule.max_pixels)
    groups = -(-len(sampled(height, width, *length)) // 2) if length else 1
    return (groups, resized[0] // 14, resized[1] // 14)


def sampled(*size: Any) -> list[int]:
    """The numbers of a video's frames that are sampled: test_video_processor compares them with transformers."""
    return FRAMES.rule.numbers(PartSize(*size))


def expanded(document: Document) -> list[int]:
    """The tokens of a document, its placeholders repeated by transformers' sizes."""
    made: list[int] = []
    for each in document:
        tokens = (
            [each] if isinstance(each, int) else [BEGIN, *[pad(each)] * (math.prod(grid_of(*each)) // 4), END]
        )
        made += tokens
    return made


def positions(document: Document, family: str = "qwen2_vl.Qwen2VLModel") -> torch.Tensor:
    """position_ids [3, tokens] of a document, by a model of transformers."""
    module, name = family.split(".")
    model = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    self = SimpleNamespace(
        config=SimpleNamespace(
            vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=2, temporal_patch_size=2)
        )
    )
    self.get_vision_position_ids = partial(model.get_vision_position_ids, self)
    tokens = torch.tensor([expanded(document)])
    parts = [each for each in document if isinstance(each, tuple)]
    images, videos = (
        torch.tensor([grid_of(*each) for each in parts if len(each) == size], dtype=torch.int64).reshape(
            -1, 3
        )
        for size in (2, 4)
    )
    seconds = [2 / (len(sampled(*each)) / each[2] * each[3]) for each in parts if len(each) == 4]
    ids, _ = model.get_rope_index(
        self,
        tokens,
        (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int(),
        image_grid_thw=images,
        video_grid_thw=videos,
        second_per_grid_ts=torch.tensor(seconds),
    )
    return ids[:, 0]


@dataclass(frozen=True)
class Family:
    """A model of transformers, and what makes its arrays. name: of its module; classes: what they begin with."""

    name: str
    classes: str
    image: NativePatches
    video: VideoPatches

    @property
    def rule(self) -> mf.Multimodal:
        """With its positions."""
        return mf.Multimodal(image=self.image, video=self.video, positions="mrope")


HALF = (0.5, 0.5, 0.5)
SPELLED = {**{str(digit): 104 + digit for digit in range(10)}, "<": 114, ".": 115, " seconds>": 116}
"""Tokens of the times that Qwen3-VL writes before the frames."""
QWEN2 = Family("qwen2_vl", "Qwen2VL", PATCHES, FRAMES)
QWEN3 = Family(
    "qwen3_vl",
    "Qwen3VL",
    NativePatches(NativeImages(patch=16, min_pixels=32 * 32, max_pixels=96 * 96), mean=HALF, std=HALF),
    VideoPatches(
        TimedVideo(
            digits=tuple(range(104, 114)),
            before=(SPELLED["<"],),
            point=SPELLED["."],
            after=(SPELLED[" seconds>"],),
            start=BEGIN,
            end=END,
            min_pixels=32 * 32,
            max_pixels=6 * 64 * 96,
        ),
        mean=HALF,
        std=HALF,
    ),
)


def model(family: Family = QWEN2) -> Any:
    """A tiny one, with the same weights each time."""
    import transformers

    torch.manual_seed(0)
    text: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        "initializer_range": 0.3,  # so that attention is uneven, and positions matter
        "bos_token_id": None,
        "eos_token_id": None,
    }
    vision: dict[str, Any] = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    if family == QWEN3:
        text |= {"head_dim": 16}
        vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2}
        vision |= {"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    tokens: Any = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": BEGIN,
        "vision_end_token_id": END,
    }
    config = getattr(transformers, f"{family.classes}Config")(
        text_config=text, vision_config=vision, **tokens
    )
    return getattr(transformers, f"{family.classes}ForConditionalGeneration")(config)
