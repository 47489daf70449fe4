"""What ships for published models: how many tokens images, audio and video become, and what encoders take.

A rule counts (`parts.PartRule`), and a processor decodes (`multimodal.Processor`); those of a family of
models share a file. `pixels` has what all processors of images share, Pillow's bits too, faster.

Sizes are computed with the floating-point operations of the published processors, in their order: IEEE 754
rounds division, multiplication and square root alike on every machine.

The default `alpha` of each rule is 6 x the width of its usual encoder: a layer of width d with a feed-forward
of 4 d spends 24 d^2 FLOPs on a patch, and 4 d on each of its pairs with another.
"""

from meshfeed.processors.gemma import (
    BudgetFrames,
    BudgetImages,
    BudgetPatches,
    BudgetVideo,
    CroppedImages,
    CroppedPixels,
)
from meshfeed.processors.glm import SecondsVideo
from meshfeed.processors.idefics import PlacedPixels, PlacedTiles
from meshfeed.processors.omni import OmniVideo
from meshfeed.processors.patches import NativeImages, NativePatches
from meshfeed.processors.pixels import ImageProcessor, rgb_image
from meshfeed.processors.pixtral import RowImages, RowPatches
from meshfeed.processors.tiles import (
    AnyResImages,
    AnyResPixels,
    FixedImages,
    FixedPixels,
    TiledImages,
    TiledPixels,
)
from meshfeed.processors.video import (
    FixedFrames,
    FixedVideo,
    NativeVideo,
    NumberedVideo,
    TimedVideo,
    VideoPatches,
)
from meshfeed.processors.whisper import WhisperAudio, WhisperFeatures

__all__ = [
    "AnyResImages",
    "AnyResPixels",
    "BudgetFrames",
    "BudgetImages",
    "BudgetPatches",
    "BudgetVideo",
    "CroppedImages",
    "CroppedPixels",
    "FixedFrames",
    "FixedImages",
    "FixedPixels",
    "FixedVideo",
    "ImageProcessor",
    "NativeImages",
    "NativePatches",
    "NativeVideo",
    "NumberedVideo",
    "OmniVideo",
    "PlacedPixels",
    "PlacedTiles",
    "RowImages",
    "RowPatches",
    "SecondsVideo",
    "TiledImages",
    "TiledPixels",
    "TimedVideo",
    "VideoPatches",
    "WhisperAudio",
    "WhisperFeatures",
    "rgb_image",
]
