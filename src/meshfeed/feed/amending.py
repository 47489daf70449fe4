"""How the ranks of a job agree on amendments while they train, without waiting for each other.

One key of the job's rendezvous store holds the *horizon*: the first step that no rank may plan yet, and the
digest of the last amendment. A rank that comes to the horizon moves it on. A rank that amends takes the
horizon's step and writes the amendment's digest there. Both are one compare-and-set of that key, so an
amendment is at a step that no rank has planned, and a rank knows all amendments of the steps that it plans.
The horizon begins anew after ranks have loaded a state.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from meshfeed.amendments import Ledger, amendment_of
from meshfeed.deliver import Meeting
from meshfeed.deliver.rendezvous import first_text, key_of
from meshfeed.errors import DeliveryError, OptionError, StateError
from meshfeed.order import extend
from meshfeed.recipe import Amendment, Change, Recipe
from meshfeed.state import State

T = TypeVar("T")

_log = logging.getLogger("meshfeed")

AT_ONCE = 4
"""Steps that a rank moves the horizon on by: it asks the store once for so many."""

_LEFT = 2**62
"""Loads in the text of a horizon that ranks have left."""

_MOST_BYTES = 4 << 20  # of an amendment; a TCPStore takes no value of 8 MiB


class Recipes:
    """A job's recipe under its ledgers, one after the other: each is made once, of the one before it.

    Args:
        given: the recipe without amendments.
    """

    def __init__(self, given: Recipe) -> None:
        self._first = self._last = Ledger(), given

    def of(self, state: State, ledger: Ledger) -> Recipe:
        """The recipe of a state: with the amendments that were agreed before its step.

        Before all steps it may have those of step 0, or not: nothing is trained yet.
        """
        if state.step == 0 and state.recipe == self.under(ledger).summary(until=0):
            return self.under(ledger)
        return self._first[1].amended(each for each in ledger if each.known < state.step)

    def under(self, ledger: Ledger) -> Recipe:
        """The recipe as the ledger amends it. Raises RecipeError for a ledger that it cannot have."""
        known, recipe = self._last
        if ledger.digest == known.digest:
            return recipe
        further, latest = ledger.amendments[len(known) :], max((each.step for each in known), default=0)
        if not ledger.begins_with(known) or any(each.step < latest for each in further):
            (_, recipe), further = self._first, ledger.amendments
        amended = recipe.amended(further)
        extend(amended, recipe)
        self._last = ledger, amended
        return amended


class Amending:
    """One rank's side of the agreement.

    Args:
        ledger: what the job begins with; equal on all ranks.
        path: of the file that keeps it; the same text on all ranks.
        timeout_s: how long another process may hold that file.
        meeting: -> where the ranks meet; None for one process.

    Attributes:
        loads: states that this rank has loaded; equal on all ranks that plan.
    """

    def __init__(
        self, ledger: Ledger, path: str, timeout_s: float, meeting: Callable[[], Meeting | None]
    ) -> None:
        self.ledger, self.began, self._path, self._meeting = ledger, ledger.digest, path, meeting
        self._timeout_s = timeout_s
        self.loads = 0
        self._alone = HashStore()
        self._left = False
        self._planned = 0, 0  # after so many loads, this rank may plan the steps before
        self._lock = threading.Lock()  # the producer and callers of `amend`
        self._holder: int | None = None
        self._keeper: int | None = None
        self._tried: tuple[str, int | None, str] | None = None  # a change, its `at`, the digest of its line

    def known_at(self, step: int) -> Ledger:
        """All amendments that affect a step, which this rank is about to plan. Raises DeliveryError."""
        with self._held():
            while (self.loads, step) >= self._planned:
                text, loads, horizon = self._caught_up(step)
                if loads > self.loads:  # other ranks have left this run, and so will this one
                    break
                if horizon <= step:
                    horizon = step + AT_ONCE
                    if not self._replaced(text, loads, horizon, self.ledger.digest):
                        continue
                self._planned = self.loads, horizon
        return self.ledger

    def leave(self, *, tells: bool) -> None:
        """The ranks go on in another arrangement. Whoever stays behind may not amend the job any more.

        tells: in the store, too, for ranks that do not leave. Raises DeliveryError.
        """
        with self._held():
            self._left = True
            while tells:
                text, loads, horizon = self._caught_up(0)
                if loads == _LEFT or self._replaced(text, _LEFT, horizon, self.ledger.digest):
                    return

    def amend(self, change: Change, at: int | None, least: int, check: Callable[[Ledger], object]) -> int:
        """Agree on a change at a step, or at the first that no rank has planned; write the ledger. The step.

        least: the first step that this rank has not trained. check: raises for a ledger that the job cannot
        have. Raises OptionError for a step that some rank may have planned, a change that is too large, on a
        rank that the job goes on without, or in a signal handler that has interrupted this; DeliveryError;
        StateError if the ledger cannot be written.
        """
        agreed = self._agreed(change, at, least, check)
        _log.info("the job is amended from step %d on: %s", agreed["step"], json.dumps(agreed))
        try:
            self.keep()
        except StateError as bad:
            raise StateError(
                f"amend: the amendment is in force from step {agreed['step']}; the ledger could not be "
                f"written: {bad}. Cure that and amend again with the same change, which then writes it"
            ) from bad
        self._tried = None
        return agreed["step"]

    def _agreed(
        self, change: Change, at: int | None, least: int, check: Callable[[Ledger], object]
    ) -> dict[str, Any]:
        """The line of the ledger that ranks have agreed on."""
        with self._held():
            while True:
                text, loads, horizon = self._caught_up(least)
                if self._tried is not None and self._tried[:2] == (change.digest, at):
                    for line in self.ledger.lines:  # agreed, though the call failed
                        if line["digest"] == self._tried[2]:
                            return line
                if self._left or loads == _LEFT:
                    raise OptionError(
                        "amend: the job goes on in another arrangement of its ranks, in which this one takes "
                        "no part yet; nothing has changed, amend on a rank that does"
                    )
                first = max(horizon, least)
                if at is not None and at < first:
                    raise OptionError(
                        f"amend(at={at}): the steps before {first} are planned already; give a later one, or "
                        f"leave at= out"
                    )
                # other ranks may still be before the step where this one has not begun
                agreed = first if self._planned[0] == self.loads and self._planned[1] else None
                step = first if at is None else at
                ledger = self.ledger.added(Amendment(step, change, None if agreed == step else agreed))
                check(ledger)
                told = json.dumps([self.ledger.digest, ledger.lines[-1]])
                if len(told) > _MOST_BYTES:
                    raise OptionError(
                        f"amend: {change!r} takes {len(told):,} bytes, and ranks pass on {_MOST_BYTES:,}; "
                        f"put the documents in a file, mf.Exclude(files=...)"
                    )
                self._call(lambda store, key, of=ledger.digest, text=told: store.set(f"{key}/{of}", text))
                self._tried = change.digest, at, ledger.digest
                try:
                    replaced = self._replaced(text, loads, horizon, ledger.digest)
                except DeliveryError as lost:
                    raise DeliveryError(
                        f"{lost}; amend: it is not known whether the amendment is in force from step {step}; "
                        f"amend again with the same change, which finds out and puts it in once"
                    ) from lost
                if replaced:
                    self.ledger = ledger
                    return ledger.lines[-1]

    def keep(self) -> None:
        """Write the ledger, unless another rank has written one that goes on from it. Raises StateError."""
        if self._keeper == threading.get_ident():
            return  # a signal handler has interrupted it, and it goes on
        self._keeper = threading.get_ident()
        try:
            self.ledger.keep(self._path, timeout_s=self._timeout_s)
        finally:
            self._keeper = None

    @contextlib.contextmanager
    def _held(self) -> Generator[None]:
        if self._holder == threading.get_ident():
            raise OptionError(
                "amend: this signal handler has interrupted the planning of a step; note the change there, "
                "and amend in the loop"
            )
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

    def _caught_up(self, step: int) -> tuple[str, int, int]:
        """Get the amendments of other ranks. The horizon's text, its loads, the first step not to be planned.

        step: where the horizon begins if this rank is the first to ask.
        """
        begins = json.dumps([self.loads, step, self.began])
        text = self._call(lambda store, key: first_text(store, key, begins))
        loads, horizon, head = json.loads(text)
        if loads < self.loads:  # of a run that is over
            loads, horizon = self.loads, 0
        lines, known = list[Any](), {"", *self.ledger.digests}
        while head not in known:
            told = self._call(lambda store, key, of=head: store.get(f"{key}/{of}"))
            head, line = json.loads(told)
            lines.append(line)
        if head != self.ledger.digest:
            raise DeliveryError(
                "ranks disagree on the amendments of this job; give them one ledger, and feeds that keep "
                "others a name (name=)"
            )
        for line in reversed(lines):
            self.ledger = self.ledger.added(amendment_of(line, "an amendment of another rank"))
        return text, loads, horizon

    def _replaced(self, text: str, loads: int, horizon: int, head: str) -> bool:
        """Replace the horizon's text. False if another rank has come between."""
        new = json.dumps([loads, horizon, head])
        return self._call(lambda store, key: store.compare_set(key, text, new)).decode() == new

    def _call(self, operation: Callable[[Any, str], T]) -> T:
        """Run an operation on the store, with the key of the horizon. Raises DeliveryError."""
        meeting = self._meeting()
        name = "" if meeting is None else meeting.name
        key = f"meshfeed/{key_of(f'{name} {self._path}')}/ledger/{self.began}"
        if meeting is None:
            return operation(self._alone, key)
        return meeting.call(lambda store: operation(store, key))
