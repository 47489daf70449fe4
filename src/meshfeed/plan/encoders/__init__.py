"""Encoders of images, audio and video: packs that are even for them too, who encodes what, and who gets it.

`even_out` balances the packs; `assign` gives each part a rank, and says where outputs go.
"""

from meshfeed.plan.encoders.assign import (
    ROUTE,
    Encoder,
    EncoderPlan,
    EncoderRoute,
    encoder_routes,
    plan_encoder,
)

__all__ = ["ROUTE", "Encoder", "EncoderPlan", "EncoderRoute", "encoder_routes", "plan_encoder"]
