"""CroppedImages, Gemma 3's with pan and scan; BudgetImages and BudgetVideo, Gemma 4's; and their pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from meshfeed.arrays import Array, Longs
from meshfeed.errors import RecipeError
from meshfeed.multimodal.processor import PartField, PartSize
from meshfeed.parts import PLACEHOLDER, Kind, Parts, Repeat, Template
from meshfeed.parts.types import TokenId
from meshfeed.processors.patches import ResizedImages, SizedPatches
from meshfeed.processors.pixels import PIXELS, Color, PixelProcessor, Resample, rgb_image
from meshfeed.processors.tiles import Fit, FixedImages, FixedPixels, Framed
from meshfeed.processors.video import PIXELS as PIXELS_OF_VIDEO
from meshfeed.processors.video import evenly, refuse_short, sampled_frames, video_pixels
from meshfeed.whole import real


@dataclass(frozen=True, kw_only=True)
class CroppedImages(FixedImages):
    """Images of one size and, of those that are long, crops side by side, with words around them.

    Like Gemma 3 with `do_pan_and_scan`. The encoder attends within the image, and within each crop.
    `CroppedImages.spelled` finds the ids. The blank line behind an image is in the stored text, where its
    newlines merge with those that follow; what is before an image is the rule's.

    Attributes:
        before: ids before the outputs of an image without crops; of the four, each ends with PLACEHOLDER, for
            <start_of_image>.
        first: the same of one with crops.
        between: from its end to the outputs of the first crop.
        next: from the end of a crop to the outputs of the next one.
        min_crop, max_crops, min_ratio: `pan_and_scan_min_crop_size`, in pixels,
            `pan_and_scan_max_num_crops`, `pan_and_scan_min_ratio_to_activate`.

    Other options: see `FixedImages`. Raises RecipeError for options below 1, and max_crops above min_crop.
    """

    first: tuple[TokenId, ...]
    between: tuple[TokenId, ...]
    next: tuple[TokenId, ...]
    min_crop: int = 256
    max_crops: int = 4
    min_ratio: float = 1.2
    size: int = 896
    tokens_per_image: int | None = 256
    alpha: float = 6 * 1152

    def __post_init__(self) -> None:
        super().__post_init__()
        ratio = real(self.min_ratio)
        if self.max_crops > self.min_crop or ratio is None or not ratio >= 1:
            raise RecipeError(
                f"CroppedImages(max_crops={self.max_crops}, min_crop={self.min_crop}, "
                f"min_ratio={self.min_ratio!r}): no more crops than pixels of one, and a ratio from 1"
            )

    @classmethod
    def spelled(
        cls,
        encode: Callable[[str], Sequence[int]],
        *,
        output: int,
        end: int,
        before: str = "",
        **options: Any,
    ) -> CroppedImages:
        """With the ids that a tokenizer has for what Gemma 3's processor writes around images.

        encode: text -> ids, without any that the tokenizer adds at its ends. output, end: ids of
        <image_soft_token> and <end_of_image>. before: the text right before each image, as far as its tokens
        may merge with what follows; "\n" for images that begin a turn. It is left out of the stored text.
        """
        line, words = "\n\n", f"{before}Here is the original image \n\n"
        crops = f"{line} and here are some crops to help you see better {line}"
        ids = [(*encode(each), PLACEHOLDER) for each in (before + line, words, crops, f"{line} {line}")]
        names = dict(zip(("before", "first", "between", "next"), ids))
        return cls(**names, output=output, after=(end,), **options)

    def crops(self, parts: Parts) -> Longs:
        """Crops of each image along its longer side; 0 for one that has none; int64 [p]."""
        longer, shorter = np.maximum(parts.height, parts.width), np.minimum(parts.height, parts.width)
        count = np.minimum(longer // self.min_crop, np.floor(longer / shorter + 0.5).astype(np.int64))
        count = np.minimum(np.maximum(count, 2), self.max_crops)
        is_small = np.minimum(-(-longer // count), shorter) < self.min_crop
        return np.where((longer / shorter < self.min_ratio) | is_small, 0, count)

    def patches(self, parts: Parts) -> tuple[Longs, Longs]:
        return 1 + self.crops(parts), super().patches(parts)[1]

    def outputs(self, parts: Parts) -> Longs:
        return self.outputs_of_one * (1 + self.crops(parts))

    def tokens(self, parts: Parts) -> Longs:
        return self.template(parts).tokens

    def template(self, parts: Parts) -> Template:
        outputs = Repeat(self.output, self.outputs_of_one, is_output=True)

        def image(before: Sequence[int]) -> list[Repeat]:
            return [*map(Repeat, before), outputs, *map(Repeat, self.after)]

        alone, further = image(self.before), image(self.next)
        crops = [*image(self.first), *image(self.between)]
        return Template.of(
            [*crops, *further * (count - 1)] if count else alone for count in self.crops(parts).tolist()
        )


@dataclass(frozen=True)
class CroppedPixels(FixedPixels):
    """An image and its crops, each resized to one square, with the values of Gemma 3's processor.

    Attributes:
        rule: size of images, and crops.

    Field, for the first stage: pixel_values, dtype [images and crops, 3, size, size]: an image, then its
    crops. Other options: see `ImageProcessor`.
    """

    rule: CroppedImages  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]
    _: KW_ONLY
    mean: Color = (0.5, 0.5, 0.5)
    std: Color = (0.5, 0.5, 0.5)
    resample: Resample = "bilinear"
    fit: Fit = "stretch"

    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        return {PIXELS: self.rule.patches(parts)[0]}

    def bytes_of(self, data: bytes, size: PartSize) -> Mapping[str, Array]:
        image, count = rgb_image(data, size, self.alpha), int(self.rule.crops(size.as_image())[0])
        width, height = image.size
        longer = max(image.size)
        edges = [min(i * -(-longer // max(count, 1)), longer) for i in range(count + 1)]
        boxes = [
            (begin, 0, end, height) if width >= height else (0, begin, width, end)
            for begin, end in pairwise(edges)
        ]
        whole_and_crops = [image, *map(image.crop, boxes)]
        return {PIXELS: np.concatenate([self.square(each) for each in whole_and_crops])}


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

    def outputs(self, parts: Parts) -> Longs:
        return self.patches(parts)[1] // self.merge**2

    def resized(self, parts: Parts) -> tuple[Longs, Longs]:
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
    one_color: ClassVar[bool] = True
    size_field: ClassVar[PartField] = PartField(name="image_position_ids", dtype="int64", shape=(2,))

    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        patches = self.rule.patches(parts)[1]
        return {PIXELS: patches, self.size_field.name: patches}

    def bytes_of(self, data: bytes, size: PartSize) -> Mapping[str, Array]:
        """The patches of one image, of each pixel its three colors."""
        made = super().bytes_of(data, size)
        patches = made[PIXELS].reshape(-1, 3, self.rule.patch**2).swapaxes(1, 2)
        return {**made, PIXELS: np.ascontiguousarray(patches).reshape(len(patches), -1)}

    def sizes_of(self, height: int, width: int) -> Array:
        """The column and row of each patch."""
        return _places(height // self.rule.patch, width // self.rule.patch)

    def num_tokens(self, made: Mapping[str, Array]) -> int:
        return len(made["image_position_ids"]) // self.rule.merge**2


def _places(rows: int, columns: int) -> Array:
    """The column and row of each patch; int64 [rows * columns, 2]."""
    return np.stack([np.tile(np.arange(columns), rows), np.arange(rows).repeat(columns)], axis=1)


@dataclass(frozen=True, kw_only=True)
class BudgetVideo(BudgetImages):
    """Frames of a video as BudgetImages, each behind its time, for Gemma 4.

    `num_frames` lie evenly in the video, spelled "00:05", space, before, outputs, after, with a space between
    two. The encoder attends within a frame.

    Attributes:
        digits: ids of "0" to "9".
        colon, space: ids of ":" and of " ".
        num_frames: of a video; one that has fewer is refused.
        max_tokens: of a frame.

    Other options: see `BudgetImages`.
    """

    digits: tuple[TokenId, ...]
    colon: TokenId
    space: TokenId
    num_frames: int = 32
    max_tokens: int = 70
    kind: Kind = "video"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.digits) != 10:
            raise RecipeError(f"BudgetVideo(digits={self.digits}): the ids of 0 to 9")

    def numbers(self, size: PartSize) -> list[int]:
        """The numbers of the frames that are sampled of a video, ascending."""
        return evenly(size.length, self.num_frames)

    def patches(self, parts: Parts) -> tuple[Longs, Longs]:
        refuse_short(parts, self.num_frames)
        one, patches = super().patches(parts)
        return one * self.num_frames, patches

    def outputs(self, parts: Parts) -> Longs:
        return super().outputs(parts) * self.num_frames

    def grid(self, parts: Parts) -> tuple[Longs, Longs]:
        rows, columns = super().grid(parts)
        return rows.repeat(self.num_frames), columns.repeat(self.num_frames)

    def tokens(self, parts: Parts) -> Longs:
        return self.template(parts).tokens

    def template(self, parts: Parts) -> Template:
        of_frame = (self.outputs(parts) // self.num_frames).tolist()
        return Template.of(self._runs(PartSize.of(parts, i), of_frame[i]) for i in range(len(parts)))

    def _runs(self, size: PartSize, outputs: int) -> list[Repeat]:
        ids = dict(zip("0123456789: ", (*self.digits, self.colon, self.space)))
        made = Repeat(self.output, outputs, is_output=True)
        runs: list[Repeat] = []
        for number in self.numbers(size):
            seconds = number / size.rate
            told = f" {int(seconds // 60):02d}:{int(seconds % 60):02d} "
            runs += [*(Repeat(ids[each]) for each in told), *map(Repeat, self.before), made]
            runs += map(Repeat, self.after)
        return runs[1:]


@dataclass(frozen=True)
class BudgetFrames(PixelProcessor):
    """The patches of a video's frames, with the values of Gemma 4's video processor; decoded by PyAV.

    Attributes:
        rule: which frames, and sizes of these and of patches.

    Fields, all for the first stage, without padding: pixel_values_videos, dtype [patches, patch * patch *
    3], frame by frame and row by row; video_position_ids int64 [patches, 2], the column and row of each;
    num_frames_per_video int64 [videos]. Other options and errors: see `VideoPatches` and `BudgetPatches`.
    """

    rule: BudgetVideo  # pyright: ignore[reportIncompatibleVariableOverride]
    _: KW_ONLY
    mean: Color = (0.0, 0.0, 0.0)
    std: Color = (1.0, 1.0, 1.0)
    one_color: ClassVar[bool] = True

    @property
    def fields(self) -> tuple[PartField, ...]:
        places = PartField(name="video_position_ids", dtype="int64", shape=(2,))
        count = PartField(name="num_frames_per_video", dtype="int64")
        return video_pixels(self, (3 * self.rule.patch**2,)), places, count

    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        frames, patches = self.rule.patches(parts)
        several = {each.name: frames * patches for each in self.fields}
        return several | {"num_frames_per_video": np.ones_like(frames)}

    def bytes_of(self, data: bytes, size: PartSize) -> Mapping[str, Array]:
        """The patches of one video, of each pixel its three colors."""
        (height,), (width,) = self.rule.resized(size.as_video())
        side = self.rule.patch
        frames = sampled_frames(data, size, self.rule.numbers(size), int(height), int(width))
        split = frames.reshape(-1, height // side, side, width // side, side, 3).swapaxes(2, 3)
        return {PIXELS_OF_VIDEO: split.reshape(-1, 3 * side**2), **self._sizes(size)}

    def blank(self, size: PartSize, rows: Mapping[str, int]) -> Mapping[str, Array]:
        return {**super().blank(size, rows), **self._sizes(size)}

    def _sizes(self, size: PartSize) -> Mapping[str, Array]:
        (height,), (width,) = self.rule.resized(size.as_video())
        count, side = self.rule.num_frames, self.rule.patch
        places = np.tile(_places(height // side, width // side), (count, 1))
        return {"video_position_ids": places, "num_frames_per_video": np.array([count])}

    def num_tokens(self, made: Mapping[str, Array]) -> int:
        return len(made["video_position_ids"]) // self.rule.merge**2
