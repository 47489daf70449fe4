"""Encoders of images, audio and video: packs that are even for them too, who encodes what, and who gets it.

`balance` makes packs even; `assign` gives each part a rank; `routes` says where outputs go.
"""

from meshfeed.multimodal.encoders.assign import EncoderPlan, plan_encoder
from meshfeed.multimodal.encoders.balance import even_out
from meshfeed.multimodal.encoders.routes import ROUTE, EncoderRoute, encoder_routes

__all__ = ["ROUTE", "EncoderPlan", "EncoderRoute", "encoder_routes", "even_out", "plan_encoder"]
