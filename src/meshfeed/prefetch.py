"""Producing ahead on a thread, and telling what the consumer waited for."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Generic, NamedTuple, TypeVar

from meshfeed.errors import DeliveryError, PeerError

T = TypeVar("T")
CalledOff = Callable[[], BaseException | None]


class Span(NamedTuple):
    """A stretch of the producer's time, in seconds of `time.monotonic`."""

    stage: str
    start: float
    stop: float


class StageClock:
    """The producer's diary: which stage it was in, when.

    Attributes:
        spans: stages that are over, since the last `take`.
        now: the stage that it entered last.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.now: str | None = None

    @contextlib.contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Time what happens inside as one stage."""
        start, self.now = time.monotonic(), name
        try:
            yield
        finally:
            self.spans.append(Span(name, start, time.monotonic()))

    def take(self) -> list[Span]:
        """The spans since the last call."""
        taken, self.spans = self.spans, []
        return taken


def exposed_wait(start: float, stop: float, spans: list[Span]) -> dict[str, float]:
    """A wait of the consumer split by the stages that the producer was in meanwhile; seconds.

    What no span covers is "other".
    """
    wait: dict[str, float] = {}
    for span in spans:
        shared = min(stop, span.stop) - max(start, span.start)
        if shared > 0:
            wait[span.stage] = wait.get(span.stage, 0.0) + shared
    rest = (stop - start) - sum(wait.values())
    if rest > 0:
        wait["other"] = rest
    return wait


class Prefetcher(Generic[T]):
    """Runs an iterator on a thread, at most `depth` items ahead.

    Errors come out of `get` in their turn, but a lost peer comes out at once: what is still queued
    would only lead the trainer into a collective that its peer will never join.
    """

    def __init__(self, items: Iterator[T], clock: StageClock, depth: int) -> None:
        self._items, self._clock, self._depth = items, clock, max(depth, 1)
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

    def get(
        self, timeout_s: float, asked: float, called_off: CalledOff = lambda: None
    ) -> tuple[T, dict[str, float]]:
        """The next item, and the seconds waited for it by stage, since it was `asked` for.

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
            self._changed.notify_all()
        return item, exposed_wait(asked, time.monotonic(), spans)

    def wake(self) -> None:
        """Have a waiting consumer look around."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Want no more; the producer goes on until its iterator ends, and what it makes is dropped."""
        with self._changed:
            self._stopped = True
            self._queue.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False where it has not in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _has_news(self) -> bool:
        return bool(self._queue) or self._finished or isinstance(self._error, PeerError)

    def _run(self) -> None:
        try:
            for item in self._items:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or len(self._queue) < self._depth)
                    if not self._stopped:
                        self._queue.append((item, self._clock.take()))
                        self._changed.notify_all()
        except BaseException as error:  # carried to the consumer, whatever it is
            self._error = error
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

    def get(
        self, timeout_s: float, asked: float, called_off: CalledOff = lambda: None
    ) -> tuple[T, dict[str, float]]:
        """The next item, all of whose making is waited for; raises as above, but sees `called_off` first."""
        if other := called_off():
            raise other
        item = next(self._items)
        return item, exposed_wait(asked, time.monotonic(), self._clock.take())

    def wake(self) -> None:
        """Nobody waits."""

    def stop(self) -> None:
        """Nothing runs."""

    def join(self, timeout_s: float) -> bool:
        """Let the iterator end, as its peers expect; False where they have not let it in time."""
        ending = threading.Thread(target=self._exhaust, name="meshfeed-ending", daemon=True)
        ending.start()
        ending.join(timeout_s)
        return not ending.is_alive()

    def _exhaust(self) -> None:
        with contextlib.suppress(Exception):
            for _ in self._items:
                pass
