"""Images of Idefics3 and SmolVLM, cut into squares of which each has its place in the text: PlacedTiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import numpy as np

from meshfeed.arrays import Array, Longs
from meshfeed.errors import RecipeError
from meshfeed.multimodal.processor import PartSize
from meshfeed.parts import PLACEHOLDER, Kind, PartRule, Parts, Repeat, Template
from meshfeed.parts.types import TokenId, check_options
from meshfeed.processors.pixels import PIXELS, Color, Resample, rgb_image, squares_of
from meshfeed.processors.tiles import TiledPixels

_MOST = 4096  # pixels along a side, in the published processor


@dataclass(frozen=True, kw_only=True)
class PlacedTiles(PartRule):
    """Images scaled to one longest side, cut into squares behind a token of their place, then a small copy.

    Like Idefics3 (Laurençon et al. 2024, arXiv 2408.12637); for SmolVLM, longest=2048, tile=512, patch=16,
    tokens_per_tile=64. Small images are scaled up. The encoder attends within a tile.

    Attributes:
        places: ids of <row_1_col_1>, <row_1_col_2>, ...: those of a row, row after row.
        around, whole: ids of <fake_token_around_image> and <global-img>.
        newline, blank_line: the tokens of "\\n" and of "\\n\\n", which many tokenizers have as one.
        longest, tile: side of the scaled image and of a tile, in pixels: "longest_edge" of the processor's
            size, at most 4096, and of its max_image_size.
        patch: side of a patch, in pixels.
        tokens_per_tile: of the language model: `image_seq_len`.
        splits: `do_image_splitting`; without it there is the small copy alone.

    Raises RecipeError for options below 1, too few places, or a longest side above 4096.
    """

    places: tuple[tuple[TokenId, ...], ...]
    around: TokenId
    whole: TokenId
    newline: tuple[TokenId, ...]
    blank_line: tuple[TokenId, ...]
    longest: int = 1456
    tile: int = 364
    patch: int = 14
    tokens_per_tile: int = 169
    splits: bool = True
    alpha: float = 6 * 1152
    kind: Kind = "image"

    def __post_init__(self) -> None:
        check_options(self)
        most = -(-(self.longest + self.longest % 2) // self.tile)
        if self.longest > _MOST or min([len(self.places), *map(len, self.places)]) < most:
            raise RecipeError(
                f"PlacedTiles(longest={self.longest}): at most {_MOST}, and {most} rows and columns of places"
            )

    def tokens(self, parts: Parts) -> Longs:
        rows, columns = self.tile_grid(parts)
        lines = rows * len(self.newline) + len(self.blank_line) - len(self.newline)
        of_tiles = rows * columns * (2 + self.tokens_per_tile) + lines
        return np.where(rows > 0, of_tiles, 0) + 3 + self.tokens_per_tile

    def template(self, parts: Parts) -> Template:
        fake, outputs = Repeat(self.around), Repeat(PLACEHOLDER, self.tokens_per_tile, is_output=True)

        def runs(rows: int, columns: int) -> list[Repeat]:
            made: list[Repeat] = []
            for row, places in enumerate(self.places[:rows], 1):
                made += [each for place in places[:columns] for each in (fake, Repeat(place), outputs)]
                made += map(Repeat, self.newline if row < rows else self.blank_line)
            return [*made, fake, Repeat(self.whole), outputs, fake]

        return Template.of(runs(*each) for each in self.tile_grid(parts).T.tolist())

    def patches(self, parts: Parts) -> tuple[Longs, Longs]:
        tiles = self.tile_grid(parts).prod(axis=0) + 1
        return tiles, np.full_like(tiles, (self.tile // self.patch) ** 2)

    def tile_grid(self, parts: Parts) -> Longs:
        """(rows, columns) of each image's tiles; 0 for one that has the copy alone; int64 [2, p]."""
        grid = self.resized(parts)[1] // self.tile
        return grid * ((grid.prod(axis=0) > 1) & self.splits)

    def resized(self, parts: Parts) -> tuple[Longs, Longs]:
        """(height, width) that an image is scaled to, and then stretched to, in pixels; int64 [2, p] each."""
        shape, is_wide = parts.width / parts.height, parts.width >= parts.height
        shorter = np.where(is_wide, self.longest / shape, self.longest * shape).astype(np.int64)
        shorter = np.maximum(shorter + shorter % 2, 1)
        longest = np.full_like(shorter, self.longest)
        scaled = np.where(is_wide, [shorter, longest], [longest, shorter])
        height, width = scaled
        shape, is_wide = width / height, width >= height
        longer = self._whole(np.maximum(height, width))
        shorter = self._whole(np.where(is_wide, longer / shape, longer * shape).astype(np.int64))
        return scaled, np.where(is_wide, [shorter, longer], [longer, shorter])

    def _whole(self, side: Longs) -> Longs:
        return np.maximum(-(-side // self.tile), 1) * self.tile


@dataclass(frozen=True)
class PlacedPixels(TiledPixels):
    """Square tiles of an image, and a small copy, with the values of the processors of Idefics3 and SmolVLM.

    Attributes:
        rule: size and number of tiles, and ids.

    Field, for the first stage: pixel_values, dtype [tiles, 3, tile, tile]: the tiles of an image, row by row,
    then its copy. Other options: see `ImageProcessor`.
    """

    rule: PlacedTiles  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]
    _: KW_ONLY
    mean: Color = (0.5, 0.5, 0.5)
    std: Color = (0.5, 0.5, 0.5)
    resample: Resample = "lanczos"

    def bytes_of(self, data: bytes, size: PartSize) -> Mapping[str, Array]:
        image, tile, made = rgb_image(data, size, self.alpha), self.rule.tile, list[Array]()
        sizes = np.stack(self.rule.resized(size.as_image()))[:, :, 0].tolist()
        for height, width in sizes[: 1 + self.rule.splits]:
            image = self.resized(image, height, width)
        if self.rule.tile_grid(size.as_image()).any():
            made.append(squares_of(image, tile))
        return {PIXELS: np.concatenate([*made, squares_of(self.resized(image, tile, tile), tile)])}
