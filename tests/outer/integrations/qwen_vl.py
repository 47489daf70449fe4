"""Documents with images for models of Qwen's vision family, and what transformers makes of them."""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

import meshfeed as mf
from meshfeed.multimodal import MultimodalWriter
from meshfeed.parts import Parts
from meshfeed.processors import NativeImages, NativePatches

IMAGE, BEGIN, END = 100, 101, 102
"""The placeholder, and the tokens that stand around it."""
PATCHES = NativePatches(NativeImages(min_pixels=28 * 28, max_pixels=84 * 84))

Document = Sequence[int | tuple[int, int]]
"""Tokens of text below IMAGE, and images as (height, width)."""


def picture(height: int, width: int) -> bytes:
    """A PNG whose pixels follow from its size."""
    pixels = np.random.default_rng((height, width)).integers(0, 256, (3, 4, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).resize((width, height)).save(stream, "PNG")
    return stream.getvalue()


def write_documents(folder: Path, documents: Sequence[Document], *, broken: bool = False) -> Any:
    """A store of documents. broken: nothing of their images can be decoded."""
    with MultimodalWriter(folder, {"tokens": np.uint16}) as writer:
        for document in documents:
            sizes = [each for each in document if isinstance(each, tuple)]
            text = [
                t for each in document for t in ([each] if isinstance(each, int) else [BEGIN, IMAGE, END])
            ]
            data = [b"no picture" if broken else picture(*size) for size in sizes]
            numbers = np.array([len(each) for each in data], np.int64)
            at, starts = np.flatnonzero(np.array(text) == IMAGE), np.array([0, len(sizes)])
            writer.add_document(tokens=np.array(text, np.uint16))
            writer.add_parts(replace(Parts.of_images(sizes), num_bytes=numbers, at=at, starts=starts), data)
    return mf.open(folder)


def grid_of(height: int, width: int) -> tuple[int, int, int]:
    """image_grid_thw of an image, by transformers."""
    module = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    rule = PATCHES.rule
    resized = module.smart_resize(height, width, 28, rule.min_pixels, rule.max_pixels)
    return (1, resized[0] // 14, resized[1] // 14)


def expanded(document: Document) -> list[int]:
    """The tokens of a document, its placeholders repeated by transformers' sizes."""
    made: list[int] = []
    for each in document:
        tokens = [each] if isinstance(each, int) else [BEGIN, *[IMAGE] * (np.prod(grid_of(*each)) // 4), END]
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
    grids = torch.tensor([grid_of(*each) for each in document if isinstance(each, tuple)]).reshape(-1, 3)
    ids, _ = model.get_rope_index(self, tokens, (tokens == IMAGE).int(), image_grid_thw=grids)
    return ids[:, 0]
