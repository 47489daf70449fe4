"""Video of Qwen2.5-Omni: OmniVideo."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshfeed.intervals import numbered
from meshfeed.parts import Parts, Rope, Template
from meshfeed.processors.video import NativeVideo
from meshfeed.sequence.runs import Longs


@dataclass(frozen=True, kw_only=True)
class OmniVideo(NativeVideo):
    """NativeVideo for Qwen2.5-Omni (Xu et al. 2025, arXiv 2503.20215), on whose rope time passes as in sound.

    A second has `tokens_per_second` positions, as many as tokens of sound, and merged frames are
    `merge_frames / fps` apart, however many are sampled. What follows a video comes after its last frames.

    Attributes:
        tokens_per_second: positions in time, position_id_per_seconds of the model's config.
    """

    tokens_per_second: int = 25  # pyright: ignore[reportIncompatibleVariableOverride]

    def rope(self, parts: Parts) -> Rope:
        rows, columns = self.grid(parts)
        made = Rope.of_grids(Template.repeated(self.tokens(parts)), rows, columns, self.interval(parts))
        groups = self.patches(parts)[0]
        of, number = numbered(groups)
        times = self._times(number)
        made.offsets[:, 0] = times.repeat((rows * columns)[of])
        last = times[np.cumsum(groups) - 1]
        return Rope(made.offsets, np.maximum(made.steps, last + 1))

    def _times(self, number: Longs) -> Longs:
        """Positions of merged frames from the first ones, rounded as by the model; int64 [k] -> int64 [k]."""
        seconds = np.float32(self.merge_frames / self.fps)
        return (number.astype(np.float32) * seconds * np.float32(self.tokens_per_second)).astype(np.int64)
