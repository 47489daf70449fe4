"""Items whose lengths are known only after reading: gather lengths, plan, reroute, pack.

Read in this order: `keys` (what an item holds), `items` (items as bytes), `lengths` (which rank has which
items), `membership` (which ranks exchange), `routing` (which bytes go where), `steps` (the separate calls),
`rerouting` (which calls them for a run, with `item_source` and `delivery`), and `loop` (the Exchange).
"""

from meshfeed.deliver import Group
from meshfeed.exchange.items import encode, nothing
from meshfeed.exchange.keys import Keys
from meshfeed.exchange.lengths import GatheredLengths
from meshfeed.exchange.loop import Exchange
from meshfeed.exchange.membership import Membership
from meshfeed.exchange.steps import Received, gather_lengths, pack, plan, reroute

__all__ = [
    "Exchange",
    "GatheredLengths",
    "Group",
    "Keys",
    "Membership",
    "Received",
    "encode",
    "gather_lengths",
    "nothing",
    "pack",
    "plan",
    "reroute",
]
