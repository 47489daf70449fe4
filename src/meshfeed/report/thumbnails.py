"""Small pictures of stored images and videos, as data URLs."""

from __future__ import annotations

import base64
import io
import warnings
from typing import Any

import numpy as np

from meshfeed.formats.images import opened_image
from meshfeed.formats.video import decoded_frames, video_header
from meshfeed.parts.types import in_pixels

_WIDTH, _HEIGHT = 480, 240  # pixels, at most
_LOSSLESS_PIXELS = 96 * 96
_FRAMES = 4  # of a strip


def thumbnail(data: bytes, height: int, width: int) -> str:
    """A data URL of the image at no more than 480 x 240 pixels, in its display orientation.

    height, width: from the index. Raises ValueError for another size, ImportError without Pillow, and errors
    of Pillow, for decompression bombs, too.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*decompression bomb")
        with opened_image(data) as image:
            if {image.height, image.width} != {height, width}:
                raise ValueError(
                    f"{in_pixels(image.height, image.width)}, the index says {in_pixels(height, width)}"
                )
            return _data_url(_small(image))


def strip(data: bytes, height: int, width: int, length: int) -> str:
    """A data URL of some frames of a video, from its first to its last, side by side, in 480 x 240 pixels.

    height, width, length: from the index. Raises ValueError for another size, PartError, and ImportError
    without Pillow or PyAV.
    """
    from PIL import Image

    header = video_header(data)
    if (header.height, header.width, header.frames) != (height, width, length):
        found, told = in_pixels(header.height, header.width), in_pixels(height, width)
        raise ValueError(f"{header.frames} frames, {found}, the index says {length} frames, {told}")
    numbers = sorted({k * (length - 1) // (_FRAMES - 1) for k in range(_FRAMES)})
    small: list[Any] = []
    for frame in decoded_frames(data, numbers, header):
        small.append(Image.fromarray(np.ascontiguousarray(frame)))
        small[-1].thumbnail((_WIDTH // _FRAMES, _HEIGHT))
    whole = Image.new("RGB", (sum(each.width for each in small), small[0].height))
    for k, each in enumerate(small):
        whole.paste(each, (k * each.width, 0))
    return _data_url(whole)


def _small(image: Any) -> Any:
    from PIL import ImageOps

    image.draft("RGB", (_WIDTH, _WIDTH))  # a JPEG is decoded at a fraction of its size
    turned = ImageOps.exif_transpose(image)
    small = turned.convert("RGBA" if turned.has_transparency_data else "RGB")
    small.thumbnail((_WIDTH, _HEIGHT))
    return small


def _data_url(image: Any) -> str:
    lossless = image.mode == "RGBA" or image.width * image.height <= _LOSSLESS_PIXELS
    out, form = io.BytesIO(), "PNG" if lossless else "JPEG"
    image.save(out, form, optimize=True)
    return f"data:image/{form.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"
