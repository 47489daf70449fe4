"""Images, audio and video in samples: what an index knows of them, and what they become in a model.

Read `types` first, then the families: `images`, `video`, `audio`.
"""

from meshfeed.parts.audio import WhisperAudio
from meshfeed.parts.expansion import Expansion
from meshfeed.parts.images import AnyResImages, FixedImages, NativeImages, TiledImages
from meshfeed.parts.types import KINDS, Kind, PartRule, Parts, Rules, check_rules
from meshfeed.parts.video import NativeVideo

__all__ = [
    "KINDS",
    "AnyResImages",
    "Expansion",
    "FixedImages",
    "Kind",
    "NativeImages",
    "NativeVideo",
    "PartRule",
    "Parts",
    "Rules",
    "TiledImages",
    "WhisperAudio",
    "check_rules",
]
