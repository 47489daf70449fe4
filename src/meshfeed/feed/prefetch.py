"""Producing ahead on a thread."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from meshfeed.errors import DeliveryError, PeerError
from meshfeed.metrics import Span, StageClock

T = TypeVar("T")
ErrorOfJob = Callable[[], BaseException | None]


class Prefetcher(Generic[T]):
    """Runs an iterator on a thread, at most `depth` items ahead.

    Only `heavy` items count. Light items are queued along with them, so the thread need not run between two
    heavy
    items: switching to it would cost a loop that takes both a millisecond.

    `get` raises errors in order, but a lost peer at once: the queued items would lead the trainer into a
    collective that its peer never joins.
    """

    def __init__(
        self,
        items: Iterator[T],
        clock: StageClock,
        depth: int,
        heavy: Callable[[T], bool] = lambda item: True,
    ) -> None:
        self._items, self._clock, self._depth, self._heavy = items, clock, max(depth, 1), heavy
        self._num_ready = 0
        self._process = os.getpid()
        self._queue: deque[tuple[T, list[Span]]] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._finished = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="meshfeed-prefetch", daemon=True)

    def start(self) -> None:
        """Start producing."""
        self._thread.start()

    @property
    def num_ready(self) -> int:
        """Heavy items made ahead and not taken yet."""
        return self._num_ready

    def get(self, timeout_s: float, error_of_job: ErrorOfJob = lambda: None) -> tuple[T, list[Span]]:
        """The next item, and the producer's spans since the previous one.

        error_of_job: an error to raise instead; asked again after each `wake`.
        Raises StopIteration at the end, TimeoutError after `timeout_s`, the producer's own error, or the
        job's.
        """
        if os.getpid() != self._process:
            raise DeliveryError(
                "this Feed belongs to the parent of this forked process, and its reader thread does not run "
                "here; make a new Feed in this process"
            )
        with self._changed:
            is_ready = self._changed.wait_for(lambda: self._has_news() or error_of_job(), timeout_s)
            if other := error_of_job():
                raise other
            if isinstance(self._error, PeerError) or (self._error and not self._queue):
                raise self._error
            if not is_ready:
                raise TimeoutError
            if not self._queue:
                raise StopIteration
            item, spans = self._queue.popleft()
            self._num_ready -= self._heavy(item)
            self._changed.notify_all()
        return item, spans

    def wake(self) -> None:
        """Make a waiting consumer ask for the job's error again."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Stop. The producer runs until its iterator ends; its items are dropped."""
        with self._changed:
            self._stopped = True
            self._queue.clear()
            self._error = None  # its traceback would keep its frames' objects alive, such as memory maps
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False after `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _has_news(self) -> bool:
        return bool(self._queue) or self._finished or isinstance(self._error, PeerError)

    def _has_room(self, heavy: bool) -> bool:
        # there are few light items, but the queue must be bounded
        return self._num_ready < self._depth if heavy else len(self._queue) < 3 * self._depth

    def _offer(self, item: T, heavy: bool) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._has_room(heavy))
            if not self._stopped:
                self._queue.append((item, self._clock.take()))
                self._num_ready += heavy
                self._changed.notify_all()

    def _run(self) -> None:
        try:
            for item in self._items:
                self._offer(item, self._heavy(item))
        except BaseException as error:  # carried to the consumer, whatever it is
            with self._changed:
                self._error = None if self._stopped else error
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()


class Inline(Generic[T]):
    """The same interface without a thread: each item is made on request."""

    def __init__(self, items: Iterator[T], clock: StageClock) -> None:
        self._items, self._clock = items, clock

    def start(self) -> None:
        """Nothing to start."""

    @property
    def num_ready(self) -> int:
        """Nothing is ever made ahead."""
        return 0

    def get(self, timeout_s: float, error_of_job: ErrorOfJob = lambda: None) -> tuple[T, list[Span]]:
        """Make and return the next item; raises as above, but asks `error_of_job` first."""
        if other := error_of_job():
            raise other
        return next(self._items), self._clock.take()

    def wake(self) -> None:
        """Nothing waits."""

    def stop(self) -> None:
        """Nothing runs."""

    def join(self, timeout_s: float) -> bool:
        """Run the iterator to its end, as its peers expect; False after `timeout_s`."""
        ending = threading.Thread(target=self._exhaust, name="meshfeed-ending", daemon=True)
        try:
            ending.start()
        except RuntimeError:  # the interpreter is exiting and starts no thread
            return False
        ending.join(timeout_s)
        return not ending.is_alive()

    def _exhaust(self) -> None:
        with contextlib.suppress(Exception):
            for _ in self._items:
                pass
