"""Rules for images: how many tokens a picture of a size becomes in a family of models.

Sizes are computed with the floating-point operations of the published processors, in their order: IEEE 754
rounds division, multiplication and square root alike on every machine.

The default `alpha` of each is 6 x the width of its usual encoder: a layer of width d with a feed-forward of
4 d spends 24 d^2 FLOPs on a patch, and 4 d on each of its pairs with another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshfeed.errors import RecipeError, StoreError
from meshfeed.parts.types import Kind, Longs, PartRule, Parts, check_options, in_pixels

_MOST_ELONGATED = 200
"""The largest ratio of an image's sides that Qwen's processors take."""


def native_size(
    parts: Parts, *, factor: int, min_pixels: int, max_pixels: int | Longs
) -> tuple[Longs, Longs]:
    """(height, width) that images are resized to: multiples of `factor`, the area within limits; int64 [p].

    From Qwen2-VL (Wang et al. 2024, arXiv 2409.12191). Raises StoreError for an image more than 200 times as
    long as wide, which its processor refuses too.
    """
    _refuse_elongated(parts)
    sides = np.stack((parts.height, parts.width))
    rounded = np.rint(sides / factor).astype(np.int64) * factor
    area, resized = sides.prod(axis=0).astype(np.float64), rounded.prod(axis=0)
    shrunk = np.maximum(np.floor(sides / np.sqrt(area / max_pixels) / factor), 1)
    grown = np.ceil(sides * np.sqrt(min_pixels / area) / factor)
    multiples = np.where(resized < min_pixels, grown, rounded // factor)
    height, width = np.where(resized > max_pixels, shrunk, multiples).astype(np.int64) * factor
    return height, width


def _refuse_elongated(parts: Parts) -> None:
    longer, shorter = np.maximum(parts.height, parts.width), np.minimum(parts.height, parts.width)
    bad = np.flatnonzero(longer / np.maximum(shorter, 1) > _MOST_ELONGATED)
    if bad.size:
        i = bad[0]
        raise StoreError(
            f"part {i}, {in_pixels(int(parts.height[i]), int(parts.width[i]))}: one side is more than "
            f"{_MOST_ELONGATED} times the other, which these models refuse; crop it, or leave it out when "
            f"preparing the data"
        )


@dataclass(frozen=True, kw_only=True)
class NativeImages(PartRule):
    """Images at their own resolution: `merge` x `merge` patches become a token.

    Like Qwen2-VL and Qwen2.5-VL; for Qwen3-VL, patch=16, min_pixels=65_536, max_pixels=16_777_216. The
    encoder attends over the whole image.

    Attributes:
        patch: side of a patch, in pixels.
        merge: side of the square of patches that become one token.
        min_pixels, max_pixels: limits of the resized image, "shortest_edge" and "longest_edge" of the
            processor's size.

    Raises RecipeError for options below 1.
    """

    patch: int = 14
    merge: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    alpha: float = 6 * 1280
    kind: Kind = "image"

    def __post_init__(self) -> None:
        check_options(self)

    def tokens(self, parts: Parts) -> Longs:
        return self.patches(parts)[1] // self.merge**2

    def resized(self, parts: Parts) -> tuple[Longs, Longs]:
        """(height, width) of the resized images, in pixels; int64 [p] twice. Raises as `native_size`."""
        factor = self.patch * self.merge
        return native_size(parts, factor=factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels)

    def patches(self, parts: Parts) -> tuple[Longs, Longs]:
        height, width = self.resized(parts)
        return np.ones_like(height), (height // self.patch) * (width // self.patch)

    def grid(self, parts: Parts) -> tuple[Longs, Longs]:
        height, width = self.resized(parts)
        return height // (self.patch * self.merge), width // (self.patch * self.merge)


@dataclass(frozen=True, kw_only=True)
class TiledImages(PartRule):
    """Images cut into equal square tiles in the grid nearest to their shape, and a small copy of the whole.

    Like InternVL 1.5 and later (Chen et al. 2024, arXiv 2404.16821). An image of one tile has no further
    copy. The encoder attends within a tile.

    Attributes:
        tile: side of a tile, in pixels.
        patch: side of a patch, in pixels.
        tokens_per_tile: of the language model.
        min_tiles, max_tiles: of an image, the copy not counted.
        thumbnail: whether an image of several tiles has the copy.

    Raises RecipeError for options below 1, or more than max_tiles.
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
        check_options(self)
        if self.min_tiles > self.max_tiles:
            raise RecipeError(
                f"TiledImages(min_tiles={self.min_tiles}, max_tiles={self.max_tiles}): at most that"
            )

    def tokens(self, parts: Parts) -> Longs:
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

    Raises RecipeError for options below 1.
    """

    tile: int = 336
    patch: int = 14
    grids: tuple[tuple[int, int], ...] = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
    most_tiles: int | None = None
    alpha: float = 6 * 1024
    kind: Kind = "image"

    def __post_init__(self) -> None:
        check_options(self)
        if not self.grids or any(side < 1 for grid in self.grids for side in grid):
            raise RecipeError(f"AnyResImages(grids={self.grids}): at least one, each of 1 or more tiles")

    @classmethod
    def onevision(cls) -> AnyResImages:
        """LLaVA-OneVision (Li et al. 2024, arXiv 2408.03326): to 6 x 6 tiles, at most the tokens of 9."""
        sides = range(1, 7)
        grids = tuple((rows, columns) for rows in sides for columns in sides)
        return cls(tile=384, grids=grids, most_tiles=9, alpha=6 * 1152)

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
        return rows * columns + rows + self._side**2

    def patches(self, parts: Parts) -> tuple[Longs, Longs]:
        tiles = self.tile_grid(parts).prod(axis=0) + 1
        return tiles, np.full_like(tiles, self._side**2)

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


@dataclass(frozen=True, kw_only=True)
class FixedImages(PartRule):
    """Images of one size: as many tokens whatever they were.

    Like LLaVA-1.5 over CLIP (576 tokens of 336 pixels); for Gemma 3 over SigLIP, size=896, patch=14,
    tokens_per_image=256.

    Attributes:
        size: side of the resized image, in pixels.
        patch: side of a patch, in pixels.
        tokens_per_image: of the language model; None for one per patch.

    Raises RecipeError for options below 1.
    """

    size: int = 336
    patch: int = 14
    tokens_per_image: int | None = None
    alpha: float = 6 * 1024
    kind: Kind = "image"

    def __post_init__(self) -> None:
        check_options(self)

    def tokens(self, parts: Parts) -> Longs:
        patches = self.patches(parts)[1]
        return patches if self.tokens_per_image is None else np.full_like(patches, self.tokens_per_image)

    def patches(self, parts: Parts) -> tuple[Longs, Longs]:
        one = np.ones(len(parts), np.int64)
        return one, one * (self.size // self.patch) ** 2
