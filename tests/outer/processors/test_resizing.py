"""Images resized by the compiled loop: the bits of Pillow, whichever order its version resizes in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from meshfeed.processors import NativePatches, pixels
from meshfeed.processors.pixels import Resample, resized, resized_squares, squares_of
from services.needs import needs_compiled
from soak import SEED, cases

SIDES = st.integers(1, 120)


def noise(height: int, width: int, *, is_hard: bool = True) -> Any:
    """is_hard: black and white, whose sums leave the bytes at both ends."""
    pixels = np.random.default_rng((SEED, height, width)).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(np.where(pixels < 128, 0, 255).astype(np.uint8) if is_hard else pixels)


@settings(max_examples=cases(150), deadline=None)
@given(
    old=st.tuples(SIDES, SIDES),
    new=st.tuples(SIDES, SIDES),
    cut=st.sampled_from([(1, 1), (1, 2), (3, 2), (7, 1), (14, 2), (16, 2)]),
    resample=st.sampled_from(["bilinear", "bicubic"]),
    is_hard=st.booleans(),
)
@example(old=(28, 28), new=(28, 28), cut=(14, 2), resample="bicubic", is_hard=True)
@example(old=(28, 90), new=(28, 28), cut=(14, 2), resample="bicubic", is_hard=True)
@example(old=(90, 28), new=(28, 28), cut=(14, 2), resample="bicubic", is_hard=True)
@example(old=(98, 51), new=(56, 28), cut=(14, 2), resample="bicubic", is_hard=False)  # 42 lines fewer, 23
@example(old=(98, 49), new=(56, 28), cut=(14, 2), resample="bicubic", is_hard=False)  # and 21 columns
@example(old=(1, 1), new=(28, 56), cut=(14, 2), resample="bilinear", is_hard=False)
def test_squares_have_pillows_bits(
    old: tuple[int, int], new: tuple[int, int], cut: tuple[int, int], resample: Resample, is_hard: bool
) -> None:
    needs_compiled()
    assert pixels.pillows_order(resample) in pixels.ORDERS  # so that a new Pillow is noticed
    side, merge = cut
    height, width = (max(each // (side * merge), 1) * side * merge for each in new)
    image = noise(*old, is_hard=is_hard)
    expected = squares_of(resized(image, height, width, resample), side, merge)
    assert np.array_equal(resized_squares(image, height, width, resample, side, merge), expected)


def test_where_the_loop_has_other_bits_pillow_resizes(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_compiled()
    monkeypatch.setattr(pixels, "_resize_squares", lambda *given: given[-1].fill(0))
    pixels.pillows_order.cache_clear()
    try:
        image = noise(40, 60)
        found = NativePatches().squares(image, 28, 56, 14, 2)
        assert pixels.pillows_order("bicubic") is None
        assert np.array_equal(found, squares_of(image.resize((56, 28)), 14, 2))
    finally:
        pixels.pillows_order.cache_clear()
