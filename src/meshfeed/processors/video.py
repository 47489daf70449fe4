"""Video as Qwen2-VL and its heirs take it: NativeVideo, TimedVideo, VideoPatches. Of one size: FixedVideo.

`SpelledVideo` is what other families of videos with times share.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from meshfeed.arrays import Array, Floats, Longs
from meshfeed.errors import PartError, RecipeError, StoreError
from meshfeed.formats.video import Frame, decoded_frames, video_header
from meshfeed.multimodal.processor import PartField, PartSize
from meshfeed.parts import PLACEHOLDER, Kind, PartRule, Parts, Repeat, Template
from meshfeed.parts.types import TokenId, check_options, in_pixels
from meshfeed.processors.patches import ResizedImages, native_size, refuse_elongated
from meshfeed.processors.pixels import PixelField, PixelProcessor

PIXELS, GRID = "pixel_values_videos", "video_grid_thw"


@dataclass(frozen=True, kw_only=True)
class NativeVideo(ResizedImages):
    """Frames at their own resolution, sampled evenly; `merge_frames` of them are encoded together.

    Like Qwen2-VL and Qwen2.5-VL with `do_sample_frames`. The encoder attends within merged frames.

    Attributes:
        fps: frames sampled per second.
        min_frames, max_frames: that are sampled, as far as the video has them.
        merge_frames: frames that become one.
        patch, merge: as of NativeImages.
        min_pixels, max_pixels: limits of each resized frame.
        max_video_tokens: the context that a long video shares among its frames, `max_video_tokens` of the
            processor under `cap_pixels_per_frame`; None for no such limit.
        tokens_per_second: positions in time of a multimodal rope, of the model's vision config, as for
            Qwen2.5-VL; None for one position for each merged frames, as for Qwen2-VL.

    Raises RecipeError for options below 1, and frames below merge_frames.
    """

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    merge_frames: int = 2
    patch: int = 14
    merge: int = 2
    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 768 * 28 * 28
    max_video_tokens: int | None = None
    tokens_per_second: int | None = None
    alpha: float = 6 * 1280
    kind: Kind = "video"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (np.isfinite(self.fps) and self.fps > 0):
            raise RecipeError(f"NativeVideo(fps={self.fps}): above 0")
        if min(self.min_frames, self.max_frames) < self.merge_frames:
            raise RecipeError(
                f"{type(self).__name__}(min_frames={self.min_frames}, max_frames={self.max_frames}): at "
                f"least merge_frames, {self.merge_frames}"
            )

    def frames(self, parts: Parts) -> Longs:
        """Frames sampled of each video; int64 [p]. Raises StoreError for one with fewer than merge_frames."""
        return self._asked(parts).astype(np.int64)

    def numbers(self, size: PartSize) -> list[int]:
        """The numbers of the frames that are sampled of a video, ascending. Raises as `frames`.

        By torch.arange, as transformers computes them: in float32, whose rounding may choose the frame
        before. Where rounding gives one more, behind the last frame, transformers raises; it is left out.
        """
        asked = int(self._asked(size.as_video())[0])
        return _spaced(0, size.length, size.length / asked)[:asked]

    def tokens(self, parts: Parts) -> Longs:
        groups, patches = self.patches(parts)
        return groups * (patches // self.merge**2)

    def resized(self, parts: Parts) -> tuple[Longs, Longs]:
        """(height, width) of the resized frames, in pixels; int64 [p] twice. Raises as `frames`
        and `native_size`."""
        frames, factor = self.frames(parts), self.patch * self.merge
        most = np.full_like(frames, self.max_pixels)
        if self.max_video_tokens is not None:
            total = int(self.max_video_tokens * factor * factor * 0.9)
            share = np.minimum(self.max_pixels, total * self.merge_frames // frames)
            most = np.maximum(share, int(self.min_pixels * 1.05))
        return native_size(parts, factor=factor, min_pixels=self.min_pixels, max_pixels=most)

    def patches(self, parts: Parts) -> tuple[Longs, Longs]:
        return -(-self.frames(parts) // self.merge_frames), super().patches(parts)[1]

    def interval(self, parts: Parts) -> npt.NDArray[np.float32]:
        if self.tokens_per_second is None:
            return super().interval(parts)
        seconds = self.merge_frames / (self.frames(parts) / parts.length * parts.rate)
        return np.float32(self.tokens_per_second) * seconds.astype(np.float32)

    def _asked(self, parts: Parts) -> Floats:
        """Frames to sample; float64 [p], whole numbers."""
        refuse_short(parts, self.merge_frames)
        most = self._merged(np.minimum(self.max_frames, parts.length).astype(np.float64))
        asked = np.maximum(parts.length / parts.rate * self.fps, self.min_frames)
        return self._merged(np.minimum(np.minimum(asked, most), parts.length))

    def _merged(self, frames: Floats) -> Floats:
        return np.floor(frames / self.merge_frames) * self.merge_frames


@dataclass(frozen=True)
class VideoPatches(PixelProcessor):
    """The patches of a video's frames, with the values of Qwen2-VL's video processor; decoded by PyAV.

    A frame is resized by torch, as there. A video whose size, frames or rate are not those of the index is
    broken.

    Attributes:
        rule: which frames, and sizes of these and of patches.

    Fields, both for the first stage: pixel_values_videos, dtype [patches, 3 * merge_frames * patch * patch],
    squares of merge x merge patches one after the other; video_grid_thw int64 [videos, 3], patches of time,
    height and width. Other options: see `PixelProcessor`.
    """

    rule: NativeVideo = NativeVideo()  # pyright: ignore[reportIncompatibleVariableOverride]
    _: KW_ONLY

    @property
    def fields(self) -> tuple[PartField, ...]:
        shape = (3 * self.rule.merge_frames * self.rule.patch**2,)
        return video_pixels(self, shape), PartField(name=GRID, dtype="int64", shape=(3,))

    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        groups, patches = self.rule.patches(parts)
        return {PIXELS: groups * patches, GRID: np.ones(len(parts), np.int64)}

    def bytes_of(self, data: bytes, size: PartSize) -> Mapping[str, Array]:
        rule, grid = self.rule, self._grid(size)
        _, rows, columns = grid
        frames = sampled_frames(data, size, rule.numbers(size), rows * rule.patch, columns * rule.patch)
        if missing := grid[0] * rule.merge_frames - len(frames):
            frames = np.concatenate([frames, frames[-1:].repeat(missing, axis=0)])
        merge, side = rule.merge, rule.patch
        split = frames.reshape(
            -1, rule.merge_frames, rows // merge, merge, side, columns // merge, merge, side, 3
        )
        # group, square, patch of it, channel, frame, pixel
        patches = split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return {PIXELS: patches.reshape(math.prod(grid), -1), GRID: np.array([grid])}

    def blank(self, size: PartSize, rows: Mapping[str, int]) -> Mapping[str, Array]:
        return {**super().blank(size, rows), GRID: np.array([self._grid(size)])}

    def num_tokens(self, made: Mapping[str, Array]) -> int:
        return int(made[GRID].prod()) // self.rule.merge**2

    def _grid(self, size: PartSize) -> tuple[int, int, int]:
        """Patches of time, height and width."""
        video = size.as_video()
        (groups,), (height,), (width,) = (self.rule.patches(video)[0], *self.rule.resized(video))
        return int(groups), int(height) // self.rule.patch, int(width) // self.rule.patch


def video_pixels(of: PixelProcessor, shape: tuple[int, ...]) -> PixelField:
    """The field pixel_values_videos of a processor, of rows of that shape."""
    return PixelField(name=PIXELS, dtype=of.dtype, shape=shape, mean=of.mean, std=of.std, fused=True)


def sampled_frames(data: bytes, size: PartSize, numbers: list[int], height: int, width: int) -> Array:
    """Those frames of a video, of that many pixels; uint8 [frames, height, width, 3].

    Raises PartError for one whose size, frames or rate are not those of the index.
    """
    header = video_header(data)
    found = PartSize(header.height, header.width, header.frames, header.rate, size.of_sample)
    if found != size:
        raise PartError(f"{_told(found)}, and the index says {_told(size)}")
    frames = np.empty((len(numbers), height, width, 3), np.uint8)
    for frame, into in zip(decoded_frames(data, numbers, header), frames):
        into[:] = _resized(frame, height, width)
    return frames


def evenly(length: int, num_frames: int) -> list[int]:
    """The numbers of frames that lie evenly in a video of that length, from the first one."""
    return (np.arange(num_frames) * length // num_frames).tolist()


def _spaced(begin: float, end: float, step: float) -> list[int]:
    """Numbers a step apart, rounded down by torch.arange; in float32, whatever torch's default is."""
    return torch.arange(begin, end, step, dtype=torch.float32, device="cpu").int().tolist()


def refuse_short(parts: Parts, least: int) -> None:
    """Raises StoreError for a video of fewer frames than least."""
    short = np.flatnonzero(parts.length < least)
    if short.size:
        raise StoreError(
            f"part {short[0]}: a video of {parts.length[short[0]]} frames, and {least} are needed; give it "
            f"as an image, or leave it out when preparing the data"
        )


def _resized(frame: Frame, height: int, width: int) -> Array:
    """A frame of that many pixels; uint8 [height, width, 3]."""
    if frame.shape[:2] == (height, width):
        return frame
    pixels = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None]
    made = torch.nn.functional.interpolate(pixels, (height, width), mode="bicubic", antialias=True)
    return made[0].permute(1, 2, 0).numpy()


def _told(size: PartSize) -> str:
    return f"{size.length} frames at {size.rate:g} a second, {in_pixels(size.height, size.width)}"


@dataclass(frozen=True, kw_only=True)
class SpelledVideo(NativeVideo):
    """NativeVideo whose merged frames have their time beside them, in words, and share a size.

    `min_pixels` and `max_pixels` are of all frames together. The outputs of merged frames stand between start
    and end.

    Attributes:
        start, end: ids.
        output: id of the token of each output; by default the placeholder.
    """

    start: TokenId
    end: TokenId
    output: TokenId = PLACEHOLDER
    unused: ClassVar[tuple[str, ...]] = ("max_video_tokens", "tokens_per_second")

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in self.unused if getattr(self, name) != getattr(type(self), name)]
        if given:
            name = type(self).__name__
            raise RecipeError(f"{name}: leave {' and '.join(given)} out, which it does not use")

    @abstractmethod
    def told(self, first: float, last: float) -> tuple[Sequence[TokenId], Sequence[TokenId]]:
        """Ids before and behind merged frames, from the seconds of the first and last of them."""

    def resized(self, parts: Parts) -> tuple[Longs, Longs]:
        frames, factor = self.frames(parts), self.patch * self.merge
        sides = np.stack((parts.height, parts.width))
        small = sides.min(axis=0) < factor
        sides = np.where(small, (sides * (factor / sides).max(axis=0)).astype(np.int64), sides)
        refuse_elongated(replace(parts, height=sides[0], width=sides[1]))
        rounded = np.rint(sides / factor).astype(np.int64) * factor
        total = (
            np.rint(frames / self.merge_frames).astype(np.int64) * self.merge_frames * rounded.prod(axis=0)
        )
        area = (frames * sides.prod(axis=0)).astype(np.float64)
        shrunk = np.maximum(np.floor(sides / np.sqrt(area / self.max_pixels) / factor), 1) * factor
        grown = np.ceil(sides * np.sqrt(self.min_pixels / area) / factor) * factor
        made = np.where(total > self.max_pixels, shrunk, np.where(total < self.min_pixels, grown, rounded))
        height, width = made.astype(np.int64)
        return height, width

    def tokens(self, parts: Parts) -> Longs:
        return self.template(parts).tokens

    def grid(self, parts: Parts) -> tuple[Longs, Longs]:
        rows, columns = super().grid(parts)
        groups = self.patches(parts)[0]
        return rows.repeat(groups), columns.repeat(groups)

    def template(self, parts: Parts) -> Template:
        rows, columns = super().grid(parts)
        cells = (rows * columns).tolist()
        return Template.of(self._runs(PartSize.of(parts, i), cells[i]) for i in range(len(parts)))

    def _runs(self, size: PartSize, outputs: int) -> list[Repeat]:
        numbers, merged = self.numbers(size), self.merge_frames
        numbers += numbers[-1:] * (-len(numbers) % merged)
        made = [Repeat(self.start), Repeat(self.output, outputs, is_output=True), Repeat(self.end)]
        runs: list[Repeat] = []
        for first, last in zip(numbers[::merged], numbers[merged - 1 :: merged]):
            before, behind = self.told(first / size.rate, last / size.rate)
            runs += [*map(Repeat, before), *made, *map(Repeat, behind)]
        return runs


@dataclass(frozen=True, kw_only=True)
class TimedVideo(SpelledVideo):
    """SpelledVideo for Qwen3-VL: merged frames behind "<0.2 seconds>", the time in the middle of them.

    Frames are sampled from the first to the last one. Its pixels have mean and std 0.5, and checkpoints other
    limits than the defaults, those of the class in transformers: min_pixels=4096, max_pixels=25_165_824.

    Attributes:
        digits: ids of "0" to "9".
        before, point, after: ids of "<", of ".", and of " seconds>".
        start, end: ids of "<|vision_start|>" and "<|vision_end|>".
    """

    digits: tuple[TokenId, ...]
    before: tuple[TokenId, ...]
    point: TokenId
    after: tuple[TokenId, ...]
    patch: int = 16
    min_pixels: int = 128 * 32 * 32
    max_pixels: int = 768 * 32 * 32

    def __post_init__(self) -> None:
        super().__post_init__()
        ids = (*self.digits, *self.before, *self.after)
        if len(self.digits) != 10 or not all(isinstance(each, int) and each >= 0 for each in ids):
            raise RecipeError(f"TimedVideo(digits={self.digits}, ...): the ids of 0 to 9, and others from 0")

    def frames(self, parts: Parts) -> Longs:
        refuse_short(parts, self.merge_frames)
        asked = (parts.length / parts.rate * self.fps).astype(np.int64)
        return np.minimum(np.minimum(np.maximum(asked, self.min_frames), self.max_frames), parts.length)

    def numbers(self, size: PartSize) -> list[int]:
        frames = int(self.frames(size.as_video())[0])
        return np.linspace(0, size.length - 1, frames).round().astype(int).tolist()

    def told(self, first: float, last: float) -> tuple[Sequence[TokenId], Sequence[TokenId]]:
        whole, _, tenths = f"{(first + last) / 2:.1f}".partition(".")
        spelled = [self.digits[int(each)] for each in whole], [self.digits[int(each)] for each in tenths]
        return (*self.before, *spelled[0], self.point, *spelled[1], *self.after), ()


@dataclass(frozen=True, kw_only=True)
class FixedVideo(PartRule):
    """So many frames of each video, resized to one square, whose outputs are pooled; then one newline token.

    Like LLaVA-OneVision (Li et al. 2024, arXiv 2408.03326) with `do_sample_frames` and `num_frames`. The
    encoder attends within a frame.

    Attributes:
        num_frames: sampled evenly; a video of fewer is refused.
        size, patch: side of the resized frame and of a patch, in pixels.
        pool: side of the square of patches that become one token.

    Raises RecipeError for options below 1.
    """

    num_frames: int = 32
    size: int = 384
    patch: int = 14
    pool: int = 2
    alpha: float = 6 * 1152
    kind: Kind = "video"

    def __post_init__(self) -> None:
        check_options(self)

    def numbers(self, size: PartSize) -> list[int]:
        """The numbers of the frames that are sampled of a video, ascending."""
        return evenly(size.length, self.num_frames)

    def tokens(self, parts: Parts) -> Longs:
        refuse_short(parts, self.num_frames)
        return np.full(len(parts), self.outputs_of_one, np.int64)

    @property
    def outputs_of_frame(self) -> int:
        """Outputs of the encoder for a frame."""
        return (-(-(self.size // self.patch) // self.pool)) ** 2

    @property
    def outputs_of_one(self) -> int:
        """Outputs of the encoder for a video, with the newline."""
        return self.num_frames * self.outputs_of_frame + 1

    def patches(self, parts: Parts) -> tuple[Longs, Longs]:
        one = np.ones(len(parts), np.int64)
        return one * self.num_frames, one * (self.size // self.patch) ** 2


@dataclass(frozen=True)
class FixedFrames(PixelProcessor):
    """The sampled frames of a video, with the values of LLaVA-OneVision's and InternVL's; decoded by PyAV.

    A frame is resized by torch, as there. A video whose size, frames or rate are not those of the index is
    broken.

    Attributes:
        rule: how many frames, and their size.

    Field, for the first stage: pixel_values_videos, dtype [videos, num_frames, 3, size, size]. Other options:
    see `PixelProcessor`.
    """

    rule: FixedVideo = FixedVideo()  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def fields(self) -> tuple[PartField, ...]:
        shape = (self.rule.num_frames, 3, self.rule.size, self.rule.size)
        return (video_pixels(self, shape),)

    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        return {PIXELS: np.ones(len(parts), np.int64)}

    def bytes_of(self, data: bytes, size: PartSize) -> Mapping[str, Array]:
        frames = sampled_frames(data, size, self.rule.numbers(size), self.rule.size, self.rule.size)
        return {PIXELS: frames.transpose(0, 3, 1, 2)[None]}

    def num_tokens(self, made: Mapping[str, Array]) -> int:
        return len(made[PIXELS]) * self.rule.outputs_of_one


@dataclass(frozen=True, kw_only=True)
class NumberedVideo(FixedVideo):
    """FixedVideo for InternVL 3 and 3.5: frames from the middle of even stretches, behind "Frame1: ", ...

    Attributes:
        before: ids before the outputs of each frame: of "Frame1: <img>", of "\\nFrame2: <img>", ...
        after: ids behind the outputs of a frame: of </img>.
        output: id of the token of each output, <IMG_CONTEXT>; by default the placeholder.

    Other options: see `FixedVideo`; there is no newline token. Raises RecipeError unless there are ids before
    each of num_frames.
    """

    before: tuple[tuple[TokenId, ...], ...]
    after: tuple[TokenId, ...]
    output: TokenId = PLACEHOLDER
    size: int = 448
    alpha: float = 6 * 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.before) != self.num_frames:
            raise RecipeError(
                f"NumberedVideo(num_frames={self.num_frames}): ids before {len(self.before)} frames"
            )

    def numbers(self, size: PartSize) -> list[int]:
        step = size.length / self.num_frames
        return _spaced(step / 2, size.length, step)

    @property
    def outputs_of_one(self) -> int:
        """Outputs of the encoder for a video."""
        return self.num_frames * self.outputs_of_frame

    def tokens(self, parts: Parts) -> Longs:
        refuse_short(parts, self.num_frames)
        return self.template(parts).tokens

    def template(self, parts: Parts) -> Template:
        made, behind = Repeat(self.output, self.outputs_of_frame, is_output=True), [*map(Repeat, self.after)]
        return Template.of(
            [[run for ids in self.before for run in (*map(Repeat, ids), made, *behind)]] * len(parts)
        )
