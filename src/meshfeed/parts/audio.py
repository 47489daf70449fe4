"""Rules for audio."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from meshfeed.errors import RecipeError, StoreError
from meshfeed.parts.types import Kind, Longs, PartRule, Parts, check_options

Longer = Literal["cut", "error"]


@dataclass(frozen=True, kw_only=True)
class WhisperAudio(PartRule):
    """Audio through Whisper's encoder: `frame_rate` spectrum frames a second, halved, then pooled to tokens.

    Like Qwen2-Audio (Chu et al. 2024, arXiv 2407.10759): pool=2, so 25 tokens a second. The encoder (Radford
    et al. 2022, arXiv 2212.04356) attends over `seconds` of sound, padded.

    Attributes:
        seconds: of a part, at most.
        sample_rate: that the processor resamples to, in Hz.
        frame_rate: spectrum frames per second; a divisor of sample_rate.
        pool: frames of the encoder's output that become one token.
        longer: what becomes of a part beyond `seconds`: "cut" leaves its rest out, as the published processor
            does; "error" refuses the part, by name, when its step is planned.

    Raises RecipeError for options below 1.
    """

    seconds: int = 30
    sample_rate: int = 16_000
    frame_rate: int = 100
    pool: int = 2
    alpha: float = 6 * 1280
    kind: Kind = "audio"
    longer: Longer = field(default="cut", repr=False)

    def __post_init__(self) -> None:
        check_options(self)
        if self.longer not in get_args(Longer):
            raise RecipeError(f"WhisperAudio(longer={self.longer!r}): choose {', '.join(get_args(Longer))}")
        if self.sample_rate % self.frame_rate:
            raise RecipeError(
                f"WhisperAudio(frame_rate={self.frame_rate}): a divisor of sample_rate={self.sample_rate}"
            )

    def summary(self) -> str:
        """As its repr, with `longer` unless it is "cut", so that older fingerprints stay."""
        return super().summary() + ("" if self.longer == "cut" else f" with longer={self.longer!r}")

    def tokens(self, parts: Parts) -> Longs:
        long = np.flatnonzero(parts.length > self.seconds * parts.rate)
        if self.longer == "error" and long.size:
            i = long[0]
            raise StoreError(
                f"part {i}, {parts.length[i] / parts.rate[i]:.1f} s of audio, of which WhisperAudio takes "
                f"{self.seconds} s; cut it into several parts, or leave out longer='error'"
            )
        return self.tokens_of_frames(self.frames_of(parts.length, parts.rate))

    def frames_of(self, length: Longs, rate: npt.NDArray[np.float64]) -> Longs:
        """Spectrum frames of each part that are not padding; int64 [p].

        length, rate: PCM samples of each, and per second; [p].
        """
        samples = np.ceil(length * self.sample_rate / rate).astype(np.int64)
        return np.minimum(-(-samples // (self.sample_rate // self.frame_rate)), self._most_frames)

    def tokens_of_frames(self, frames: Longs) -> Longs:
        """Tokens of parts of so many spectrum frames; int64 [p] -> int64 [p]."""
        encoded = (frames - 1) // 2 + 1
        return np.maximum((encoded - self.pool) // self.pool + 1, 1)

    def patches(self, parts: Parts) -> tuple[Longs, Longs]:
        one = np.ones(len(parts), np.int64)
        return one, one * (self._most_frames // 2)

    @property
    def _most_frames(self) -> int:
        return self.seconds * self.frame_rate
