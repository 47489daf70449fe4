"""Worker processes that make the items of a user's dataset ahead.

Each worker has a pipe of its own, so one that is killed in the middle of a message breaks only that pipe. A
thread receives what workers have made and hands out what is next; whoever fetches waits for that thread.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch

from meshfeed.errors import StoreError
from meshfeed.order import EpochIndex

Make = Callable[[EpochIndex], Any]

_MOST_IN_HAND = 2  # items of one worker: the one that it makes, and the next
_GRACE_S = 2.0  # for busy workers at the end


@dataclass(frozen=True, slots=True)
class Failure:
    """How a worker failed to make an item: its number, and the traceback as text."""

    worker: int
    text: str


@dataclass(slots=True)
class _Worker:
    """A worker process, this end of its pipe, and how many items it has in hand."""

    process: Any
    pipe: Connection
    in_hand: int = 0


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
        self._workers: list[_Worker] = []
        self._thread: threading.Thread | None = None
        self._closing = False
        self._dead = self._broken = ""

    def announce(self, places: Sequence[EpochIndex]) -> None:
        """These will be fetched next, in this order."""
        with self._changed:
            for at in places:
                self._order.append(at)
                self._uses[at] += 1
                if self._uses[at] == 1:
                    self._queue.append(at)
            self._hand_out()

    def fetch(self, places: Sequence[EpochIndex]) -> list[Any]:
        """What `make` gave for each place, or a Failure.

        Raises StoreError if a worker dies, an item takes longer than timeout_s, or the store is closed.
        """
        with self._turn, self._changed:
            self._now = frozenset(places)
            self._queue.extendleft(reversed([at for at in dict.fromkeys(places) if not self._uses[at]]))
            for at in places:
                if self._uses[at]:
                    self._advance(at)
            self._hand_out()
            for at in places:
                self._await(at)
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
        if thread is not None:
            self._bell.send(None)
            thread.join(2 * _GRACE_S)
            for end in (self._bell, self._news):
                end.close()

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

    def _await(self, at: EpochIndex) -> None:
        """Wait until an item is there; releases the lock meanwhile."""
        self._changed.wait_for(
            lambda: at in self._made or self._closing or self._dead or self._broken, self._timeout_s
        )
        if at in self._made:
            return
        if self._closing:
            raise StoreError(f"{self._name}: closed while {at} was being made")
        if self._dead:
            raise StoreError(
                f"{self._name}: {self._dead} while {at} was asked for; signal 9 is most often the system out "
                f"of memory: use fewer workers or smaller items"
            )
        if self._broken:
            raise StoreError(f"{self._name}: its workers cannot go on, {at} is asked for:\n{self._broken}")
        raise StoreError(
            f"{self._name}: {at} is not there after {self._timeout_s:g} s; look at what the dataset does in "
            f"a worker, or raise timeout_s"
        )

    def _hand_out(self) -> None:
        """Give workers what is next, first to those with nothing in hand."""
        if self._thread is None and not self._closing:
            self._news, self._bell = multiprocessing.Pipe(duplex=False)
            self._thread = threading.Thread(target=self._run, name="meshfeed-workers", daemon=True)
            self._thread.start()
        for most in range(1, _MOST_IN_HAND + 1):
            for worker in self._workers:
                while self._queue and worker.in_hand < most:
                    at = self._queue.popleft()
                    if self._wanted(at):
                        worker.in_hand += 1
                        with contextlib.suppress(OSError):  # it has died, which its process tells
                            worker.pipe.send(at)

    # -- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._start()
            while not self._closing and not self._dead:
                self._receive()
        except BaseException:  # told to whoever waits for an item
            self._broken = traceback.format_exc()
        with self._changed:
            self._changed.notify_all()
            workers, self._workers = self._workers, []
        _end(workers)

    def _start(self) -> None:
        context = multiprocessing.get_context()
        for number in range(self._count):
            mine, theirs = context.Pipe()
            process = cast(Any, context).Process(target=_work, args=(number, theirs, self._make), daemon=True)
            worker = _Worker(process, mine)
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
                theirs.close()  # of its writing end only the worker's is left, so that its death is noticed
            with self._changed:
                self._workers.append(worker)
                self._hand_out()

    def _receive(self) -> None:
        """Wait for news: items, a death, or the end."""
        ends = {worker.pipe: worker for worker in self._workers}
        sentinels = [worker.process.sentinel for worker in self._workers]
        ready = wait([self._news, *ends, *sentinels])
        received = False
        for pipe, worker in ends.items():
            if pipe in ready:
                with contextlib.suppress(EOFError, OSError):
                    at, item = pipe.recv()
                    received = True
                    with self._changed:
                        worker.in_hand -= 1
                        if self._wanted(at):
                            self._made[at] = item
                        self._hand_out()
                        self._changed.notify_all()
        if received:
            return  # a worker may have sent more before it died
        for number, worker in enumerate(self._workers):
            if worker.process.sentinel in ready or worker.pipe in ready:
                worker.process.join(_GRACE_S)
                code = worker.process.exitcode
                how = f"was killed by signal {-code}" if code and code < 0 else f"ended with exit code {code}"
                self._dead = f"worker {number} (process {worker.process.pid}) {how}"


def _end(workers: Sequence[_Worker]) -> None:
    """End workers: in peace those that are idle or soon ready, by force the others."""
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.pipe.send(None)
    deadline, ends = time.monotonic() + _GRACE_S, [worker.pipe for worker in workers]
    while ends and (ready := wait(ends, max(deadline - time.monotonic(), 0))):
        for pipe in [end for end in ends if end in ready]:
            try:
                pipe.recv()  # it may wait for room to send what nobody wants any more
            except (EOFError, OSError):
                ends.remove(pipe)
    for worker in workers:
        if worker.pipe in ends:
            worker.process.kill()
        worker.process.join(_GRACE_S)
        worker.pipe.close()


def _work(number: int, pipe: Connection, make: Make) -> None:
    """What a worker runs: item after item, until there is None to make."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None:  # a rank that is killed leaves no worker, even a busy one
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C reaches the rank, too, which ends the workers
        while (at := pipe.recv()) is not None:
            try:
                item = make(at)
            except Exception:  # as text: its type might not travel
                item = Failure(number, traceback.format_exc())
            pipe.send((at, item))
