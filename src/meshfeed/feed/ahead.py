"""Working ahead of the training loop: plan steps and announce them to storage, make items on a thread.

The order is known, so a remote store can fetch the data of later steps while a step is trained. Announced
data that are not read yet are limited in bytes, and planned steps in number. The first step is returned
before any other is planned; after that every portion read may allow one more.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from meshfeed.errors import DeliveryError, PeerError, StoreError
from meshfeed.feed.stepping import GlobalBatch, Stepping
from meshfeed.layout import Coord
from meshfeed.metrics import Span, StageClock
from meshfeed.sequence import Portion

T = TypeVar("T")
ErrorOfJob = Callable[[], BaseException | None]

MOST_STEPS = 64
"""The most steps planned ahead, however small they are."""

Planned = tuple[GlobalBatch, list[Portion]]


class Ahead:
    """The steps of one rank from `start` on, with its portions of them; each is announced once, in order.

    Call `have_read` after each portion: it plans and announces further steps.

    Args:
        stepping: computes the steps.
        coord, served, needs: the rank's portions; see `Stepping.portions`.
        reads: whether this rank reads. If not, nothing is announced.
        clock: measures the stages "plan" and "read".
        left_out: steps that are neither planned nor given.
        amended: step -> what computes it from there on, where ranks may amend the recipe.
        budget_bytes: announce further steps while fewer bytes are announced and unread. At least one step is
            announced ahead, and only one if no store `wants_ahead`.
    """

    def __init__(
        self,
        stepping: Stepping,
        coord: Coord,
        served: Sequence[int],
        needs: frozenset[str],
        start: int,
        clock: StageClock,
        *,
        reads: bool,
        budget_bytes: int,
        left_out: frozenset[int] = frozenset(),
        amended: Callable[[int], Stepping] | None = None,
    ) -> None:
        self._left_out, self._amended = left_out, amended
        self._coord, self._served, self._clock = coord, served, clock
        self._needs = needs
        self._reads, self._budget_bytes = reads, budget_bytes
        self._plan_by(stepping)
        self._next: int | None = start
        self._planned: deque[Planned] = deque()
        self._unread: deque[int] = deque()  # bytes of each portion
        self._unread_bytes = 0
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Planned]:
        self._plan()
        while self._planned:
            yield self._planned.popleft()
            self._plan_more(besides=1)  # besides the next step: one is announced while it is read
        if self._error is not None:
            raise self._error

    def have_read(self) -> None:
        """The next portion has been read: plan another step if the budget allows."""
        self._unread_bytes -= self._unread.popleft()
        self._plan_more()

    def _plan_by(self, stepping: Stepping) -> None:
        """Plan further steps by this. An amendment may have added a remote store."""
        self._stepping = stepping
        self._is_remote = self._reads and any(store.wants_ahead for store in stepping.recipe.sources)

    def _plan_more(self, besides: int = 0) -> None:
        ahead, most = len(self._planned) - besides, MOST_STEPS if self._is_remote else 1
        if ahead < 1 or (ahead < most and self._unread_bytes < self._budget_bytes):
            self._plan()

    def _plan(self) -> None:
        """Plan and announce the next step; does nothing past the end of the stream."""
        if self._next is None:
            return
        batch, portions = None, list[Portion]()
        try:
            with self._clock.stage("plan"):
                self._next = self._first_given(self._next)
                batch = self._stepping.global_batch(self._next)
                if batch is not None:
                    portions = self._stepping.portions(batch, self._coord, self._served, self._needs)
        except Exception as error:  # raised after the earlier steps, which can be trained
            batch, self._error = None, error
        if batch is None:
            self._next = None
            return
        rule, recipe = self._stepping.rule, self._stepping.recipe
        if self._reads:
            # Announcing is only advice: `load` meets the same error again and sends it to the peers.
            with self._clock.stage("read"), contextlib.suppress(StoreError):
                rule.announce(recipe, portions)
        sizes = [rule.num_bytes(recipe, each) if self._is_remote else 0 for each in portions]
        self._unread.extend(sizes)
        self._unread_bytes += sum(sizes)
        self._next += 1
        self._planned.append((batch, portions))

    def _first_given(self, step: int) -> int:
        """The first step from this one on that is not left out, with the recipe amended up to it."""
        while True:
            if self._amended is not None and (latest := self._amended(step)) is not self._stepping:
                self._plan_by(latest)
            recipe = self._stepping.recipe
            given = recipe.first_given(step) if recipe.amendments.skipped else step
            if given == step and step not in self._left_out:
                return step
            step = max(given, step + 1)


class _Taking(threading.local):
    """Whether the current thread is in `get`, as a signal handler that interrupted it is."""

    yes = False


class Prefetcher(Generic[T]):
    """Runs an iterator on a thread, at most `depth` items ahead; with a depth of 0, where `get` is called.

    Only `heavy` items count. Light items are queued along with them, so the thread need not run between two
    heavy items: switching to it would cost a loop that takes both a millisecond.

    `get` raises errors in order, but a lost peer at once: the queued items would lead the trainer into a
    collective that its peer never joins.

    Attributes:
        num_ready: heavy items made ahead and not taken yet.
    """

    def __init__(
        self,
        items: Iterator[T],
        clock: StageClock,
        depth: int,
        heavy: Callable[[T], bool] = lambda item: True,
    ) -> None:
        self._items, self._clock, self._depth, self._heavy = items, clock, depth, heavy
        self.num_ready = 0
        self._process = os.getpid()
        self._queue: deque[tuple[T, list[Span]]] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._finished = False
        self._error: BaseException | None = None
        self._taking = _Taking()
        self._making = threading.Lock()  # while an item is made where `get` is called
        self._thread = threading.Thread(target=self._run, name="meshfeed-prefetch", daemon=True)

    def start(self) -> None:
        """Start producing."""
        if self._depth:
            self._thread.start()

    def get(self, timeout_s: float, error_of_job: ErrorOfJob = lambda: None) -> tuple[T, list[Span]]:
        """The next item, and the producer's spans since the previous one.

        error_of_job: an error to raise instead; asked again after each `wake`.
        Raises StopIteration at the end and, at once, after `stop`; TimeoutError after `timeout_s`, the
        producer's own error, or the job's. With a depth of 0 it makes the item, however long that takes.
        """
        if self._depth and os.getpid() != self._process:
            raise DeliveryError(
                "this Feed belongs to the parent of this forked process, and its reader thread does not run "
                "here; make a new Feed in this process"
            )
        self._taking.yes = True
        try:
            return self._take(timeout_s, error_of_job) if self._depth else self._make(error_of_job)
        finally:
            self._taking.yes = False

    def _make(self, error_of_job: ErrorOfJob) -> tuple[T, list[Span]]:
        if other := error_of_job():
            raise other
        with self._making:
            if self._stopped:
                raise StopIteration
            return next(self._items), self._clock.take()

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
            self.num_ready -= self._heavy(item)
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

    @property
    def is_busy(self) -> bool:
        """Whether an item is being made where `get` was called, or a signal handler has interrupted `get`."""
        return self._taking.yes or self._making.locked()

    def _has_news(self) -> bool:
        return self._stopped or bool(self._queue) or self._finished or isinstance(self._error, PeerError)

    def _has_room(self, heavy: bool) -> bool:
        # there are few light items, but the queue must be bounded
        return self.num_ready < self._depth if heavy else len(self._queue) < 3 * self._depth

    def _offer(self, item: T, heavy: bool) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._has_room(heavy))
            if not self._stopped:
                self._queue.append((item, self._clock.take()))
                self.num_ready += heavy
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
