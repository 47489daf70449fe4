"""What a Feed and an Exchange are for their users alike: this rank's place, and a loop over its steps."""

from __future__ import annotations

import abc
import atexit
import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Iterator
from typing import Any, Generic, NoReturn, Self

from torch.utils.data import get_worker_info

from meshfeed.deliver import Meeting
from meshfeed.errors import DeliveryError, StateError
from meshfeed.feed.batch import Step
from meshfeed.feed.loop import Loop
from meshfeed.feed.options import Options
from meshfeed.feed.run import P, Producer, VirtualStage
from meshfeed.layout import Layout
from meshfeed.metrics import Recorder
from meshfeed.roles import DeliveryName, Role, Roles, StageMap


class StepSource(abc.ABC, Generic[P]):
    """One rank's view of a stream of steps. The constructor opens nothing that is read from; `iter` does.

    A run waits for the other ranks to join where it begins: in `iter`, in the first `next` of a run that the
    user was given, and in the first one after a change. So all ranks are at the same point of the program
    there, never inside a pipeline schedule, where one stage waits for another.
    """

    _place: P
    """This rank's, in the present run or the next one."""

    def __init__(self, options: Options) -> None:
        self._recorder = Recorder(options.metrics, lambda step: self._producer().about(step))
        self._loop = Loop(
            self._producer,
            lambda: self._place,
            self._recorder,
            enter=self._enter,
            meets=self._meets,
            has_step=self._has_step,
            ended=self._ended,
        )
        self._entered = self._entered_by_loop = False
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self), os.getpid())

    @abc.abstractmethod
    def _producer(self) -> Producer[Any]:
        """What makes the items of a run that begins now."""

    def _meets(self, meeting: Meeting | None) -> None:
        """Called before a run begins, with where its ranks meet."""

    def _has_step(self, step: int) -> bool:
        return True

    def _open(self) -> None:
        """Open what this rank's role needs."""

    # -- this rank's place ----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self._place.rank

    @property
    def layout(self) -> Layout:
        """The layout; an omitted node size comes from the launcher."""
        return self._place.layout

    @property
    def stage_map(self) -> StageMap:
        """Which pipeline stages embed, compute loss, predict further tokens."""
        return self._place.stage_map

    @property
    def delivery(self) -> DeliveryName:
        """The delivery's name, with "auto" resolved."""
        return self._place.delivery

    @property
    def roles(self) -> Roles:
        """Every rank's role; a rank that `reads` opens storage or is a member of the exchange."""
        return self._place.roles

    @property
    def role(self) -> Role:
        """This rank's role. Raises LayoutError if the layout does not contain the rank."""
        return self._place.role

    @property
    def cp_groups(self) -> dict[int, tuple[int, ...]]:
        """The context-parallel groups that this rank can be in: size -> global ranks in order of slices.

        A trainer creates them once, at its start; `Microbatch.cp_ranks` is always one of them. With a fixed
        cp there is only one.
        """
        return self._place.cp_groups

    # -- the training loop's side ---------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        """Begin a run: join the peers and start to produce. Raises the error that prevents this rank."""
        return self._loop.begin(0, 1)

    @property
    def virtual_stages(self) -> tuple[VirtualStage, ...]:
        """The stream as each virtual pipeline stage of this rank needs it; see `VirtualStage`."""
        vpp = self.stage_map.vpp
        return tuple(VirtualStage(lambda stage: self._loop.begin(stage, vpp), index) for index in range(vpp))

    @property
    def next_step(self) -> int:
        """The first step that was not fully handed out: that of a state taken now."""
        return self._loop.next_step

    def __enter__(self) -> Self:
        if not self._entered:
            try:
                self._open()
            except Exception as error:
                self._loop.fail(error)
            self._entered = True
        return self

    def _enter(self) -> None:
        """For a loop: it closes what it has entered."""
        if (worker := get_worker_info()) is not None:
            raise DeliveryError(
                f"a {type(self).__name__} in worker {worker.id} of a torch DataLoader: each of its "
                f"{worker.num_workers} workers would give every sequence; iterate it in the process that "
                f"trains, where it reads ahead by itself; for a slow dataset, mf.Feed(machine="
                f"mf.Machine(workers=...))"
            )
        if not self._entered:
            self.__enter__()
            self._entered_by_loop = True
        # A thread inside torch when the interpreter exits aborts the process.
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def _ended(self, by_stages: bool) -> None:
        """A loop has taken the last step. An iterator dropped midway leaves its run to the next one."""
        if not by_stages:
            self.close() if self._entered_by_loop else self._loop.stop()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._loop.tell(error)
        self._close(error)

    def close(self) -> None:
        """Stop, disconnect from the peers and close all files.

        Iterating again resumes at the first step that was not fully handed out. Raises MetricsError, after
        closing everything, if a metrics sink has not received all data.
        """
        self._close(None)

    def _close(self, during: BaseException | None) -> None:
        with self._loop.changing:
            self._loop.stop()
            atexit.unregister(self._at_exit)
            self._entered = self._entered_by_loop = False
            self._recorder.close(during)

    def __reduce__(self) -> NoReturn:
        kind = type(self).__name__
        raise StateError(
            f"a {kind} cannot be pickled or copied: its threads, files and peers belong to this process; "
            f"make one in each process, and pass its state_dict()"
        )

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} has no len(); feed.num_steps has the number of its steps, None if the "
            f"stream is endless, and that of an Exchange is known when its iterators have ended. It is its "
            f"own loader: iterate it in the process that trains, without a DataLoader"
        )

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} has no items: it gives steps in order, for step in feed; to begin at "
            f"another one, load_state_dict a state of it. It is its own loader, without a DataLoader"
        )


def _close_at_exit(source: weakref.ref[StepSource[Any]], process: int) -> None:
    left = source()
    if left is not None and process == os.getpid():  # in a fork, the parent closes it
        with contextlib.suppress(Exception):
            left.__exit__(None, getattr(sys, "last_value", None), None)  # that no code has caught
