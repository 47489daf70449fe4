"""Columns -> the ranks: four ways to the same bytes."""

from meshfeed.deliver.alarm import Alarm
from meshfeed.deliver.cause import Cause
from meshfeed.deliver.delivery import Delivery, Direct, EndOfStream, Traffic, make_delivery, tell
from meshfeed.deliver.rendezvous import Meeting, default_store, ranks_in_words
from meshfeed.deliver.share import can_share
from meshfeed.deliver.verify import Digester, Digests, Verifier

__all__ = [
    "Alarm",
    "Cause",
    "Delivery",
    "Digester",
    "Digests",
    "Direct",
    "EndOfStream",
    "Meeting",
    "Traffic",
    "Verifier",
    "can_share",
    "default_store",
    "make_delivery",
    "ranks_in_words",
    "tell",
]
