"""Images at their own resolution, as Qwen2-VL and its heirs take them: NativeImages, and NativePatches.

`ResizedImages` and `SizedPatches` are what other families of such images share with them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from meshfeed.arrays import Array, Longs
from meshfeed.errors import StoreError
from meshfeed.multimodal.processor import PartField, PartSize
from meshfeed.parts import Kind, PartRule, Parts
from meshfeed.parts.types import check_options, in_pixels
from meshfeed.processors.pixels import PIXELS, ImageProcessor, rgb_image

_MOST_ELONGATED = 200
"""The largest ratio of an image's sides that Qwen's processors take."""


def native_size(
    parts: Parts, *, factor: int, min_pixels: int, max_pixels: int | Longs
) -> tuple[Longs, Longs]:
    """(height, width) that images are resized to: multiples of `factor`, the area within limits; int64 [p].

    From Qwen2-VL (Wang et al. 2024, arXiv 2409.12191). Raises StoreError for an image more than 200 times as
    long as wide, which its processor refuses too.
    """
    refuse_elongated(parts)
    sides = np.stack((parts.height, parts.width))
    rounded = np.rint(sides / factor).astype(np.int64) * factor
    area, resized = sides.prod(axis=0).astype(np.float64), rounded.prod(axis=0)
    shrunk = np.maximum(np.floor(sides / np.sqrt(area / max_pixels) / factor), 1)
    grown = np.ceil(sides * np.sqrt(min_pixels / area) / factor)
    multiples = np.where(resized < min_pixels, grown, rounded // factor)
    height, width = np.where(resized > max_pixels, shrunk, multiples).astype(np.int64) * factor
    return height, width


def refuse_elongated(parts: Parts) -> None:
    """Raises StoreError for parts with one side more than 200 times the other."""
    longer, shorter = np.maximum(parts.height, parts.width), np.minimum(parts.height, parts.width)
    bad = np.flatnonzero(longer / np.maximum(shorter, 1) > _MOST_ELONGATED)
    if bad.size:
        i = bad[0]
        raise StoreError(
            f"part {i}, {in_pixels(int(parts.height[i]), int(parts.width[i]))}: one side is more than "
            f"{_MOST_ELONGATED} times the other, which these models refuse; crop it, or leave it out when "
            f"preparing the data"
        )


class ResizedImages(PartRule):
    """A rule for images, or frames, resized to whole patches, over all of which the encoder attends.

    Attributes:
        patch: side of a patch, in pixels.
        merge: side of the square of patches that become one output.
    """

    patch: int
    merge: int

    def __post_init__(self) -> None:
        check_options(self)

    @abstractmethod
    def resized(self, parts: Parts) -> tuple[Longs, Longs]:
        """(height, width) of the resized images, in pixels; int64 [p] twice."""

    def patches(self, parts: Parts) -> tuple[Longs, Longs]:
        height, width = self.resized(parts)
        return np.ones_like(height), (height // self.patch) * (width // self.patch)

    def grid(self, parts: Parts) -> tuple[Longs, Longs]:
        height, width = self.resized(parts)
        return height // (self.patch * self.merge), width // (self.patch * self.merge)


@dataclass(frozen=True, kw_only=True)
class NativeImages(ResizedImages):
    """Images at their own resolution: `merge` x `merge` patches become a token.

    Like Qwen2-VL and Qwen2.5-VL; for Qwen3-VL, patch=16, min_pixels=65_536, max_pixels=16_777_216; for
    GLM-4.1V and GLM-4.5V, grow_first=True, min_pixels=6272, max_pixels=5_880_000, half of the processor's,
    which counts two frames. The encoder attends over the whole image.

    Attributes:
        patch: side of a patch, in pixels.
        merge: side of the square of patches that become one token.
        min_pixels, max_pixels: limits of the resized image, "shortest_edge" and "longest_edge" of the
            processor's size.
        grow_first: whether an image with a side below a token's is first scaled up, so that it has it.

    Raises RecipeError for options below 1.
    """

    patch: int = 14
    merge: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    grow_first: bool = False
    alpha: float = 6 * 1280
    kind: Kind = "image"

    def tokens(self, parts: Parts) -> Longs:
        return self.patches(parts)[1] // self.merge**2

    def resized(self, parts: Parts) -> tuple[Longs, Longs]:
        """(height, width) of the resized images, in pixels; int64 [p] twice. Raises as `native_size`."""
        factor = self.patch * self.merge
        if self.grow_first:
            scale = np.maximum(np.maximum(factor / parts.height, factor / parts.width), 1)
            height, width = ((side * scale).astype(np.int64) for side in (parts.height, parts.width))
            parts = replace(parts, height=height, width=width)
        return native_size(parts, factor=factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels)


@dataclass(frozen=True)
class SizedPatches(ImageProcessor):
    """The patches of resized images, and an array that tells their sizes: what processors of both share."""

    rule: ResizedImages  # pyright: ignore[reportIncompatibleVariableOverride]
    size_field: ClassVar[PartField]

    @cached_property
    def together(self) -> int:
        """Side of the squares of patches that follow each other; 1 for row by row."""
        return 1

    @abstractmethod
    def sizes_of(self, height: int, width: int) -> Array:
        """The rows of a resized image, from its pixels."""

    @property
    def copies(self) -> int:
        """Of an image, in a patch."""
        return 1

    @cached_property  # asked for with each image
    def fields(self) -> tuple[PartField, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        values = 3 * self.copies * self.rule.patch**2
        return self.pixel_field((values,), copies=self.copies), self.size_field

    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        return {PIXELS: self.rule.patches(parts)[1], self.size_field.name: np.ones(len(parts), np.int64)}

    def bytes_of(self, data: bytes, size: PartSize) -> Mapping[str, Array]:
        image, (height, width) = rgb_image(data, size, self.alpha), self._resized(size)
        patches = self.squares(image, height, width, self.rule.patch, self.together)
        sizes = self.sizes_of(height, width)
        return {PIXELS: patches.reshape(len(patches), -1), self.size_field.name: sizes}

    def blank(self, size: PartSize, rows: Mapping[str, int]) -> Mapping[str, Array]:
        return {**super().blank(size, rows), self.size_field.name: self.sizes_of(*self._resized(size))}

    def _resized(self, size: PartSize) -> tuple[int, int]:
        """(height, width) in pixels of the resized image."""
        height, width = self.rule.resized(size.as_image())
        return int(height[0]), int(width[0])


@dataclass(frozen=True)
class NativePatches(SizedPatches):
    """The patches of an image at its own resolution, with the values of Qwen2-VL's processor and its heirs.

    Attributes:
        rule: sizes of images and patches.
        frames: copies of an image in a patch: `temporal_patch_size`.

    Fields, both for the first stage: pixel_values, dtype [patches, 3 * frames * patch * patch], squares of
    merge x merge patches one after the other; image_grid_thw int64 [images, 3], patches of time, height and
    width. Other options: see `ImageProcessor`.
    """

    rule: NativeImages = NativeImages()  # pyright: ignore[reportIncompatibleVariableOverride]
    _: KW_ONLY
    frames: int = 2
    size_field: ClassVar[PartField] = PartField(name="image_grid_thw", dtype="int64", shape=(3,))

    @property
    def copies(self) -> int:
        return self.frames

    @cached_property
    def together(self) -> int:
        return self.rule.merge

    def sizes_of(self, height: int, width: int) -> Array:
        """Patches of time, height and width."""
        return np.array([[1, height // self.rule.patch, width // self.rule.patch]])

    def num_tokens(self, made: Mapping[str, Array]) -> int:
        return int(made["image_grid_thw"].prod()) // self.rule.merge**2
