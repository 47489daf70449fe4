"""Decoding the sound track of a stored video by PyAV, of the extra "video".

Samples are laid where their times say, so that there are as many as the header tells, whatever the decoder
gives: silence stands before a track that begins late, and where one has a gap.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from meshfeed.arrays import Floats
from meshfeed.errors import PartError
from meshfeed.extras import install
from meshfeed.formats.matroska import is_matroska
from meshfeed.formats.video import LEAST_HZ, is_mp4, sound_size
from meshfeed.formats.video_header import CONVERT

_LACKING_S = 0.25  # that the last packets may be shorter than the header says, or lie elsewhere
_JITTER_S = 0.05  # times of packets may be rounded, to ms in Matroska


def is_video(data: bytes) -> bool:
    """Whether a file begins as one of those whose sound track is read."""
    return is_mp4(data) or is_matroska(data)


def decoded_track(data: bytes, length: int, rate: float, most: int) -> Floats:
    """The first `most` samples of a video's sound, the mean of the channels, from -1 to 1; float64 [samples].

    Of several tracks, the first. length, rate: as `sound_size` has them. Raises PartError for other ones, for
    sound that cannot be decoded, and for sound that ends before; ImportError without PyAV.
    """
    if (found := sound_size(data)) != (length, rate):
        told = "no sound" if found is None else f"{found[0]} samples at {found[1]} Hz"
        raise PartError(f"a video of {told}, and the index says {length} at {rate:.0f} Hz")
    try:
        import av.error
    except ImportError as missing:
        raise ImportError(f"decoding the sound of video needs PyAV: {install('video')}") from missing
    sound, end = np.zeros(min(most, length)), 0
    try:
        for at, samples in _pieces(av, data, int(rate)):
            begin = end if end and abs(at - end) < _JITTER_S * rate else at
            some = samples[max(-begin, 0) : max(sound.size - begin, 0)]
            sound[max(begin, 0) : max(begin, 0) + some.size] = some
            end = max(end, begin + samples.size)
            if end >= sound.size:
                break
    except (av.error.FFmpegError, ValueError) as error:  # ValueError: a layout that changes
        told = getattr(error, "strerror", None) or error
        raise PartError(f"video whose sound cannot be decoded: {told}") from error
    if sound.size - end > _LACKING_S * rate:
        raise PartError(
            f"video whose sound ends after {end / rate:.2f} s, and its header says {length / rate:.2f} s; "
            "get the whole file"
        )
    if not np.isfinite(sound).all():
        raise PartError("video with sound whose samples are not finite; write it again")
    return sound


def _pieces(av: Any, data: bytes, rate: int) -> Iterator[tuple[int, Floats]]:
    """The place of some samples, and their mean over the channels; float64 [samples]."""
    # the format is named, so that no other reader, of playlists or the like, is ever tried
    form = "matroska" if is_matroska(data) else "mov"
    with av.open(io.BytesIO(data), "r", format=form, metadata_errors="replace") as container:
        stream: Any = next(iter(container.streams.audio), None)
        if stream is None or stream.codec_context is None:
            raise PartError("video whose sound is in a format that PyAV does not decode")
        stream.codec_context.thread_count = 1
        # channels side by side: PyAV reads beyond the end of eight planes
        resampler: Any = av.AudioResampler(format="flt", rate=rate)
        for frame in itertools.chain(container.decode(stream), (None,)):
            if frame is not None and frame.sample_rate < LEAST_HZ:  # or it would become far more samples
                raise PartError(f"video with sound at {frame.sample_rate} Hz; {CONVERT}")
            for each in resampler.resample(frame):
                if each.pts is None or each.format.name != "flt":
                    raise PartError(f"video whose sound has no times, or changes its format; {CONVERT}")
                samples = each.to_ndarray().reshape(-1, each.layout.nb_channels)
                yield round(each.pts * each.time_base * rate), samples.mean(axis=1, dtype=np.float64)
