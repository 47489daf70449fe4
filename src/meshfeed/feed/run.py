"""One run of a feed: a producer that runs ahead on a thread, and its items for one or several consumers."""

from __future__ import annotations

import abc
import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NoReturn, TypeVar

from meshfeed.deliver import (
    Delivery,
    Digests,
    EndOfStream,
    Failures,
    LeftBehindError,
    Meeting,
    Verifier,
    Whereabouts,
    tell_left_behind,
)
from meshfeed.errors import DeliveryError, PeerError, StateError
from meshfeed.extras import version_of
from meshfeed.feed.batch import Microbatch, Microbatches, Step
from meshfeed.feed.device import placer_of
from meshfeed.feed.place import RankPlace
from meshfeed.feed.prefetcher import Prefetcher
from meshfeed.feed.stepping import GlobalBatch
from meshfeed.metrics import Recorder, RunStart, Span, StepCosts

P = TypeVar("P", bound=RankPlace)

_JOIN_S = 10.0  # how long a producer may take to end with its peers


@dataclass(frozen=True, slots=True)
class StepStart:
    """The producer begins a step. costs: those of the step, added up by the run."""

    batch: GlobalBatch
    costs: StepCosts


@dataclass(frozen=True, slots=True)
class Made:
    """The producer has made some microbatches. counted: their cost, by counter."""

    microbatches: list[Microbatch]
    ticket: Any
    counted: Mapping[str, float]

    def without(self, names: frozenset[str]) -> Made:
        """The same without some fields."""
        some = [
            each.with_fields({name: v for name, v in each.fields.items() if name not in names})
            for each in self.microbatches
        ]
        return replace(self, microbatches=some)


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The producer has made all of a step. reread: recomputes its digests from storage."""

    step: int
    digests: Digests | None
    reread: Callable[[], Digests]


Item = StepStart | Made | StepEnd


class Producer(abc.ABC, Generic[P]):
    """Makes the items of a run of a Feed or an Exchange. It is made where the run begins.

    Attributes:
        place: this rank's.
        depth: made items that wait for the loop, at most; 0 if they are made on the loop's own thread.
        compared: names of what `verify` compares.
        origin: why a batch of its own may be late, for an error message: what is late, and what to check.
    """

    place: P
    depth: int
    compared: Sequence[str]
    origin: str

    @abc.abstractmethod
    def agreed(self) -> Mapping[str, str]:
        """What every rank must agree on, besides the place: name -> value."""

    @abc.abstractmethod
    def about(self, step: int) -> RunStart:
        """The description of a run, from a step on, for metrics sinks."""

    @abc.abstractmethod
    def new_delivery(self, meeting: Meeting | None, patience_s: float | None) -> Delivery:
        """The delivery; entering it meets the peers."""

    @abc.abstractmethod
    def items(self, run: Run) -> Iterator[Item]:
        """All that it makes, on the device, from the run's start on."""

    def forget(self) -> None:
        """Forget what it has announced to stores, and will not read."""


@dataclass(slots=True)
class _View:
    """A consumer's position: fields it does not need, items queued for it, its next step.

    whole: the first step it has not completed, by taking all microbatches or by asking for the next step.
    left: the first step that it has not left, by asking for the next one.
    """

    hidden: frozenset[str]
    step: int
    whole: int
    left: int
    items: deque[StepStart | Made | None] = field(default_factory=deque)
    joined: bool = False


class Run:
    """From the first item of a producer to the last, or to `stop`.

    `stop` may come from another thread or from a signal handler, at any moment: then a loop that waits raises
    StateError. It never ends as if the stream had ended.

    Args:
        producer: what makes its items.
        meeting: where a rank that fails notifies all others; None for one process.
        start: the first step.
        num_views: its consumers, virtual stages if there are several. Each of them gets every step.
        recorder: records the costs of each step.
        ended: called when a consumer has taken the last step.

    Attributes:
        producer: as given.
        first: the first step.
        num_views: as given.
        delivery, clock, placer, recorder: that the producer uses.
        ends_before: the step at which another run goes on from there; without one, it is infinite.
        is_whole: whether another run follows it, and all steps before that are made, in the views' queues.
    """

    def __init__(
        self,
        producer: Producer[Any],
        meeting: Meeting | None,
        start: int,
        num_views: int,
        *,
        recorder: Recorder,
        ended: Callable[[], None],
    ) -> None:
        place, options = producer.place, producer.place.options
        place.check_rank()
        self._role = place.role
        self._timeout_s = options.transport.timeout_s
        self.placer, self.clock, self.recorder = placer_of(options.device), recorder.new_clock(), recorder
        self.delivery = producer.new_delivery(meeting, None if producer.depth else self._timeout_s)
        self._verifier: Verifier | None = None
        if options.verify:
            self._verifier = Verifier.among(place.layout, place.roles, place.rank, producer.compared, meeting)
        self.producer, self._meeting, self._ended = producer, meeting, ended
        self._telling, self._behind = threading.Lock(), None
        self.first, self.num_views, self._num_ready = start, num_views, 0
        self._views = [_View(hidden, start, start, start) for hidden in place.hidden_from(num_views)]
        self._prefetcher = Prefetcher(self._reporting(start), self.clock, producer.depth, Made)
        self._failures = Failures(meeting, place.rank, self._wake, self._where)
        self._due = start  # the step that the producer's next item belongs to
        self._left = 0  # its microbatches that no view was given
        self._given = 0, 0, start  # the loop's place: so many of the microbatches of a step
        self._taken = 0  # items of the producer, in all steps
        self._waits, self._since = "", time.monotonic()  # what the loop waits for, since when
        self.ends_before: float = math.inf
        self.is_whole = False
        self._resources = contextlib.ExitStack()
        self._started = self._stopped = False
        self._stopping = threading.RLock()  # held while the run is started or stopped
        self._stop_until = 0.0  # how long `stop` waits for the producer
        self._starting: list[Span] = []
        self._failure: Exception | None = None
        self._process = os.getpid()

    @property
    def step(self) -> int:
        """The first step that some view has not completed."""
        return min(view.whole for view in self._views)

    @property
    def step_in_loop(self) -> int:
        """The step that the slowest view is in, or waits for."""
        return min(view.left for view in self._views)

    @property
    def next_begun(self) -> int:
        """The first step that no view was given."""
        return max(view.step for view in self._views)

    @property
    def is_left_behind(self) -> bool:
        """Whether other ranks have ended this run, to begin another one that this rank does not know of.

        Raises DeliveryError if the store does not answer.
        """
        return self._failures.is_left_behind(self.next_begun)

    def end_before(self, step: int, why: str, *, without_others: bool | None = False) -> None:
        """End before a step, where another run begins. See `Failures.leave`."""
        self.ends_before = step
        self._failures.leave(step, why, without_others=without_others)

    def say(self, key: str, text: str) -> None:
        """Tell ranks that begin it later, unless one has told them before. Raises DeliveryError."""
        if self._meeting is not None:
            self._meeting.say(key, text)

    def pass_over(self, step: int) -> None:
        """Count a step that is left out, the next one, as given to all views."""
        self._take_all_before(step)
        self._due = max(self._due, step + 1)
        for view in self._views:
            view.step = view.whole = view.left = max(view.step, step + 1)

    def join(self, view: int, num_views: int) -> bool:
        """Join as a view; False if that is impossible and a new run must begin."""
        is_over = self._stopped and not self.is_whole
        if is_over or num_views != self.num_views or self._views[view].joined:
            return False
        self._views[view].joined = True
        return True

    def start(self, *, follows: bool = False) -> None:
        """Meet the peers and start producing; the only part of a run that waits for ranks to join.

        follows: it goes on from another run.
        """
        try:
            self._start(follows)
        except Exception as failure:
            self._end_with(failure)

    def steps(self, view: int) -> Iterator[Step]:
        """The steps of one view. Asking for the next step drops the rest of the current one."""
        consumer = self._views[view]
        while True:
            if not self._stopped or self.is_whole:  # an unfinished step does not count after a failure
                consumer.whole = consumer.left = consumer.step
            if consumer.step >= self.ends_before:
                self._complete()
                return
            self._num_ready = self._prefetcher.num_ready
            item = self._take(consumer)
            if item is None:
                self._ended()
                return
            if isinstance(item, StepStart):
                consumer.step = item.batch.step + 1
                if not item.batch.plan.num_microbatches:
                    consumer.whole = consumer.step
                yield self._step(consumer, item.batch, item.costs)

    def record(self, error: Exception) -> None:
        """Record the producer's final error. Call before notifying peers."""
        self._failures.record(error)

    def tell(self, error: Exception) -> None:
        """Tell the other ranks that this rank's own code has raised in its loop: they end, too."""
        if not self._stopped:
            self._failures.tell(error, self._due)

    def stop(self) -> None:
        """Stop the producer and disconnect. Items not handed out are dropped."""
        if self._process != os.getpid():
            self._stopped = True  # in a forked child; the parent's run continues
            return
        with self._stopping:
            if not self._stopped:
                self._stopped, self._stop_until = True, time.monotonic() + min(_JOIN_S, self._timeout_s)
                self.recorder.over()
            if self._started:
                self._prefetcher.stop()
                self.delivery.interrupt()
                if not self._prefetcher.join(max(0.0, self._stop_until - time.monotonic())):
                    # It waits for a peer that does not close: its group cannot be closed while in use, and is
                    # when the producer ends. Or the loop's own thread is making an item; when it returns from
                    # that, it stops the run again.
                    self._prefetcher.at_end(self._resources.close)
                    return
            elif self._meeting is not None:
                self._meeting.cancelled.set()  # `start` may wait for peers
            self._resources.close()

    def close_with(self, resources: contextlib.ExitStack) -> None:
        """Close what a stopped run reads from: now, or when the loop's thread returns from making an item."""
        with self._stopping:
            if self._prefetcher.is_busy:
                self._resources.push(resources)
                return
        resources.close()

    def _step(self, view: _View, batch: GlobalBatch, costs: StepCosts) -> Step:
        return Step(
            index=batch.step,
            num_microbatches=batch.plan.num_microbatches,
            tokens=batch.tokens,
            valid_tokens=batch.valid_tokens,
            sum_sq=batch.sum_sq,
            sources=batch.sources,
            plan=batch.plan,
            microbatches=Microbatches(self._microbatches(view, batch), batch.plan.num_microbatches),
            _costs=costs,
        )

    def _microbatches(self, view: _View, batch: GlobalBatch) -> Generator[Microbatch]:
        left = num = batch.plan.num_microbatches
        after = batch.step + 1
        while left:
            made = self._take(view) if view.step == after else None
            if not isinstance(made, Made):
                raise _of_finished_step()
            for microbatch in made.microbatches:
                if view.step != after:
                    raise _of_finished_step()
                if self._stopped and not self.is_whole:
                    raise self._why_stopped()
                self.placer.receive(microbatch, made.ticket)  # now: the loop may use another stream for each
                left -= 1
                if not left:
                    view.whole = after
                self._given, self._since = (num - left, num, batch.step), time.monotonic()
                yield microbatch

    def _why_stopped(self) -> Exception:
        """The error that has ended the run."""
        return stopped_elsewhere() if self._failure is None else self._failure

    def _take(self, view: _View) -> StepStart | Made | None:
        """The view's next item; None at the end of the stream."""
        if self._stopped and not self.is_whole:
            raise self._why_stopped()
        while not view.items:
            self._pull_or_end()
        return view.items.popleft()

    def _complete(self) -> None:
        """Take all that the run makes of the steps before its end, for every view."""
        self._take_all_before(self.ends_before)
        self.is_whole = True

    def _take_all_before(self, step: float) -> None:
        while self._due < step and not self.is_whole:
            self._pull_or_end()

    def _pull_or_end(self) -> None:
        try:
            self._pull()
        except Exception as failure:
            self._end_with(failure)
        except BaseException:  # Ctrl-C, or SystemExit of a signal handler, which may have closed the feed
            self.stop()
            raise

    def _end_with(self, failure: Exception) -> NoReturn:
        """Stop, and raise the error that has ended the run."""
        was_stopped = self._stopped
        if isinstance(failure, LeftBehindError):
            failure = self._left_behind(failure, self._due)
        if not was_stopped:
            self._failure = failure
        self.stop()  # even if the caller handles the error, peers that wait for this rank must see it leave
        if was_stopped and self._failure is None and not isinstance(failure, StateError):
            raise stopped_elsewhere() from failure  # which comes of that
        raise failure

    def _left_behind(self, error: LeftBehindError, step: int) -> PeerError:
        with self._telling:  # also called where notices arrive
            if self._behind is None:
                self._behind = tell_left_behind(self._meeting, self._role.rank, error, step)
        return self._behind

    def _pull(self) -> None:
        """Pass the producer's next item to all views."""
        asked = self._since = time.monotonic()
        self._waits = "batch"
        try:
            with self.recorder.around("wait"):
                item, spans = self._prefetcher.get(self._timeout_s, self._job_error)
        except StopIteration:
            if self._stopped:
                raise self._why_stopped() from None
            self._enqueue(None)
            return
        except EndOfStream as end:
            self._publish(self._source_closed(end))
        except TimeoutError:
            self._publish(self._late("for its next batch"))
        except PeerError as lost:
            self._publish(lost)
        if self._stopped:
            raise self._why_stopped()
        if isinstance(item, StepStart):
            batch, self._due, self._left = item.batch, item.batch.step, item.batch.plan.num_microbatches
            self._given = 0, self._left, batch.step
            starting, self._starting = self._starting, []
            began = starting[0].start if starting else asked
            self.recorder.step(batch.step, batch.tokens, self._num_ready, item.costs, began)
            for span in starting:  # the loop waited for these too, in `iter`
                self.recorder.costs.waits.append((span.start, span.stop, [span]))
        self.recorder.waited(asked, time.monotonic(), spans)
        if isinstance(item, StepEnd):
            self._due = item.step + 1
            if self._verifier is not None and item.digests is not None:
                self._compare(self._verifier, item.step)
            self.recorder.over()
        elif isinstance(item, Made):
            self.recorder.costs.counted(item.counted)
            for view in self._views:
                view.items.append(item.without(view.hidden) if view.hidden else item)
            self._left -= len(item.microbatches)
            self._taken += 1
            if self._verifier is not None and self._left == 0:
                self._verifier.taken(self._due)
        else:
            self._enqueue(item)
        self._waits, self._since = "", time.monotonic()

    def _compare(self, verifier: Verifier, step: int) -> None:
        self._waits = "comparison"
        try:
            with self.recorder.stage("verify"):
                verifier.check(step, self._job_error)
        except TimeoutError:
            self._publish(self._late(f"to compare step {step} with ranks {verifier.others}"))
        except DeliveryError as error:
            self._publish(error)

    def _publish(self, error: Exception) -> NoReturn:
        """End the job with an error of this rank, unless the error comes of having been stopped."""
        if self._stopped:
            raise self._why_stopped()
        self._failures.fail(error, self._due)

    def _job_error(self) -> BaseException | None:
        return None if self._meeting is None else self._failures.error_at(self._due)

    def _wake(self) -> None:
        """Another rank has published a notice: interrupt the loop's wait."""
        if self.ends_before == math.inf and (left := self._failures.left_before(self.next_begun)) is not None:
            self._left_behind(left, self.next_begun)  # the loop is in a step that it should not have begun
        self._prefetcher.wake()
        if self._verifier is not None:
            self._verifier.wake()

    def _reporting(self, step: int) -> Iterator[Item]:
        """The producer's items. Its error is published as soon as it is known.

        Except a lost peer: peers may leave while it runs ahead. The loop reports that if it needs more.
        """
        try:
            for item in self.producer.items(self):
                if not isinstance(item, Made):
                    step = item.batch.step if isinstance(item, StepStart) else item.step + 1
                if isinstance(item, StepEnd) and item.digests is not None and self._verifier is not None:
                    self._verifier.made(item.step, item.digests, item.reread)
                yield item
        except (EndOfStream, TimeoutError, PeerError):
            raise
        except Exception as error:
            if self._stopped:
                raise
            self._failures.fail(error, step)

    def _enqueue(self, item: StepStart | None) -> None:
        for view in self._views:
            view.items.append(item)

    def _start(self, follows: bool) -> None:
        with self.clock.stage("start"), contextlib.ExitStack() as stack:
            stack.enter_context(self._failures)
            try:
                if self._meeting is not None:
                    self._meeting.compare(agreed_by(self.producer))
                stack.enter_context(self.delivery)
                if self._verifier is not None:
                    stack.enter_context(self._verifier)
                self.recorder.start(self._due, self._meeting, follows=follows)
            except Exception as error:
                rank = self._role.rank
                closed = f"rank {rank} has closed its feed, or loaded a state, while it joined its peers"
                self._failures.fail(PeerError(closed, [rank]) if self._stopped else error, self._due)
            stack.callback(self.placer.synchronize)
            self._resources = stack.pop_all()
        self._starting = self.clock.take()
        for span in self._starting:
            self.recorder.tell_wait(span.start, span.stop, [span])
        with self._stopping:
            if self._stopped:
                raise self._why_stopped()
            self._prefetcher.start()
            self._started = True
            if self._stopped:  # by a signal handler, in between
                raise self._why_stopped()

    def _source_closed(self, end: EndOfStream) -> PeerError:
        ended = end.args or (self._role.source,)
        closed = f"rank {ended[0]} has closed its feed"
        if len(ended) > 1:
            closed = f"ranks {', '.join(map(str, ended))} have closed their feeds"
        return PeerError(
            f"{closed}, but rank {self._role.rank} needs more; all ranks of a group take the same steps",
            [rank for rank in ended if rank is not None],
        )

    def _late(self, what: str) -> DeliveryError:
        waited, at = f"rank {self._role.rank} waited {self._timeout_s:g} s {what}", self._where()
        if awaited := at.loops or at.producers:
            return self._failures.late(waited, awaited)
        return DeliveryError(f"{waited}, and {self.producer.origin}")

    def _where(self) -> Whereabouts:
        """Where this rank is, for a roll call."""
        verifier, producers = self._verifier, self.delivery.awaited()
        given, planned, step = self._given
        away = (
            f"is in its loop, not in its feed, since microbatch {given} of {planned} of step {step}, "
            f"{time.monotonic() - self._since:.1f} s ago; look at its stack"
        )
        return Whereabouts(
            made=self._prefetcher.num_made,
            taken=self._taken,
            loop="has closed its feed" if self._stopped else "" if self._waits else away,
            loops=verifier.others if verifier is not None and self._waits == "comparison" else (),
            producer=f"waits too: {self.producer.origin if self._role.reads else self.clock.now}",
            producers=producers,
            is_full=self._prefetcher.is_full or not (self._prefetcher.depth or self._waits),
        )


def agreed_by(producer: Producer[Any]) -> dict[str, str]:
    """All that the ranks of a run must agree on."""
    known = {"version": str(version_of("meshfeed")), "kind": type(producer).__name__}
    return {**known, **producer.agreed(), **producer.place.agreed()}


def _of_finished_step() -> StateError:
    return StateError("these microbatches belong to a finished step; take them before the next step")


def stopped_elsewhere() -> StateError:
    """The error of a loop whose run was ended by somebody else."""
    return StateError("load_state_dict, close or a new loop ended this iteration; start a new one")


class Steps(Iterator[Step]):
    """Steps. After an error they are not at their end: asked again, they raise it. A generator would stop."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps
        self._error: BaseException | None = None

    def __next__(self) -> Step:
        if self._error is not None:
            raise self._error
        try:
            return next(self._steps)
        except StopIteration:
            raise
        except BaseException as error:  # Ctrl-C, too
            self._error = error if isinstance(error, Exception) else stopped_elsewhere()
            raise


class VirtualStage:
    """The stream as one virtual pipeline stage needs it; `virtual_stages[i]` of a Feed.

    Iterate all virtual stages of a rank, in any interleaving: each microbatch is made once and kept
    until the last of them has taken it.

    Args:
        begin: virtual stage -> its steps, of a run that has begun.
        index: of this virtual stage.
    """

    def __init__(self, begin: Callable[[int], Iterator[Step]], index: int) -> None:
        self._begin, self.index = begin, index

    def __iter__(self) -> Iterator[Step]:
        """The first of a rank's virtual stages begins the run, as `iter(feed)` does; the others join it."""
        return self._begin(self.index)
