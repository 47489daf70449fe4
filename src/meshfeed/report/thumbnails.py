"""Small pictures of stored images, as data URLs."""

from __future__ import annotations

import base64
import io
import warnings
from typing import Any

from meshfeed.formats.images import opened_image
from meshfeed.parts.types import in_pixels

_WIDTH, _HEIGHT = 480, 240  # pixels, at most
_LOSSLESS_PIXELS = 96 * 96


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
