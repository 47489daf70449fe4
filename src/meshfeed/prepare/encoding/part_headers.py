"""The kind and size of a part, from the header of its bytes. Only MP3 is decoded, to count its samples.

The bytes decide the kind, not the file's name. An animated picture counts as its first frame. The sound track
of a video is a part of its own; see `track_of`.
"""

from __future__ import annotations

import contextlib
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshfeed.errors import PrepareError, StoreError
from meshfeed.formats.images import brands_of, opened_image
from meshfeed.formats.matroska import is_matroska
from meshfeed.formats.sound import audio_format, audio_size
from meshfeed.formats.video import is_mp4, sound_size, video_header
from meshfeed.parts import Kind
from meshfeed.parts.types import in_pixels

MOST_PIXELS = 89_478_485
"""Default limit of an image: from here on, Pillow warns of a decompression bomb."""

_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # of EXIF: a quarter turn swaps height and width
_XMP, _MOST_TEXT = "XML:com.adobe.xmp", 1 << 20
_MOST_RATE = 1000  # frames per second of a video
_TIFF_WIDTH, _TIFF_HEIGHT = 256, 257
_PAGE = re.compile(rb"\s*<(?:!doctype\s+)?html", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a part; see `Parts` for the units.

    Attributes:
        kind: of the part.
        height, width: as displayed; 0 for audio.
        length: PCM samples of one channel, frames of a video; 1 for an image.
        rate: PCM samples or frames per second; 0 for an image.
    """

    kind: Kind
    height: int
    width: int
    length: int
    rate: float


def size_of(data: bytes, max_pixels: int = MOST_PIXELS) -> Size:
    """The size of an image, of WAV, FLAC, MP3 or Ogg audio, or of MP4, MOV, Matroska or WebM video.

    max_pixels: height times width, at most. Raises StoreError that says what the bytes are instead.
    """
    if not data:
        raise StoreError("empty; fetch it again, or leave its sample out")
    if audio_format(data) is not None:
        return _size_of_audio(data)
    other = _other(data)
    if other is not None:
        what, cure = other
        raise StoreError(f"{what}, whose size prepare cannot read; {cure}")
    if is_matroska(data) or (is_mp4(data) and not brands_of(data) & _AVIF):
        return _size_of_video(data, max_pixels)
    return _size_of_image(data, max_pixels)


def _other(data: bytes) -> tuple[str, str] | None:
    """(format, cure) of bytes in a format that is not supported; None if they may be an image."""
    brand = data[8:12]
    if brands := brands_of(data):
        if brands & _HEIF and not brands & _AVIF:
            return "a HEIC image", _NO_IMAGE
        return ("M4A audio", _NO_AUDIO) if brand in (b"M4A ", b"M4B ") else None
    if data[:4] == b"RIFF" and brand == b"AVI ":
        return "AVI video", _NO_VIDEO
    if data[:2] == b"\xff\x0a" or data[:12] == b"\0\0\0\x0cJXL \r\n\x87\n":
        return "a JPEG XL image", _NO_IMAGE
    if data[:4] == b"\xff\x4f\xff\x51" or data[:12] == b"\0\0\0\x0cjP  \r\n\x87\n":
        return "a JPEG 2000 image", _NO_IMAGE
    return None


_AVIF = {b"avif", b"avis"}
_HEIF = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}
_NO_IMAGE = "convert it to JPEG, PNG or WebP"
_NO_AUDIO = "convert it to FLAC or WAV"
_NO_VIDEO = (
    "convert it to MP4, without encoding it again where its codec allows: ffmpeg -i FILE -c copy OUT.mp4"
)


# -- images -----------------------------------------------------------------------------------------------


def _size_of_image(data: bytes, max_pixels: int) -> Size:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with opened_image(data) as image:
                width, height = image.size
                if image.format == "TIFF":  # newer versions of Pillow have turned its size
                    width, height = image.tag_v2[_TIFF_WIDTH], image.tag_v2[_TIFF_HEIGHT]
                turned = _orientation(image, data) in _TURNED
    except ImportError as missing:  # of this machine, not of the record
        raise PrepareError(str(missing)) from missing
    except Exception as error:  # each format has its own for a broken header
        raise StoreError(_refusal(error, data)) from error
    if height < 1 or width < 1:
        raise StoreError(f"its header says {in_pixels(height, width)}; fetch it again")
    _refuse_large(height, width, max_pixels)
    return Size("image", width, height, 1, 0.0) if turned else Size("image", height, width, 1, 0.0)


def _refuse_large(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise StoreError(
            f"{in_pixels(height, width)}, more than --max-pixels {max_pixels}; leave it out, or allow it"
        )


def _refusal(error: Exception, data: bytes) -> str:
    """The reason for an image that Pillow cannot open, without its bytes."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, Image.DecompressionBombError):
        return f"{error}; leave it out, or store it smaller"
    if isinstance(error, UnidentifiedImageError):
        what = " (a web page)" if _PAGE.match(data) else ""
        return (
            f"not an image, audio or video: {len(data)} bytes{what}; fetch it again, or leave its sample out"
        )
    # Pillow's message may repeat bytes, which must not reach the author of a URL.
    return f"its header is broken ({type(error).__name__}); fetch it again"


def _orientation(image: Any, data: bytes) -> int:
    """As EXIF or XMP number it; 1 without a readable entry."""
    from PIL import Image

    if image.format == "PNG":  # Pillow would decode it, since both may come last
        for name, body in _chunks(data):
            if name == b"eXIf":
                image.info["exif"] = body
            elif (xmp := _xmp_in(body)) is not None:
                image.info[_XMP] = xmp
        found = Image.Image.getexif(image)
    else:
        found = image.getexif()
    return found.get(_ORIENTATION, 1)


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(name, body) of each chunk of EXIF or text, as far as they are there."""
    at = 8
    while at + 8 <= len(png):
        size, name = struct.unpack_from(">I4s", png, at)
        if name in (b"eXIf", b"iTXt"):
            yield name, png[at + 8 : at + 8 + size]
        at += 12 + size


def _xmp_in(body: bytes) -> str | None:
    """The XMP in an iTXt chunk: keyword, whether it is compressed and how, language, translation, text."""
    keyword, _, rest = body.partition(b"\0")
    if keyword != _XMP.encode() or len(rest) < 2:
        return None
    text = rest[2:].split(b"\0", 2)[-1]
    with contextlib.suppress(zlib.error):  # Pillow passes over what it cannot read, too
        plain = zlib.decompressobj().decompress(text, _MOST_TEXT) if rest[0] else text
        return plain.decode("utf-8", "replace")
    return None


# -- audio and video --------------------------------------------------------------------------------------


def _size_of_audio(data: bytes) -> Size:
    try:
        length, rate = audio_size(data)
    except ImportError as missing:
        raise PrepareError(str(missing)) from missing
    if length < 1 or rate < 1:
        raise StoreError(f"audio of {length} samples at {rate} Hz; write it again, with its length known")
    return Size("audio", 0, 0, length, float(rate))


def track_of(data: bytes) -> Size | None:
    """The size of a video's sound track; None for a video without one. Raises StoreError."""
    found = sound_size(data)
    return None if found is None else Size("audio", 0, 0, found[0], float(found[1]))


def _size_of_video(data: bytes, max_pixels: int) -> Size:
    header = video_header(data)
    _refuse_large(header.height, header.width, max_pixels)
    if header.frames < 2:
        raise StoreError("a video of one frame; give it as an image, or leave its sample out")
    if not 0 < header.rate <= _MOST_RATE:
        raise StoreError(
            f"a video of {header.rate:g} frames a second, outside 0 to {_MOST_RATE}; leave it out"
        )
    return Size("video", header.height, header.width, header.frames, header.rate)
