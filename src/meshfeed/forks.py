"""What a forked child does first: forget the parent's threads, which are not there, and its connections.

Peers detect a dead rank by its closed connections. A trainer forks data workers and uploads. A child that
kept the connections open would hide the death of its parent.

`import meshfeed` imports this, so that it knows of every fork after it, also of one before the first feed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from functools import cached_property
from typing import Any, Protocol

of_parent: weakref.WeakSet[Any] = weakref.WeakSet()
"""In a forked child: the rendezvous stores that it must leave alone: that of its parent's default group, and
connections that its parent uses."""


class Forks(Protocol):
    """An object with locks or connections."""

    def forget_parent(self) -> None:
        """In a forked child: the parent's threads hold no lock here, and its connections are its own."""


def at_fork(one: Forks) -> None:
    """Call an object's `forget_parent` in each forked child, while it exists."""
    _all.add(one)


_all: weakref.WeakSet[Forks] = weakref.WeakSet()


def _forget_parent() -> None:
    for one in list(_all):
        one.forget_parent()


def _free_properties() -> None:
    """Before Python 3.12 a cached property has a lock, which a thread of the parent may hold."""
    modules = [module for name, module in sys.modules.items() if name.startswith("meshfeed")]
    classes = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    for each in (each for kind in classes for each in vars(kind).values()):
        if isinstance(each, cached_property):
            each.lock = threading.RLock()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_forget_parent)
if sys.version_info < (3, 12):
    os.register_at_fork(after_in_child=_free_properties)


class Private:
    """Descriptors that forked children close and executed programs do not inherit.

    In a forked child each number then refers to /dev/null. The number stays in use, so a library that closes
    it there, as gloo does, cannot close another file.
    """

    def __init__(self) -> None:
        self._files: dict[int, tuple[int, int]] = {}
        at_fork(self)

    def add(self, descriptor: int) -> None:
        """Hide an open descriptor from children while both it and this object exist."""
        os.set_inheritable(descriptor, False)
        self._files[descriptor] = _file_of(descriptor)

    def forget_parent(self) -> None:
        """Close them in a forked child."""
        for descriptor, file in self._files.items():
            # each is closed first, so that this works where none is free
            with contextlib.suppress(OSError):
                if _file_of(descriptor) == file:  # else it was closed, and the number may be another file's
                    os.close(descriptor)
                    _put(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), descriptor)


def _put(opened: int, descriptor: int) -> None:
    """Give an open file that number, and no other."""
    if opened != descriptor:
        os.dup2(opened, descriptor, inheritable=False)
        os.close(opened)


def _file_of(descriptor: int) -> tuple[int, int]:
    """(device, inode) of an open file."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _note_default_store() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        of_parent.add(dist.distributed_c10d._get_default_store())


os.register_at_fork(after_in_child=_note_default_store)
