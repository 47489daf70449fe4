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
CalledOff = Callable[[], BaseException | None]


class Prefetcher(Generic[T]):
    """Runs an iterator on a thread, at most `depth` items ahead.

    Only items that are `heavy` count. The others go with them, so that the thread need not run between one
    heavy item and the next: where a loop takes both at once, that would cost it a millisecond.

    Errors come out of `get` in their turn, but a lost peer comes out at once: what is still queued
    would only lead the trainer into a collective that its peer will never join.
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
        """Heavy items made ahead that nobody has taken yet."""
        return self._num_ready

    def get(self, timeout_s: float, called_off: CalledOff = lambda: None) -> tuple[T, list[Span]]:
        """The next item, and what the producer did since the one before.

        called_off: an error that forbids to hand it out; looked at again after each `wake`.
        Raises StopIteration at the end, TimeoutError after `timeout_s`, the producer's own error, or that.
        """
        if os.getpid() != self._process:
            raise DeliveryError(
                "this process was forked from the one whose Feed this is, and has no thread that reads; make "
                "a Feed of its own here"
            )
        with self._changed:
            came = self._changed.wait_for(lambda: self._has_news() or called_off(), timeout_s)
            if other := called_off():
                raise other
            if isinstance(self._error, PeerError) or (self._error and not self._queue):
                raise self._error
            if not came:
                raise TimeoutError
            if not self._queue:
                raise StopIteration
            item, spans = self._queue.popleft()
            self._num_ready -= self._heavy(item)
            self._changed.notify_all()
        return item, spans

    def wake(self) -> None:
        """Have a waiting consumer look around."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Want no more; the producer goes on until its iterator ends, and what it makes is dropped."""
        with self._changed:
            self._stopped = True
            self._queue.clear()
            self._error = None  # with its frames it would keep alive what they hold, such as memory maps
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False where it has not in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _has_news(self) -> bool:
        return bool(self._queue) or self._finished or isinstance(self._error, PeerError)

    def _has_room(self, heavy: bool) -> bool:
        # light ones are few, but nothing endless may pile up
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
    """The same without a thread: each item is made when it is asked for."""

    def __init__(self, items: Iterator[T], clock: StageClock) -> None:
        self._items, self._clock = items, clock

    def start(self) -> None:
        """Nothing to start."""

    @property
    def num_ready(self) -> int:
        """Nothing is ever made ahead."""
        return 0

    def get(self, timeout_s: float, called_off: CalledOff = lambda: None) -> tuple[T, list[Span]]:
        """The next item, all of whose making is waited for; raises as above, but sees `called_off` first."""
        if other := called_off():
            raise other
        return next(self._items), self._clock.take()

    def wake(self) -> None:
        """Nobody waits."""

    def stop(self) -> None:
        """Nothing runs."""

    def join(self, timeout_s: float) -> bool:
        """Let the iterator end, as its peers expect; False where they have not let it in time."""
        ending = threading.Thread(target=self._exhaust, name="meshfeed-ending", daemon=True)
        try:
            ending.start()
        except RuntimeError:  # the interpreter ends, and begins no thread
            return False
        ending.join(timeout_s)
        return not ending.is_alive()

    def _exhaust(self) -> None:
        with contextlib.suppress(Exception):
            for _ in self._items:
                pass
