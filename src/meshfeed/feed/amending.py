"""How the ranks of a job agree on amendments while they train, without waiting for each other.

One key of the job's rendezvous store holds the *horizon*: the first step that no rank may plan yet, and the
digest of the last amendment. A rank that comes to the horizon moves it on. A rank that amends takes the
horizon's step and writes the amendment's digest there. Both are one compare-and-set of that key, so an
amendment is at a step that no rank has planned, and a rank knows all amendments of the steps that it plans.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from meshfeed.amendments import Amendment, Ledger
from meshfeed.deliver import Meeting
from meshfeed.deliver.rendezvous import first_text
from meshfeed.errors import OptionError
from meshfeed.recipe import Change

T = TypeVar("T")

AT_ONCE = 4
"""Steps that a rank moves the horizon on by: it asks the store once for so many."""


class Amending:
    """One rank's side of the agreement.

    Args:
        ledger: what the job begins with; equal on all ranks.
        meeting: -> where the ranks meet; None for one process.
    """

    def __init__(self, ledger: Ledger, meeting: Callable[[], Meeting | None]) -> None:
        self.ledger, self.began, self._meeting = ledger, ledger.digest, meeting
        self._alone = HashStore()
        self._planned = 0  # this rank may plan the steps before
        self._lock = threading.Lock()  # the producer and callers of `amend`

    def known_at(self, step: int) -> Ledger:
        """All amendments that affect a step, which this rank is about to plan. Raises DeliveryError."""
        with self._lock:
            while step >= self._planned:
                text, horizon = self._caught_up(step)
                if horizon <= step:
                    horizon = step + AT_ONCE
                    if not self._replaced(text, horizon, self.ledger.digest):
                        continue
                self._planned = horizon
        return self.ledger

    def amend(self, change: Change, at: int | None, least: int, check: Callable[[Ledger], object]) -> int:
        """Agree on a change at a step, or at the first that no rank has planned. Returns its step.

        least: the first step that this rank has not trained. check: raises for a ledger that the job cannot
        have. Raises OptionError for a step that some rank may have planned, DeliveryError.
        """
        with self._lock:
            while True:
                text, horizon = self._caught_up(least)
                first = max(horizon, least)
                if at is not None and at < first:
                    raise OptionError(
                        f"amend(at={at}): the steps before {first} are planned already; give a later one, or "
                        f"leave at= out"
                    )
                ledger = self.ledger.added(Amendment(first if at is None else at, change))
                check(ledger)
                told = json.dumps([self.ledger.digest, ledger.lines[-1]])
                self._call(lambda store, key, of=ledger.digest, text=told: store.set(f"{key}/{of}", text))
                if self._replaced(text, horizon, ledger.digest):
                    self.ledger = ledger
                    return ledger.amendments[-1].step

    def _caught_up(self, step: int) -> tuple[str, int]:
        """Get the amendments of other ranks. The horizon's text, and the first step that no rank may plan.

        step: where the horizon begins if this rank is the first to ask.
        """
        text = self._call(lambda store, key: first_text(store, key, json.dumps([step, self.began])))
        horizon, head = json.loads(text)
        lines = list[Any]()
        while head != self.ledger.digest:
            told = self._call(lambda store, key, of=head: store.get(f"{key}/{of}"))
            head, line = json.loads(told)
            lines.append(line)
        for line in reversed(lines):
            self.ledger = self.ledger.added(Amendment.of_line(line, "an amendment of another rank"))
        return text, horizon

    def _replaced(self, text: str, horizon: int, head: str) -> bool:
        """Replace the horizon's text. False if another rank has come between."""
        new = json.dumps([horizon, head])
        return self._call(lambda store, key: store.compare_set(key, text, new)).decode() == new

    def _call(self, operation: Callable[[Any, str], T]) -> T:
        """Run an operation on the store, with the key of the horizon. Raises DeliveryError."""
        meeting = self._meeting()
        name = "" if meeting is None else meeting.name
        key = f"meshfeed/{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}/ledger/{self.began}"
        if meeting is None:
            return operation(self._alone, key)
        return meeting.call(lambda store: operation(store, key))
