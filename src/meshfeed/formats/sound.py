"""Opening and decoding stored audio by libsndfile, of the extra "audio": WAV, FLAC, MP3 and Ogg."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from meshfeed.errors import PartError
from meshfeed.extras import install

Sound = npt.NDArray[np.float64]

_FORMATS = {"WAV": "WAV", "WAVEX": "WAV", "RF64": "WAV", "FLAC": "FLAC", "MP3": "MP3", "OGG": "Ogg"}
_BLOCK_SAMPLES = 1 << 18
_NO_LENGTH = (1 << 63) - 1
_OGG_BEGIN = b"OggS\0\x02"  # the first page of a stream


def audio_format(data: bytes) -> str | None:
    """WAV, FLAC, MP3 or Ogg, by the first bytes; None for anything else."""
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
        return "WAV"
    if data[:4] == b"fLaC":
        return "FLAC"
    if data[:4] == b"OggS":
        return "Ogg"
    is_layer_3 = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2
    return "MP3" if is_layer_3 or data[:3] == b"ID3" else None


def audio_size(data: bytes) -> tuple[int, int]:
    """Samples of one channel, and samples per second: what `decoded_audio` gives, or it raises PartError.

    WAV, FLAC and Ogg record their length; a FLAC file that was cut off is found only by decoding it. MP3 is
    decoded to count it: many files have no header, or were cut since it was written. Raises PartError for
    bytes that cannot be read, and ImportError without soundfile.
    """
    with _opened(data) as (audio, stream):
        if audio.format != "MP3":
            length = 0 if audio.frames == _NO_LENGTH else audio.frames
        else:
            length = sum(map(len, _blocks(audio, _NO_LENGTH)))
            after = data[stream.tell() : stream.tell() + 2]
            if audio_format(after) == "MP3":  # libsndfile ends where the header, or its estimate, does
                raise PartError(
                    "MP3 audio of which only the beginning can be decoded: it is joined of several, or its "
                    "bit rate varies without a header; convert it to FLAC"
                )
        return length, audio.samplerate


def decoded_audio(data: bytes, length: int, rate: float, most: int) -> Sound:
    """The first `most` samples, the mean of the channels, from -1 to 1; float64 [samples].

    length, rate: of the whole, as the index has them. Raises PartError for other bytes, or another length or
    rate; ImportError without soundfile.
    """
    with _opened(data) as (audio, _):
        blocks = [block.mean(axis=1) for block in _blocks(audio, min(most, length + 1))]
        sound = np.concatenate([np.zeros(0), *blocks])
        if (sound.size, audio.samplerate) != (min(most, length), rate):
            raise PartError(
                f"{sound.size} samples at {audio.samplerate} Hz, and the index says {length} at {rate:.0f} Hz"
            )
    if not np.isfinite(sound).all():
        raise PartError("audio with samples that are not finite; write it again")
    return sound


@contextmanager
def _opened(data: bytes) -> Generator[tuple[Any, io.BytesIO]]:
    """A soundfile.SoundFile, and the stream that it reads."""
    form = audio_format(data)
    if form is None:
        raise PartError("not WAV, FLAC, MP3 or Ogg audio; convert it to FLAC")
    try:
        import soundfile
    except (ImportError, OSError) as missing:  # OSError: soundfile without its library
        raise ImportError(f"reading audio needs soundfile: {install('audio')}") from missing
    if form == "Ogg" and data.count(_OGG_BEGIN) > 1:
        raise PartError("Ogg audio of several streams, of which libsndfile reads one; convert it to FLAC")
    stream = io.BytesIO(data)
    try:
        with soundfile.SoundFile(stream) as audio:
            if _FORMATS.get(audio.format) != form:
                cure = "remove the tag before it" if data[:3] == b"ID3" else "convert it to FLAC"
                raise PartError(f"{audio.format} audio in what begins as {form}; {cure}")
            yield audio, stream
    except soundfile.LibsndfileError as error:
        raise PartError(f"{form} audio that cannot be decoded: {error.error_string}") from error


def _blocks(audio: Any, most: int) -> Iterator[Sound]:
    """All samples up to `most`, some at a time: a channel may need much more room decoded than stored."""
    step = max(_BLOCK_SAMPLES // audio.channels, 1)
    while most > 0 and len(block := audio.read(min(step, most), dtype="float64", always_2d=True)):
        most -= len(block)
        yield block
