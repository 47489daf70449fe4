"""What a forked child does first: forget the parent's threads, which are not there, and its connections."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forks(Protocol):
    """An object with locks or connections."""

    def forget_parent(self) -> None:
        """In a forked child: the parent's threads hold no lock here, and its connections are its own."""
        ...


def at_fork(one: Forks) -> None:
    """Call an object's `forget_parent` in each forked child, while it exists."""
    _all.add(one)


_all: weakref.WeakSet[Forks] = weakref.WeakSet()


def _forget_parent() -> None:
    for one in list(_all):
        one.forget_parent()


os.register_at_fork(after_in_child=_forget_parent)
