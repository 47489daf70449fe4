"""Limits the number of open files: a recipe may have more files than a process may have descriptors.

Files use at most half of the allowed descriptors. Opening one more first closes another that is not being
read and was not read recently; it is opened again when needed. The CLOCK algorithm chooses the victim:
reading an open file marks it, and the search goes round the ring, clearing marks, to the first unmarked file
(Corbató, "A Paging Experiment with the Multics System", 1968). So a read costs one mark and never waits.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable

from meshfeed.errors import StoreError


class Descriptor:
    """A file that is open while it is read, and may be closed otherwise.

    Args:
        opens: opens it; called again if it was closed meanwhile, under a lock that all files share.

    Attributes:
        lock: of its state. The owner of the file may use it for other short work.
    """

    def __init__(self, opens: Callable[[], int]) -> None:
        self.opens = opens
        self.lock = threading.Lock()
        self._fd: int | None = None
        self._num_readers, self._is_marked, self._is_over = 0, False, False
        _all.add(self)

    def acquire(self) -> int:
        """The open file, which stays open until `release`. Raises the errors of opening it."""
        with self.lock:
            if self._fd is not None:
                self._num_readers += 1
                self._is_marked = True
                return self._fd
        return _ring.opened(self)

    def release(self) -> None:
        """Once for each `acquire`; under `lock`."""
        self._num_readers -= 1
        if self._is_over and not self._num_readers:
            self._close()

    def close(self) -> None:
        """Close it, or let its last current reader close it."""
        _ring.remove(self)
        with self.lock:
            self._is_over = self._num_readers > 0
            if not self._is_over:
                self._close()

    def hold(self, fd: int | None = None) -> int | None:
        """For the ring: add a reader; the open file, if any. fd: the file, newly opened."""
        with self.lock:
            self._fd = self._fd if fd is None else fd
            self._num_readers += self._fd is not None
            return self._fd

    def give_up(self, *, marked: bool) -> bool:
        """For the ring: close it unless it is being read. A mark spares it once, except if `marked`."""
        with self.lock:
            spared = self._num_readers > 0 or (self._is_marked and not marked)
            self._is_marked = False
            if not spared:
                self._close()
            return not spared

    def forget_threads(self) -> None:
        """In a forked child: the parent's threads do not hold the lock or read here."""
        self.lock = threading.Lock()
        self._num_readers = 0

    def _close(self) -> None:
        fd, self._fd, self._is_over = self._fd, None, False
        if fd is not None:
            os.close(fd)


class _Ring:
    """The open files. Its lock is taken before a file's lock, never after.

    The lock is reentrant: garbage collection may close a file, and so call `remove`, at any point.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._files: OrderedDict[Descriptor, None] = OrderedDict()

    def opened(self, file: Descriptor) -> int:
        """Open a file for one more reader; close others if too many are open."""
        with self.lock:
            fd = file.hold()
            if fd is not None:  # another thread has just opened it
                return fd
            most = most_open()
            while len(self._files) >= most and self._give_up_one():
                pass
            fd = self._open(file)
            file.hold(fd)
            self._files[file] = None
            return fd

    def remove(self, file: Descriptor) -> None:
        """Remove a file that will be closed."""
        with self.lock:
            self._files.pop(file, None)

    def _open(self, file: Descriptor) -> int:
        while True:
            try:
                return file.opens()
            except StoreError as error:  # other code has used up the other half
                reason = getattr(error.__cause__, "errno", None)
                if reason not in (errno.EMFILE, errno.ENFILE) or not self._give_up_one():
                    raise

    def _give_up_one(self) -> bool:
        """Close the first file in the ring that may be closed; False if all are being read."""
        for marked in (False, True):
            for _ in range(len(self._files)):
                if not self._files:  # garbage was collected meanwhile
                    return False
                file, _ = self._files.popitem(last=False)
                if file.give_up(marked=marked):
                    return True
                self._files[file] = None
        return False


def most_open() -> int:
    """Half of the descriptors that this process may have now."""
    try:
        import resource
    except ImportError:  # not on every system
        return 128
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 62 if soft == resource.RLIM_INFINITY else max(soft // 2, 1)


_ring = _Ring()
_all: weakref.WeakSet[Descriptor] = weakref.WeakSet()


def _forget_threads() -> None:
    for file in list(_all):
        file.forget_threads()
    _ring.lock.release()


if hasattr(os, "register_at_fork"):
    # hold the lock during a fork, so that no file is in an intermediate state
    os.register_at_fork(
        before=_ring.lock.acquire, after_in_parent=_ring.lock.release, after_in_child=_forget_threads
    )
