"""Items whose lengths are known only once they are read: gather lengths, plan, reroute, pack.

Read it in this order: `keys` (what an item holds), `items` (items as bytes), `census` (who has which),
`seats` (who exchanges with whom), `routing` (which bytes go where), `group` (two collectives), `steps` (the
separate calls), and `loop` (the Exchange that calls them), with `pulling` and `ways`.
"""

from meshfeed.exchange.census import Census
from meshfeed.exchange.group import Group
from meshfeed.exchange.items import encode, nothing
from meshfeed.exchange.keys import Keys
from meshfeed.exchange.loop import Exchange
from meshfeed.exchange.seats import Seats
from meshfeed.exchange.steps import Received, gather_lengths, pack, plan, reroute

__all__ = [
    "Census",
    "Exchange",
    "Group",
    "Keys",
    "Received",
    "Seats",
    "encode",
    "gather_lengths",
    "nothing",
    "pack",
    "plan",
    "reroute",
]
