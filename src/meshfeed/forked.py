"""The rendezvous stores that a forked process has from its parent, and must leave alone.

`import meshfeed` imports this, so that it knows of every fork after it, also of one before the first feed.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any

of_parent: weakref.WeakSet[Any] = weakref.WeakSet()
"""In a forked child: the store of its parent's default group, and connections that its parent uses."""


def _note_default_store() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        of_parent.add(dist.distributed_c10d._get_default_store())


os.register_at_fork(after_in_child=_note_default_store)
