"""Documents with images, audio and video: their store, rule, decoding and encoders.

Read `rule` first, then `parts` and `fields`.
"""

from meshfeed.multimodal.encoded import EncoderExchange, encoder_routes_of, exchange_encoded
from meshfeed.multimodal.processor import PartField, PartSize, Processor
from meshfeed.multimodal.rule import MROPE, Multimodal
from meshfeed.parts.store import MultimodalStore, MultimodalWriter

__all__ = [
    "MROPE",
    "EncoderExchange",
    "Multimodal",
    "MultimodalStore",
    "MultimodalWriter",
    "PartField",
    "PartSize",
    "Processor",
    "encoder_routes_of",
    "exchange_encoded",
]
