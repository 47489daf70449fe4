"""Video of GLM-4.1V and GLM-4.5V, whose frames are followed by their second: SecondsVideo."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.errors import StoreError
from meshfeed.multimodal.processor import PartSize
from meshfeed.parts import Parts
from meshfeed.parts.types import TokenId
from meshfeed.processors.video import SpelledVideo


@dataclass(frozen=True, kw_only=True)
class SecondsVideo(SpelledVideo):
    """SpelledVideo for GLM-4.1V and GLM-4.5V: merged frames before the second of the first of them.

    Frames are `1 / fps` seconds apart, or lie evenly in a video longer than `max_frames / fps` seconds, which
    is its frames over their rate. Its placeholder is <|video|>, and `output` the id of <|image|>.

    Attributes:
        seconds: ids of "0", "1" and so on, as the tokenizer spells them; a video with a frame behind the last
            of them is refused.
        start, end: ids of <|begin_of_image|> and <|end_of_image|>.
        max_frames: max_duration * fps of the processor.
    """

    seconds: tuple[tuple[TokenId, ...], ...] = field(repr=False)
    max_frames: int = 600
    min_pixels: int = 112 * 112
    max_pixels: int = 28 * 28 * 2 * 30_000
    alpha: float = 6 * 1536
    unused: ClassVar[tuple[str, ...]] = (*SpelledVideo.unused, "min_frames")

    def frames(self, parts: Parts) -> Longs:
        counts = [len(self.numbers(PartSize.of(parts, i))) for i in range(len(parts))]
        return -(-np.array(counts, np.int64) // self.merge_frames) * self.merge_frames

    def numbers(self, size: PartSize) -> list[int]:
        seconds = size.length / size.rate
        if seconds <= self.max_frames / self.fps:
            asked = np.arange(max(int(seconds * self.fps), 1)) * size.rate / self.fps
        elif size.length <= self.max_frames:
            asked = np.arange(size.length)
        else:
            asked = np.linspace(0, seconds, self.max_frames) * size.rate
        return np.unique(np.minimum(np.ceil(asked), size.length - 1).astype(np.int64)).tolist()

    def told(self, first: float, last: float) -> tuple[Sequence[TokenId], Sequence[TokenId]]:
        if first >= len(self.seconds):
            raise StoreError(
                f"part 0: a frame {first:.0f} s from the begin, and SecondsVideo(seconds=...) has the ids of "
                f"{len(self.seconds)}; give more"
            )
        return (), self.seconds[int(first)]

    def summary(self) -> str:
        """With a digest of the ids of seconds."""
        digest = hashlib.blake2b(repr(self.seconds).encode(), digest_size=16).hexdigest()
        return f"{self!r} seconds={digest}"
