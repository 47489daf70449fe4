"""Descriptors that belong to this process alone and must not stay open in its children.

Peers detect a dead rank by its closed connections. A trainer forks data workers and uploads. A child that
kept the connections open would hide the death of its parent.
"""

from __future__ import annotations

import contextlib
import os

from meshfeed.files.forks import at_fork


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
