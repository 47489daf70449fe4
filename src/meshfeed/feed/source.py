"""The common base of Feed and Exchange: this rank's role, its runs, and its step between them."""

from __future__ import annotations

import abc
import atexit
import contextlib
import functools
import os
import sys
import threading
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, NoReturn, Self, TypeVar, cast

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import get_worker_info

from meshfeed.deliver import (
    Delivery,
    Failures,
    LeftBehindError,
    Meeting,
    Verifier,
    can_share,
    default_store,
    ranks_in_words,
)
from meshfeed.errors import DeliveryError, LayoutError, PeerError, StateError
from meshfeed.extras import version_of
from meshfeed.feed.batch import Step
from meshfeed.feed.device import Placer, placer_of
from meshfeed.feed.launch import check_rank, given_layout, num_processes, this_layout, this_rank
from meshfeed.feed.options import Options
from meshfeed.feed.run import Item, Peers, Run, VirtualStage, stopped_elsewhere, views_of
from meshfeed.feed.stepping import cp_groups_of
from meshfeed.layout import Layout
from meshfeed.metrics import Recorder, RunStart, StageClock
from meshfeed.roles import DeliveryName, Field, Role, Roles, StageMap, assign_roles, choose_delivery
from meshfeed.sequence.table import RUN_FIELDS
from meshfeed.whole import whole_numbers

D = TypeVar("D", bound=Delivery)
OptionsT = TypeVar("OptionsT", bound=Options)


class StepSource(abc.ABC, Generic[D, OptionsT]):
    """One rank's view of a stream of steps. The constructor only stores its arguments; `iter` acquires.

    Only `iter` waits for other ranks to join. So all ranks call it at the same point of the program, never
    inside a pipeline schedule, where one stage waits for another.

    A subclass defines the fields, what all ranks must agree on, and how an item is made.

    Args:
        layout: the arrangement of the ranks, also as a DeviceMesh; None for one process.
        rank: this process's global rank; None asks torch.distributed, then the launcher.
        options: see `Options`.
    """

    def __init__(self, layout: Layout | DeviceMesh | None, rank: int | None, options: OptionsT) -> None:
        (rank,) = whole_numbers(LayoutError, 0, optional=["rank"], rank=rank)
        self._recorder = Recorder(options.metrics, self._about)
        self._entered = self._entered_by_loop = False
        self._next_step, self._loaded = 0, False
        self._run: Run | None = None
        self._before: Run | None = None  # the run that this one goes on from
        self._num_stops = 0
        # Held while a run is made or ended, never while it waits for peers: another thread may end it then.
        self._changing = threading.RLock()
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self), os.getpid())
        self._move(given_layout(layout), rank, options)

    # -- what a subclass defines ----------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def _fields(self) -> Sequence[Field]:
        """The fields that roles are assigned for."""

    @property
    @abc.abstractmethod
    def _agreed(self) -> Mapping[str, str]:
        """Further arguments that every rank must agree on: name -> value."""

    @abc.abstractmethod
    def _about(self, step: int) -> RunStart:
        """The description of a run, from `step` on, for metrics sinks."""

    @abc.abstractmethod
    def _new_delivery(self, meeting: Meeting | None, patience_s: float | None) -> D:
        """The delivery; entering it meets the peers."""

    @abc.abstractmethod
    def _items(self, start: int, delivery: D, placer: Placer, clock: StageClock) -> Iterator[Item]:
        """Everything the producer makes, on the device, from step `start` on; runs on its thread."""

    @property
    def _origin(self) -> str:
        """The cause of a late reader, for an error message: what is late, and what to check."""
        return "its own storage has not returned it; check the storage"

    @property
    def _steps_hint(self) -> str:
        """Where the number of steps is, for an error message."""
        return ": how many steps there are is known when its iterators have ended"

    @property
    def _compared(self) -> Sequence[str]:
        """Names of what `verify` compares."""
        return [*(field.name for field in self._fields), *RUN_FIELDS]

    @property
    def _decoded_is_larger(self) -> bool:
        """See `choose_delivery`."""
        return False

    @property
    def _run_name(self) -> str:
        """Distinguishes its runs from those of other sources that ranks begin in different orders."""
        return self._options.transport.name

    @property
    def _depth(self) -> int:
        """How far the producer runs ahead; 0 if it runs on the loop's own thread."""
        return self._options.transport.prefetch or 0

    # -- this rank's role -----------------------------------------------------------------------------

    @cached_property
    def rank(self) -> int:
        """This process's global rank."""
        return this_rank(self._given_rank, self._given_layout or Layout())

    @cached_property
    def layout(self) -> Layout:
        """The layout; an omitted node size comes from the launcher."""
        return this_layout(self._given_layout, self._given_rank, apart=self._apart)

    @cached_property
    def delivery(self) -> DeliveryName:
        """The delivery's name, with "auto" resolved."""
        if self._options.transport.delivery != "auto":
            return self._options.transport.delivery
        return self._chosen_delivery()

    def _chosen_delivery(self) -> DeliveryName:
        return choose_delivery(
            self.layout,
            self.stage_map,
            self._fields,
            self._readers,
            can_share=can_share() is None,
            decoded_is_larger=self._decoded_is_larger,
        )

    @cached_property
    def roles(self) -> Roles:
        """Every rank's role; a rank that `reads` opens storage or is a member of the exchange."""
        packing = self._options.packing
        return assign_roles(
            self.layout,
            self.stage_map,
            self._fields,
            self.delivery,
            self._readers,
            shares_packs=packing is None or packing.policy != "dynamic_cp",
        )

    @cached_property
    def role(self) -> Role:
        """This rank's role. Raises LayoutError if the layout does not contain the rank."""
        self.layout.coord(self.rank)
        return self.roles[self.rank]

    @cached_property
    def cp_groups(self) -> dict[int, tuple[int, ...]]:
        """The context-parallel groups that this rank can be in: size -> global ranks in order of slices.

        A trainer creates them once, at its start; `Microbatch.cp_ranks` is always one of them. With a fixed
        cp there is only one.
        """
        return cp_groups_of(self.layout, self._options.packing, self.layout.coord(self.rank))

    # -- the training loop's side ---------------------------------------------------------------------

    def __enter__(self) -> Self:
        if not self._entered:
            try:
                self._open()
            except Exception as error:
                self._raise_everywhere(error, self._meeting())
            self._entered = True
        return self

    def _open(self) -> None:
        """Open what this rank's role needs."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and self._run is not None:
            self._run.tell(error)
        self._close(error)

    def __reduce__(self) -> NoReturn:
        kind = type(self).__name__
        raise StateError(
            f"a {kind} cannot be pickled or copied: its threads, files and peers belong to this process; "
            f"make one in each process, and pass its state_dict()"
        )

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(
            f"a {kind} has no len(){self._steps_hint}. It is its own loader: iterate it in the process that "
            f"trains, without a DataLoader"
        )

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} has no items: it gives steps in order, for step in feed; to begin at "
            f"another one, load_state_dict a state of it. It is its own loader, without a DataLoader"
        )

    def close(self) -> None:
        """Stop, disconnect from the peers and close all files.

        Iterating again resumes at the first step that was not fully handed out. Raises MetricsError, after
        closing everything, if a metrics sink has not received all data.
        """
        self._close(None)

    def _close(self, during: BaseException | None) -> None:
        with self._changing:
            self._stop()
            atexit.unregister(self._at_exit)
            self._entered = self._entered_by_loop = False
            self._recorder.close(during)

    def __iter__(self) -> Iterator[Step]:
        """Begin a run: join the peers and start to produce. Raises the error that prevents this rank."""
        return self._begin(None)

    @property
    def next_step(self) -> int:
        """The first step that was not fully handed out: that of a state taken now."""
        run, before = self._run, self._before
        if run is None:
            return self._next_step
        return run.step if before is None else min(run.step, before.step)

    def _begin(self, virtual_stage: int | None) -> Iterator[Step]:
        """The steps of a new run, or of the run that other virtual stages have begun."""
        if (worker := get_worker_info()) is not None:
            raise DeliveryError(
                f"a {type(self).__name__} in worker {worker.id} of a torch DataLoader: each of its "
                f"{worker.num_workers} workers would give every sequence; iterate it in the process that "
                f"trains, where it reads ahead by itself; for a slow dataset, mf.Feed(machine="
                f"mf.Machine(workers=...))"
            )
        view, num_views = (0, 1) if virtual_stage is None else (virtual_stage, self.stage_map.vpp)
        with self._changing:
            run, is_new = self._joined(view, num_views, None if virtual_stage is None else self.stage_map)
        if run is None:
            return iter(())
        if is_new:
            run.start()
        return self._steps_of(run, view)

    def _is_over(self, virtual_stage: int | None) -> bool:
        """Whether a loop gets nothing, at a loaded state of the end. Raises StateError for a second one."""
        return False

    def _steps_of(self, run: Run, view: int) -> Iterator[Step]:
        """The steps of a run, and of those that go on from it."""
        yield from run.steps(view)
        while run.goes_on:
            with self._changing:
                if self._run is run or self._before is run:
                    run, is_new = self._followed(run, view)
                else:
                    raise stopped_elsewhere()
            if is_new:
                run.start(follows=True)
            yield from run.steps(view)

    def _left_behind(self, meeting: Meeting, error: LeftBehindError, step: int) -> PeerError:
        """Tell the ranks of the next run, which may wait for this one. Returns the error of this rank."""
        behind = PeerError(f"rank {self.rank} has not begun the run that others have: {error}", [self.rank])
        of_next = Failures(meeting.following(step), self.rank, _nothing)
        with contextlib.suppress(PeerError), of_next:
            of_next.fail(behind, step)
        return behind

    def _followed(self, run: Run, view: int) -> tuple[Run, bool]:
        """The run that goes on from another one, and whether it is new and must be started."""
        if self._before is run and self._run is not None and self._run.join(view, run.num_views):
            return self._run, False
        self._before = run if run.num_views > 1 else None
        self._next_step, self._loaded = run.ends_before, True
        run.stop()
        self._drop_announced()
        self._run = following = self._new_run(run.by_stage)
        following.join(view, run.num_views)
        return following, True

    def _joined(self, view: int, num_views: int, by_stage: StageMap | None) -> tuple[Run | None, bool]:
        """The run that a loop belongs to, and whether it is new and must be started; None after the end."""
        if self._run is not None and self._run.join(view, num_views):
            return self._run, False
        self._stop()
        if self._is_over(None if by_stage is None else view):
            return None, False
        num_stops = self._num_stops
        if not self._entered:
            self.__enter__()
            self._entered_by_loop = True
        # A thread inside torch when the interpreter exits aborts the process.
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)
        self._run = run = self._new_run(by_stage)
        run.join(view, num_views)
        if self._num_stops != num_stops:  # by a signal handler, in between
            run.stop()
        return run, True

    def _ended(self, num_views: int) -> None:
        """A view has taken the last step. An iterator dropped midway leaves its run to the next one."""
        if num_views == 1:
            self.close() if self._entered_by_loop else self._stop()

    def _record(self, error: Exception | None) -> None:
        """Record the producer's final error. Call before notifying peers."""
        if error is not None and (run := self._run) is not None:
            run.record(error)

    def _move(
        self, layout: Layout | None, rank: int | None, options: OptionsT, *, apart: bool = False
    ) -> None:
        """Take another place in another layout, between two runs.

        apart: torch.distributed's default group is of other processes, or numbers them otherwise.
        """
        self._given_layout, self._given_rank, self._options = layout, rank, options
        self._apart = apart
        readers = options.transport.readers
        self._readers = None if readers is None else frozenset(readers)
        self.stage_map = options.stage_map or StageMap(pp=(layout or Layout()).pp)
        self.virtual_stages = tuple(VirtualStage(self._begin, v) for v in range(self.stage_map.vpp))
        for kind in type(self).__mro__:
            for name, value in vars(kind).items():
                if isinstance(value, cached_property):
                    vars(self).pop(name, None)

    def _drop_announced(self) -> None:
        """Forget what a run has announced to stores, and will not read."""

    def _stop(self) -> None:
        with self._changing:
            self._num_stops += 1
            if self._run is not None:
                self._run.stop()
                self._drop_announced()
                self._next_step = self.next_step
                self._run = self._before = None

    # -- a run ----------------------------------------------------------------------------------------

    def _new_run(self, by_stage: StageMap | None) -> Run:
        meeting = self._meeting()
        try:
            if self._options.transport.rendezvous is None and not self._apart:
                check_rank(self._given_rank)
            return self._run_of(meeting, by_stage)
        except Exception as error:
            self._raise_everywhere(error, meeting)

    def _run_of(self, meeting: Meeting | None, by_stage: StageMap | None) -> Run:
        role, placer = self.role, placer_of(self._options.device)
        clock = self._recorder.new_clock()
        delivery = self._new_delivery(meeting, None if self._depth else self._options.transport.timeout_s)
        verifier = None
        if self._options.verify:
            verifier = Verifier.among(self.layout, self.roles, self.rank, self._compared, meeting)
        views = views_of(self._fields, by_stage, self.layout.coord(self.rank).pp)
        self._loaded = False
        return Run(
            self._next_step,
            self._items(self._next_step, delivery, placer, clock),
            clock,
            depth=self._depth,
            timeout_s=self._options.transport.timeout_s,
            peers=Peers(
                role=role,
                delivery=delivery,
                verifier=verifier,
                meeting=meeting,
                compare=lambda: self._compare(meeting) if meeting else None,
            ),
            placer=placer,
            recorder=self._recorder,
            views=views,
            by_stage=by_stage,
            ended=lambda: self._ended(len(views)),
            left_behind=lambda error, step: self._left_behind(cast(Meeting, meeting), error, step),
            origin=self._origin,
        )

    def _compare(self, meeting: Meeting) -> None:
        meeting.compare(self._all_agreed())

    def _meeting(self) -> Meeting | None:
        store = self._options.transport.rendezvous or (None if self._apart else default_store())
        name, num_ranks = self._run_name, 2
        with contextlib.suppress(LayoutError):  # other ranks may have a valid layout
            num_ranks, ranks = self.layout.world_size, self.layout.ranks().tolist()
            if num_ranks < num_processes() or ranks[-1] >= num_ranks:  # only these ranks of the job begin it
                name = f"{name} of {ranks_in_words(ranks)}"
        if store is None or num_ranks == 1:
            return None
        # In torch.distributed's store it is torch.distributed's rank, whatever rank it was given by mistake.
        rank = self.rank if self._options.transport.rendezvous is not None else this_rank(None, Layout())
        return Meeting(store, rank, self._options.transport.timeout_s, name, self._next_step, num_ranks)

    def _all_agreed(self) -> dict[str, str]:
        grid = zlib.crc32(self.layout.grid().tobytes())  # a layout's text does not contain its table
        return {
            "version": str(version_of("meshfeed")),
            "kind": type(self).__name__,
            **self._agreed,
            "layout": f"{self.layout} with ranks {grid:08x}",
            "ranks": ranks_in_words(self.layout.ranks().tolist()),
            "stage_map": str(self.stage_map),
            "packing": str(self._options.packing),
            "cp_split": self._options.cp_split,
            "delivery": self.delivery,
            "ranks_per_node": self._per_node(),
            "readers": str(self._readers and sorted(self._readers)),
            "verify": str(self._options.verify),
        }

    def _per_node(self) -> str:
        """Ranks per node if it determines the readers; launchers may start unequal numbers."""
        if self.delivery not in ("share", "tree"):
            return "any"
        world_size = self.layout.world_size
        return str(min(self.layout.ranks_per_node or world_size, world_size))

    def _raise_everywhere(self, error: Exception, meeting: Meeting | None) -> NoReturn:
        """Raise an error that prevents this rank from taking part, here and on its peers."""
        with contextlib.ExitStack() as stack:
            try:
                failures = stack.enter_context(Failures(meeting, self.rank, lambda: None))
            except DeliveryError as lost:
                error.add_note(f"rank {self.rank} could not report this error to the other ranks: {lost}")
                raise error from None
            failures.fail(error, self._next_step)


def _nothing() -> None:
    """There is nobody to wake."""


def _close_at_exit(source: weakref.ref[StepSource[Any, Any]], process: int) -> None:
    left = source()
    if left is not None and process == os.getpid():  # in a fork, the parent closes it
        with contextlib.suppress(Exception):
            left.__exit__(None, getattr(sys, "last_value", None), None)  # that no code has caught
