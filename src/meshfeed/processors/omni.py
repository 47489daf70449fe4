"""Video of Qwen2.5-Omni, and its sound among its tokens: OmniVideo."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.errors import RecipeError, StoreError
from meshfeed.intervals import numbered
from meshfeed.parts import KINDS, PLACEHOLDER, Parts, Repeat, Rope, Template
from meshfeed.parts.types import TokenId
from meshfeed.processors.video import NativeVideo

_AUDIO = KINDS.index("audio")


@dataclass(frozen=True, kw_only=True)
class OmniVideo(NativeVideo):
    """NativeVideo for Qwen2.5-Omni (Xu et al. 2025, arXiv 2503.20215), on whose rope time passes as in sound.

    A second has `tokens_per_second` positions, as many as tokens of sound, and merged frames are
    `merge_frames / fps` apart, however many are sampled. What follows a video comes after its last frames.

    The sound of a video may stand among its tokens, as with `use_audio_in_video`: start, then for each
    `chunk_s` seconds the frames and the sound of these, then end. It is a part that shares the video's
    placeholder, which stands between <|vision_bos|> and <|vision_eos|>.

    Attributes:
        tokens_per_second: positions in time, position_id_per_seconds of the model's config.
        chunk_s: seconds_per_chunk of the model's config; merged frames are no further apart.
        sound: ids of <|audio_bos|>, <|AUDIO|> and <|audio_eos|>; None refuses sound among the tokens.

    Raises RecipeError for other options.
    """

    tokens_per_second: int = 25  # pyright: ignore[reportIncompatibleVariableOverride]
    chunk_s: float = 2.0
    sound: tuple[TokenId, TokenId, TokenId] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sound is not None and (len(self.sound) != 3 or min(self.sound) < 0):
            raise RecipeError(f"OmniVideo(sound={self.sound}): the ids of three tokens, from 0")
        if self.sound is not None and not self.merge_frames / self.fps <= self.chunk_s < np.inf:
            raise RecipeError(
                f"OmniVideo(fps={self.fps}, chunk_s={self.chunk_s}): merged frames are "
                f"{self.merge_frames / self.fps:g} s apart, further than chunk_s"
            )

    def with_sound(self, parts: Parts, sounds: Longs) -> Template | None:
        if self.sound is None:
            return None
        rows, columns = self.grid(parts)
        each = zip((rows * columns).tolist(), self._groups_of_chunks(parts), sounds.tolist())
        return Template.of(self._runs(*one) for one in each)

    def rope(self, parts: Parts, template: Template) -> Rope:
        video, of_sound = self._rope(parts), template.kinds == _AUDIO
        if not of_sound.any():
            return video
        if (first := np.flatnonzero(parts.at == 0)).size:
            raise StoreError(
                f"part {first[0]}: a video with sound at the begin of its document, where <|vision_bos|> "
                f"belongs before it; prepare it with --video-text"
            )
        made = Rope.of_text(template)
        made.offsets[(template.is_output & ~of_sound).repeat(template.sizes)] = video.offsets
        made.offsets[of_sound.repeat(template.sizes)] = numbered(template.outputs_of(_AUDIO))[1][:, None]
        ends = np.cumsum(template.runs)
        begins, lasts = ends - template.runs, ends - 2
        made.offsets[np.cumsum(template.sizes)[begins] - 1] = -1  # where <|vision_bos|> is
        # all begin where the first outputs do; what follows comes after the last run
        made.steps[:] = 0
        tops = np.maximum.reduceat(made.offsets.max(axis=1), np.cumsum(template.sizes) - template.sizes)
        made.steps[lasts] = tops[lasts] + 1
        return made

    def _rope(self, parts: Parts) -> Rope:
        """Without sound among the tokens."""
        rows, columns = self.grid(parts)
        made = Rope.of_grids(Template.repeated(self.tokens(parts)), rows, columns, self.interval(parts))
        groups = self.patches(parts)[0]
        of, number = numbered(groups)
        # as the model computes them, in float32
        seconds = number.astype(np.float32) * np.float32(self.merge_frames / self.fps)
        times = (seconds * np.float32(self.tokens_per_second)).astype(np.int64)
        made.offsets[:, 0] = times.repeat((rows * columns)[of])
        return Rope(made.offsets, np.maximum(made.steps, times[np.cumsum(groups) - 1] + 1))

    def _groups_of_chunks(self, parts: Parts) -> list[list[int]]:
        """How many merged frames each chunk of each video has."""
        chunk = int(self.tokens_per_second * self.chunk_s)
        found: list[list[int]] = []
        for groups in self.patches(parts)[0].tolist():
            times = np.arange(groups) * (self.merge_frames / self.fps) * self.tokens_per_second
            found.append(np.bincount((times // chunk).astype(np.int64)).tolist())
        return found

    def _runs(self, cells: int, groups: list[int], sounds: int) -> list[Repeat]:
        """groups: merged frames of each chunk, of so many tokens."""
        begin, sound, end = self.sound or (0, 0, 0)
        chunk = int(self.tokens_per_second * self.chunk_s)
        runs = [Repeat(begin)]
        for k in range(max(len(groups), -(-sounds // chunk))):
            if k < len(groups) and groups[k]:
                runs.append(Repeat(PLACEHOLDER, groups[k] * cells, is_output=True))
            if (some := min(chunk, sounds - k * chunk)) > 0:
                runs.append(Repeat(sound, some, is_output=True, kind=_AUDIO))
        return [*runs, Repeat(end)]
