"""Images of Pixtral and Mistral 3, in rows of tokens: RowImages, and RowPatches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from meshfeed.arrays import Array, Longs
from meshfeed.errors import StoreError
from meshfeed.multimodal.processor import PartField
from meshfeed.parts import PLACEHOLDER, Kind, Parts, Repeat, Template
from meshfeed.parts.types import TokenId, in_pixels
from meshfeed.processors.patches import ResizedImages, SizedPatches


@dataclass(frozen=True, kw_only=True)
class RowImages(ResizedImages):
    """Images at their own resolution, with a token behind each row of outputs.

    Like Pixtral (Agrawal et al. 2024, arXiv 2410.07073); for Mistral 3, patch=14, merge=2, longest=1540. An
    image is scaled down to `longest`, never up. The encoder attends over the whole image.

    Attributes:
        row_end, end: ids of the token behind each row, [IMG_BREAK], and behind the last one, [IMG_END].
        patch, merge: side of a patch, in pixels, and of the square of patches that become one output.
        longest: side of the resized image, in pixels, at most: "longest_edge" of the processor's size.

    Raises RecipeError for options below 1.
    """

    row_end: TokenId
    end: TokenId
    patch: int = 16
    merge: int = 1
    longest: int = 1024
    alpha: float = 6 * 1024
    kind: Kind = "image"

    def resized(self, parts: Parts) -> tuple[Longs, Longs]:
        """(height, width) of the resized images, in pixels; int64 [p] twice.

        Raises StoreError for an image so long that nothing is left of its other side.
        """
        ratio = np.maximum(np.maximum(parts.height / self.longest, parts.width / self.longest), 1)
        sides = np.floor(np.stack((parts.height, parts.width)) / ratio).astype(np.int64)
        if (lost := np.flatnonzero(sides.min(axis=0) < 1)).size:
            i = lost[0]
            raise StoreError(
                f"part {i}, {in_pixels(int(parts.height[i]), int(parts.width[i]))}: too long for "
                f"longest={self.longest}; crop it, or leave it out when preparing the data"
            )
        side = self.patch * self.merge
        height, width = -(-sides // side) * side
        return height, width

    def tokens(self, parts: Parts) -> Longs:
        rows, columns = self.grid(parts)
        return rows * (columns + 1)

    def template(self, parts: Parts) -> Template:
        def runs(rows: int, columns: int) -> list[Repeat]:
            row = [Repeat(PLACEHOLDER, columns, is_output=True), Repeat(self.row_end)]
            return [*(row * rows)[:-1], Repeat(self.end)]

        return Template.of(runs(*each) for each in np.stack(self.grid(parts), axis=1).tolist())


@dataclass(frozen=True)
class RowPatches(SizedPatches):
    """The patches of an image at its own resolution, with the values of the processor of Pixtral, Mistral 3.

    Attributes:
        rule: sizes of images and patches, and the ids of what ends rows.

    Fields, both for the first stage: pixel_values, dtype [patches, 3 * patch * patch], row by row;
    image_sizes int64 [images, 2], height and width of the resized image in pixels. Other options: see
    `ImageProcessor`.
    """

    rule: RowImages  # pyright: ignore[reportIncompatibleVariableOverride]
    size_field: ClassVar[PartField] = PartField(name="image_sizes", dtype="int64", shape=(2,))

    def sizes_of(self, height: int, width: int) -> Array:
        """In pixels."""
        return np.array([[height, width]])

    def num_tokens(self, made: Mapping[str, Array]) -> int:
        return int(made["image_sizes"].prod()) // (self.rule.patch * self.rule.merge) ** 2
