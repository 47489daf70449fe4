"""Encoders of images, audio and video: packs that are even for them too, who encodes what, and who gets it.

`balance` makes packs even; `assign` gives each part a rank, and says where outputs go.
"""

from meshfeed.multimodal.encoders.assign import (
    ROUTE,
    EncoderPlan,
    EncoderRoute,
    encoder_routes,
    plan_encoder,
)
from meshfeed.multimodal.encoders.balance import even_out

__all__ = ["ROUTE", "EncoderPlan", "EncoderRoute", "encoder_routes", "even_out", "plan_encoder"]
