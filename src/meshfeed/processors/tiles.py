"""Processors that give an encoder square images of one size: one for each image, or several tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import numpy as np

from meshfeed.columns import Array
from meshfeed.parts import AnyResImages, FixedImages, Parts, TiledImages
from meshfeed.processors.pixels import PIXELS, BytePixels, Color, check_choice, framed, rgb_image
from meshfeed.processors.resizing import squares_of
from meshfeed.sequence.processor import PartField, PartSize
from meshfeed.sequence.runs import Longs

Fit = Literal["crop", "stretch", "pad"]


@dataclass(frozen=True)
class FixedPixels(BytePixels):
    """Images of one size, with the values of the processors of CLIP, SigLIP, LLaVA-1.5 and Gemma 3.

    Attributes:
        rule: the size.
        fit: how an image that is not square becomes so. "crop" resizes its shorter side and keeps the middle,
            as CLIP's; "stretch" resizes both, as SigLIP's; "pad" first frames it with the mean color, as
            LLaVA-1.5's with `do_pad`.

    Field, for the first stage: pixel_values, dtype [images, 3, size, size]. Other options: see
    `ImageProcessor`. An image so long that it would be more pixels than Pillow decodes on the way is broken.
    """

    rule: FixedImages = FixedImages()  # noqa: RUF009  # pyright: ignore[reportIncompatibleVariableOverride]
    _: KW_ONLY
    fit: Fit = "crop"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "fit", get_args(Fit))

    @property
    def fields(self) -> tuple[PartField, ...]:
        """pixel_values."""
        return (self.pixel_field((3, self.rule.size, self.rule.size)),)

    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        """One."""
        return {PIXELS: np.ones(len(parts), np.int64)}

    def bytes_of(self, data: bytes, size: PartSize) -> Mapping[str, Array]:
        """The image."""
        return {PIXELS: self._square(rgb_image(data, size, self.alpha))}

    def num_tokens(self, made: Mapping[str, Array]) -> int:
        """As the rule says of an image."""
        images = Parts.of_images([made[PIXELS].shape[2:]] * len(made[PIXELS]))
        return int(self.rule.tokens(images).sum())

    def _square(self, image: Any) -> Array:
        side, shorter, longer = self.rule.size, min(image.size), max(image.size)
        if self.fit == "crop":
            width, height = (side if each == shorter else int(side * longer / shorter) for each in image.size)
            left, top = (width - side) // 2, (height - side) // 2
            return squares_of(
                self.resized(image, height, width).crop((left, top, left + side, top + side)), side
            )
        if self.fit == "pad":
            red, green, blue = (int(255 * mean) for mean in self.mean)
            image = framed(image, longer, longer, (red, green, blue))
        return self.squares(image, side, side, side)


@dataclass(frozen=True)
class TiledPixels(BytePixels):
    """Square tiles of an image, and a small copy of the whole, with the values of InternVL's processor.

    Attributes:
        rule: size and number of tiles.
        mean, std: ImageNet's.

    Field, for the first stage: pixel_values, dtype [tiles, 3, tile, tile]: the tiles of an image, row by row,
    then its copy. Other options: see `ImageProcessor`.
    """

    rule: TiledImages = TiledImages()  # noqa: RUF009  # pyright: ignore[reportIncompatibleVariableOverride]
    _: KW_ONLY
    mean: Color = (0.485, 0.456, 0.406)
    std: Color = (0.229, 0.224, 0.225)

    @property
    def fields(self) -> tuple[PartField, ...]:
        """pixel_values."""
        return (self.pixel_field((3, self.rule.tile, self.rule.tile)),)

    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        """As many as tiles, with the copy."""
        return {PIXELS: self.rule.patches(parts)[0]}

    def bytes_of(self, data: bytes, size: PartSize) -> Mapping[str, Array]:
        """The tiles of one image."""
        image, tile = rgb_image(data, size, self.alpha), self.rule.tile
        rows, columns = self.rule.tile_grid(size.as_image())[:, 0].tolist()
        tiles = self.squares(image, rows * tile, columns * tile, tile)
        if self.rule.thumbnail and len(tiles) > 1:
            tiles = np.concatenate([tiles, self.squares(image, tile, tile, tile)])
        return {PIXELS: tiles}

    def num_tokens(self, made: Mapping[str, Array]) -> int:
        """tokens_per_tile of each tile."""
        return len(made[PIXELS]) * self.rule.tokens_per_tile


@dataclass(frozen=True)
class AnyResPixels(BytePixels):
    """A small copy of an image, and its tiles, with the values of the processors of LLaVA-NeXT and OneVision.

    Attributes:
        rule: size of tiles, and grids of them; `AnyResImages.onevision()` for LLaVA-OneVision.

    Fields, both for the first stage: pixel_values, dtype [tiles, 3, tile, tile]: the copy of an image, then
    its tiles, row by row, in a black frame where it leaves room; image_sizes int64 [images, 2], height and
    width of the image as stored. Other options: see `ImageProcessor`.
    """

    rule: AnyResImages = AnyResImages()  # noqa: RUF009  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def fields(self) -> tuple[PartField, ...]:
        """pixel_values and image_sizes."""
        return (
            self.pixel_field((3, self.rule.tile, self.rule.tile)),
            PartField(name="image_sizes", dtype="int64", shape=(2,)),
        )

    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        """As many as tiles, with the copy; and one."""
        return {PIXELS: self.rule.patches(parts)[0], "image_sizes": np.ones(len(parts), np.int64)}

    def bytes_of(self, data: bytes, size: PartSize) -> Mapping[str, Array]:
        """The tiles of one image."""
        image, tile = rgb_image(data, size, self.alpha), self.rule.tile
        height, width = (self.rule.tile_grid(size.as_image())[:, 0] * tile).tolist()
        fitted = self.resized(image, *_fitted(image, height, width))
        both = self.squares(image, tile, tile, tile), squares_of(framed(fitted, height, width), tile)
        return {
            PIXELS: np.concatenate(both),
            "image_sizes": np.array([[image.height, image.width]]),
        }

    def blank(self, size: PartSize, rows: Mapping[str, int]) -> Mapping[str, Array]:
        """Tiles of zeros, and the image's size."""
        return {**super().blank(size, rows), "image_sizes": np.array([[size.height, size.width]])}

    def num_tokens(self, made: Mapping[str, Array]) -> int:
        """As the rule says of an image of that size."""
        ((height, width),) = made["image_sizes"].tolist()
        return int(self.rule.tokens(Parts.of_images([(height, width)]))[0])


def _fitted(image: Any, height: int, width: int) -> tuple[int, int]:
    """(height, width) of an image scaled into a frame, with the operations of LLaVA-NeXT's processor."""
    down, across = height / image.height, width / image.width
    if across < down:
        return min(math.ceil(image.height * across), height), width
    return height, min(math.ceil(image.width * down), width)
