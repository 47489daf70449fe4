"""Documents with images, audio and video. Read `rule` first, then `index`, `encoders`, `decode`, `build`."""

from meshfeed.sequence.multimodal.rule import MROPE, Multimodal

__all__ = ["MROPE", "Multimodal"]
