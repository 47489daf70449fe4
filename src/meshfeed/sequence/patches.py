"""NativePatches: images at their own resolution, as Qwen2-VL and its heirs take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import numpy as np

from meshfeed.columns import Array
from meshfeed.parts import NativeImages, Parts
from meshfeed.sequence.pixels import ImageProcessor, rgb_image
from meshfeed.sequence.processor import PartField, PartSize
from meshfeed.sequence.runs import Longs


@dataclass(frozen=True)
class NativePatches(ImageProcessor):
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
            PartField(name="pixel_values", dtype=self.dtype, shape=(values,)),
            PartField(name="image_grid_thw", dtype="int64", shape=(3,)),
        )

    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        """As many as patches, and one."""
        return {"pixel_values": self.rule.patches(parts)[1], "image_grid_thw": np.ones(len(parts), np.int64)}

    def __call__(self, data: bytes, size: PartSize, rng: np.random.Generator) -> Mapping[str, Array]:
        """The patches of one image; nothing is drawn."""
        rule = self.rule
        values = self.values(self.resized(rgb_image(data, size, self.alpha), *self._resized(size)))
        rows, columns = (side // rule.patch for side in values.shape[:2])
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
        height, width = self.rule.resized(size.as_image())
        return int(height[0]), int(width[0])
