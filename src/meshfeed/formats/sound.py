"""Opening and decoding stored audio by libsndfile, of the extra "audio": WAV, FLAC, MP3 and Ogg."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from meshfeed.arrays import Floats
from meshfeed.errors import PartError
from meshfeed.extras import install
from meshfeed.formats.sound_track import decoded_track, is_video

Sound = Floats

_FORMATS = {"WAV": "WAV", "WAVEX": "WAV", "RF64": "WAV", "FLAC": "FLAC", "MP3": "MP3", "OGG": "Ogg"}
_BLOCK_SAMPLES = 1 << 18
_NO_LENGTH = (1 << 63) - 1
_STREAMED = 0x7FFF_0000  # from here on, what programs write that did not know the size
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
    decoded to count it: many files have no header. Raises PartError for bytes that cannot be read, for audio
    that was cut off, as far as its header or its last page says so, and ImportError without soundfile.
    """
    with _opened(data) as (audio, stream):
        if cut := _cut_off(data):
            raise PartError(f"{audio_format(data)} audio that was cut off: {cut}; get the whole file")
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


def _cut_off(data: bytes) -> str | None:
    """How a file says that bytes of it are missing; None if they are not, or it does not say."""
    form = audio_format(data)
    if form == "Ogg":
        return _cut_ogg(data)
    wanted, have = 0, 0
    if form == "WAV":
        wanted, have = _wav_bytes(data)
    elif form == "MP3":
        wanted, have = _mp3_bytes(data)
    return f"its header tells of {wanted} bytes, and {have} are there" if wanted > have else None


def _wav_bytes(data: bytes) -> tuple[int, int]:
    """Bytes of samples as the header has them, 0 if unknown; and those that are there."""
    at, large = 12, 0
    while at + 8 <= len(data):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name == b"data":
            wanted = size if size < _STREAMED else large
            return wanted if wanted < _NO_LENGTH else 0, len(data) - at - 8
        if name == b"ds64":  # of RF64: sizes of 64 bits
            large = int.from_bytes(data[at + 16 : at + 24], "little")
        at += 8 + size + size % 2
    return 0, 0


def _cut_ogg(data: bytes) -> str | None:
    """Pages tell where the next one begins, and the last one that it is the last."""
    at, ends = 0, False
    while data[at : at + 4] == b"OggS" and at + 27 <= len(data):
        segments = data[at + 27 : at + 27 + data[at + 26]]
        ends, at = bool(data[at + 5] & 4), at + 27 + data[at + 26] + sum(segments)
        if at > len(data):
            return f"a page has {at - len(data)} bytes more"
    return None if ends else "it has no last page"


def _mp3_bytes(data: bytes) -> tuple[int, int]:
    """Bytes of all frames as a Xing header has them, 0 without one; and those that are there."""
    at = 0
    while data[at : at + 3] == b"ID3" and at + 10 <= len(data):  # sizes of 7 bits a byte, without this header
        a, b, c, d = data[at + 6 : at + 10]
        at += 10 + (a << 21 | b << 14 | c << 7 | d) + 10 * bool(data[at + 5] & 16)
    if at + 4 > len(data) or audio_format(data[at : at + 4]) != "MP3":
        return 0, 0
    is_first, is_mono = data[at + 1] & 8, data[at + 3] >> 6 == 3  # version 1; others have less before it
    tag = at + 4 + ((17 if is_mono else 32) if is_first else (9 if is_mono else 17))
    flags = int.from_bytes(data[tag + 4 : tag + 8], "big")
    if data[tag : tag + 4] not in (b"Xing", b"Info") or not flags & 2:
        return 0, 0
    size = tag + 8 + 4 * (flags & 1)
    return int.from_bytes(data[size : size + 4], "big"), len(data) - at


def decoded_audio(data: bytes, length: int, rate: float, most: int) -> Sound:
    """The first `most` samples, the mean of the channels, from -1 to 1; float64 [samples].

    data: also a video, for its sound track; see `decoded_track`. length, rate: of the whole, as the index has
    them. Raises PartError for other bytes, or another length or rate; ImportError without soundfile.
    """
    if is_video(data):
        return decoded_track(data, length, rate, most)
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
