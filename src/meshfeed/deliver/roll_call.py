"""Who holds up a rank that has waited too long: a roll call of the job.

The rank that tires first opens it by a notice. Every process answers by its thread that waits for notices,
which is awake whatever the loop does. The answer says where the loop is, where the *producer* is, which makes
the batches, and which ranks they wait for. The opener follows these waits from rank to rank to their end.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from meshfeed.deliver.meeting import Meeting
from meshfeed.errors import PeerError

Append = Callable[[str, str], object]
"""Adds a text to that under a key of the store."""

_ANSWER_S = 5.0  # an idle process answers in milliseconds; one on a node that is overloaded takes its time
_POLL_S = 0.25
_SILENT = "does not answer: its process is stopped, stuck or gone, or its host is out of reach"


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a rank's loop and producer are.

    Attributes:
        made, taken: items, of one or several microbatches, that its producer has made in this run, and its
            loop has taken.
        loop: what its loop does, in words; "" if it waits in its feed.
        loops: the ranks whose loops its loop waits for; () if it waits for its own producer.
        producer: what its producer does, in words, if it waits for no rank.
        producers: the ranks whose producers its producer waits for.
        is_full: whether its producer waits for its own loop, to take what it has made.
    """

    made: int
    taken: int
    loop: str = ""
    loops: Sequence[int] = ()
    producer: str = ""
    producers: Sequence[int] = ()
    is_full: bool = False


def silent_among(rank: int, answers: Mapping[int, Whereabouts]) -> list[int]:
    """The ranks without an answer that a rank waits for, directly or through others."""
    return [who for who, _ in _reached(rank, answers) if who not in answers]


def held_up_by(rank: int, answers: Mapping[int, Whereabouts]) -> dict[int, str]:
    """The ranks for which a rank waits in the end, and what each of them does, in words.

    These are the ones without an answer; else those that read; else those whose loops are elsewhere, of these
    the ones behind the others. If all wait for each other, the ones that are behind.
    """
    if silent := silent_among(rank, answers):
        return dict.fromkeys(sorted(silent), _SILENT)
    reached = [(who, part, answers[who]) for who, part in _reached(rank, answers)]
    read = {
        who: (at.made, at.producer)
        for who, part, at in reached
        if part == "producer" and not at.is_full and not at.producers
    }
    away = {who: (at.taken, at.loop) for who, part, at in reached if part == "loop" and at.loop}
    waiting = {who: (at.made, "waits for others that wait") for who, _, at in reached}
    found = read or away or waiting
    behind = min(count for count, _ in found.values())
    return {who: what for who, (count, what) in sorted(found.items()) if count == behind}


def _reached(rank: int, answers: Mapping[int, Whereabouts]) -> list[tuple[int, str]]:
    """Every loop and producer that a rank's loop waits for, directly or through others, with itself.

    A rank that is ahead of one that waits has done its part.
    """
    found, todo = dict[tuple[int, str], None](), [(rank, "loop")]
    while todo:
        if (node := todo.pop()) in found:
            continue
        found[node] = None
        who, part = node
        if (at := answers.get(who)) is None:
            continue
        if part == "loop" and not at.loop:
            awaited = [(one, "loop") for one in at.loops if not _has(answers, one, "taken", at.taken)]
            todo += awaited if at.loops else [(who, "producer")]
        elif part == "producer":
            awaited = [(one, "producer") for one in at.producers if not _has(answers, one, "made", at.made)]
            todo += [(who, "loop")] if at.is_full else awaited
    return list(found)


def _has(answers: Mapping[int, Whereabouts], rank: int, what: str, more_than: int) -> bool:
    return rank in answers and getattr(answers[rank], what) > more_than


class RollCall:
    """A rank's part in the roll call of a run.

    Args:
        meeting: of the run.
        prefix: of the run's keys.
        where: where this rank is; called from another thread.

    Attributes:
        over: set when the run's end is known.
    """

    def __init__(self, meeting: Meeting, prefix: str, where: Callable[[], Whereabouts]) -> None:
        self._meeting, self._prefix, self._where = meeting, prefix, where
        self._key = f"{prefix}/roll"
        self._has_answered = False
        self.over = threading.Event()
        self._patience_s = min(_ANSWER_S, meeting.timeout_s)

    @property
    def notice(self) -> str:
        """The notice that opens it."""
        return json.dumps([self._prefix, None, ""])

    def answer(self, append: Append) -> None:
        """Answer if the roll call is open and this rank has not answered."""
        if not self._has_answered and self.notice in self._meeting.rendezvous.notices.values():
            self._has_answered = True
            append(self._key, json.dumps([self._meeting.rank, *astuple(self._where())]) + "\n")

    def hold(self, waited: str, store_s: float) -> PeerError:
        """Open the roll call, or wait for the verdict of the rank that has opened it.

        waited: what this rank has waited for, in words. store_s: how long to wait for the store. Raises
        DeliveryError if it is lost.
        """
        rendezvous, is_open = self._meeting.rendezvous, False
        while not is_open and self.notice not in rendezvous.notices.values():
            is_open = rendezvous.add_notice(self.notice, store_s)
        if not is_open:
            self.over.wait(2 * self._patience_s)
        until, pause, rank = time.monotonic() + self._patience_s * is_open, 0.01, self._meeting.rank
        while True:
            answers = {**self._answers(store_s), rank: self._where()}
            if time.monotonic() >= until or not silent_among(rank, answers) or self.over.wait(pause):
                break
            pause = min(2 * pause, _POLL_S)
        found = held_up_by(rank, answers)
        places = self._meeting.places(list(found), store_s)
        why = "; ".join(f"{place} {what}" for place, what in zip(places, found.values()))
        return PeerError(f"{waited}: {why}", list(found))

    def _answers(self, store_s: float) -> dict[int, Whereabouts]:
        def read(store: Any) -> bytes:
            return store.get(self._key) if store.check([self._key]) else b""

        text = self._meeting.rendezvous.call(read, store_s)
        return {rank: Whereabouts(*at) for rank, *at in map(json.loads, text.splitlines())}
