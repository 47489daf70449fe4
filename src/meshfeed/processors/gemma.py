"""Images of Gemma 4, as many patches as fit a budget of tokens: BudgetImages, and BudgetPatches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np

from meshfeed.columns import Array
from meshfeed.errors import RecipeError
from meshfeed.multimodal.processor import PartField, PartSize
from meshfeed.parts import Kind, Parts
from meshfeed.parts.types import check_options
from meshfeed.processors.patches import ResizedImages, SizedPatches
from meshfeed.processors.pixels import PIXELS, Color
from meshfeed.processors.tiles import Framed
from meshfeed.sequence.runs import Longs


@dataclass(frozen=True, kw_only=True)
class BudgetImages(Framed, ResizedImages):
    """Images scaled to as many outputs as `max_tokens` allows, whatever their shape.

    Like Gemma 4, with the ids of <start_of_image> and <end_of_image> in before and after. Small images are
    scaled up. The encoder attends over the whole image.

    Attributes:
        max_tokens: outputs of an image, at most: `max_soft_tokens`.
        patch, merge: side of a patch, in pixels, and of the square of patches that become one output.

    Other options: see `Framed`. Raises RecipeError for options below 1.
    """

    max_tokens: int = 280
    patch: int = 16
    merge: int = 3
    alpha: float = 6 * 1152
    kind: Kind = "image"

    def __post_init__(self) -> None:
        check_options(self)

    def outputs(self, parts: Parts) -> Longs:
        return self.patches(parts)[1] // self.merge**2

    def resized(self, parts: Parts) -> tuple[Longs, Longs]:
        """(height, width) of the resized images, in pixels; int64 [p] twice."""
        side, most = self.patch * self.merge, self.max_tokens * self.merge**2 * self.patch**2
        factor = np.sqrt(most / (parts.height * parts.width))
        height, width = (
            np.floor(factor * each / side).astype(np.int64) for each in (parts.height, parts.width)
        )
        across, down = (
            np.minimum(longer // shorter, self.max_tokens)
            for longer, shorter in ((parts.width, parts.height), (parts.height, parts.width))
        )
        is_flat, is_thin = height == 0, width == 0
        height, width = np.where(is_thin, down, height), np.where(is_flat, across, width)
        return np.where(is_flat, 1, height) * side, np.where(is_thin, 1, width) * side


@dataclass(frozen=True)
class BudgetPatches(SizedPatches):
    """The patches of an image, and where each is, with the values of Gemma 4's processor.

    Attributes:
        rule: sizes of images and patches, and ids.

    Fields, both for the first stage, without padding: pixel_values, dtype [patches, patch * patch * 3],
    row by row; image_position_ids int64 [patches, 2], the column and row of each. Other options: see
    `ImageProcessor`. Raises RecipeError for a mean or std that is not the same for all colors.
    """

    rule: BudgetImages  # pyright: ignore[reportIncompatibleVariableOverride]
    _: KW_ONLY
    mean: Color = (0.0, 0.0, 0.0)
    std: Color = (1.0, 1.0, 1.0)
    size_field: ClassVar[PartField] = PartField(name="image_position_ids", dtype="int64", shape=(2,))

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({*self.mean}) > 1 or len({*self.std}) > 1:
            raise RecipeError(f"BudgetPatches(mean={self.mean}, std={self.std}): the same for all colors")

    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        """As many as patches, of both."""
        patches = self.rule.patches(parts)[1]
        return {PIXELS: patches, self.size_field.name: patches}

    def bytes_of(self, data: bytes, size: PartSize) -> Mapping[str, Array]:
        """The patches of one image, of each pixel its three colors."""
        made = super().bytes_of(data, size)
        patches = made[PIXELS].reshape(-1, 3, self.rule.patch**2).swapaxes(1, 2)
        return {**made, PIXELS: np.ascontiguousarray(patches).reshape(len(patches), -1)}

    def sizes_of(self, height: int, width: int) -> Array:
        """The column and row of each patch."""
        rows, columns = height // self.rule.patch, width // self.rule.patch
        return np.stack([np.tile(np.arange(columns), rows), np.arange(rows).repeat(columns)], axis=1)

    def num_tokens(self, made: Mapping[str, Array]) -> int:
        """Squares of merge x merge patches."""
        return len(made["image_position_ids"]) // self.rule.merge**2
