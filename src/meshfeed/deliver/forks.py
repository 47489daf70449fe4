"""Descriptors that belong to this process alone and must not stay open in its children.

Peers detect a dead rank by its closed connections. A trainer forks data workers and uploads. A child that
kept the connections open would hide the death of its parent.
"""

from __future__ import annotations

import contextlib
import os
import weakref


class Private:
    """Descriptors that forked children close and executed programs do not inherit.

    In a forked child each number then refers to /dev/null. The number stays in use, so a library that closes
    it there, as gloo does, cannot close another file.
    """

    def __init__(self) -> None:
        self._files: dict[int, tuple[int, int]] = {}
        _instances.add(self)

    def add(self, descriptor: int) -> None:
        """Hide an open descriptor from children while both it and this object exist."""
        os.set_inheritable(descriptor, False)
        file = _file_of(descriptor)
        if file is not None:
            self._files[descriptor] = file

    def release(self) -> None:
        """Close them in a forked child."""
        with contextlib.suppress(OSError):
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor, file in self._files.items():
                if _file_of(descriptor) == file:  # else it was closed, and the number is another file's
                    os.dup2(nothing, descriptor, inheritable=False)
            os.close(nothing)
        self._files.clear()


_instances: weakref.WeakSet[Private] = weakref.WeakSet()


def _release_all() -> None:
    for each in list(_instances):
        each.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_all)


def _file_of(descriptor: int) -> tuple[int, int] | None:
    """(device, inode) of an open file; None if the descriptor is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino
