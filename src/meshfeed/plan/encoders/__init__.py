"""Encoders of images, audio and video: packs that are even for them too, who encodes what, and who gets it.

`even_out` with `swap` balances the packs; `assign` gives each part a rank; `routes` says where outputs go.
"""

from meshfeed.plan.encoders.assign import Encoder, EncoderPlan, plan_encoder
from meshfeed.plan.encoders.routes import ROUTE, EncoderRoute, encoder_routes

__all__ = ["ROUTE", "Encoder", "EncoderPlan", "EncoderRoute", "encoder_routes", "plan_encoder"]
