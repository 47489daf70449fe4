"""One error for the whole job: what ends one rank's run for good ends the same run of every rank.

A rank that fails leaves a *word* in the rendezvous store: its cause, and the step at which it strikes. Every
run has a thread that waits for it, asleep, on a connection of its own.

All ranks go on until that step and raise there, so that none waits in a collective for one that stopped
earlier. Where another rank fails at an earlier step, its word follows; the cause stays that of the first.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, Self

from torch.distributed.distributed_c10d import Store

from meshfeed.deliver.cause import Cause
from meshfeed.deliver.connections import FAILURES, own_connection
from meshfeed.deliver.rendezvous import Meeting
from meshfeed.errors import PeerError, StateError

_FOR_EVER = timedelta(days=30)
_LOOK_EVERY_S = 2.0  # where the store cannot wait without polling
_JOIN_S = 5.0
_MOST_BYTES = 4096


class Alarm:
    """One run's ear and voice in the job.

    Without a way to meet, or alone, it does nothing. A store that is lost, because the rank that hosts it has
    ended, is no error of this run: what the delivery group notices by itself remains.

    Args:
        meeting: where the ranks meet; None for one process.
        rank: this one.
        wake: called, from another thread, when a word has come.
    """

    def __init__(self, meeting: Meeting | None, rank: int, wake: Callable[[], None]) -> None:
        self._meeting = None if meeting is None or len(meeting.ranks) < 2 else meeting
        self._rank, self._wake = rank, wake
        self._first: Cause | None = None
        self._own: Exception | None = None
        self._step = 0
        self._words = 0
        self._prefix = ""
        self._lock = threading.Lock()
        self._asleep = False
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = 0

    def __enter__(self) -> Self:
        if self._meeting is not None:
            self._process, start = os.getpid(), self._meeting.start
            try:
                self._find_run(self._meeting)
            except FAILURES:
                return self
            self._meeting.tell = lambda error: self._tell(error, start)
            self._thread = threading.Thread(
                target=self._listen, args=(self._meeting.store,), name="meshfeed-alarm", daemon=True
            )
            self._thread.start()
            atexit.register(self._end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._own = None  # with its frames it would keep alive what they hold
        if self._thread is None or self._meeting is None or self._process != os.getpid():
            return
        with self._lock:
            self._ending.set()
            asleep, self._asleep = self._asleep, False
        if asleep:
            with contextlib.suppress(*FAILURES):
                self._meeting.store.set(self._bell(self._rank), "1")
            self._thread.join(_JOIN_S)
            with contextlib.suppress(*FAILURES):
                self._meeting.store.delete_key(self._bell(self._rank))
        # One that is still connecting ends by itself; only the interpreter's end waits for it.
        if not self._thread.is_alive():
            atexit.unregister(self._end)

    def failing(self, error: Exception) -> None:
        """This rank is going to fail; its peers may tell the job of it sooner, and know its text alone."""
        self._own = self._own or error

    def struck(self, step: int) -> BaseException | None:
        """The job's error, where it strikes at this step or before; from this rank's own, if it has one."""
        if self._first is None:
            return None
        if self._step > step:
            self._hear()  # the job is ending anyway: see whether another rank has failed earlier
        if self._step > step:
            return None
        error, own = self._first.error(), self._own
        if own is not None and str(own) == str(error):
            return own
        error.__cause__ = own
        return error

    def sound(self, error: Exception, step: int) -> NoReturn:
        """Tell the job that this rank ends at `step`, and end it: with the job's error.

        That is `error`, unless another rank was first. A lost peer strikes at once, since the next collective
        would wait for it, and so do ranks at different steps, which have no step in common.
        """
        self.failing(error)
        own = self._tell(error, step)
        if self._first is None or self._first.text == own.text:
            raise error
        raise self._first.error() from error

    def _tell(self, error: Exception, step: int) -> Cause:
        cause = Cause.of(error)
        if not cause.text.startswith("rank "):
            cause = replace(cause, text=f"rank {self._rank} ended at step {step}: {cause.text}")
        # where the store is lost that is a consequence, and no other error than this rank's own
        with contextlib.suppress(*FAILURES):
            self._publish(cause, 0 if isinstance(error, PeerError | StateError) else step)
        return cause

    def _find_run(self, meeting: Meeting) -> None:
        """The first run that has not failed for want of this rank: those who waited for it count that one."""
        while True:
            self._prefix, self._first, self._words = f"{meeting.prefix}/alarm", None, 0
            self._hear()
            missed = self._first
            if missed is None or missed.kind != PeerError.__name__ or self._rank not in missed.ranks:
                return
            meeting.pass_over()

    def _publish(self, cause: Cause, step: int) -> None:
        """Leave a word, unless there is one that strikes no later."""
        if self._thread is None or self._meeting is None or self._process != os.getpid():
            return
        store: Any = self._meeting.store
        ranks = self._meeting.ranks
        word = json.dumps([step, cause.encode(_MOST_BYTES).decode()])
        for turn in itertools.count():
            winner = store.compare_set(f"{self._prefix}/word/{turn}", "", word).decode()
            if winner == word:
                store.multi_set([self._bell(rank) for rank in ranks], ["1"] * len(ranks))
            if winner == word or json.loads(winner)[0] <= step:
                break
        self._hear()

    def _hear(self, store: Store | None = None) -> None:
        """Take in the words that have come since. store: a connection of this thread's own."""
        if self._meeting is None or self._process != os.getpid():
            return
        store = store or self._meeting.store
        with self._lock:
            try:
                while store.check([key := f"{self._prefix}/word/{self._words}"]):
                    step, told = json.loads(store.get(key))
                    self._step = step if self._first is None else min(self._step, step)
                    self._first = self._first or Cause.decode(told.encode())
                    self._words += 1
            except FAILURES:
                return

    def _listen(self, store: Store) -> None:
        with contextlib.suppress(*FAILURES), own_connection(store) as own:
            if own is None:
                while self._first is None and not self._ending.wait(_LOOK_EVERY_S):
                    self._hear()
            elif self._may_sleep():
                own.wait([self._bell(self._rank)], _FOR_EVER)
            if not self._ending.is_set():
                self._call_off(own or store)
        if not self._ending.is_set():
            self._wake()

    def _call_off(self, store: Store) -> None:
        """End this rank's waiting for peers, where the job ends before its first step."""
        self._hear(store)
        if self._meeting is not None and self._first is not None and self._step <= self._meeting.start:
            self._meeting.call_off(store)

    def _may_sleep(self) -> bool:
        with self._lock:
            self._asleep = not self._ending.is_set()
            return self._asleep

    def _end(self) -> None:
        """Before the interpreter ends: a thread that woke up in the middle of that would end it badly."""
        self.__exit__(None, None, None)
        if self._thread is not None and self._process == os.getpid():
            self._thread.join(_JOIN_S)

    def _bell(self, rank: int) -> str:
        return f"{self._prefix}/bell/{rank}"
