"""Images, audio and video in samples: what an index knows of them, and what they become in a model.

Read `types` first, then `expansion`.
"""

from meshfeed.parts.expansion import Expansion
from meshfeed.parts.types import KINDS, Kind, PartRule, Parts, Rules, check_rules

__all__ = ["KINDS", "Expansion", "Kind", "PartRule", "Parts", "Rules", "check_rules"]
