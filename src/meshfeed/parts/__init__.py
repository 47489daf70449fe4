"""Images, audio and video in samples: what an index knows of them, and what they become in a model.

Read `types` first, then `rule`, then the families: `images`, `audio`.
"""

from meshfeed.parts.rule import PartRule, Rules, check_rules
from meshfeed.parts.types import KINDS, Kind, Parts

__all__ = ["KINDS", "Kind", "PartRule", "Parts", "Rules", "check_rules"]
