"""Items of a user's dataset, made by the worker processes of torch's DataLoader.

The DataLoader is fed by a sampler that hands on what was announced, in order. A thread takes its results in,
because a worker that is killed in the middle of a message leaves whoever reads that message stuck: it is
that thread, and the one who waits for an item watches the workers themselves.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import socket
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, get_worker_info

from meshfeed.errors import StoreError
from meshfeed.order import EpochIndex

Make = Callable[[EpochIndex], Any]

_TASKS_PER_WORKER = 4
_TICK_S = 1.0  # how soon the taking thread sees that it is to end while a worker is busy
_GRACE_S = 2.0  # what a busy worker is given at the end


@dataclass(frozen=True, slots=True)
class Failure:
    """How a worker failed to make an item: its number, and the traceback as text."""

    worker: int
    text: str


class Workers:
    """Makes announced items ahead, and hands them over by their place.

    Items are to be fetched in the order in which they were announced: what was announced before one that is
    fetched, and was not fetched itself, belongs to an iteration that was left, and is dropped. What was never
    announced is made at once.

    Args:
        make: place -> item; runs in the workers.
        count: worker processes, from 1. They start with the first item asked for.
        timeout_s: how long to wait for one item.
        name: of the dataset, for messages.
    """

    def __init__(self, make: Make, count: int, timeout_s: float, name: str) -> None:
        self._make, self._count, self._timeout_s, self._name = make, count, timeout_s, name
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # one fetch at a time
        self._queue: deque[EpochIndex] = deque()  # not yet given to a worker
        self._order: deque[EpochIndex] = deque()  # announced, not yet fetched
        self._uses: Counter[EpochIndex] = Counter()  # how often each stands in `_order`
        self._now: frozenset[EpochIndex] = frozenset()  # asked for by the fetch under way
        self._made: dict[EpochIndex, Any] = {}
        self._num_flying = 0
        self._processes: list[Any] = []
        self._queues: list[Any] = []  # the first is that of the results
        self._thread: threading.Thread | None = None
        self._closing = False
        self._broken: str | None = None
        self._news, self._bell = socket.socketpair()
        self._bell.setblocking(False)

    def announce(self, places: Sequence[EpochIndex]) -> None:
        """These will be fetched next, in this order."""
        with self._changed:
            for at in places:
                self._order.append(at)
                self._uses[at] += 1
                if self._uses[at] == 1:
                    self._queue.append(at)
            self._start()
            self._changed.notify_all()

    def fetch(self, places: Sequence[EpochIndex]) -> list[Any]:
        """What `make` gave for each place, or a Failure.

        Raises StoreError where a worker dies, an item takes longer than timeout_s, or the store is closed.
        """
        with self._turn:
            with self._changed:
                self._now = frozenset(places)
                self._queue.extendleft(reversed([at for at in dict.fromkeys(places) if not self._uses[at]]))
                for at in places:
                    if self._uses[at]:
                        self._advance(at)
                self._start()
                self._changed.notify_all()
            for at in places:
                self._await(at)
            with self._changed:
                items = [self._made[at] for at in places]
                self._now = frozenset()
                for at in set(places):
                    self._forget_unwanted(at)
        return items

    def close(self) -> None:
        """End the workers. A fetch under way raises StoreError."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        self._ring()
        if thread is not None:
            if all(process.exitcode is None for process in self._processes):
                thread.join(_GRACE_S)
            self._end(thread)
        with self._turn:
            self._news.close()
            self._bell.close()

    def _end(self, thread: threading.Thread) -> None:
        """End what has not ended in peace: a busy worker, the rest where one has died."""
        for process in self._processes:
            if process.pid is not None and process.exitcode is None:
                process.kill()
                process.join(_GRACE_S)
        thread.join(_TICK_S)
        if thread.is_alive():
            # It reads a message whose writer was killed midway. Of the pipe's writing ends only ours is left.
            for queue in self._queues[:1]:
                queue._writer.close()
            thread.join(_GRACE_S)

    # -- who wants what; all under the lock -----------------------------------------------------------

    def _advance(self, at: EpochIndex) -> None:
        """Take `at`, and all that should have come before it, off the announced."""
        while True:
            passed = self._order.popleft()
            self._uses[passed] -= 1
            self._forget_unwanted(passed)
            if passed == at:
                return

    def _forget_unwanted(self, at: EpochIndex) -> None:
        if not self._uses[at]:
            del self._uses[at]
            if at not in self._now:
                self._made.pop(at, None)

    def _wanted(self, at: EpochIndex) -> bool:
        return (at in self._uses or at in self._now) and at not in self._made

    # -- the fetching side ----------------------------------------------------------------------------

    def _await(self, at: EpochIndex) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            with self._changed:
                if at in self._made:
                    return
                broken, closing = self._broken, self._closing
            if closing:
                raise StoreError(f"{self._name}: closed while {at} was being made")
            self._refuse_dead(at)
            if broken is not None:
                raise StoreError(f"{self._name}: its workers cannot go on, {at} is asked for:\n{broken}")
            ready = wait([self._news, *self._sentinels()], max(deadline - time.monotonic(), 0))
            if self._news in ready:
                self._news.recv(4096)
            elif not ready:
                raise StoreError(
                    f"{self._name}: {at} is not there after {self._timeout_s:g} s; look at what the dataset "
                    f"does in a worker, or raise timeout_s"
                )

    def _sentinels(self) -> Iterator[int]:
        for process in list(self._processes):
            with contextlib.suppress(ValueError):  # about to start
                yield process.sentinel

    def _refuse_dead(self, at: EpochIndex) -> None:
        for worker, process in enumerate(list(self._processes)):
            code = process.exitcode
            if code is not None:
                with self._changed:
                    if at in self._made:
                        return
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                raise StoreError(
                    f"{self._name}: worker {worker} (process {process.pid}) {how} while {at} was asked for; "
                    f"signal 9 is most often the system out of memory: use fewer workers or smaller items"
                )

    # -- the taking thread ----------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(target=self._run, name="meshfeed-workers", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._take_all()
        except BaseException:  # told to whoever waits for an item
            self._broken = traceback.format_exc()
        self._ring()

    def _take_all(self) -> None:
        results = self._started()
        while True:
            try:
                made = next(results)
            except StopIteration:
                return
            except RuntimeError as error:
                if self._closing:
                    return
                # a tick, not an end: the DataLoader may be asked again
                if "timed out" in str(error) and all(process.is_alive() for process in self._processes):
                    continue
                raise
            if self._closing:
                return
            if made is not None:
                at, item = made
                with self._changed:
                    self._num_flying -= 1
                    if self._wanted(at):
                        self._made[at] = item
                self._ring()

    def _started(self) -> Iterator[Any]:
        context = multiprocessing.get_context()
        try:
            return iter(self._loader(context))
        except Exception as error:
            if (method := context.get_start_method()) == "fork":
                raise
            raise StoreError(
                f"workers cannot be started by {method!r}; the dataset must be of what pickle can send, and "
                f"the script must start its work under `if __name__ == '__main__':`"
            ) from error

    def _loader(self, given: BaseContext) -> DataLoader[Any]:
        # Ours alone, and it keeps what the DataLoader makes with it: how else to watch its processes?
        context = cast(Any, copy.copy(given))
        context.Process = _kept(context.Process, self._processes)
        context.Queue = _kept(context.Queue, self._queues)
        return DataLoader(
            cast(Any, _Making(self._make)),
            batch_size=None,
            sampler=_Tasks(self._next_task),
            num_workers=self._count,
            collate_fn=_as_it_is,
            # without one, the DataLoader draws its seed from the trainer's global generator
            generator=torch.Generator(),
            prefetch_factor=_TASKS_PER_WORKER,
            timeout=_TICK_S,
            multiprocessing_context=context,
            worker_init_fn=_end_with_parent,
        )

    def _next_task(self) -> EpochIndex | None:
        """What a worker is to make next; None for nothing at the moment. Raises StopIteration at the end.

        The DataLoader asks for a task whenever it has a result, before it hands that over: to wait here is
        right only when no worker has anything in hand.
        """
        with self._changed:
            while True:
                if self._closing:
                    raise StopIteration
                while self._queue:
                    at = self._queue.popleft()
                    if self._wanted(at):
                        self._num_flying += 1
                        return at
                if self._num_flying:
                    return None
                self._changed.wait()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it rings already; closed: nobody listens
            self._bell.send(b"!")


class _Tasks:
    """The sampler: tasks as they come."""

    def __init__(self, next_task: Callable[[], EpochIndex | None]) -> None:
        self._next_task = next_task

    def __iter__(self) -> Iterator[EpochIndex | None]:
        while True:
            try:
                task = self._next_task()
            except StopIteration:
                return
            yield task


class _Making:
    """What a worker runs: item or failure. Never an exception, whose type might not travel."""

    def __init__(self, make: Make) -> None:
        self._make = make

    def __getitem__(self, at: EpochIndex | None) -> tuple[EpochIndex, Any] | None:
        if at is None:
            return None
        try:
            return at, self._make(at)
        except Exception:
            worker = get_worker_info()
            return at, Failure(-1 if worker is None else worker.id, traceback.format_exc())


def _kept(make: Callable[..., Any], kept: list[Any]) -> Callable[..., Any]:
    def made(*args: Any, **options: Any) -> Any:
        kept.append(make(*args, **options))
        return kept[-1]

    return made


def _as_it_is(item: Any) -> Any:
    return item


def _end_with_parent(worker: int) -> None:
    """A rank that is killed leaves no worker, even one that is busy, holding its sockets open."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
