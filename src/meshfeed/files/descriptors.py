"""How many files stay open to be read: a recipe may have more of them than a process may have descriptors.

Half of the descriptors that the system allows are for them. Whoever opens one more closes another first, that
nobody is reading or has read for long; it is opened again when it is read again. They stand in a ring: a
second read leaves a mark, and who looks for a victim goes round, taking marks away, to the first file without
one (Corbató, "A Paging Experiment with the Multics System", 1968). So a read costs a mark, and no waiting.
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
    """A file that is open while it is read, and may be closed when it is not.

    Args:
        opens: opens it. Called again where it was closed meanwhile, under a lock that all files share.

    Attributes:
        lock: of its state. Whoever has the file may use it for short work of their own.
    """

    def __init__(self, opens: Callable[[], int]) -> None:
        self.opens = opens
        self.lock = threading.Lock()
        self._fd: int | None = None
        self._num_readers, self._is_marked, self._is_over = 0, False, False
        _all.add(self)

    def acquire(self) -> int:
        """The open file, which stays open until `release`. Raises what opening it raises."""
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
        """Close it, or have the last one close it who is reading it now."""
        _ring.remove(self)
        with self.lock:
            self._is_over = self._num_readers > 0
            if not self._is_over:
                self._close()

    def hold(self, fd: int | None = None) -> int | None:
        """For the ring: the open file, for one more reader. fd: it was opened just now."""
        with self.lock:
            self._fd = self._fd if fd is None else fd
            self._num_readers += self._fd is not None
            return self._fd

    def give_up(self, *, marked: bool) -> bool:
        """For the ring: close it, unless somebody reads it. A mark spares it once, but where `marked`."""
        with self.lock:
            spared = self._num_readers > 0 or (self._is_marked and not marked)
            self._is_marked = False
            if not spared:
                self._close()
            return not spared

    def forget_threads(self) -> None:
        """In a forked child: no thread of the parent holds the lock here, or reads."""
        self.lock = threading.Lock()
        self._num_readers = 0

    def _close(self) -> None:
        fd, self._fd, self._is_over = self._fd, None, False
        if fd is not None:
            os.close(fd)


class _Ring:
    """The files that are open. Its lock is taken before a file's, never after.

    Its holder may find itself in `remove`: wherever Python collects garbage, it may close what that had open.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._files: OrderedDict[Descriptor, None] = OrderedDict()

    def opened(self, file: Descriptor) -> int:
        """Open a file for one more reader, in the place of others where there are many."""
        with self.lock:
            fd = file.hold()
            if fd is not None:  # by another thread, just now
                return fd
            most = most_open()
            while len(self._files) >= most and self._give_up_one():
                pass
            fd = self._open(file)
            file.hold(fd)
            self._files[file] = None
            return fd

    def remove(self, file: Descriptor) -> None:
        """It will be closed."""
        with self.lock:
            self._files.pop(file, None)

    def _open(self, file: Descriptor) -> int:
        while True:
            try:
                return file.opens()
            except StoreError as error:  # others have taken the other half, too
                reason = getattr(error.__cause__, "errno", None)
                if reason not in (errno.EMFILE, errno.ENFILE) or not self._give_up_one():
                    raise

    def _give_up_one(self) -> bool:
        """Close the first file round the ring that may be; False where all are being read."""
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
    # no fork while a file is between two states
    os.register_at_fork(
        before=_ring.lock.acquire, after_in_parent=_ring.lock.release, after_in_child=_forget_threads
    )
