"""Rules for video."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshfeed.errors import RecipeError, StoreError
from meshfeed.parts import Kind, PartRule, Parts
from meshfeed.parts.types import check_options
from meshfeed.processors.patches import native_size
from meshfeed.sequence.runs import Longs


@dataclass(frozen=True, kw_only=True)
class NativeVideo(PartRule):
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

    Raises RecipeError for options below 1.
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
    alpha: float = 6 * 1280
    kind: Kind = "video"

    def __post_init__(self) -> None:
        check_options(self)
        if not (np.isfinite(self.fps) and self.fps > 0):
            raise RecipeError(f"NativeVideo(fps={self.fps}): above 0")

    def frames(self, parts: Parts) -> Longs:
        """Frames sampled of each video; int64 [p]. Raises StoreError for one with fewer than merge_frames."""
        short = np.flatnonzero(parts.length < self.merge_frames)
        if short.size:
            raise StoreError(
                f"part {short[0]}: a video of {parts.length[short[0]]} frames, and {self.merge_frames} are "
                f"needed; give it as an image, or leave it out when preparing the data"
            )
        most = self._merged(np.minimum(self.max_frames, parts.length).astype(np.float64))
        asked = np.maximum(parts.length / parts.rate * self.fps, self.min_frames)
        frames = self._merged(np.minimum(np.minimum(asked, most), parts.length))
        # sampled at multiples of length / frames, below length
        return np.ceil(parts.length / (parts.length / frames)).astype(np.int64)

    def tokens(self, parts: Parts) -> Longs:
        groups, patches = self.patches(parts)
        return groups * (patches // self.merge**2)

    def patches(self, parts: Parts) -> tuple[Longs, Longs]:
        frames, factor = self.frames(parts), self.patch * self.merge
        most = np.full_like(frames, self.max_pixels)
        if self.max_video_tokens is not None:
            total = int(self.max_video_tokens * factor * factor * 0.9)
            share = np.minimum(self.max_pixels, total * self.merge_frames // frames)
            most = np.maximum(share, int(self.min_pixels * 1.05))
        height, width = native_size(parts, factor=factor, min_pixels=self.min_pixels, max_pixels=most)
        return -(-frames // self.merge_frames), (height // self.patch) * (width // self.patch)

    def _merged(self, frames: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.floor(frames / self.merge_frames) * self.merge_frames
