"""Worker processes that make the items of a user's dataset ahead.

Each worker has its own pipe, so a worker that is killed within a message breaks only that pipe. A thread of
the rank serves each worker: it sends the next task and receives the item. A fetch waits for these threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, TypeVar, cast

import torch

from meshfeed.errors import MeshfeedError, StoreError

P = TypeVar("P", bound=Hashable)

_starting = threading.Lock()  # so that no worker inherits an end of another worker's pipe
_GRACE_S = 2.0  # how long busy workers may take to end
_LAZY = "numpy.fft", "numpy.ma", "numpy.random"  # that NumPy imports where they are named first
_KILLED_S = 60.0  # and killed ones, which end at once but on an overloaded machine
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT_BYTES, _FROM_HEAP_BYTES = 256 << 20, 32 << 20  # the second is the most that glibc takes


@dataclass(frozen=True, slots=True)
class Failure:
    """How a worker failed to make an item: its number, and the traceback as text."""

    worker: int
    text: str


class Workers(Generic[P]):
    """Makes announced items ahead, and returns them by their place.

    Fetch items in the order of announcement: an item announced before a fetched one, but not fetched, belongs
    to an abandoned iteration and is dropped. Items that were never announced are made at once.

    Args:
        make: place, or the result of `read` for it -> item; runs in the workers.
        count: worker processes, from 1. They start with the first requested item.
        timeout_s: how long to wait for one item.
        name: of the store, for messages.
        read: place -> what a worker needs to make the item; runs in this process, on the worker's thread. If
            it raises a MeshfeedError, that is the item.
        received: (task, result of `make`) -> item; runs on the worker's thread.
        called: place -> its name in messages.
        is_full: whether so many items wait to be fetched that no further one is begun.
    """

    def __init__(
        self,
        make: Callable[[Any], Any],
        count: int,
        timeout_s: float,
        name: str,
        *,
        read: Callable[[P], Any] | None = None,
        received: Callable[[Any, Any], Any] = lambda task, made: made,
        is_full: Callable[[Iterable[Any]], bool] = lambda items: False,
        called: Callable[[P], str] = str,
    ) -> None:
        self._make, self._count, self._timeout_s, self._name = make, count, timeout_s, name
        self._read, self._received, self._is_full, self._called = read, received, is_full, called
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # one fetch at a time
        self._queue: deque[P] = deque()  # not yet given to a worker
        self._order: deque[P] = deque()  # announced, not yet fetched
        self._uses: Counter[P] = Counter()  # how often each is in `_order`
        self._now: frozenset[P] = frozenset()  # of the current fetch
        self._made: dict[P, Any] = {}
        self._threads: list[threading.Thread] = []
        self._processes: list[Any] = []
        self._closing = False
        self._dead = self._broken = ""

    def announce(self, places: Sequence[P]) -> None:
        """Announce items that will be fetched next, in this order."""
        with self._changed:
            for at in places:
                self._order.append(at)
                self._uses[at] += 1
                if self._uses[at] == 1:
                    self._queue.append(at)
            self._wake()

    def fetch(self, places: Sequence[P]) -> list[Any]:
        """The result of `make` for each place, or a Failure.

        Raises StoreError if a worker dies, an item takes longer than `timeout_s`, or the store is closed.
        """
        with self._turn, self._changed:
            interrupted, self._now = self._now, frozenset(places)
            for at in interrupted:
                self._forget_unwanted(at)
            self._queue.extendleft(reversed([at for at in dict.fromkeys(places) if not self._uses[at]]))
            for at in places:
                if self._uses[at]:
                    self._advance(at)
            self._wake()
            for at in places:
                self._await(at)
            items = [self._made[at] for at in places]
            self._now = frozenset()
            for at in set(places):
                self._forget_unwanted(at)
            self._changed.notify_all()  # `is_full` may have changed
        return items

    def close(self) -> None:
        """End the workers. The current fetch raises StoreError."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        deadline = time.monotonic() + _GRACE_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        for process in self._processes:
            with contextlib.suppress(ValueError):  # ended, and closed by its thread
                process.kill()  # those that are still busy
        for ending in (*self._threads, *self._processes):
            with contextlib.suppress(ValueError):
                ending.join(_KILLED_S)

    # -- the queue; all under the lock ----------------------------------------------------------------

    def _advance(self, at: P) -> None:
        """Remove `at`, and everything announced before it, from the announced items."""
        while True:
            passed = self._order.popleft()
            self._uses[passed] -= 1
            self._forget_unwanted(passed)
            if passed == at:
                return

    def _forget_unwanted(self, at: P) -> None:
        if not self._uses[at]:
            del self._uses[at]
            if at not in self._now:
                self._made.pop(at, None)

    def _wanted(self, at: P) -> bool:
        return (at in self._uses or at in self._now) and at not in self._made

    def _await(self, at: P) -> None:
        """Wait until an item has arrived; releases the lock meanwhile."""
        self._changed.wait_for(
            lambda: at in self._made or self._closing or self._dead or self._broken, self._timeout_s
        )
        if at in self._made:
            return
        if self._closing:
            raise StoreError(f"{self._name}: closed while {self._called(at)} was being made")
        if self._dead:
            raise StoreError(
                f"{self._name}: {self._dead} while {self._called(at)} was fetched; signal 9 is most often "
                f"the system out of memory: use fewer workers or smaller items"
            )
        if self._broken:
            raise StoreError(
                f"{self._name}: its workers have failed while {self._called(at)} was fetched:\n{self._broken}"
            )
        raise StoreError(
            f"{self._name}: {self._called(at)} has not arrived after {self._timeout_s:g} s; check what "
            f"makes it in a worker, or raise Machine(item_timeout_s=)"
        )

    def _wake(self) -> None:
        """Wake the threads; the first time, start them."""
        if not self._threads and not self._closing:
            for number in range(self._count):
                thread = threading.Thread(
                    target=self._run, args=(number,), name="meshfeed-workers", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        self._changed.notify_all()

    # -- the thread of a worker -----------------------------------------------------------------------

    def _run(self, number: int) -> None:
        try:
            process, pipe = self._started(number)
            with pipe:
                watch = _shut_at_the_end_of(process, pipe)
                try:
                    self._serve(pipe)
                    pipe.send(None)
                except (EOFError, OSError):
                    watch.join(_GRACE_S)
                    code = process.exitcode
                    died = (
                        f"was killed by signal {-code}"
                        if code and code < 0
                        else f"ended with exit code {code}"
                    )
                    with self._changed:
                        self._dead = self._dead or f"worker {number} (process {process.pid}) {died}"
                watch.join(_GRACE_S)
                process.kill()
                watch.join()
                process.close()  # close its descriptors now: an error may keep a reference to it
        except BaseException:  # raised by the fetch that waits for an item
            self._broken = traceback.format_exc()
        with self._changed:
            self._changed.notify_all()

    def _serve(self, pipe: Connection) -> None:
        """Exchange tasks and items until the end. Raises EOFError or OSError if the worker dies."""
        handed = self._handed(pipe, wait=True)
        while handed is not None:
            made = pipe.recv_bytes()
            following = self._handed(pipe, wait=False)  # before this one is unpacked: keeps the worker busy
            at, task = handed
            self._put(at, self._received(task, cast(Any, ForkingPickler).loads(made)))
            handed = self._handed(pipe, wait=True) if following is None else following

    def _handed(self, pipe: Connection, *, wait: bool) -> tuple[P, Any] | None:
        """Send a worker its next task; returns its place and the task, or None without one or at the end."""
        while (at := self._next(wait=wait)) is not None:
            try:
                task = at if self._read is None else self._read(at)
            except MeshfeedError as error:
                self._put(at, error)
                continue
            pipe.send(task)
            return at, task
        return None

    def _next(self, *, wait: bool) -> P | None:
        """Take the next place off the queue; None without one or at the end."""
        with self._changed:
            while not (self._closing or self._dead or self._broken):
                while self._queue and not self._wanted(self._queue[0]):
                    self._queue.popleft()
                if self._queue and not self._is_full(self._made.values()):
                    return self._queue.popleft()
                # where it is full, those of an abandoned iteration are passed over
                waits = {at for at in self._now if self._wanted(at)} if self._queue else ()
                for at in self._queue if waits else ():  # which may be long
                    if at in waits:
                        self._queue.remove(at)
                        return at
                if not wait:
                    break
                self._changed.wait()
        return None

    def _put(self, at: P, item: Any) -> None:
        with self._changed:
            if self._wanted(at):
                self._made[at] = item
            self._changed.notify_all()

    def _started(self, number: int) -> tuple[Any, Connection]:
        context = multiprocessing.get_context()
        for name in _LAZY:  # forked while another thread imports it, a worker would wait for that endlessly
            importlib.import_module(name)
        with _starting:
            mine, theirs = context.Pipe()
            process = cast(Any, context).Process(target=_work, args=(number, theirs, self._make), daemon=True)
            try:
                process.start()
            except Exception as error:
                mine.close()
                if (method := context.get_start_method()) == "fork":
                    raise
                raise StoreError(
                    f"workers cannot be started by {method!r}; the dataset must be of what pickle can send, "
                    f"and the script must start its work under `if __name__ == '__main__':`"
                ) from error
            finally:
                theirs.close()  # only the worker keeps the writing end, so that its death is noticed
            self._processes.append(process)
            return process, mine


def _shut_at_the_end_of(process: Any, pipe: Connection) -> threading.Thread:
    """A thread that shuts a worker's pipe when it ends, since processes it forked may keep the pipe open."""
    end = socket.socket(fileno=os.dup(pipe.fileno()))

    def watch() -> None:
        with end:
            process.join()
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # sent messages can still be received

    thread = threading.Thread(target=watch, name="meshfeed-workers", daemon=True)
    thread.start()
    return thread


def _work(number: int, pipe: Connection, make: Callable[[Any], Any]) -> None:
    """The main loop of a worker: make item after item, until it receives None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the rank, too, which ends us or goes on
    torch.set_num_threads(1)
    _keep_freed_memory()
    parent = multiprocessing.parent_process()
    if parent is not None:  # a killed rank leaves no worker, not even a busy one
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    while (at := pipe.recv()) is not None:
        try:
            item = make(at)
        except Exception:  # as text: its type may not pickle
            item = Failure(number, traceback.format_exc())
        pipe.send_bytes(_pickled(number, item))


def _keep_freed_memory() -> None:
    """Have malloc keep freed memory: the next item takes as much, and new pages cost more than filling."""
    with contextlib.suppress(AttributeError):  # of a libc other than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _FROM_HEAP_BYTES)


def _pickled(number: int, item: Any) -> Any:
    """An item ready to be sent, its tensors in shared memory; or a Failure with the reason."""
    pickler = cast(Any, ForkingPickler)
    try:
        return pickler.dumps(item)
    except Exception:
        text = traceback.format_exc()
        if "No space left on device" in text:
            text += (
                "\nThe shared memory is full: items made ahead are in /dev/shm until they are used. "
                "Give it more, in Docker by --shm-size, or use fewer workers or smaller items."
            )
        return pickler.dumps(Failure(number, text))
