"""Opening stored images by Pillow, of the extra "vlm": headers alone, in formats that run no program."""

from __future__ import annotations

import contextlib
import importlib
import io
from functools import cache
from typing import Any

from meshfeed.extras import install

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""Formats that Pillow may read from stored bytes: none that runs a program."""

_MOST_BRANDS_BYTES = 256
_NAMES = {"AVIF": "an AVIF", "WEBP": "a WebP"}


def opened_image(data: bytes) -> Any:
    """An image, a PIL.Image.Image; nothing is decoded.

    Raises ImportError without Pillow, or for a format that this Pillow is built without; for other bytes
    whatever Pillow raises.
    """
    try:
        from PIL import Image, features
    except ImportError as missing:
        raise ImportError(f"reading images needs Pillow: {install('vlm')}") from missing
    _load_plugins()
    found = None
    if brands_of(data) & {b"avif", b"avis"}:
        found = "AVIF"
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        found = "WEBP"
    if found is not None and (found not in Image.OPEN or _lacks(features, found.lower())):
        raise ImportError(
            f"{_NAMES[found]} image, which this Pillow cannot read; install one that does (its wheels read "
            f"AVIF from 11.3 on), or convert it to JPEG or PNG"
        )
    return Image.open(io.BytesIO(data), formats=[name for name in FORMATS if name in Image.OPEN])


@cache
def _load_plugins() -> None:
    """Load Pillow's plugins for FORMATS: loading all forty would take twice as long."""
    from PIL import Image

    Image.preinit()
    for name in ("Avif", "Tiff", "WebP"):
        with contextlib.suppress(ImportError):  # of a Pillow without it
            importlib.import_module(f"PIL.{name}ImagePlugin")


def _lacks(features: Any, name: str) -> bool:
    """Whether this Pillow was built without one of its own codecs; codecs of plugins do not count."""
    return name in {*features.modules, *features.features} and not features.check(name)


def brands_of(data: bytes) -> set[bytes]:
    """What a file of ISO boxes says that it is: the major brand and the compatible ones; empty of others."""
    if data[4:8] != b"ftyp":
        return set()
    box = data[8 : min(int.from_bytes(data[:4], "big"), _MOST_BRANDS_BYTES)]
    return {data[8:12], *(box[at : at + 4] for at in range(8, len(box), 4))}
