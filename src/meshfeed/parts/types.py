"""What is known of a sample's parts before one byte of them is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, Self, TypeVar, get_args

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]
V = TypeVar("V", bound=np.generic)

Kind = Literal["image", "audio", "video"]

KINDS: tuple[Kind, ...] = get_args(Kind)


def in_pixels(height: int, width: int) -> str:
    """The size of a picture in words: (255, 237) -> "237 pixels wide x 255 high"."""
    return f"{width} pixels wide x {height} high"


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts of some samples, sample after sample, each sample's in the order of its text.

    Attributes:
        kind: index into KINDS; int64 [p].
        height, width: pixels as displayed, so after the turn that EXIF asks for; 0 for audio; int64 [p].
        length: frames of a video, PCM samples of one channel of audio, 1 for an image; int64 [p].
        rate: frames or PCM samples per second; 0 for an image; float64 [p].
        num_bytes: of the part as stored; int64 [p].
        at: which token of the sample's text is its placeholder, from 0; ascending in a sample; int64 [p].
        starts: where each sample's parts begin, then their end; int64 [samples + 1].
    """

    kind: Longs
    height: Longs
    width: Longs
    length: Longs
    rate: npt.NDArray[np.float64]
    num_bytes: Longs
    at: Longs
    starts: Longs

    @property
    def num_samples(self) -> int:
        """Samples, those without parts too."""
        return self.starts.size - 1

    @property
    def sample(self) -> Longs:
        """The sample of each part; int64 [p]."""
        return np.arange(self.num_samples).repeat(np.diff(self.starts))

    def __len__(self) -> int:
        return self.kind.size

    def of_kind(self, kind: Kind) -> Longs:
        """The places of all parts of a kind, ascending; int64 [k]."""
        return np.flatnonzero(self.kind == KINDS.index(kind))

    def take(self, places: Longs) -> Self:
        """Some parts, ascending, of the same samples; int64 [k]."""
        columns = {
            each.name: getattr(self, each.name)[places] for each in fields(self) if each.name != "starts"
        }
        return replace(self, **columns | {"starts": np.searchsorted(places, self.starts)})

    def only(self, place: int) -> Self:
        """One part, as a sample of its own."""
        one = self.take(np.array([place]))
        return replace(one, starts=np.array([0, 1]))

    def per_sample(self, values: npt.NDArray[V]) -> npt.NDArray[V]:
        """The sum over the parts of each sample of a value of each part; [samples], the dtype of values."""
        sums = np.zeros(self.num_samples, values.dtype)
        np.add.at(sums, self.sample, values)
        return sums

    @classmethod
    def merged(cls, num_samples: int, several: Sequence[tuple[Longs, Parts]]) -> Self:
        """The parts of samples that come from several places. several: (which samples, their parts)."""
        sample = np.concatenate([which[parts.sample] for which, parts in several])
        order = np.argsort(sample, kind="stable")
        columns = {
            each.name: np.concatenate([getattr(parts, each.name) for _, parts in several])[order]
            for each in fields(cls)
            if each.name != "starts"
        }
        return cls(**columns, starts=np.searchsorted(sample[order], np.arange(num_samples + 1)))

    @classmethod
    def none(cls, num_samples: int) -> Self:
        """Samples without parts."""
        none = np.zeros(0, np.int64)
        starts = np.zeros(num_samples + 1, np.int64)
        return cls(none, none, none, none, np.zeros(0), none, none, starts)

    @classmethod
    def of_images(cls, sizes: Sequence[tuple[int, int]]) -> Self:
        """Samples of one image each, from (height, width): for trying a rule, and for tests."""
        height, width = np.array(sizes, np.int64).reshape(-1, 2).T
        n = height.size
        nothing, one = np.zeros(n, np.int64), np.ones(n, np.int64)
        return cls(nothing, height, width, one, np.zeros(n), nothing, nothing, np.arange(n + 1))
