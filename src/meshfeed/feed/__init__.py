"""The virtual dataloader: plan, read, deliver and build ahead on a thread, and hand steps to the loop.

Read in this order: `feed` (what is open, and where a changed run begins), `place` (this rank's) and `terms`
(the recipe's), `reading` (the path of a sequence), `stepping` (step k for one rank, planned ahead), `run` and
`prefetcher` (from there to the user's loop), `loop` (one run after another), `source` (what Feed and
Exchange share), `device`, `nested` and `batch` (what the loop receives), `options` and `launch` (arguments).
"""

from meshfeed.feed.feed import Feed

__all__ = ["Feed"]
