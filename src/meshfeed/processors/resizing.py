"""RGB images resized and cut into squares, with the bits of Pillow's `Image.resize`.

Pillow makes each byte of a weighted sum of bytes, first along lines and then across them, or the other way
round, and rounds after each. The compiled loop does the same, several bytes at a time. It is used where a
trial finds no difference from the Pillow that is installed; else Pillow resizes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, reduce
from typing import Any, Literal, cast

import numpy as np

from meshfeed.arrays import Array, Floats, Ints
from meshfeed.multimodal.native import compiled
from meshfeed.native import ARRAY, WHOLE

Resample = Literal["bilinear", "bicubic", "lanczos"]
LinesFirst = Callable[[int, int, int, int], bool]
"""Whether Pillow resizes along lines first: (height, width, new height, new width) -> bool."""

_resize_squares = compiled(
    "mf_resize_squares",
    *(WHOLE, ARRAY, WHOLE),
    *(WHOLE, WHOLE, ARRAY),
    *(WHOLE, WHOLE, ARRAY),
    *(WHOLE, WHOLE, ARRAY, ARRAY, ARRAY),
)

_FILTERS = {"lanczos": 1, "bilinear": 2, "bicubic": 3}  # PIL.Image.Resampling
_REACH = {"bilinear": 1.0, "bicubic": 2.0}
_WEIGHT_BITS = 22  # as in loops.c
_MOST_TABLES = 256  # some 10 KiB each
_TRIED = (  # height, width, new height, new width
    *((23, 31, 42, 28), (40, 30, 14, 42), (60, 91, 28, 14), (91, 60, 14, 28), (5, 3, 14, 28)),
    *((28, 30, 28, 42), (30, 28, 42, 28), (300, 2, 28, 14), (98, 51, 56, 28), (98, 49, 56, 28)),
)
_SIDE = 14

ORDERS: tuple[LinesFirst, ...] = (
    # Pillow 13: not if the height shrinks, by more than twice what the width does
    lambda height, width, to_height, to_width: (
        to_height >= height or height - to_height <= 2 * (width - to_width)
    ),
    # 12.2: not if the height of a very high image shrinks
    lambda height, width, to_height, to_width: to_height >= height or height <= 100 * width,
    lambda height, width, to_height, to_width: True,
)
"""Pillow 12.2 and 13 each changed the order of its passes, and so its bits. The newest first."""


def resized(image: Any, height: int, width: int, resample: Resample) -> Any:
    """A PIL.Image.Image of that many pixels."""
    return image.resize((width, height), resample=_FILTERS[resample])


def squares_of(image: Any, side: int, merge: int = 1) -> Array:
    """The squares of an RGB image, row by row; uint8 [squares, 3, side, side].

    merge: blocks of merge x merge squares follow each other, and within a block its squares.
    """
    pixels = np.asarray(image)
    rows, columns = (extent // (merge * side) for extent in pixels.shape[:2])
    squares = pixels.reshape(rows, merge, side, columns, merge, side, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return np.ascontiguousarray(squares).reshape(-1, 3, side, side)


def resized_squares(
    image: Any, height: int, width: int, resample: Resample, side: int, merge: int = 1
) -> Array:
    """`squares_of` an RGB image that is `resized` to multiples of merge * side."""
    if (lines_first := pillows_order(resample)) is None:
        return squares_of(resized(image, height, width, resample), side, merge)
    return _by_loop(image, height, width, resample, side, merge, lines_first)


def _by_loop(
    image: Any, height: int, width: int, resample: Resample, side: int, merge: int, lines_first: LinesFirst
) -> Array:
    loop = cast(Callable[..., int], _resize_squares)
    pixels = np.frombuffer(image.tobytes("raw", "RGBX"), np.uint8)
    merges, across = _table(image.height, height, resample), _table(image.width, width, resample)
    is_first = lines_first(image.height, image.width, height, width)
    room = np.empty(4 * (image.width + width), np.int32)
    lines = np.empty(7 * width + 4 * max(image.width, is_first * image.height * width), np.uint8)
    out = np.empty((height // side * (width // side), 3, side, side), np.uint8)
    loop(
        *(image.width, pixels, is_first),
        *(height, merges.shape[1] - 1, merges),
        *(width, across.shape[1] - 1, across),
        *(side, merge, room, lines, out),
    )
    return out


@lru_cache(_MOST_TABLES)
def _table(size: int, new_size: int, resample: Resample) -> Ints:
    """Of each new pixel of a line, the first old one that it is made of, and the weight of each.

    int32 [new_size, 1 + weights], in units of 2^-22; by Pillow's operations on floats, in their order.
    """
    if size == new_size:
        return np.stack([np.arange(size), np.full(size, 1 << _WEIGHT_BITS)], axis=1).astype(np.int32)
    scale = size / new_size
    stretch = max(scale, 1.0)
    reach, middle = _REACH[resample] * stretch, (np.arange(new_size) + 0.5) * scale
    low = np.maximum((middle - reach + 0.5).astype(np.int64), 0)
    high = np.minimum((middle + reach + 0.5).astype(np.int64), size)
    count = int((high - low).max())
    first = np.minimum(low, size - count)  # so that none ends behind the last pixel
    at = first[:, None] + np.arange(count)
    shares = _share((at - middle[:, None] + 0.5) * (1.0 / stretch), resample)
    shares[(at < low[:, None]) | (at >= high[:, None])] = 0
    shares /= reduce(np.add, shares.T)[:, None]  # in this order, which NumPy's own sum does not keep
    weights = np.copysign(0.5, shares) + shares * (1 << _WEIGHT_BITS)
    return np.column_stack([first, weights]).astype(np.int32)  # rounds towards 0


def _share(distance: Floats, resample: Resample) -> Floats:
    """The share of a pixel at a distance from the middle of a new one."""
    x = np.abs(distance)
    if resample == "bilinear":
        return np.maximum(1.0 - x, 0.0)
    near, far = (1.5 * x - 2.5) * x * x + 1.0, (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


@cache
def pillows_order(resample: Resample) -> LinesFirst | None:
    """The order with which the loop gives this Pillow's bits of noise of some sizes; None for none."""
    if _resize_squares is None or resample not in _REACH:
        return None
    from PIL import Image

    rng = np.random.default_rng(0)
    tried = [
        (Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)), new_height, new_width)
        for height, width, new_height, new_width in _TRIED
    ]

    def agrees(order: LinesFirst) -> bool:
        return all(
            np.array_equal(
                _by_loop(image, height, width, resample, _SIDE, 1, order),
                squares_of(resized(image, height, width, resample), _SIDE),
            )
            for image, height, width in tried
        )

    return next(filter(agrees, ORDERS), None)
