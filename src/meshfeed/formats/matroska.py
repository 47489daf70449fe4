"""The header of Matroska and WebM video, and its frames counted from the heads of their blocks; RFC 9559.

What elements say is checked against the bytes that are there, and the number of elements is bounded.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.errors import PartError
from meshfeed.formats.video_header import CONVERT, VideoHeader

_SEGMENT, _CLUSTER, _TRACK = 0x18538067, 0x1F43B675, 0xAE
_ENTERED = {_SEGMENT, _CLUSTER, _TRACK, 0x1549A966, 0x1654AE6B, 0xE0, 0xE1, 0x7670, 0xA0}
"""Elements that hold others which are read."""
_SCALE, _CLUSTER_TIME, _BLOCKS = 0x2AD7B1, 0xE7, (0xA3, 0xA1)
_NUMBER, _TYPE, _CODEC, _DURATION, _WIDTH, _HEIGHT = 0xD7, 0x83, 0x86, 0x23E383, 0xB0, 0xBA
_HERTZ, _DELAY, _COMPRESSED = 0xB5, 0x56AA, 0x6D80
_STRETCH, _UNSTRETCHED = 0x23314F, (0, 0x3F800000, 0x3FF0000000000000)  # empty, or 1.0
_REFUSED = {
    **dict.fromkeys((0x54AA, 0x54BB, 0x54CC, 0x54DD), "cropped when displayed"),
    **dict.fromkeys((0x7673, 0x7674, 0x7675), "turned when displayed"),
    _COMPRESSED: "compressed once more, or encrypted",
}
_OF_TRACKS = {_NUMBER, _TYPE, _CODEC, _DURATION, _WIDTH, _HEIGHT, _HERTZ, _DELAY, _STRETCH, *_REFUSED}
_MOST_ELEMENTS = 1 << 20  # of a file; nine hours of 30 frames a second
_LACING, _SHOWN = 0x06, 0x10  # of a block's flags, and of the first byte of a VP8 frame
_SECOND = 10**9  # in ns


def is_matroska(data: bytes) -> bool:
    """Whether a file begins as Matroska or WebM."""
    return data[:4] == b"\x1aE\xdf\xa3"


def matroska_header(data: bytes) -> VideoHeader:
    """The header of a Matroska or WebM file.

    Raises PartError for a file that was cut off, is damaged, or is of a kind that is not read.
    """
    tracks, rows, scale = _read(data)
    videos = [each for each in tracks if each.get(_TYPE) == 1]
    has_sound = any(each.get(_TYPE) == 2 for each in tracks)
    if has_sound and not videos:
        raise PartError(
            "Matroska or WebM of sound alone, which is not read; convert it: ffmpeg -i FILE OUT.flac"
        )
    if len(videos) != 1:
        raise PartError(
            f"Matroska or WebM of {len(videos)} video tracks, where one belongs; leave it out, or convert "
            "it: ffmpeg -i FILE -map 0:v:0 OUT.mp4"
        )
    (video,) = videos
    for name, what in _REFUSED.items():
        if video.get(name):
            raise PartError(f"video that is {what}; {CONVERT}")
    if video.get(_STRETCH, 0) not in _UNSTRETCHED:
        raise PartError(f"video whose track has a TrackTimestampScale other than 1; {CONVERT}")
    own = rows[rows[:, 0] == video.get(_NUMBER, 0), 1:]
    if (own[:, 2] < 0).any():
        raise PartError(f"video with a frame of 0 bytes; {CONVERT}")
    if (own[:, 0] < 0).any():  # FFmpeg tells none, or another
        raise PartError(f"video with frames before time 0; {CONVERT}")
    codec = video.get(_CODEC, 0).to_bytes(8, "big").strip(b"\0")  # may be padded
    hides = codec == b"V_VP8" and (own[:, 2] & _SHOWN == 0).any()
    if (own[:, 1] & _LACING).any() or hides:
        raise PartError(f"video whose frames and blocks differ in number; {CONVERT}")
    return _header(video, np.sort(own[:, 0]), scale, has_sound)


def matroska_sound(data: bytes) -> tuple[int, int] | None:
    """(samples, samples per second) of the first sound track, until its last block ends; None without one.

    Raises PartError for a file that was cut off or is damaged, and for sound of a kind that is not read.
    """
    tracks, rows, scale = _read(data)
    if (track := next((each for each in tracks if each.get(_TYPE) == 2), None)) is None:
        return None
    times = np.sort(rows[rows[:, 0] == track.get(_NUMBER, 0), 1])
    if times.size == 0:
        return None
    if track.get(_STRETCH, 0) not in _UNSTRETCHED or track.get(_COMPRESSED) or times.size == 1:
        raise PartError(
            f"video whose sound is stretched, compressed once more, or a single packet; {CONVERT}"
        )
    rate, wide = track.get(_HERTZ, 0x45FA0000), 1 << 32  # 8000 if it is not there
    hertz = struct.unpack(">f" if rate < wide else ">d", rate.to_bytes(4 if rate < wide else 8, "big"))[0]
    if not 0 < hertz < 1 << 32:
        raise PartError(f"video with sound at {hertz:g} Hz; {CONVERT}")
    steps = times.size - 1
    ends = int(times[-1]) * scale + int(times[-1] - times[0]) * scale // steps - track.get(_DELAY, 0)
    return ends * int(hertz) // _SECOND, int(hertz)


def _read(data: bytes) -> tuple[list[dict[int, int]], Longs, int]:
    """(values of each track, blocks, ns of a tick). Blocks: track, time, flags, first byte of the frame."""
    tracks, scale, time = list[dict[int, int]](), 1_000_000, 0
    blocks = array("q")  # of each: track, time, flags, first byte of the frame or -1
    for name, begin, end in _elements(data):
        if name == _TRACK:
            tracks.append({})
        elif name in _BLOCKS:
            track, at = _number(data, begin, end)
            shift, flags, first = struct.unpack_from(">hBB", data, at) if at + 4 <= end else (0, 0, -1)
            blocks.extend((track, time + shift, flags, first))
        elif (name in _OF_TRACKS and tracks) or name in (_SCALE, _CLUSTER_TIME):
            value = int.from_bytes(data[begin : min(end, begin + 8)], "big")
            if name == _SCALE:
                scale = value
            elif name == _CLUSTER_TIME:
                time = min(value, 1 << 62)
            else:
                tracks[-1][name] = value
    return tracks, np.frombuffer(blocks, np.int64).reshape(-1, 4), scale


def _header(video: dict[int, int], times: Longs, scale: int, has_sound: bool) -> VideoHeader:
    """times: of the frames in ticks, ascending; int64. scale: ns of a tick."""
    height, width = video.get(_HEIGHT, 0), video.get(_WIDTH, 0)
    if not (0 < height < 1 << 16 and 0 < width < 1 << 16):
        raise PartError(f"video whose header says {width} pixels wide x {height} high; get it again")
    if times.size < 2:
        count = "one frame" if times.size else "no frame"
        raise PartError(f"a video of {count}; give it as an image, or leave its sample out")
    steps = np.diff(times)
    if not (steps.min() and scale):
        raise PartError(f"video of {times.size} frames, of which some last no time; {CONVERT}")
    between, lasts = int(times[-1] - times[0]) * scale, video.get(_DURATION, 0)
    rate = float(Fraction(steps.size * _SECOND, between))
    is_fine = 2 * scale < lasts < 100 * _SECOND  # ticks tell frames apart, and 1/1001 tells their rate
    if is_fine and abs(between - steps.size * lasts) <= 2 * scale + steps.size:  # times are rounded to ticks
        rate = float(Fraction(_SECOND, lasts).limit_denominator(1001))
    return VideoHeader(
        height=height,
        width=width,
        frames=times.size,
        rate=rate,
        is_variable=bool(steps.max() - steps.min() > 1),
        turns=0,
        has_sound=has_sound,
    )


def _elements(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(name, where its body begins and ends) of each element, and of what those of `_ENTERED` hold."""
    at, until, last = 0, len(data), data.rfind(_CLUSTER.to_bytes(4, "big"))
    for _ in range(_MOST_ELEMENTS):
        if at >= until:
            return
        name, size_at = _number(data, at, len(data), is_name=True)
        size, begin = _number(data, size_at, len(data))
        end = begin + size
        is_unknown = size == (1 << 7 * (begin - size_at)) - 1  # when it was written
        if is_unknown and name in (_SEGMENT, _CLUSTER):
            end = len(data)
        if end > len(data):
            raise PartError(
                f"video that was cut off or is damaged: element {name:x} at byte {at} tells of {size} bytes, "
                f"and {len(data) - begin} are there; get the whole file"
            )
        yield name, begin, end
        if name == _SEGMENT and end > last:  # no frames stand behind it, whatever else does
            until = end
        at = begin if name in _ENTERED else end
    raise PartError(f"video of more than {_MOST_ELEMENTS} elements; {CONVERT}")


def _number(data: bytes, at: int, end: int, *, is_name: bool = False) -> tuple[int, int]:
    """(a number of variable size, where it ends); as a name, with the bit that tells its size."""
    size = 9 - data[at].bit_length() if at < end else 9
    if size > (4 if is_name else 8) or at + size > end:
        raise PartError(f"video that was cut off or is damaged at byte {at}; get the whole file")
    value = int.from_bytes(data[at : at + size], "big")
    return value if is_name else value & (1 << 7 * size) - 1, at + size
