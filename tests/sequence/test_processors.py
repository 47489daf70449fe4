"""Processors that ship: the arrays of the published ones, bit for bit; and what they refuse."""

from __future__ import annotations

import importlib
import io
import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import meshfeed as mf
from meshfeed.parts import NativeImages, Parts
from meshfeed.sequence import NativePatches, PartSize
from soak import SEED, cases

QWEN = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"


def picture(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Any:
    rng = np.random.default_rng((SEED, seed, height, width))
    coarse = Image.fromarray(rng.integers(0, 256, (3, 4, 3), np.uint8))
    return coarse.resize((width, height)).convert(mode)


def bomb(side: int) -> bytes:
    """A PNG that says how large it is, and no more."""
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    )


def stored(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def made(processor: NativePatches, data: bytes, height: int, width: int) -> Any:
    size = PartSize(height, width, 1, 0.0)
    arrays = processor(data, size, mf.rng(0, 0, 0))
    parts = Parts.of_images([(height, width)])
    assert processor.num_tokens(arrays) == processor.rule.tokens(parts)[0]
    rows = {name: int(count[0]) for name, count in processor.rows(parts).items()}
    blank = processor.blank(size, rows)
    assert np.array_equal(blank["image_grid_thw"], arrays["image_grid_thw"])
    assert blank["pixel_values"].shape == arrays["pixel_values"].shape and not blank["pixel_values"].any()
    assert {name: len(array) for name, array in arrays.items()} == {
        name: rows[0] for name, rows in processor.rows(parts).items()
    }
    return arrays


@pytest.mark.parametrize("patch", [14, 16])
def test_native_patches_are_qwens(patch: int) -> None:
    limits = {"shortest_edge": 3136, "longest_edge": 40_000}
    qwen = importlib.import_module(QWEN).Qwen2VLImageProcessorPil(size=limits, patch_size=patch)
    ours = NativePatches(NativeImages(patch=patch, min_pixels=3136, max_pixels=40_000))
    rng = np.random.default_rng(SEED)
    for case in range(cases(8)):
        height, width = rng.integers(1, 400, 2).tolist()
        if max(height, width) > 200 * min(height, width):
            continue
        mode, kind = [("RGB", "JPEG"), ("RGBA", "PNG"), ("L", "PNG"), ("P", "PNG"), ("CMYK", "JPEG")][
            case % 5
        ]
        data = stored(picture(height, width, mode, case), kind)
        theirs = qwen(Image.open(io.BytesIO(data)).convert("RGB"), return_tensors="np")
        arrays = made(ours, data, height, width)
        for name in ("pixel_values", "image_grid_thw"):
            assert arrays[name].dtype == theirs[name].dtype
            assert np.array_equal(arrays[name], theirs[name]), (name, height, width, mode)
        small = made(replace(ours, dtype="uint8"), data, height, width)["pixel_values"]
        mean, std = (np.repeat(each, 2 * patch**2) for each in (ours.mean, ours.std))
        assert small.dtype == np.uint8
        assert np.allclose((small / 255 - mean) / std, theirs["pixel_values"], atol=1e-6)


def test_an_image_is_turned_as_it_is_shown() -> None:
    image = picture(30, 90)
    exif = image.getexif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise
    turned = stored(image.rotate(-90, expand=True))
    one = made(NativePatches(), stored(image, "PNG", exif=exif), 90, 30)
    assert np.array_equal(one["pixel_values"], made(NativePatches(), turned, 90, 30)["pixel_values"])


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animated_image_is_its_first_frame(kind: str) -> None:
    frames = [picture(30, 40, "RGB", seed) for seed in range(3)]
    moving = stored(frames[0], kind, save_all=True, append_images=frames[1:], duration=40, lossless=True)
    with Image.open(io.BytesIO(moving)) as image:
        assert image.n_frames == 3
        still = stored(image.convert("RGB"))
    one, other = (made(NativePatches(), data, 30, 40)["pixel_values"] for data in (moving, still))
    assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cannot identify"),
        (b"\x89PNG\r\n\x1a\n", "cannot identify|truncated|broken"),
        (stored(picture(40, 40), "JPEG")[:-200], "truncated|broken"),
        (stored(picture(40, 40), "EPS"), "cannot identify"),
        (bomb(30_000), "exceeds limit"),
        (bomb(5_000), "5000 x 5000 pixels, and the index says"),
        (stored(picture(40, 41)), "40 x 41 pixels, and the index says 40 x 40"),
    ],
)
def test_what_is_no_such_image_is_broken(data: bytes, said: str) -> None:
    with pytest.raises((OSError, ValueError, Image.DecompressionBombError), match=said):
        NativePatches()(data, PartSize(40, 40, 1, 0.0), mf.rng(0, 0, 0))
