"""Passes records to the sinks on a background thread, so that the training loop never waits."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Sequence

from meshfeed.errors import MetricsError
from meshfeed.metrics.sink import RunStart, Sink, StepRecord, by_runs
from meshfeed.metrics.slowest import Slowest

EVERY_S = 1.0
"""How often sinks receive records."""

MOST_KEPT = 4096
"""Steps kept for a failing sink; beyond that, the oldest are lost."""

_CLOSE_S = 10.0

Entry = RunStart | StepRecord


class _Backlog:
    """Records that a sink has not taken yet."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.entries: list[Entry] = []
        self.dropped = 0
        self.error: Exception | None = None

    def take(self, more: Sequence[Entry]) -> None:
        self.entries += more
        try:
            for some in by_runs(self.entries):
                self.sink.take(some)
                self.entries = self.entries[len(some) :]
        except Exception as error:  # of a disk or a user's sink: training continues after any error
            self.error = error
            self._drop_oldest()
        else:
            self.error = None

    @property
    def lost(self) -> int:
        """Steps that the sink has missed, or will miss unless it recovers."""
        return self.dropped + (len(self.entries) if self.error else 0)

    def _drop_oldest(self) -> None:
        old, kept = self.entries[:-MOST_KEPT], self.entries[-MOST_KEPT:]
        starts = [entry for entry in old if isinstance(entry, RunStart)]
        self.dropped += len(old) - len(starts)
        self.entries = starts + kept


class BackgroundSinks:
    """The sinks and the thread that passes records to them, from `start` to `close`.

    Args:
        slowest: gets all records too, after the sinks.
    """

    def __init__(self, sinks: Sequence[Sink], slowest: Slowest) -> None:
        self._backlogs, self._slowest = [_Backlog(sink) for sink in sinks], slowest
        self._inbox: deque[Entry] = deque()
        self._overflown = 0  # records dropped because a sink hangs
        self._process = os.getpid()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshfeed-metrics", daemon=True)

    def start(self, first: RunStart) -> None:
        """Pass on the first record, raising a sink's error here, and start the thread."""
        with contextlib.ExitStack() as stack:
            for backlog in self._backlogs:
                stack.callback(backlog.sink.close)
                backlog.sink.take([first])
            stack.pop_all()
        self._slowest.take([first])
        self._thread.start()

    def send(self, entry: Entry) -> None:
        if len(self._inbox) < MOST_KEPT or isinstance(entry, RunStart):
            self._inbox.append(entry)
        else:
            self._overflown += 1

    @property
    def lost(self) -> int:
        """Steps that some sink has failed to take."""
        return self._overflown + max(backlog.lost for backlog in self._backlogs)

    def close(self) -> None:
        """Pass on the rest and close the sinks. Raises MetricsError if a sink has missed anything."""
        if self._process != os.getpid():
            return  # in a forked child
        self._closing.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            names = ", ".join(type(backlog.sink).__name__ for backlog in self._backlogs)
            raise MetricsError(f"{names}: {len(self._inbox)} steps or more are not written: the sink hangs")
        for backlog in self._backlogs:
            lost = backlog.lost + self._overflown
            if lost or backlog.error:
                raise MetricsError(
                    f"{type(backlog.sink).__name__} has missed {lost} steps: {backlog.error}"
                ) from backlog.error

    def _run(self) -> None:
        while not self._closing.wait(EVERY_S):
            self._forward()
        self._forward()
        for backlog in self._backlogs:
            try:
                backlog.sink.close()
            except Exception as error:
                backlog.error = backlog.error or error

    def _forward(self) -> None:
        more = [self._inbox.popleft() for _ in range(len(self._inbox))]
        for backlog in self._backlogs:
            backlog.take(more)
        self._slowest.take(more)
