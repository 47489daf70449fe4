"""Connections to the rendezvous store on which one may wait.

Who waits on a connection keeps every other thread from it. The user's own is therefore never waited on:
another feed, a checkpoint thread or torch may need it, and for the very thing that is waited for.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Generator
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

FAILURES = (RuntimeError, dist.DistError)  # of a store: its host is gone, or was never reached

_idle: weakref.WeakKeyDictionary[Store, list[tuple[int, Store]]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def own_connection(store: Store) -> Generator[Store | None]:
    """A connection on which one may wait without keeping others from theirs; None where there is none.

    Connecting may take seconds where names resolve slowly, so it is kept for the next run.
    """
    idle = _idle.setdefault(store, [])
    process, own = idle.pop() if idle else (0, None)
    if process != os.getpid():  # a fork's parent goes on using its own
        process, own = os.getpid(), _clone(store)
    yield own
    if own is not None:
        idle.append((process, own))


def _clone(store: Store) -> Store | None:
    base: Any = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    # a FileStore waits in a busy loop
    if isinstance(base, dist.FileStore) or not hasattr(store, "clone"):  # pyright: ignore[reportPrivateImportUsage]
        return None
    try:
        return cast(Any, store).clone()
    except FAILURES:
        return None
