"""What processors of images share: decoding, resizing and normalizing, with Pillow, of the extra "vlm"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Array
from meshfeed.errors import PartError, RecipeError
from meshfeed.parts.opened import opened_image
from meshfeed.parts.rule import check_counts
from meshfeed.parts.types import in_pixels
from meshfeed.sequence.processor import PartSize, Processor

Color = tuple[float, float, float]
Resample = Literal["bilinear", "bicubic"]
Dtype = Literal["float32", "uint8"]
Alpha = Literal["white", "drop"]

_FILTERS = {"bilinear": 2, "bicubic": 3}  # PIL.Image.Resampling
_MOST_PIXELS = 178_956_970  # where Pillow refuses to decode


@dataclass(frozen=True, kw_only=True)
class ImageProcessor(Processor):
    """A processor of images with the options that all of them have.

    Attributes:
        mean, std: of red, green and blue, from 0 to 1; CLIP's.
        resample: the filter that resizes.
        dtype: "float32", or "uint8" for the bytes of the resized image. They take a quarter of the memory and
            traffic; normalize them on the device: (x / 255 - mean) / std.
        alpha: what becomes of transparent pixels, of palettes and GIFs too: "white" lays them on white, as
            transformers 5; "drop" takes the colors stored under them, most often black, as transformers 4.

    An image whose size is not the one in the index is broken. Raises RecipeError for other options.
    """

    mean: Color = (0.48145466, 0.4578275, 0.40821073)
    std: Color = (0.26862954, 0.26130258, 0.27577711)
    resample: Resample = "bicubic"
    dtype: Dtype = "float32"
    alpha: Alpha = field(default="white", repr=False)

    def __post_init__(self) -> None:
        check_choice(self, "resample", get_args(Resample))
        check_choice(self, "dtype", get_args(Dtype))
        check_choice(self, "alpha", get_args(Alpha))
        check_counts(self)
        mean, std = np.array(self.mean, float), np.array(self.std, float)
        if not (mean.shape == std.shape == (3,) and np.isfinite([mean, std]).all() and (std > 0).all()):
            raise RecipeError(
                f"{type(self).__name__}(mean={self.mean}, std={self.std}): three numbers each, std above 0"
            )

    def summary(self) -> str:
        """As its repr, with alpha unless it is "white", so that older fingerprints stay."""
        return super().summary() + ("" if self.alpha == "white" else f" with alpha={self.alpha!r}")

    def resized(self, image: Any, height: int, width: int) -> Any:
        """An image of that many pixels. Raises PartError for more than Pillow decodes."""
        _refuse_huge(image, height, width)
        return image.resize((width, height), resample=_FILTERS[self.resample])

    def values(self, image: Any) -> Array:
        """The pixels of an RGB image, normalized if dtype is "float32"; [height, width, 3]."""
        pixels = np.asarray(image)
        return pixels if self.dtype == "uint8" else self._values()[pixels, np.arange(3)]

    def _values(self) -> npt.NDArray[np.float32]:
        """What each byte of each channel becomes, rounded as by transformers; float32 [256, 3]."""
        shares = (np.arange(256) * (1 / 255)).astype(np.float32)[:, None]
        return (shares - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)


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
            turned = ImageOps.exif_transpose(image)
            if (turned.height, turned.width) != (size.height, size.width):
                raise _other_size(turned, size)
            return turned.convert("RGB") if alpha == "drop" else _on_white(turned)
    except (ImportError, MemoryError, PartError):
        raise
    except Exception as error:  # each of Pillow's formats has its own
        raise PartError(f"{type(error).__name__}: {error}") from error


def _on_white(image: Any) -> Any:
    """An image as RGB, what is transparent laid on white."""
    from PIL import Image

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def framed(image: Any, height: int, width: int, color: tuple[int, int, int] = (0, 0, 0)) -> Any:
    """An image in the middle of a larger one of a color. Raises as `ImageProcessor.resized`."""
    from PIL import Image

    _refuse_huge(image, height, width)
    frame = Image.new("RGB", (width, height), color)
    frame.paste(image, ((width - image.width) // 2, (height - image.height) // 2))
    return frame


def tiles_of(values: Array, side: int) -> Array:
    """The square tiles of an image, row by row; [height, width, 3] -> [tiles, 3, side, side]."""
    rows, columns = (extent // side for extent in values.shape[:2])
    tiles = values.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3)
    return tiles.reshape(rows * columns, 3, side, side)


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
