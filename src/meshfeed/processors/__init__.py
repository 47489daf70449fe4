"""Processors that ship: images and audio as the encoders of published models take them.

The contract is `sequence/processor.py`. `pixels` has what all processors of images share, and `resizing`
Pillow's bits, faster.
"""

from meshfeed.processors.patches import NativePatches
from meshfeed.processors.pixels import ImageProcessor, rgb_image
from meshfeed.processors.tiles import AnyResPixels, FixedPixels, TiledPixels
from meshfeed.processors.whisper import WhisperFeatures

__all__ = [
    "AnyResPixels",
    "FixedPixels",
    "ImageProcessor",
    "NativePatches",
    "TiledPixels",
    "WhisperFeatures",
    "rgb_image",
]
