"""One error for the whole job: an error that ends one rank's run ends that run on every rank.

A rank that fails publishes a *notice* in the rendezvous store: its error, and the step at which the run ends.
All ranks continue until that step and raise there, so none waits in a collective for a rank that stopped
earlier. If another rank fails at an earlier step, it publishes another notice; the error stays the first one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Self, cast

from meshfeed.deliver.error_codec import ErrorRecord
from meshfeed.deliver.meeting import Meeting
from meshfeed.deliver.roll_call import Append, RollCall, Whereabouts
from meshfeed.errors import DeliveryError, MeshfeedError, PeerError, StateError

_MAX_BYTES = 4096
_PREFIX = r"^rank \d+ ended at step \d+: "


class LeftBehindError(PeerError):
    """Another rank has ended this run to begin the next one, and this rank has not."""


class Failures:
    """Publishes the error that ends this rank's run and reads the notices of other ranks.

    Without a meeting it does nothing. If the store is lost during a run, because the rank that hosts it has
    ended, this run continues: the delivery group still detects ranks that die.

    Args:
        meeting: where the ranks meet; None for one process.
        rank: this rank.
        wake: called from another thread when a notice arrives.
        where: where this rank is, for a roll call; called from another thread.
    """

    def __init__(
        self,
        meeting: Meeting | None,
        rank: int,
        wake: Callable[[], None],
        where: Callable[[], Whereabouts] | None = None,
    ) -> None:
        self._meeting, self._rank, self._wake, self._where = meeting, rank, wake, where
        self._roll_call: RollCall | None = None
        self._own: Exception | None = None
        self._prefix = ""
        self._notices: tuple[str, int, list[tuple[Any, ...]]] = "", 0, []  # a prefix, how many read, its own
        self._has_looked = self._leaves = False
        self._process = 0
        # of store calls here: with the wait before it, an error ends within twice the timeout
        self._patience_s = 0.0 if meeting is None else meeting.timeout_s / 2

    def __enter__(self) -> Self:
        meeting = self._meeting
        if meeting is not None:
            self._process, start = os.getpid(), meeting.start
            meeting.on_error = lambda error: self._publish(error, start)
            self._find_run(meeting)
            if self._where is not None:
                self._roll_call = RollCall(meeting, self._prefix, self._where)
            meeting.rendezvous.watch(self)
            # for notices that arrived between the two calls
            self.on_notice(lambda key, text: meeting.later(lambda store: store.append(key, text)))
        return self

    def __exit__(self, *_: object) -> None:
        self._own = None  # its traceback would keep its frames' objects alive
        if self._meeting is not None and self._is_open:
            self._meeting.rendezvous.unwatch(self)

    def leave(self, step: int, why: str, *, without_others: bool | None) -> None:
        """Tell the ranks of this run that it ends before a step, where all of them begin the next one.

        A rank that goes on to that step gets a LeftBehindError, which says why. Without an answer of the
        store within `timeout_s` nobody is told. without_others: they do not begin it, since it is one of
        other ranks; None if they begin it, maybe from a later step of this run.
        """
        self._leaves = True
        record = ErrorRecord.of(LeftBehindError(why))
        text = json.dumps([self._prefix, step, record.encode(_MAX_BYTES).decode(), without_others])
        if self._meeting is None or not self._is_open:
            return
        with contextlib.suppress(DeliveryError):
            while not any(at <= step and alone == without_others for at, _, alone in self._departures()):
                if self._meeting.rendezvous.add_notice(text, self._patience_s):
                    break

    def record(self, error: Exception) -> None:
        """Record this rank's own error. Call before notifying peers: they receive its text alone."""
        self._own = self._own or error

    def error_at(self, step: int) -> BaseException | None:
        """The job's error if the run ends at or before this step; this rank's own exception if it was first.

        Asks the store once before a run's second step, since other ranks may have refused to start, and again
        while the job is ending, since another rank may have failed earlier.
        """
        if (left := self._left_at()) is not None and left[0] <= step:
            return left[1]
        ends, record = self._notice()
        has_begun = self._meeting is not None and step > self._meeting.start
        if (has_begun and not self._has_looked) or (record is not None and ends > step):
            self._has_looked = self._has_looked or has_begun
            ends, record = self._notice(look=True)
        if record is None or ends > step:
            return None
        if (own := self._own) is not None and _is_of(record, own):
            return own
        error = record.exception()
        error.__cause__ = own
        return error

    def fail(self, error: Exception, step: int) -> NoReturn:
        """Publish that this rank ends at `step`, and raise the job's error: the first one published.

        It raises its own if that says the same: a mistake that all ranks make is not the first one's. A
        process that is not a member of the run publishes nothing, and raises its own.

        A lost peer ends the run at once, since the next collective would wait for it. So do ranks that start
        from different steps: they have no step in common.
        """
        is_loss = isinstance(error, PeerError) and self._rank not in error.ranks  # not what ranks disagree on
        if is_loss and not isinstance(error, LeftBehindError):
            self._notice(look=True)
            if (left := self._left_at()) is not None:  # so the lost rank has left this run
                error = left[1]
        if isinstance(error, LeftBehindError):  # whoever is in this run yet reads that, too
            raise error
        self.record(error)
        if isinstance(error, MeshfeedError):
            error.rank = self._rank if error.rank is None else error.rank
            error.step = step if error.step is None else error.step
        is_member, (_, first) = self._publish(error, step), self._notice()
        if not is_member or first is None or _is_of(first, error):
            raise error
        raise first.exception() from error

    def tell(self, error: Exception, step: int) -> None:
        """Publish that this rank ends at `step` by an error that is being raised."""
        _ = self._publish(error, step)

    def late(self, waited: str, awaited: Sequence[int]) -> DeliveryError:
        """The error of a rank that has waited too long: it names who holds it up, see `RollCall`.

        waited: what it has waited for, in words. awaited: the ranks to name if the store is lost.
        """
        try:
            return cast(RollCall, self._roll_call).hold(waited, self._patience_s)
        except DeliveryError as lost:
            return PeerError(f"{waited} from ranks {list(awaited)}, which cannot be asked: {lost}", awaited)

    def on_notice(self, append: Append) -> None:
        if self._roll_call is not None:
            self._roll_call.answer(append)
        (ends, record), meeting = self._notice(), self._meeting
        if record is not None and meeting is not None:
            if self._roll_call is not None:
                self._roll_call.over.set()
            if ends <= meeting.start:
                meeting.cancelled.set()
        if record is not None or self._left_at() is not None:
            self._wake()

    @property
    def _is_open(self) -> bool:
        return bool(self._prefix) and self._process == os.getpid()

    def _publish(self, error: Exception, step: int) -> bool:
        """Publish a notice unless another ends the run at this step or before.

        Returns whether this process is a member of the run; another one publishes nothing.
        """
        record = ErrorRecord.of(error)
        if not record.text.startswith("rank "):
            record = replace(record, text=f"rank {self._rank} ended at step {step}: {record.text}")
        if self._meeting is None or not self._is_open:
            return False
        ends = 0 if isinstance(error, PeerError | StateError) else step
        text = json.dumps([self._prefix, ends, record.encode(_MAX_BYTES).decode()])
        try:
            if not self._meeting.is_member():
                return False
            while self._notice(look=True)[0] > ends:
                if self._meeting.rendezvous.add_notice(text, self._patience_s):
                    break
        except DeliveryError as lost:
            error.add_note(f"rank {self._rank} could not report this error to the other ranks: {lost}")
        return True

    def _find_run(self, meeting: Meeting) -> None:
        """Skip failed runs that its peers have counted: this rank was missing, or not among their ranks."""
        while True:
            self._prefix = meeting.prefix
            _, record = self._notice(look=True)
            if record is None:
                return
            was_missing = record.kind == PeerError.__name__ and self._rank in record.ranks
            is_told = meeting.number is not None  # which run it is: it joins no other one
            if is_told or (not was_missing and (not meeting.was_refused() or meeting.is_counted())):
                return
            meeting.skip()

    def _notice(self, *, look: bool = False) -> tuple[float, ErrorRecord | None]:
        """The earliest step of this run's notices, and the first error; (inf, None) without any.

        look: ask the store for new ones.
        """
        meeting = self._meeting
        if meeting is None or not self._is_open:
            return math.inf, None
        if look:
            with contextlib.suppress(DeliveryError):
                meeting.rendezvous.read_notices(self._patience_s)
        own = [(step, error) for step, error, *left in self._told() if step is not None and not left]
        if not own:
            return math.inf, None
        return min(step for step, _ in own), ErrorRecord.decode(own[0][1].encode())

    def left_before(self, step: int) -> LeftBehindError | None:
        """The error of a rank whose loop was given the steps before this one, if others left sooner for a run
        that it cannot begin from there."""
        left, departures = self._left_at(), self._departures()
        is_late = any(at < step and alone is False for at, _, alone in departures)
        return left[1] if left is not None and is_late else None

    def is_left_behind(self, step: int) -> bool:
        """Whether others have begun a run without this rank, or left before a step that it was given.

        step: the first that it was not given. Asks the store. Raises DeliveryError without its answer.
        """
        if self._meeting is not None and self._is_open:
            self._meeting.rendezvous.read_notices(self._patience_s)
        return any(alone or at < step for at, _, alone in self._departures())

    def _left_at(self) -> tuple[int, LeftBehindError] | None:
        """The first step before which another rank has left, and the error of this one if it goes on."""
        if self._leaves or not (left := self._departures()):
            return None
        step, error, _ = min(left)
        return step, LeftBehindError(ErrorRecord.decode(error.encode()).text)

    def _departures(self) -> list[tuple[int, str, bool | None]]:
        return [(step, error, left[0]) for step, error, *left in self._told() if left]

    def _told(self) -> list[tuple[Any, ...]]:
        """The notices of this run that have arrived, without its prefix; a step of None opens a roll call."""
        if self._meeting is None or not self._is_open:
            return []
        if self._notices[0] != self._prefix:
            self._notices = self._prefix, 0, []
        _, num_read, own = self._notices
        arrived = [*self._meeting.rendezvous.notices.values()]
        for text in arrived[num_read:]:
            if self._prefix in text:  # there may be many of other runs
                run, *told = json.loads(text)
                if run == self._prefix:
                    own.append(tuple(told))
        self._notices = self._prefix, len(arrived), own
        return own


def _is_of(record: ErrorRecord, error: Exception) -> bool:
    """Whether a notice says what this error says, whichever rank published it."""
    own = ErrorRecord.of(error)
    return record.kind == own.kind and own.text in (record.text, re.sub(_PREFIX, "", record.text))


def fail_everywhere(error: Exception, meeting: Meeting | None, rank: int, step: int) -> NoReturn:
    """Raise an error that prevents this rank from taking part in a run, here and on its peers."""
    with contextlib.ExitStack() as stack:
        try:
            failures = stack.enter_context(Failures(meeting, rank, _nothing))
        except DeliveryError as lost:
            error.add_note(f"rank {rank} could not report this error to the other ranks: {lost}")
            raise error from None
        failures.fail(error, step)


def tell_left_behind(meeting: Meeting | None, rank: int, error: LeftBehindError, step: int) -> PeerError:
    """Tell the ranks of the next run, which may wait for this one. Returns the error of this rank."""
    behind = PeerError(f"rank {rank} has not begun the run that others have: {error}", [rank])
    of_next = Failures(None if meeting is None else meeting.following(step), rank, _nothing)
    with contextlib.suppress(PeerError), of_next:
        of_next.fail(behind, step)
    return behind


def _nothing() -> None:
    """There is nobody to wake."""
