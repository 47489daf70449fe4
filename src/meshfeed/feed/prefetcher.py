"""A producer that runs ahead of its consumer, on a thread."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from meshfeed.errors import DeliveryError, PeerError
from meshfeed.metrics import Span, StageClock

T = TypeVar("T")
ErrorOfJob = Callable[[], BaseException | None]


class _Taking(threading.local):
    """Whether the current thread is in `get`, as a signal handler that interrupted it is."""

    yes = False


class Prefetcher(Generic[T]):
    """Runs an iterator on a thread, at most `depth` items ahead; with a depth of 0, where `get` is called.

    Only items of the type `heavy` count. Light items are queued along with them, so the thread need not run
    between two heavy items: switching to it would cost a loop that takes both a millisecond.

    `get` raises errors in order, but a lost peer at once: the queued items would lead the trainer into a
    collective that its peer never joins.

    Attributes:
        depth: see above.
        num_made: heavy items made.
        num_ready: those of them that were not taken yet.
        is_full: whether it waits until one is taken, or has made all.
    """

    def __init__(
        self,
        items: Iterator[T],
        clock: StageClock,
        depth: int,
        heavy: type = object,
    ) -> None:
        self._items, self._clock, self.depth, self._heavy = items, clock, depth, heavy
        self.num_ready, self.num_made, self.is_full = 0, 0, False
        self._process = os.getpid()
        self._queue: deque[tuple[T, list[Span]]] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._finished = False
        self._error: BaseException | None = None
        self._over: Callable[[], object] | None = None
        self._taking = _Taking()
        self._making = threading.Lock()  # while an item is made where `get` is called
        self._thread = threading.Thread(target=self._run, name="meshfeed-prefetch", daemon=True)

    def start(self) -> None:
        """Start producing."""
        if self.depth:
            self._thread.start()

    def get(self, timeout_s: float, error_of_job: ErrorOfJob = lambda: None) -> tuple[T, list[Span]]:
        """The next item, and the producer's spans since the previous one.

        error_of_job: an error to raise instead; asked again after each `wake`.
        Raises StopIteration at the end and, at once, after `stop`; TimeoutError after `timeout_s`, the
        producer's own error, or the job's. With a depth of 0 it makes the item, however long that takes.
        """
        if self.depth and os.getpid() != self._process:
            raise DeliveryError(
                "this Feed belongs to the parent of this forked process, and its reader thread does not run "
                "here; make a new Feed in this process"
            )
        self._taking.yes = True
        try:
            return self._take(timeout_s, error_of_job) if self.depth else self._make(error_of_job)
        finally:
            self._taking.yes = False

    def _make(self, error_of_job: ErrorOfJob) -> tuple[T, list[Span]]:
        if other := error_of_job():
            raise other
        with self._making:
            if self._stopped:
                raise StopIteration
            item = next(self._items)
            self.num_made += isinstance(item, self._heavy)
            return item, self._clock.take()

    def _take(self, timeout_s: float, error_of_job: ErrorOfJob) -> tuple[T, list[Span]]:
        with self._changed:
            is_ready = self._changed.wait_for(lambda: self._has_news() or error_of_job(), timeout_s)
            if self._stopped:
                raise StopIteration
            if other := error_of_job():
                raise other
            if isinstance(self._error, PeerError) or (self._error and not self._queue):
                raise self._error
            if not is_ready:
                raise TimeoutError
            if not self._queue:
                raise StopIteration
            item, spans = self._queue.popleft()
            self.num_ready -= isinstance(item, self._heavy)
            self._changed.notify_all()
        return item, spans

    def wake(self) -> None:
        """Make a waiting consumer ask for the job's error again."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Stop. The producer runs until its iterator ends; its items are dropped. An item that is being made
        on another thread, or below a signal handler, is made."""
        with self._changed:
            self._stopped = True
            self._queue.clear()
            self._error = None  # its traceback would keep its frames' objects alive, such as memory maps
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the iterator to run to its end, as peers expect.

        False after `timeout_s`, and at once on the producer's thread, as where a user's dataset closes its
        feed, and in a signal handler that has interrupted `get`, which may hold what the thread waits for.
        """
        until = time.monotonic() + timeout_s
        if self._thread is threading.current_thread() or self._taking.yes:
            return False
        if not self._making.acquire(timeout=timeout_s):
            return False
        self._making.release()
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is exiting and starts no thread
                return False
        self._thread.join(max(0.0, until - time.monotonic()))
        return not self._thread.is_alive()

    def at_end(self, over: Callable[[], object]) -> None:
        """After `join` in vain: call this on the producer's thread when it ends, or here if it just has."""
        with self._changed:
            has_ended = self._finished
            self._over = over
        if has_ended and not self._taking.yes:
            over()

    @property
    def is_busy(self) -> bool:
        """Whether an item is being made where `get` was called, or a signal handler has interrupted `get`."""
        return self._taking.yes or self._making.locked()

    def _has_news(self) -> bool:
        return self._stopped or bool(self._queue) or self._finished or isinstance(self._error, PeerError)

    def _has_room(self, heavy: bool) -> bool:
        # there are few light items, but the queue must be bounded
        return self.num_ready < self.depth if heavy else len(self._queue) < 3 * self.depth

    def _offer(self, item: T, heavy: bool) -> None:
        with self._changed:
            self.num_made += heavy
            self.is_full = True
            self._changed.wait_for(lambda: self._stopped or self._has_room(heavy))
            self.is_full = False
            if not self._stopped:
                self._queue.append((item, self._clock.take()))
                self.num_ready += heavy
                self._changed.notify_all()

    def _run(self) -> None:
        try:
            for item in self._items:
                self._offer(item, isinstance(item, self._heavy))
        except BaseException as error:  # carried to the consumer, whatever it is
            with self._changed:
                self._error = None if self._stopped else error
        finally:
            with self._changed:
                self._finished = self.is_full = True
                over = self._over
                self._changed.notify_all()
            if over is not None:
                over()
