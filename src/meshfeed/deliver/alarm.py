"""One error for the whole job: what ends one rank's run for good ends the same run of every rank.

A rank that fails publishes a *notice* in the rendezvous store: its cause, and the step at which it strikes.
All ranks go on until that step and raise there, so that none waits in a collective for one that stopped
earlier. Where another rank fails at an earlier step, its notice follows; the cause stays that of the first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import NoReturn, Self

from meshfeed.deliver.cause import Cause
from meshfeed.deliver.client import Notice
from meshfeed.deliver.rendezvous import Meeting
from meshfeed.errors import DeliveryError, PeerError, StateError

_MOST_BYTES = 4096


class Alarm:
    """One run's ear and voice in the job.

    Without a way to meet it does nothing. A store that is lost in the middle of a run, because the rank that
    hosts it has ended, is no error of this run: what the delivery group notices by itself remains.

    Args:
        meeting: where the ranks meet; None for one process.
        rank: this one.
        wake: called, from another thread, when a notice has come.
    """

    def __init__(self, meeting: Meeting | None, rank: int, wake: Callable[[], None]) -> None:
        self._meeting, self._rank, self._wake = meeting, rank, wake
        self._own: Exception | None = None
        self._prefix = ""
        self._looked = False
        self._process = 0

    def __enter__(self) -> Self:
        meeting = self._meeting
        if meeting is not None:
            self._process, start = os.getpid(), meeting.start
            meeting.tell = lambda error: self._tell(error, start)
            self._find_run(meeting)
            meeting.client.watch(self)
            self.heard()  # of what came between the two
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._own = None  # with its frames it would keep alive what they hold
        if self._meeting is not None and self._is_open:
            self._meeting.client.unwatch(self)

    def failing(self, error: Exception) -> None:
        """This rank is going to fail; its peers may tell the job of it sooner, and know its text alone."""
        self._own = self._own or error

    def struck(self, step: int) -> BaseException | None:
        """The job's error, where it strikes at this step or before; from this rank's own, if it has one.

        Asks the store once before a run's second step, since other ranks may have refused to begin at all,
        and where the job is ending: whether another rank has failed earlier.
        """
        known = self._known()
        begun = self._meeting is not None and step > self._meeting.start
        if (begun and not self._looked) or (known is not None and known.step > step):
            self._looked = self._looked or begun
            known = self._known(look=True)
        if known is None or known.step > step:
            return None
        error, own = known.cause.error(), self._own
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
        own, known = self._tell(error, step), self._known()
        if known is None or known.cause.text == own.text:
            raise error
        raise known.cause.error() from error

    def heard(self) -> None:
        """See Watcher."""
        known, meeting = self._known(), self._meeting
        if known is not None and meeting is not None:
            if known.step <= meeting.start:
                meeting.call_off()
            self._wake()

    @property
    def _is_open(self) -> bool:
        return bool(self._prefix) and self._process == os.getpid()

    def _tell(self, error: Exception, step: int) -> Cause:
        cause = Cause.of(error)
        if not cause.text.startswith("rank "):
            cause = replace(cause, text=f"rank {self._rank} ended at step {step}: {cause.text}")
        if self._meeting is not None and self._is_open:
            try:
                self._publish(cause, 0 if isinstance(error, PeerError | StateError) else step, self._meeting)
            except DeliveryError as lost:
                error.add_note(f"rank {self._rank} could not tell the other ranks of this error: {lost}")
        return cause

    def _find_run(self, meeting: Meeting) -> None:
        """The first run that has not failed for want of this rank: those who waited for it count that one."""
        while True:
            self._prefix = meeting.prefix
            known = self._known(look=True)
            if known is None or known.cause.kind != PeerError.__name__ or self._rank not in known.cause.ranks:
                return
            meeting.pass_over()

    def _publish(self, cause: Cause, step: int, meeting: Meeting) -> None:
        """Publish a notice, unless there is one that strikes no later."""
        notice = Notice(self._prefix, step, cause).encode(_MOST_BYTES)
        while (known := self._known(look=True)) is None or known.step > step:
            if meeting.client.add_notice(notice, self._patience_s):
                return

    def _known(self, *, look: bool = False) -> Notice | None:
        """The first cause, and the earliest step of all notices of this run. look: at the store, too."""
        meeting = self._meeting
        if meeting is None or not self._is_open:
            return None
        if look:
            with contextlib.suppress(DeliveryError):
                meeting.client.read_notices(self._patience_s)
        own = [notice for notice in list(meeting.client.notices.values()) if notice.run == self._prefix]
        return replace(own[0], step=min(notice.step for notice in own)) if own else None

    @property
    def _patience_s(self) -> float:
        """For the store, so that with what has been waited for before an error ends within twice that."""
        return 0.0 if self._meeting is None else self._meeting.timeout_s / 2
