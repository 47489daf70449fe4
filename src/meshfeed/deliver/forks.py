"""Descriptors that belong to this process alone, and must not live on in its children.

Peers notice that a rank has died when its connections close. A trainer forks, for data workers and uploads; a
child that kept the connections would hide that death for as long as the child lives.
"""

from __future__ import annotations

import contextlib
import os
import weakref


class Private:
    """Descriptors that forked children let go, and programs that this process starts never get.

    In a forked child each number then stands for /dev/null. It stays taken: a library that closes it there,
    as gloo does, closes no other file.
    """

    def __init__(self) -> None:
        self._files: dict[int, tuple[int, int]] = {}
        _every.add(self)

    def add(self, descriptor: int) -> None:
        """Keep an open descriptor from children for as long as it and this object live."""
        os.set_inheritable(descriptor, False)
        file = _file_of(descriptor)
        if file is not None:
            self._files[descriptor] = file

    def let_go(self) -> None:
        """In a forked child: drop them."""
        with contextlib.suppress(OSError):
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor, file in self._files.items():
                if _file_of(descriptor) == file:  # else it was closed, and the number is another file's
                    os.dup2(nothing, descriptor, inheritable=False)
            os.close(nothing)
        self._files.clear()


_every: weakref.WeakSet[Private] = weakref.WeakSet()


def _let_go_all() -> None:
    for each in list(_every):
        each.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_all)


def _file_of(descriptor: int) -> tuple[int, int] | None:
    """What tells a file from any other that is open; None where nothing is."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino
