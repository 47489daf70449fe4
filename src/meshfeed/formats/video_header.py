"""What the headers of videos say, in whatever container."""

from __future__ import annotations

from dataclasses import dataclass

CONVERT = "convert it: ffmpeg -i FILE OUT.mp4"


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """What the header of a video says.

    Attributes:
        height, width: of a frame as displayed, after the turns; pixels.
        frames: of the whole video.
        rate: frames per second, on average.
        is_variable: whether frames last unequally long.
        turns: quarter turns clockwise from a frame as stored to one as displayed; 0 to 3.
        has_sound: whether it has a sound track, too.
    """

    height: int
    width: int
    frames: int
    rate: float
    is_variable: bool
    turns: int
    has_sound: bool

    @property
    def seconds(self) -> float:
        return self.frames / self.rate
