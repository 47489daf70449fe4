"""The rank that waits longest for its own work, told to all ranks without a collective.

One key of the job's rendezvous store names the slowest rank. Every rank looks at it now and then: one that
waits longer takes its place, and the rank named there keeps its figures fresh. So a rank that has become
faster is soon replaced, as is one that has left. Nobody waits for the store.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from meshfeed.deliver import Meeting
from meshfeed.deliver.rendezvous import first_text
from meshfeed.errors import DeliveryError
from meshfeed.metrics.sink import RunStart, StepRecord
from meshfeed.metrics.stages import FOLLOWS, summed
from meshfeed.metrics.stats import SlowRank

_STEPS = 64  # that a rank averages over
_LOOKS_PER_S = 100.0  # of all ranks together
_LOST_S = 60.0  # after which a figure that its rank does not refresh counts no more
_NOTHING = 0.01  # share of its time below which no rank is slow


class Slowest:
    """One rank's side.

    Attributes:
        known: the slowest rank, as told last; None if nobody is slow, or before the first look.
        meeting: of the current run; None for one process.
    """

    def __init__(self) -> None:
        self.known: SlowRank | None = None
        self.meeting: Meeting | None = None
        self._start: RunStart | None = None
        self._records: deque[StepRecord] = deque(maxlen=_STEPS + 2)
        self._look_at = 0.0
        self._asked: Future[SlowRank] | None = None

    def take(self, entries: Sequence[RunStart | StepRecord]) -> None:
        """Take more records of a run, and compare this rank with the slowest. Does not wait."""
        for entry in entries:
            if isinstance(entry, RunStart):
                self._start, self.known, self._asked = entry, None, None
                self._records.clear()
            else:
                self._records.append(entry)
        if self._asked is not None and self._asked.done():
            answered, self._asked = self._asked, None
            if answered.exception() is None:  # a store that is lost ends the job elsewhere
                self._learn(answered.result())
        if (mine := self._mine()) is None or self._asked is not None:
            return
        if self.meeting is None:
            self._learn(mine)
        elif time.monotonic() >= self._look_at:
            with contextlib.suppress(DeliveryError):
                self._asked = self._ask(self.meeting, mine)

    def _ask(self, meeting: Meeting, mine: SlowRank) -> Future[SlowRank]:
        """Begin to compare this rank's figures with those of the slowest."""
        pause = meeting.num_ranks / _LOOKS_PER_S
        self._look_at = time.monotonic() + pause
        key, at, limit = f"{meeting.prefix}/slowest", self._records[-1].time_s, _LOST_S + 4 * pause
        return meeting.later(lambda store: compared(store, key, mine, at, limit))

    def _learn(self, slow: SlowRank) -> None:
        self.known = slow if slow.share >= _NOTHING else None

    def _mine(self) -> SlowRank | None:
        """This rank's own figures, without the first step, in which ranks join, and the last one."""
        if self._start is None or len(self._records) < 3:
            return None
        _, *rest, last = self._records
        seconds = max(last.time_s - rest[0].time_s, 1e-9)
        each = (wait for record in rest for wait in record.stats.exposed_wait_s.items())
        waits = summed((stage, wait) for stage, wait in each if stage not in FOLLOWS)
        total = sum(waits.values())
        return SlowRank(
            rank=self._start.rank,
            host=self._start.host,
            stage=max(waits, key=waits.__getitem__, default="other"),
            wait_s=total / len(rest),
            share=min(total / seconds, 1.0),
            step=rest[-1].step,
        )


def compared(store: Any, key: str, mine: SlowRank, at: float, limit: float) -> SlowRank:
    """The slowest rank, mine among them. at: unix time of my figures, which count for `limit` seconds."""
    text = json.dumps([at, mine])
    there = first_text(store, key, text)
    while there != text:
        told_at, told = json.loads(there)
        slow = SlowRank(*told)
        if slow.rank != mine.rank and slow.wait_s >= mine.wait_s and abs(at - told_at) <= limit:
            return slow
        there = store.compare_set(key, there, text).decode()
    return mine
