"""Square images of one size, one for each image or several tiles: how many tokens, and their pixels."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import numpy as np

from meshfeed.arrays import Array, Bools, Longs
from meshfeed.errors import RecipeError
from meshfeed.multimodal.processor import PartField, PartSize
from meshfeed.parts import PLACEHOLDER, Kind, PartRule, Parts, Repeat, Template
from meshfeed.parts.types import TokenId, check_options
from meshfeed.processors.pixels import (
    PIXELS,
    Color,
    ImageProcessor,
    check_choice,
    framed,
    rgb_image,
    squares_of,
)

Fit = Literal["crop", "stretch", "pad"]


@dataclass(frozen=True, kw_only=True)
class Framed(PartRule):
    """A rule whose outputs may have other tokens around them.

    Attributes:
        before, after: ids of the tokens around all outputs of a part; PLACEHOLDER for its own.
        output: id of the token of each output; by default the placeholder.
    """

    before: tuple[TokenId, ...] = ()
    after: tuple[TokenId, ...] = ()
    output: TokenId = PLACEHOLDER

    def __post_init__(self) -> None:
        check_options(self)

    @abstractmethod
    def outputs(self, parts: Parts) -> Longs:
        """Outputs of the encoder for each part; int64 [p]."""

    def tokens(self, parts: Parts) -> Longs:
        return self.outputs(parts) + len(self.before) + len(self.after)

    def template(self, parts: Parts) -> Template:
        begin, end = [*map(Repeat, self.before)], [*map(Repeat, self.after)]
        made = self.outputs(parts).tolist()
        return Template.of([*begin, Repeat(self.output, count, is_output=True), *end] for count in made)


@dataclass(frozen=True, kw_only=True)
class FixedImages(Framed):
    """Images of one size: as many tokens whatever they were.

    Like LLaVA-1.5 over CLIP (576 tokens of 336 pixels); for Gemma 3 over SigLIP, without pan and scan,
    size=896, patch=14, tokens_per_image=256, and where <start_of_image> is the placeholder,
    before=(PLACEHOLDER,), output= the id of <image_soft_token>, after= that of <end_of_image>.

    Attributes:
        size: side of the resized image, in pixels.
        patch: side of a patch, in pixels.
        tokens_per_image: of the language model; None for one per patch.

    Other options: see `Framed`. Raises RecipeError for options below 1.
    """

    size: int = 336
    patch: int = 14
    tokens_per_image: int | None = None
    alpha: float = 6 * 1024
    kind: Kind = "image"

    @property
    def outputs_of_one(self) -> int:
        """Outputs of the encoder for an image."""
        return self.tokens_per_image or (self.size // self.patch) ** 2

    def outputs(self, parts: Parts) -> Longs:
        return np.full(len(parts), self.outputs_of_one, np.int64)

    def patches(self, parts: Parts) -> tuple[Longs, Longs]:
        one = np.ones(len(parts), np.int64)
        return one, one * (self.size // self.patch) ** 2


@dataclass(frozen=True)
class FixedPixels(ImageProcessor):
    """Images of one size, with the values of the processors of CLIP, SigLIP, LLaVA-1.5 and Gemma 3.

    Attributes:
        rule: the size.
        fit: how an image that is not square becomes so. "crop" resizes its shorter side and keeps the middle,
            as CLIP's; "stretch" resizes both, as SigLIP's; "pad" first frames it with the mean color, as
            LLaVA-1.5's with `do_pad`.

    Field, for the first stage: pixel_values, dtype [images, 3, size, size]. Other options: see
    `ImageProcessor`. An image so long that it would be more pixels than Pillow decodes on the way is broken.
    """

    rule: FixedImages = FixedImages()  # pyright: ignore[reportIncompatibleVariableOverride]
    _: KW_ONLY
    fit: Fit = "crop"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "fit", get_args(Fit))

    @property
    def fields(self) -> tuple[PartField, ...]:
        return (self.pixel_field((3, self.rule.size, self.rule.size)),)

    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        return {PIXELS: np.ones(len(parts), np.int64)}

    def bytes_of(self, data: bytes, size: PartSize) -> Mapping[str, Array]:
        return {PIXELS: self.square(rgb_image(data, size, self.alpha))}

    def num_tokens(self, made: Mapping[str, Array]) -> int:
        return len(made[PIXELS]) * self.rule.outputs_of_one

    def square(self, image: Any) -> Array:
        """An RGB image of the rule's size; uint8 [1, 3, size, size]."""
        side, shorter, longer = self.rule.size, min(image.size), max(image.size)
        if self.fit == "crop":
            width, height = (side if each == shorter else int(side * longer / shorter) for each in image.size)
            left, top = (width - side) // 2, (height - side) // 2
            return squares_of(
                self.resized(image, height, width).crop((left, top, left + side, top + side)), side
            )
        if self.fit == "pad":
            image = _squared(image, self.mean)
        return self.squares(image, side, side, side)


@dataclass(frozen=True, kw_only=True)
class TiledImages(Framed):
    """Images cut into equal square tiles in the grid nearest to their shape, and a small copy of the whole.

    Like InternVL 1.5 to 3.5 (Chen et al. 2024, arXiv 2404.16821), with the ids of <img> and </img> in before
    and after, unless they are in the text. An image of one tile has no further
    copy. The encoder attends within a tile.

    Attributes:
        tile: side of a tile, in pixels.
        patch: side of a patch, in pixels.
        tokens_per_tile: of the language model.
        min_tiles, max_tiles: of an image, the copy not counted.
        thumbnail: whether an image of several tiles has the copy.

    Other options: see `Framed`. Raises RecipeError for options below 1, or more than max_tiles.
    """

    tile: int = 448
    patch: int = 14
    tokens_per_tile: int = 256
    min_tiles: int = 1
    max_tiles: int = 12
    thumbnail: bool = True
    alpha: float = 6 * 1024
    kind: Kind = "image"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_tiles > self.max_tiles:
            raise RecipeError(
                f"TiledImages(min_tiles={self.min_tiles}, max_tiles={self.max_tiles}): at most that"
            )

    def outputs(self, parts: Parts) -> Longs:
        return self.patches(parts)[0] * self.tokens_per_tile

    def patches(self, parts: Parts) -> tuple[Longs, Longs]:
        tiles = self.tile_grid(parts).prod(axis=0)
        tiles += (tiles > 1) & self.thumbnail
        return tiles, np.full_like(tiles, (self.tile // self.patch) ** 2)

    def tile_grid(self, parts: Parts) -> Longs:
        """(rows, columns) of each image's tiles; int64 [2, p].

        Of grids that are equally near to the image's shape, a larger one is taken if the image covers more
        than half of its tiles.
        """
        shape, area = parts.width / parts.height, parts.width * parts.height
        nearest, grid = np.full(len(parts), np.inf), np.ones((2, len(parts)), np.int64)
        for rows, columns in self._grids():
            distance = np.abs(shape - columns / rows)
            covers = area > 0.5 * self.tile * self.tile * columns * rows
            better = (distance < nearest) | ((distance == nearest) & covers)
            grid[:, better] = [[rows], [columns]]
            nearest = np.minimum(nearest, distance)
        return grid

    def _grids(self) -> list[tuple[int, int]]:
        sides = range(1, self.max_tiles + 1)
        grids = [(r, c) for c in sides for r in sides if self.min_tiles <= r * c <= self.max_tiles]
        return sorted(grids, key=lambda grid: grid[0] * grid[1])


@dataclass(frozen=True)
class TiledPixels(ImageProcessor):
    """Square tiles of an image, and a small copy of the whole, with the values of InternVL's processor.

    Attributes:
        rule: size and number of tiles.
        mean, std: ImageNet's.

    Field, for the first stage: pixel_values, dtype [tiles, 3, tile, tile]: the tiles of an image, row by row,
    then its copy. Other options: see `ImageProcessor`.
    """

    rule: TiledImages = TiledImages()  # pyright: ignore[reportIncompatibleVariableOverride]
    _: KW_ONLY
    mean: Color = (0.485, 0.456, 0.406)
    std: Color = (0.229, 0.224, 0.225)

    @property
    def fields(self) -> tuple[PartField, ...]:
        return (self.pixel_field((3, self.rule.tile, self.rule.tile)),)

    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        return {PIXELS: self.rule.patches(parts)[0]}

    def bytes_of(self, data: bytes, size: PartSize) -> Mapping[str, Array]:
        image, tile = rgb_image(data, size, self.alpha), self.rule.tile
        rows, columns = self.rule.tile_grid(size.as_image())[:, 0].tolist()
        tiles = self.squares(image, rows * tile, columns * tile, tile)
        if self.rule.thumbnail and len(tiles) > 1:
            tiles = np.concatenate([tiles, self.squares(image, tile, tile, tile)])
        return {PIXELS: tiles}

    def num_tokens(self, made: Mapping[str, Array]) -> int:
        return len(made[PIXELS]) * self.rule.tokens_per_tile


@dataclass(frozen=True, kw_only=True)
class AnyResImages(PartRule):
    """Images scaled into one of a list of grids of tiles, and a copy of the whole.

    Like LLaVA-NeXT (Liu et al. 2024); for LLaVA-OneVision, `AnyResImages.onevision()`. Tokens
    that are padding alone are cut off, and each row of tokens ends with a newline token. The encoder attends
    within a tile.

    Attributes:
        tile: side of a tile, in pixels.
        patch: side of a patch, in pixels; a patch becomes a token.
        grids: (rows, columns) of tiles to choose from.
        most_tiles: images of more tokens than so many tiles are scaled down to them; None for any.
        tiles_several: whether images have tiles in documents of several. Without, such an image is framed to
            a square, which becomes one tile, and has one newline token.

    Raises RecipeError for options below 1.
    """

    tile: int = 336
    patch: int = 14
    grids: tuple[tuple[int, int], ...] = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
    most_tiles: int | None = None
    tiles_several: bool = True
    alpha: float = 6 * 1024
    kind: Kind = "image"

    def __post_init__(self) -> None:
        check_options(self)
        if not self.grids or any(side < 1 for grid in self.grids for side in grid):
            raise RecipeError(f"AnyResImages(grids={self.grids}): at least one, each of 1 or more tiles")

    @classmethod
    def onevision(cls) -> AnyResImages:
        """LLaVA-OneVision (Li et al. 2024, arXiv 2408.03326): to 6 x 6 tiles, at most the tokens of 9.

        Images of a document of several have no tiles.
        """
        sides = range(1, 7)
        grids = tuple((rows, columns) for rows in sides for columns in sides)
        return cls(tile=384, grids=grids, most_tiles=9, tiles_several=False, alpha=6 * 1152)

    @property
    def _side(self) -> int:
        """Patches along a tile."""
        return self.tile // self.patch

    def tokens(self, parts: Parts) -> Longs:
        rows, columns = self.tile_grid(parts) * self._side
        # the image keeps its shape in the grid; half of what it leaves is cut off at either edge
        wide = parts.width / parts.height > columns / rows
        fitted_rows = parts.height * columns // parts.width
        fitted_columns = parts.width * rows // parts.height
        rows, columns = (
            rows - np.where(wide, (rows - fitted_rows) // 2 * 2, 0),
            columns - np.where(wide, 0, (columns - fitted_columns) // 2 * 2),
        )
        if self.most_tiles is not None:
            ratio = np.maximum(np.sqrt(rows * columns / (self.most_tiles * self._side**2)), 1)
            over = ratio > 1.1
            rows, columns = (np.where(over, side // ratio, side).astype(np.int64) for side in (rows, columns))
        return np.where(self.is_whole(parts), 1, rows * columns + rows) + self._side**2

    def patches(self, parts: Parts) -> tuple[Longs, Longs]:
        tiles = np.where(self.is_whole(parts), 0, self.tile_grid(parts).prod(axis=0)) + 1
        return tiles, np.full_like(tiles, self._side**2)

    def is_whole(self, parts: Parts) -> Bools:
        """Which images have no tiles beside their document's others; bool [p]."""
        return (parts.of_sample > 1) & (not self.tiles_several)

    def tile_grid(self, parts: Parts) -> Longs:
        """(rows, columns) of each image's tiles; int64 [2, p].

        The grid that keeps most of its pixels, and the smallest of those.
        """
        height, width = parts.height, parts.width
        most, least = np.full(len(parts), -1), np.zeros(len(parts), np.int64)
        grid = np.ones((2, len(parts)), np.int64)
        for rows, columns in self.grids:
            scale = np.minimum(columns * self.tile / width, rows * self.tile / height)
            scaled = (width * scale).astype(np.int64) * (height * scale).astype(np.int64)
            kept = np.minimum(scaled, width * height)
            wasted = rows * columns * self.tile**2 - kept
            better = (kept > most) | ((kept == most) & (wasted < least))
            grid[:, better] = [[rows], [columns]]
            most, least = np.where(better, kept, most), np.where(better, wasted, least)
        return grid


@dataclass(frozen=True)
class AnyResPixels(ImageProcessor):
    """A small copy of an image, and its tiles, with the values of the processors of LLaVA-NeXT and OneVision.

    Attributes:
        rule: size of tiles, and grids of them; `AnyResImages.onevision()` for LLaVA-OneVision.

    Fields, both for the first stage: pixel_values, dtype [tiles, 3, tile, tile]: the copy of an image, then
    its tiles, row by row, in a black frame where it leaves room; image_sizes int64 [images, 2], height and
    width of the image as stored; without `tiles_several`, image_tiles int64 [images], rows of pixel_values of
    each: 1 for one without tiles. Other options: see `ImageProcessor`.
    """

    rule: AnyResImages = AnyResImages()  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def fields(self) -> tuple[PartField, ...]:
        pixels = self.pixel_field((3, self.rule.tile, self.rule.tile))
        tiles = PartField(name="image_tiles", dtype="int64")
        sizes = PartField(name="image_sizes", dtype="int64", shape=(2,))
        return (pixels, sizes) if self.rule.tiles_several else (pixels, sizes, tiles)

    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        one = np.ones(len(parts), np.int64)
        return {each.name: one for each in self.fields} | {PIXELS: self.rule.patches(parts)[0]}

    def bytes_of(self, data: bytes, size: PartSize) -> Mapping[str, Array]:
        image, tile = rgb_image(data, size, self.alpha), self.rule.tile
        if self.rule.is_whole(size.as_image())[0]:
            return self._told(self.squares(_squared(image, self.mean), tile, tile, tile), size)
        height, width = (self.rule.tile_grid(size.as_image())[:, 0] * tile).tolist()
        fitted = self.resized(image, *_fitted(image, height, width))
        both = self.squares(image, tile, tile, tile), squares_of(framed(fitted, height, width), tile)
        return self._told(np.concatenate(both), size)

    def blank(self, size: PartSize, rows: Mapping[str, int]) -> Mapping[str, Array]:
        return self._told(super().blank(size, rows)[PIXELS], size)

    def _told(self, pixels: Array, size: PartSize) -> Mapping[str, Array]:
        """The fields. pixels: of the image's tiles."""
        sizes, tiles = np.array([[size.height, size.width]]), np.array([len(pixels)])
        made = {PIXELS: pixels, "image_sizes": sizes, "image_tiles": tiles}
        return {each.name: made[each.name] for each in self.fields}

    def num_tokens(self, made: Mapping[str, Array]) -> int:
        ((height, width),) = made["image_sizes"].tolist()
        several = 1 + (len(made[PIXELS]) == 1)
        return int(self.rule.tokens(PartSize(height, width, 1, 0.0, several).as_image())[0])


def _squared(image: Any, mean: Color) -> Any:
    """An image in a square frame of the mean color."""
    red, green, blue = (int(255 * each) for each in mean)
    return framed(image, max(image.size), max(image.size), (red, green, blue))


def _fitted(image: Any, height: int, width: int) -> tuple[int, int]:
    """(height, width) of an image scaled into a frame, with the operations of LLaVA-NeXT's processor."""
    down, across = height / image.height, width / image.width
    if across < down:
        return min(math.ceil(image.height * across), height), width
    return height, min(math.ceil(image.width * down), width)
