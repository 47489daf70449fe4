"""What processors of pixels share: their values; of images, decoding by Pillow (extra "vlm") and resizing.

Images are resized and cut into squares with the bits of Pillow's `Image.resize`.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, reduce
from typing import Any, ClassVar, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Array, Floats, Ints
from meshfeed.errors import PartError, RecipeError
from meshfeed.formats.images import opened_image
from meshfeed.multimodal.native import compiled
from meshfeed.multimodal.processor import PartField, PartSize, Processor, check_rule
from meshfeed.native import ARRAY, WHOLE
from meshfeed.parts.types import check_counts, in_pixels

Color = tuple[float, float, float]
Dtype = Literal["float32", "uint8"]
Alpha = Literal["white", "drop"]
Resample = Literal["bilinear", "bicubic", "lanczos"]

PIXELS = "pixel_values"

_widen_pixels = compiled("mf_widen_pixels", WHOLE, WHOLE, WHOLE, ARRAY, ARRAY, ARRAY)

_MOST_PIXELS = 178_956_970  # where Pillow refuses to decode

_log = logging.getLogger("meshfeed")


@dataclass(frozen=True, kw_only=True)
class PixelProcessor(Processor):
    """A processor whose pixels travel as bytes, and get their values in the last copy.

    A subclass with a `__call__` of its own sends what that makes, as fields.

    Attributes:
        mean, std: of red, green and blue, from 0 to 1; CLIP's.
        dtype: "float32", or "uint8" for the bytes of the resized image. They take a quarter of the memory and
            traffic; normalize them on the device: (x / 255 - mean) / std.

    Raises RecipeError for other options.
    """

    mean: Color = (0.48145466, 0.4578275, 0.40821073)
    std: Color = (0.26862954, 0.26130258, 0.27577711)
    dtype: Dtype = "float32"
    one_color: ClassVar[bool] = False  # whether mean and std are the same for all, which lie side by side

    def __post_init__(self) -> None:
        check_rule(self)
        check_choice(self, "dtype", get_args(Dtype))
        check_counts(self)
        mean, std = np.array(self.mean, float), np.array(self.std, float)
        fits = mean.shape == std.shape == (3,) and np.isfinite(std).all()
        fits = fits and ((mean >= 0) & (mean <= 1) & (std > 0)).all()
        if not fits or (self.one_color and len({*mean}) + len({*std}) > 2):
            raise RecipeError(
                f"{type(self).__name__}(mean={self.mean}, std={self.std}): three numbers each, mean from "
                f"0 to 1, std above 0{', the same for all colors' * self.one_color}"
            )

    @abstractmethod
    def bytes_of(self, data: bytes, size: PartSize) -> Mapping[str, Array]:
        """Decode a part: field -> array, with bytes for pixels; nothing is drawn."""

    def __call__(self, data: bytes, size: PartSize, rng: np.random.Generator) -> Mapping[str, Array]:
        """Decode a part; nothing is drawn."""
        made = self.bytes_of(data, size)
        return {each.name: each.joined([made[each.name]], np.empty) for each in self.fields}

    @cached_property  # asked for with each image
    def columns(self) -> tuple[PartField, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Its fields, with bytes for pixels."""
        if not self._sends_bytes:
            return self.fields
        return tuple(each.column if isinstance(each, PixelField) else each for each in self.fields)

    def decoded(self, data: bytes, size: PartSize, rng: np.random.Generator) -> Mapping[str, Array]:
        """Decode a part: column -> array; nothing is drawn."""
        return self.bytes_of(data, size) if self._sends_bytes else self(data, size, rng)

    @cached_property
    def _sends_bytes(self) -> bool:
        return type(self).__call__ is PixelProcessor.__call__


@dataclass(frozen=True, kw_only=True)
class ImageProcessor(PixelProcessor):
    """A processor of images with the options that all of them have.

    Attributes:
        resample: the filter that resizes.
        alpha: what becomes of transparent pixels, of palettes and GIFs too: "white" lays them on white, as
            transformers 5; "drop" takes the colors stored under them, most often black, as transformers 4.

    An image whose size is not the one in the index is broken. Raises RecipeError for other options.
    """

    resample: Resample = "bicubic"
    alpha: Alpha = "white"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "resample", get_args(Resample))
        check_choice(self, "alpha", get_args(Alpha))

    def resized(self, image: Any, height: int, width: int) -> Any:
        """An image of that many pixels. Raises PartError for more than Pillow decodes."""
        _refuse_huge(image, height, width)
        return resized(image, height, width, self.resample)

    def squares(self, image: Any, height: int, width: int, side: int, merge: int = 1) -> Array:
        """The squares of an RGB image of that many pixels; see `squares_of`. Raises as `resized`."""
        _refuse_huge(image, height, width)
        return resized_squares(image, height, width, self.resample, side, merge)

    def pixel_field(self, shape: tuple[int, ...], *, copies: int = 1) -> PixelField:
        """The field pixel_values, of rows of that shape."""
        return PixelField(
            name=PIXELS, dtype=self.dtype, shape=shape, mean=self.mean, std=self.std, copies=copies
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelField(PartField):
    """Pixels that may travel as bytes: uint8 [rows, 3 * n] for rows of 3 * copies * n values, or of frames.

    Attributes:
        mean, std: of red, green and blue, which follow each other in a row; for dtype "float32".
        copies: of each channel, one after the other.
        fused: whether values are rounded as by processors of transformers that use torch: see
            `values_of_bytes`.
    """

    mean: Color
    std: Color
    copies: int = 1
    fused: bool = False

    @property
    def column(self) -> PartField:
        """The bytes of a row, each once."""
        shape = self.shape if self.copies == 1 else (math.prod(self.shape) // self.copies,)
        return PartField(name=self.name, dtype="uint8", shape=shape, stages=self.stages)

    def write(self, value: Array, out: Array) -> None:
        """Write the rows of one part. value: bytes as in `column`, or the field itself."""
        if (value.dtype, value.shape) == (out.dtype, out.shape):
            out[...] = value
            return
        frames = math.prod(self.shape[:-3])  # of a row
        rows, size = len(out) * frames, math.prod(self.shape) // (3 * self.copies * frames)
        read, to = value.reshape(rows, 3, 1, size), out.reshape(rows, 3, self.copies, size)
        if self.dtype == "uint8":
            to[...] = read
            return
        values = values_of_bytes(tuple(self.mean), tuple(self.std), self.fused)
        if _widen_pixels is None:
            to[...] = values[np.arange(3)[:, None, None], read]
        else:
            _widen_pixels(rows, size, self.copies, np.ascontiguousarray(read), values, to)


@lru_cache
def values_of_bytes(mean: Color, std: Color, fused: bool = False) -> npt.NDArray[np.float32]:
    """What each byte of each channel becomes, rounded as by transformers; float32 [3, 256].

    fused: (byte - 255 mean) / (255 std), as with torch; otherwise (byte / 255 - mean) / std, as with NumPy.
    """
    by_channel = np.array([mean, std], np.float32)[:, :, None]
    if fused:
        by_channel *= np.float32(255)
    shares = np.arange(256, dtype=np.float32) if fused else (np.arange(256) * (1 / 255)).astype(np.float32)
    return (shares - by_channel[0]) / by_channel[1]


def check_choice(options: Any, name: str, choices: tuple[str, ...]) -> None:
    """Raises RecipeError unless an option has one of the values."""
    if (value := getattr(options, name)) not in choices:
        raise RecipeError(f"{type(options).__name__}({name}={value!r}): choose {', '.join(choices)}")


def rgb_image(data: bytes, size: PartSize, alpha: Alpha = "white") -> Any:
    """A stored image, decoded, as an RGB PIL.Image.Image, turned as EXIF asks.

    data: JPEG, PNG, WebP, GIF, BMP, TIFF, PPM or AVIF. alpha: see `ImageProcessor`. Raises PartError for
    other bytes, or if the index knows another size, and ImportError without Pillow.
    """
    try:
        with opened_image(data) as image:
            from PIL import ImageOps

            if {image.height, image.width} != {size.height, size.width}:  # before any pixel is decoded
                raise _other_size(image, size)
            ImageOps.exif_transpose(image, in_place=True)
            if (image.height, image.width) != (size.height, size.width):
                raise _other_size(image, size)
            has_alpha = "A" in image.getbands() or image.info.get("transparency") is not None
            return _on_white(image) if has_alpha and alpha == "white" else _as_rgb(image)
    except (ImportError, MemoryError, PartError):
        raise
    except Exception as error:  # each of Pillow's formats has its own
        raise PartError(f"{type(error).__name__}: {error}") from error


def _as_rgb(image: Any) -> Any:
    if image.mode.startswith(("I", "F")):
        warn_of_depth()
    return image if image.mode == "RGB" else image.convert("RGB")  # which copies an RGB one


@cache
def warn_of_depth() -> None:
    """Warn once of an image of more than 8 bits a pixel."""
    _log.warning(
        "an image has more than 8 bits a pixel, of which all above 255 become white, as in transformers; "
        "scale such images to 8 bits before they are prepared"
    )


def _on_white(image: Any) -> Any:
    """An image as RGB, what is transparent laid on white."""
    from PIL import Image

    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def framed(image: Any, height: int, width: int, color: tuple[int, int, int] = (0, 0, 0)) -> Any:
    """An image in the middle of a larger one of a color. Raises as `ImageProcessor.resized`."""
    from PIL import Image

    _refuse_huge(image, height, width)
    frame = Image.new("RGB", (width, height), color)
    frame.paste(image, ((width - image.width) // 2, (height - image.height) // 2))
    return frame


def _refuse_huge(image: Any, height: int, width: int) -> None:
    if height * width > _MOST_PIXELS:
        raise PartError(
            f"{in_pixels(image.height, image.width)}: so long an image would become "
            f"{in_pixels(height, width)}, more than {_MOST_PIXELS} pixels, on the way; crop it"
        )


def _other_size(image: Any, size: PartSize) -> PartError:
    return PartError(
        f"{in_pixels(image.height, image.width)}, and the index says {in_pixels(size.height, size.width)}"
    )


# -- resized, and cut into squares --------------------------------------------------------------------------
#
# Pillow makes each byte of a weighted sum of bytes, first along lines and then across them, or the other way
# round, and rounds after each. The compiled loop does the same, several bytes at a time. It is used where a
# trial finds no difference from the Pillow that is installed; else Pillow resizes.

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
