"""Documents with images, audio and video. Read `rule` first, then `parts` and `fields`."""

from meshfeed.sequence.multimodal.rule import MROPE, Multimodal

__all__ = ["MROPE", "Multimodal"]
