"""Processors that ship with the package. They decode with Pillow, of the extra "vlm"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Array
from meshfeed.errors import RecipeError
from meshfeed.parts import NativeImages, Parts
from meshfeed.parts.opened import opened_image
from meshfeed.parts.rule import check_counts
from meshfeed.sequence.processor import PartField, PartSize, Processor
from meshfeed.sequence.runs import Longs


@dataclass(frozen=True)
class NativePatches(Processor):
    """The patches of an image at its own resolution, with the values of Qwen2-VL's processor and its heirs.

    Attributes:
        rule: sizes of images and patches.
        mean, std: of each channel, from 0 to 1; CLIP's.
        frames: copies of an image in a patch: `temporal_patch_size`.
        dtype: "float32", or "uint8" for the bytes of the resized image. They take a quarter of the memory and
            traffic; normalize them on the device: (x / 255 - mean) / std.

    Fields, both for the first stage: pixel_values, dtype [patches, 3 * frames * patch * patch], squares of
    merge x merge patches one after the other; image_grid_thw int64 [images, 3], patches of time, height and
    width. An image whose size is not the one in the index is broken.
    """

    rule: NativeImages = NativeImages()  # noqa: RUF009  # pyright: ignore[reportIncompatibleVariableOverride]
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    frames: int = 2
    dtype: Literal["float32", "uint8"] = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "uint8"):
            raise RecipeError(f"NativePatches(dtype={self.dtype!r}): choose float32, uint8")
        check_counts(self)

    @property
    def fields(self) -> tuple[PartField, ...]:
        """pixel_values and image_grid_thw."""
        values = 3 * self.frames * self.rule.patch**2
        return (
            PartField(name="pixel_values", dtype=self.dtype, shape=(values,)),
            PartField(name="image_grid_thw", dtype="int64", shape=(3,)),
        )

    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        """As many as patches, and one."""
        return {"pixel_values": self.rule.patches(parts)[1], "image_grid_thw": np.ones(len(parts), np.int64)}

    def __call__(self, data: bytes, size: PartSize, rng: np.random.Generator) -> Mapping[str, Array]:
        """The patches of one image; nothing is drawn."""
        rule, image = self.rule, _opened(data, size)
        height, width = self._resized(size)
        pixels = np.asarray(image.resize((width, height), resample=_BICUBIC))
        values = pixels if self.dtype == "uint8" else self._values()[pixels, np.arange(3)]
        rows, columns = (side // rule.patch for side in pixels.shape[:2])
        squares = values.reshape(
            rows // rule.merge, rule.merge, rule.patch, columns // rule.merge, rule.merge, rule.patch, 3
        ).transpose(0, 3, 1, 4, 6, 2, 5)  # rows, columns, then both within a square, then channel, y, x
        copied = np.broadcast_to(
            squares[..., None, :, :], (*squares.shape[:5], self.frames, *squares.shape[5:])
        )
        return {
            "pixel_values": copied.reshape(rows * columns, -1),
            "image_grid_thw": np.array([[1, rows, columns]]),
        }

    def blank(self, size: PartSize, rows: Mapping[str, int]) -> Mapping[str, Array]:
        """Patches of zeros, and the grid that the image should have had."""
        height, width = (side // self.rule.patch for side in self._resized(size))
        return {**super().blank(size, rows), "image_grid_thw": np.array([[1, height, width]])}

    def num_tokens(self, made: Mapping[str, Array]) -> int:
        """Squares of merge x merge patches."""
        return int(made["image_grid_thw"].prod()) // self.rule.merge**2

    def _resized(self, size: PartSize) -> tuple[int, int]:
        """(height, width) in pixels of the resized image."""
        height, width = self.rule.resized(Parts.of_images([(size.height, size.width)]))
        return int(height[0]), int(width[0])

    def _values(self) -> npt.NDArray[np.float32]:
        """What each byte of each channel becomes, rounded as by the published processor; float32 [256, 3]."""
        shares = (np.arange(256) * (1 / 255)).astype(np.float32)[:, None]
        return (shares - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)


_BICUBIC = 3  # PIL.Image.Resampling.BICUBIC


def _opened(data: bytes, size: PartSize) -> Any:
    """A decoded RGB image, turned as EXIF asks. Raises ValueError if the index knows another size."""
    with opened_image(data) as image:
        from PIL import ImageOps

        if {image.height, image.width} != {size.height, size.width}:  # before any pixel is decoded
            raise _other_size(image, size)
        turned = ImageOps.exif_transpose(image)
        if (turned.height, turned.width) != (size.height, size.width):
            raise _other_size(turned, size)
        return turned.convert("RGB")


def _other_size(image: Any, size: PartSize) -> ValueError:
    return ValueError(
        f"{image.height} x {image.width} pixels, and the index says {size.height} x {size.width}"
    )
