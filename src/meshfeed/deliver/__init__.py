"""Columns -> the ranks: four deliveries of the same bytes."""

from meshfeed.deliver.choose import levels_of, make_delivery, tell
from meshfeed.deliver.delivery import Delivery, Direct, EndOfStream, Traffic
from meshfeed.deliver.error_codec import ErrorRecord, ranks_in_words
from meshfeed.deliver.failure import Failures, LeftBehindError, fail_everywhere, tell_left_behind
from meshfeed.deliver.group import Group
from meshfeed.deliver.meeting import Meeting
from meshfeed.deliver.rendezvous import default_store
from meshfeed.deliver.roll_call import Whereabouts
from meshfeed.deliver.share import can_share
from meshfeed.deliver.verify import Digester, Digests, Verifier

__all__ = [
    "Delivery",
    "Digester",
    "Digests",
    "Direct",
    "EndOfStream",
    "ErrorRecord",
    "Failures",
    "Group",
    "LeftBehindError",
    "Meeting",
    "Traffic",
    "Verifier",
    "Whereabouts",
    "can_share",
    "default_store",
    "fail_everywhere",
    "levels_of",
    "make_delivery",
    "ranks_in_words",
    "tell",
    "tell_left_behind",
]
