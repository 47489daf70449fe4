"""NativePatches: images at their own resolution, as Qwen2-VL and its heirs take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import numpy as np

from meshfeed.columns import Array
from meshfeed.parts import NativeImages, Parts
from meshfeed.processors.pixels import PIXELS, BytePixels, rgb_image
from meshfeed.sequence.processor import PartField, PartSize
from meshfeed.sequence.runs import Longs


@dataclass(frozen=True)
class NativePatches(BytePixels):
    """The patches of an image at its own resolution, with the values of Qwen2-VL's processor and its heirs.

    Attributes:
        rule: sizes of images and patches.
        frames: copies of an image in a patch: `temporal_patch_size`.

    Fields, both for the first stage: pixel_values, dtype [patches, 3 * frames * patch * patch], squares of
    merge x merge patches one after the other; image_grid_thw int64 [images, 3], patches of time, height and
    width. Other options: see `ImageProcessor`.
    """

    rule: NativeImages = NativeImages()  # noqa: RUF009  # pyright: ignore[reportIncompatibleVariableOverride]
    _: KW_ONLY
    frames: int = 2

    @property
    def fields(self) -> tuple[PartField, ...]:
        """pixel_values and image_grid_thw."""
        values = 3 * self.frames * self.rule.patch**2
        return (
            self.pixel_field((values,), copies=self.frames),
            PartField(name="image_grid_thw", dtype="int64", shape=(3,)),
        )

    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        """As many as patches, and one."""
        return {"pixel_values": self.rule.patches(parts)[1], "image_grid_thw": np.ones(len(parts), np.int64)}

    def bytes_of(self, data: bytes, size: PartSize) -> Mapping[str, Array]:
        """The patches of one image."""
        image, (height, width) = rgb_image(data, size, self.alpha), self._resized(size)
        patches = self.squares(image, height, width, self.rule.patch, self.rule.merge)
        return {
            PIXELS: patches.reshape(len(patches), -1),
            "image_grid_thw": np.array([[1, height // self.rule.patch, width // self.rule.patch]]),
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
        height, width = self.rule.resized(size.as_image())
        return int(height[0]), int(width[0])
