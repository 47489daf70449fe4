"""The virtual dataloader: plan, read, deliver and build ahead on a thread, and hand steps to the loop.

Read in this order: `feed` (the path of a sequence), `source` (what Feed and Exchange share), `run` (from
producer to loop), `stepping` (step k for one rank, planned ahead), `device` and `batch` (what the loop
receives), `encoded` (encoder outputs between ranks), `options` and `launch` (arguments, and this process's
rank). Where a run begins, and what ends it, is in `changing`.
"""

from meshfeed.feed.feed import Feed

__all__ = ["Feed"]
