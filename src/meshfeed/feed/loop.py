"""The runs of a Feed or an Exchange, one after another: which one is on, and where the next one begins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NoReturn, Self

from meshfeed.deliver import Meeting, fail_everywhere
from meshfeed.errors import StateError
from meshfeed.feed.batch import Step
from meshfeed.feed.place import RankPlace
from meshfeed.feed.run import Producer, Run, Steps, stopped_elsewhere
from meshfeed.metrics import Recorder
from meshfeed.recipe import Recipe


class FeedRun(Iterator[Step]):
    """A run of a feed: its steps, from one on. Nothing changes it; another run of the feed ends it.

    The first `next` begins it, and waits for the ranks that this one shares reads with. `with` ends it. An
    amendment goes on from it, in the same loop.

    Attributes:
        step: where it begins.
        recipe, layout, rank: of it.
        left_out: steps that it neither reads nor gives.
        next_step: that it gives next, or the first one after it that is not left out.
    """

    def __init__(
        self, loop: Loop, step: int, recipe: Recipe, place: RankPlace, left_out: frozenset[int]
    ) -> None:
        self.step, self.recipe, self.layout, self.rank = step, recipe, place.layout, place.rank
        self.left_out, self.next_step, self._loop = left_out, step, loop
        self._steps: Iterator[Step] | None = None
        self._num_begun = loop.num_begun  # another number says that another loop has begun

    @property
    def has_begun(self) -> bool:
        """Whether it has begun, or a loop over the feed since: a loop that begins now is another run."""
        is_past = self._num_begun != self._loop.num_begun
        return self._steps is not None or self.next_step > self.step or is_past

    def __next__(self) -> Step:
        if self._steps is None and (self._loop.given is not self or self._num_begun != self._loop.num_begun):
            raise StateError("another run or loop of this feed has begun since, or this one was ended")
        try:
            if self._steps is None:
                try:
                    self._steps = self._loop.begin(0, 1, self)
                finally:
                    self._num_begun = self._loop.num_begun
            step = next(self._steps)
        except StopIteration:
            raise
        except BaseException:  # Ctrl-C, too
            self._steps = None  # it is not at its end: asked again, it goes on, or says why not
            raise
        self.next_step = step.index + 1
        return step

    def can_go_on_at(self, step: int) -> bool:
        """Whether `next` gives a step that was to be the next one: not after the run was ended."""
        is_on = self._loop.on is not None or (self._steps is None and self._loop.begins_at == step)
        return is_on and self._num_begun == self._loop.num_begun

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._loop.given is self:
            self._loop.tell(error)
            self._loop.stop()
            self._loop.given = None


class Loop:
    """A loop is a run, or several that go on from each other; virtual stages of a rank share one.

    Args:
        produce: makes the producer of the next run.
        place: this rank's in the next run.
        recorder: records the costs of each step.
        enter, meets: called before a run begins; meets with where its ranks meet.
        has_step: whether the stream gives a step from this one on.
        ended: called when the stream has ended, with whether virtual stages shared the run.

    Attributes:
        changing: held while a run is made or ended, never while it waits for peers: another thread may end it
            then.
        begins_at: the first step of the next run.
        is_loaded: whether that was loaded, and no run has begun there.
        num_begun: how many runs have begun, without those that go on from another one.
        given: the run that the user was given, and nobody has ended since.
        left: the step that the last loop was in; None if there was none since a state was loaded.
    """

    def __init__(
        self,
        produce: Callable[[], Producer[Any]],
        place: Callable[[], RankPlace],
        recorder: Recorder,
        *,
        enter: Callable[[], None],
        meets: Callable[[Meeting | None], None],
        has_step: Callable[[int], bool],
        ended: Callable[[bool], None],
    ) -> None:
        self._produce, self._place, self._recorder = produce, place, recorder
        self._enter, self._meets, self._has_step, self._ended = enter, meets, has_step, ended
        self._line: list[Run] = []  # those that go on from each other, as far as a view has not left them
        self.changing = threading.RLock()
        self._num_stops = self.num_begun = 0
        self.begins_at, self.is_loaded = 0, False
        self.left: int | None = None
        self.given: FeedRun | None = None
        self._told_end = set[int]()  # virtual stages whose loop got nothing, at a loaded state

    @property
    def on(self) -> Run | None:
        """The present run; None between two."""
        return self._line[-1] if self._line else None

    @property
    def next_step(self) -> int:
        """The first step that was not fully handed out."""
        return min((run.step for run in self._line), default=self.begins_at)

    @property
    def next_begun(self) -> int:
        """The first step that no loop was given."""
        return self.begins_at if self.on is None else self.on.next_begun

    @property
    def known_step(self) -> int | None:
        """The step that this rank would go on at; None if it has neither trained nor loaded a state."""
        if self._line:
            return min(run.step_in_loop for run in self._line)
        if self.left is not None:
            return self.left
        return self.begins_at if self.begins_at or self.is_loaded else None

    def begin(self, view: int, num_views: int, by: FeedRun | None = None) -> Iterator[Step]:
        """The steps of a new run, or of the run that other views have begun: virtual stages, if several."""
        with self.changing:
            run, is_new = self._joined(view, num_views, by)
        if run is None:
            return iter(())
        if is_new:
            run.start()
        return Steps(chain.from_iterable(self._in_line(run, view)))

    def stop(self) -> None:
        """End the present run; the next one begins at the first step that was not fully handed out."""
        with self.changing:
            self._num_stops += 1
            if self.on is not None:
                self.left = self.known_step
                self._end(self.on)
                self.begins_at, self._line = self.next_step, []

    def go_to(self, step: int) -> None:
        """End the present run; the next one begins at this step."""
        with self.changing:
            self.stop()
            self.begins_at, self.is_loaded = step, True
            self.left = self.given = None
            self._told_end.clear()

    def give(
        self, step: int, recipe: Recipe, place: RankPlace, left_out: frozenset[int] = frozenset()
    ) -> FeedRun:
        """The run that begins at a step, for the user. It ends the present one."""
        self.go_to(step)
        self.given = FeedRun(self, step, recipe, place, left_out)
        return self.given

    def pass_over(self, step: int) -> None:
        """Count a step that is left out, the next one, as handed out."""
        with self.changing:
            if self.given is not None:
                self.given.next_step = step + 1
            if self.on is None:
                self.begins_at = step + 1
            else:
                self.on.pass_over(step)

    def tell(self, error: BaseException | None) -> None:
        """Tell the present run's other ranks that this rank's own code has raised in its loop."""
        if isinstance(error, Exception) and self.on is not None:
            self.on.tell(error)

    def fail(self, error: Exception, meeting: Meeting | None = None) -> NoReturn:
        """Raise an error that prevents this rank from taking part in the next run, here and on its peers."""
        place = self._place()
        fail_everywhere(error, meeting or place.meeting(self.begins_at), place.rank, self.begins_at)

    def _joined(self, view: int, num_views: int, by: FeedRun | None) -> tuple[Run | None, bool]:
        """The run that a loop belongs to, and whether it is new and must be started; None after the end."""
        for run in self._line:
            if run.join(view, num_views):
                return run, False
        self.stop()
        if self.given is not None and self.given is not by and self.given.has_begun:
            self.given = None
        if self._is_over(view):
            return None, False
        num_stops, self.num_begun = self._num_stops, self.num_begun + 1
        self._enter()
        run = self._new_run(view, num_views)
        if self._num_stops != num_stops:  # by a signal handler, in between
            run.stop()
        return run, True

    def _new_run(self, view: int, num_views: int) -> Run:
        step = self.begins_at
        meeting = self._place().meeting(step)
        try:
            self._meets(meeting)
            run = Run(
                self._produce(),
                meeting,
                step,
                num_views,
                recorder=self._recorder,
                ended=lambda: self._ended(num_views > 1),
            )
        except Exception as error:
            self.fail(error, meeting)
        self.is_loaded = False
        run.join(view, num_views)
        self._line.append(run)
        return run

    def _in_line(self, run: Run, view: int) -> Iterator[Iterator[Step]]:
        """The steps of a run, and those of each that goes on from it."""
        yield run.steps(view)
        while run.is_whole:
            with self.changing:
                run, is_new = self._followed(run, view)
            if is_new:
                run.start(follows=True)
            yield run.steps(view)

    def _end(self, run: Run) -> None:
        run.stop()
        run.producer.forget()

    def _followed(self, run: Run, view: int) -> tuple[Run, bool]:
        """The run that goes on from another one, and whether it is new and must be started."""
        after = self._line[self._line.index(run) + 1 :] if run in self._line else None
        if after is None or (after and not after[0].join(view, run.num_views)):
            raise stopped_elsewhere()
        self._line = [each for each in self._line if each is not run or each.step_in_loop < each.ends_before]
        if after:
            return after[0], False
        self.begins_at, self.is_loaded = int(run.ends_before), True
        self._end(run)
        return self._new_run(view, run.num_views), True

    def _is_over(self, view: int) -> bool:
        """Whether a loop gets nothing, at a loaded state of the end. Raises StateError for a second one."""
        step = self.begins_at
        if not (step or self.is_loaded) or self._has_step(step):
            return False
        self._ended(False)
        if not self.is_loaded or view in self._told_end:
            raise StateError(
                f"the stream has ended, all its {step} steps were handed out; for another pass give the "
                f"recipe more epochs (epochs=), make a new Feed, or load_state_dict an earlier state"
            )
        self._told_end.add(view)
        return True  # a job that is done waits for nobody: others may be gone
