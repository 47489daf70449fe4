"""Audio through Whisper's encoder: WhisperAudio, and the spectrum that it takes, WhisperFeatures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Array, Floats, Longs
from meshfeed.errors import PartError, RecipeError, StoreError
from meshfeed.formats.sound import Sound, decoded_audio
from meshfeed.multimodal.processor import PartField, PartSize, Processor, check_rule
from meshfeed.parts import Kind, PartRule, Parts, Rope, Template
from meshfeed.parts.types import check_counts, check_options
from meshfeed.processors.pixels import check_choice

Longer = Literal["cut", "error"]

_HIGHEST_HZ = 8000.0
_MOST_HZ = 768_000


@dataclass(frozen=True, kw_only=True)
class WhisperAudio(PartRule):
    """Audio through Whisper's encoder: `frame_rate` spectrum frames a second, halved, then pooled to tokens.

    Like Qwen2-Audio (Chu et al. 2024, arXiv 2407.10759): pool=2, so 25 tokens a second. The encoder (Radford
    et al. 2022, arXiv 2212.04356) attends over `seconds` of sound, padded. That of Qwen2.5-Omni (Xu et al.
    2025, arXiv 2503.20215) attends within windows of 2 seconds, without padding: seconds=300, window_s=2.

    Attributes:
        seconds: of a part, at most.
        sample_rate: that the processor resamples to, in Hz.
        frame_rate: spectrum frames per second; a divisor of sample_rate.
        pool: frames of the encoder's output that become one token.
        window_s: seconds that the encoder attends within; None for `seconds`, padded.
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
    longer: Longer = "cut"
    window_s: int | None = None

    def __post_init__(self) -> None:
        check_options(self)
        check_choice(self, "longer", get_args(Longer))
        if self.sample_rate % self.frame_rate:
            raise RecipeError(
                f"WhisperAudio(frame_rate={self.frame_rate}): a divisor of sample_rate={self.sample_rate}"
            )

    def tokens(self, parts: Parts) -> Longs:
        long = np.flatnonzero(parts.length > self.seconds * parts.rate)
        if self.longer == "error" and long.size:
            i = long[0]
            raise StoreError(
                f"part {i}, {parts.length[i] / parts.rate[i]:.1f} s of audio, of which WhisperAudio takes "
                f"{self.seconds} s; cut it into several parts, or leave out longer='error'"
            )
        tokens = self.tokens_of_frames(self.frames_of(parts.length, parts.rate))
        if (short := np.flatnonzero(tokens < 1)).size:
            i = int(short[0])
            raise StoreError(
                f"part {i}, {parts.length[i]} samples of audio at {parts.rate[i]:g} Hz, of which the encoder "
                f"makes no output; leave the document out, such as by mf.amendments.Exclude"
            )
        return tokens

    def frames_of(self, length: Longs, rate: Floats) -> Longs:
        """Spectrum frames of each part that are not padding; int64 [p].

        length, rate: PCM samples of each, and per second; [p].
        """
        samples = np.ceil(length * self.sample_rate / rate).astype(np.int64)
        return np.minimum(-(-samples // (self.sample_rate // self.frame_rate)), self._most_frames)

    def tokens_of_frames(self, frames: Longs) -> Longs:
        """Tokens of parts of so many spectrum frames; int64 [p] -> int64 [p]."""
        encoded = (frames - 1) // 2 + 1
        return (encoded - self.pool) // self.pool + 1

    def patches(self, parts: Parts) -> tuple[Longs, Longs]:
        one = np.ones(len(parts), np.int64)
        if self.window_s is None:
            return one, one * (self._most_frames // 2)
        frames = self.frames_of(parts.length, parts.rate)
        return -(-frames // self._window_frames), one * ((self._window_frames - 1) // 2 + 1)

    def last_patches(self, parts: Parts) -> Longs:
        if self.window_s is None:
            return super().last_patches(parts)
        frames = self.frames_of(parts.length, parts.rate)
        return (frames - 1) % self._window_frames // 2 + 1

    def rope(self, parts: Parts, template: Template) -> Rope:
        """As text, as those of Qwen2.5-Omni."""
        return Rope.of_text(template)

    @property
    def _window_frames(self) -> int:
        return (self.window_s or self.seconds) * self.frame_rate

    @property
    def _most_frames(self) -> int:
        return self.seconds * self.frame_rate


@dataclass(frozen=True)
class WhisperFeatures(Processor):
    """The log-mel spectrum of WAV, FLAC, MP3 or Ogg audio, with the values of Whisper's feature extractor.

    Channels are averaged. Audio of another rate than the rule's is resampled by its Fourier transform.

    Attributes:
        rule: rates, and how much of a part is kept.
        mels: bands of the spectrum: 128 for Qwen2-Audio and Whisper large-v3, 80 for earlier ones.
        window: samples that a frame of the spectrum is of.

    Fields, both for the first stage, of `frames` = seconds * frame_rate: input_features float32
    [parts, mels, frames]; feature_attention_mask int32 [parts, frames], 1 for frames of the part and 0 for
    padding. Audio whose length or rate is not the one in the index is broken. Raises RecipeError for options
    below 1.
    """

    rule: WhisperAudio = WhisperAudio()  # pyright: ignore[reportIncompatibleVariableOverride]
    _: KW_ONLY
    mels: int = 128
    window: int = 400

    def __post_init__(self) -> None:
        check_rule(self)
        check_counts(self)

    @property
    def fields(self) -> tuple[PartField, ...]:
        frames = self.rule.seconds * self.rule.frame_rate
        return (
            PartField(name="input_features", dtype="float32", shape=(self.mels, frames)),
            PartField(name="feature_attention_mask", dtype="int32", shape=(frames,)),
        )

    def rows(self, parts: Parts) -> Mapping[str, Longs]:
        one = np.ones(len(parts), np.int64)
        return {each.name: one for each in self.fields}

    def __call__(self, data: bytes, size: PartSize, rng: np.random.Generator) -> Mapping[str, Array]:
        """The spectrum of one part; nothing is drawn."""
        rule = self.rule
        sound = np.zeros(rule.seconds * rule.sample_rate)
        stored = decoded_audio(data, size.length, size.rate, (rule.seconds + 1) * int(size.rate))
        heard = resampled(stored, size.rate, rule.sample_rate)[: sound.size]
        sound[: heard.size] = heard.astype(np.float32)  # the extractor takes no finer samples
        spectrum = log_mel(sound, rule.sample_rate, rule.frame_rate, self.window, self.mels)
        return {"input_features": spectrum[None], "feature_attention_mask": self._mask(size)}

    def blank(self, size: PartSize, rows: Mapping[str, int]) -> Mapping[str, Array]:
        return {**super().blank(size, rows), "feature_attention_mask": self._mask(size)}

    def num_tokens(self, made: Mapping[str, Array]) -> int:
        return int(self.rule.tokens_of_frames(made["feature_attention_mask"].sum(axis=1)).sum())

    def _mask(self, size: PartSize) -> Array:
        frames = self.rule.frames_of(np.array([size.length]), np.array([size.rate]))
        return (np.arange(self.rule.seconds * self.rule.frame_rate) < frames[:, None]).astype(np.int32)


def resampled(sound: Sound, rate: float, new_rate: int) -> Sound:
    """Samples at another rate, ceil(samples * new_rate / rate) of them; float64 [samples] -> float64 [k].

    By Fourier's transform: frequencies below half of the lower rate are kept as they are, others dropped.
    Raises PartError for a rate above 768 kHz.
    """
    if rate == new_rate:
        return sound
    if rate > _MOST_HZ:
        raise PartError(f"audio at {rate:g} Hz; resample it to {_MOST_HZ} Hz or less")
    shared = math.gcd(int(rate), new_rate)
    down, up = int(rate) // shared, new_rate // shared
    # a tenth of a second of silence keeps the end from running on into the begin
    blocks = -(-(sound.size + int(rate) // 10) // down)
    spectrum = np.fft.rfft(sound, blocks * down)[: blocks * min(up, down) // 2 + 1]
    return np.fft.irfft(spectrum, blocks * up)[: -(-sound.size * up // down)] * (up / down)


def log_mel(sound: Sound, rate: int, frame_rate: int, window: int, mels: int) -> npt.NDArray[np.float32]:
    """(decades + 4) / 4 of the power of sound in bands; float32 [mels, frames].

    From Whisper (Radford et al. 2022, arXiv 2212.04356): windows of Hann, centered at each frame, and 8
    decades below the loudest band.
    """
    hop = rate // frame_rate
    around = np.pad(sound, window // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(around, window)[::hop][: sound.size // hop]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    power = np.abs(np.fft.rfft(frames * hann)) ** 2
    decades = np.log10(np.maximum(power @ mel_bands(mels, window, rate), 1e-10))
    return ((np.maximum(decades, decades.max() - 8) + 4) / 4).T.astype(np.float32)


@lru_cache(maxsize=8)
def mel_bands(mels: int, window: int, rate: int) -> Sound:
    """What each frequency of a spectrum counts in each band; float64 [window // 2 + 1, mels].

    Triangles of equal area over Slaney's mel scale (Auditory Toolbox, 1998), from 0 to 8000 Hz: linear to
    1000 Hz, logarithmic above.
    """
    per_mel, step = 200 / 3, math.log(6.4) / 27
    knee = 1000 / per_mel
    mel = np.linspace(0, knee + math.log(_HIGHEST_HZ / 1000) / step, mels + 2)
    edges = np.where(mel < knee, mel * per_mel, 1000 * np.exp((mel - knee) * step))
    hertz = np.linspace(0, rate // 2, window // 2 + 1)[:, None]
    widths = np.diff(edges)
    rising, falling = (hertz - edges[:-2]) / widths[:-1], (edges[2:] - hertz) / widths[1:]
    return np.minimum(rising, falling).clip(0) * (2 / (edges[2:] - edges[:-2]))
