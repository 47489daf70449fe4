"""What processors of pixels share: their values; of images, decoding by Pillow (extra "vlm") and resizing."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Array
from meshfeed.errors import PartError, RecipeError
from meshfeed.formats.images import opened_image
from meshfeed.multimodal.native import compiled
from meshfeed.multimodal.processor import PartField, PartSize, Processor, check_rule
from meshfeed.native import ARRAY, WHOLE
from meshfeed.parts.types import check_counts, in_pixels
from meshfeed.processors.resizing import Resample, resized, resized_squares

Color = tuple[float, float, float]
Dtype = Literal["float32", "uint8"]
Alpha = Literal["white", "drop"]

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

    def __post_init__(self) -> None:
        check_rule(self)
        check_choice(self, "dtype", get_args(Dtype))
        check_counts(self)
        mean, std = np.array(self.mean, float), np.array(self.std, float)
        fits = mean.shape == std.shape == (3,) and np.isfinite(std).all()
        if not (fits and ((mean >= 0) & (mean <= 1) & (std > 0)).all()):
            raise RecipeError(
                f"{type(self).__name__}(mean={self.mean}, std={self.std}): three numbers each, mean from "
                f"0 to 1, std above 0"
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
