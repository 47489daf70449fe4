"""What changes while a feed is trained on: its recipe, and which ranks there are.

Ranks agree on amendments as `amending` says, and on where to go on as `regrouping` says.
"""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store as Rendezvous

from meshfeed.amendments import Ledger
from meshfeed.deliver import Delivery
from meshfeed.errors import DeliveryError, MeshfeedError, OptionError, StateError
from meshfeed.feed.amending import Amending, Recipes
from meshfeed.feed.batch import Step
from meshfeed.feed.launch import given_layout, num_processes
from meshfeed.feed.options import FeedOptions
from meshfeed.feed.regrouping import Asked, LoopPosition, Seat, agree, left_out
from meshfeed.feed.source import StepSource
from meshfeed.feed.stepping import Stepping
from meshfeed.layout import Layout
from meshfeed.mixture import Store
from meshfeed.order import has_step, num_positions
from meshfeed.recipe import Change, Recipe
from meshfeed.whole import whole

_log = logging.getLogger("meshfeed")


class ChangingSource(StepSource[Delivery, FeedOptions]):
    """The steps of a recipe that is amended, on ranks that come and go.

    Args:
        recipe: without amendments.
        layout, rank, options: see `StepSource`.

    Attributes:
        recipe: with all amendments that this rank has applied.
    """

    def __init__(
        self, recipe: Recipe, layout: Layout | DeviceMesh | None, rank: int | None, options: FeedOptions
    ) -> None:
        super().__init__(layout, rank, options)
        kept = None if options.ledger is None else Ledger.read(options.ledger, missing_ok=True)
        self._amending = None if kept is None else self._amends(kept)
        self._recipes, self._where = Recipes(recipe), LoopPosition()
        self._told_end = set[int | None]()  # virtual stages whose loop got nothing, at a loaded state
        self.recipe = self._begins_as = self._recipes.under(self.ledger)
        self._applied = self.ledger
        self._stepping = Stepping(
            recipe=self.recipe,
            layout=self._given_layout or Layout(),
            micro_batch_size=options.micro_batch_size or 1,
            packing=options.packing,
            vpp=self.stage_map.vpp,
            cp_split=options.cp_split,
        )

    @abstractmethod
    def _open_further(self, stores: Sequence[Store], recipe: Recipe) -> None:
        """Open stores that an amendment adds to those that are open. recipe: with them."""

    # -- amendments ---------------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """The amendments that this rank knows: all that affect a step which it has planned."""
        return Ledger() if self._amending is None else self._amending.ledger

    def amend(self, change: Change, at: int | None = None) -> int:
        """Change the recipe while it trains: on any one rank, at any time; all others follow.

        The change holds from step `at` on, or from the first step that no rank has planned yet: no rank waits
        for another. Returns that step, with the amendment in the ledger: a job that resumes has it, under any
        layout.

        change: `Reweigh`, `BatchSize`, `SkipSteps`, `Exclude` or `Grow`. Raises OptionError without a ledger,
        for a step that may have been planned, rows that do not fill microbatches, or in a process that takes
        no part; RecipeError for a change that the recipe cannot have: nothing changes then. StateError if the
        ledger cannot be written: the change is in force all the same. DeliveryError for a lost store: maybe
        it is. The same call again finds out, and puts it in once.
        """
        at = whole(at)
        if not isinstance(cast(object, change), Change) or (at is not None and type(at) is not int):
            raise OptionError(f"amend({change!r}, at={at!r}): such as amend(mf.BatchSize(512), at=1000)")
        if self._amending is None:
            raise OptionError(
                "amend: this Feed keeps no ledger; give every rank the same path beside the checkpoints, "
                "mf.Feed(..., ledger=path)"
            )
        has_begun = self._given_layout is not None or self._run is not None or self._next_step
        if self._options.rendezvous is not None and not has_begun:
            raise OptionError(
                "amend: this process takes no part in the job yet; nothing has changed, amend on a rank that "
                "does, or after the first step of this one"
            )
        return self._amending.amend(change, at, self.next_step, self._check_ledger)

    def _keep_for_a_state(self) -> None:
        """Look at the ledger that a state needs, and write it again if it has lost amendments.

        The state is worth more than this, so an error is logged, with the amendments.
        """
        placed = self._given_layout is not None or num_processes() == 1
        if self._amending is None or not self.ledger or not placed or not self._is_first:
            return
        try:
            self._amending.keep()
        except StateError as bad:
            _log.error(
                "a state needs the ledger, which cannot be written: %s; it is %s", bad, self.ledger.text
            )

    def _amends(self, ledger: Ledger) -> Amending:
        options = self._options
        return Amending(ledger, os.fspath(options.ledger or ""), options.timeout_s, self._meeting)

    def _check_ledger(self, ledger: Ledger) -> None:
        recipe = self._recipes.under(ledger)
        num_positions(recipe)  # raises if its sources cannot have these amounts or batch sizes
        amended = replace(self._stepping, layout=self.layout, recipe=recipe, opened=None)  # or these columns
        if not self._options.pad_rows:
            amended.check_filled()

    def _amended(self, step: int) -> Stepping:
        """What computes a step that is about to be planned, with all amendments that affect it."""
        if self._amending is not None and (ledger := self._amending.known_at(step)) is not self._applied:
            self._apply(ledger)
        return self._stepping

    @property
    def _is_first(self) -> bool:
        return self.rank == min(self.layout.ranks().tolist())

    def _apply(self, ledger: Ledger) -> None:
        """Plan further steps by these amendments."""
        if self._amending is not None and self._is_first:
            self._amending.keep()
        recipe = self._recipes.under(ledger)
        known = {id(store) for store in self.recipe.sources}
        further = [store for store in recipe.sources if id(store) not in known]
        if further and self._entered:
            self._open_further(further, recipe)
        if recipe is not self.recipe:
            self._stepping = replace(self._stepping, recipe=recipe)
        self._applied, self.recipe = ledger, recipe

    # -- ranks and steps ----------------------------------------------------------------------------------

    def commit(self, step: int) -> None:
        """Note that the model has taken a step for good, for `regroup`.

        For a trainer that may drop a step after its microbatches were taken, as torchft does. Without it, a
        step counts once the loop asks for the next one.
        """
        last = self._next_step - 1 if self._run is None else self._run.last_given
        step = whole(step)
        if type(step) is not int or not 0 <= step <= last:
            raise OptionError(f"commit({step!r}): give a step that the loop has had, 0 to {last}")
        self._where.committed = step + 1

    def at(self, step: int, layout: Layout | DeviceMesh, rank: int, *, generation: int | None = None) -> Step:
        """One step, where it is known only when it begins who takes part in it, as with torchft's manager.

        In place of a loop: every rank that takes part asks for the step, with the layout of this step and its
        rank there; others do not ask. As long as neither changes and the steps follow one another, the feed
        reads ahead as a loop does. Otherwise it goes on at that step, in that layout, with all that is open:
        the same as `regroup`, but for the caller's word on who is where. So nobody waits for another rank. A
        step that was not committed is asked for again.

        A step that an amendment leaves out has no microbatches, and cost nothing. torch.distributed's default
        group is not asked for anything; where the ranks need to meet, for a ledger or a delivery other than
        "direct", give the Feed a rendezvous=, and generation: a number that is equal on all ranks and grows
        with each change of the layout. Raises OptionError for other arguments, StateError past the end of the
        stream.
        """
        step, rank, generation = whole(step), whole(rank), whole(generation)
        if type(step) is not int or step < 0 or type(rank) is not int:
            raise OptionError(
                f"at({step!r}, rank={rank!r}): give the number of the step, and this process's rank in the "
                f"layout; a process that takes no part in the step does not ask for it"
            )
        where, seat = self._where, Seat(given_layout(layout), rank, generation)
        asked, where.asked = where.asked, None
        if asked is None or asked.run is not self._run or asked.next != step or where.seat != seat:
            if where.seat != seat:
                self._take(seat, self._options, apart=True)
                if self._amending is not None:
                    self._begin_with(self._agreed_on(step)[1], step)
                where.seat = seat
            self._go_on_at(step)
            loop = iter(self)
            asked = Asked(self._run, loop, step)
        given = asked.take()
        if given is None and not has_step(self.recipe, step):
            raise StateError(
                f"at({step}): the stream has ended before; feed.num_steps has its number of steps"
            )
        where.asked = asked
        return given or left_out(step, self.recipe.source_names_at(step), self.layout)

    def regroup(
        self,
        layout: Layout | DeviceMesh,
        rank: int | None = None,
        *,
        generation: int,
        rendezvous: Rendezvous | None = None,
        readers: Iterable[int] | None = None,
    ) -> int:
        """Go on in another layout without a restart, after ranks were lost or have come back.

        Every rank of the new layout calls it: survivors, and new processes with a Feed of their own. They
        meet here, and then begin a loop. Open files, caches, indices and decoders stay. The loops go on at
        the lowest step that a survivor has not committed, see `commit`; a Feed that has neither trained nor
        loaded a state follows. Returns that step.

        layout, rank, readers: as for a Feed. generation: the number of this arrangement, equal on all ranks
        and new each time. rendezvous: a torch.distributed Store that all of them reach; None takes that of
        the default process group. Raises PeerError if a rank does not come within `timeout_s`.
        """
        rank, generation = whole(rank), whole(generation)
        self._where.check_later(generation)
        options = replace(self._options, rendezvous=rendezvous, readers=readers)
        known = (
            self._where.committed,
            None if self._run is None else self._run.step_in_loop,
            self._where.left,
            self._next_step if self._next_step or self._loaded else None,  # else it has just started
        )
        first = next((step for step in known if step is not None), None)
        apart = rendezvous is not None and rank is not None
        self._take(Seat(given_layout(layout), rank, generation), options, apart=apart)
        try:
            step, ledger = self._agreed_on(first)
        except MeshfeedError as error:
            error.add_note(
                "regroup: nothing is agreed; this rank has left its loop and will go on from the same step: "
                "call regroup again on all ranks, with a later generation"
            )
            raise
        self._begin_with(ledger, step)
        self._go_on_at(step)
        return step

    def _take(self, seat: Seat, options: FeedOptions, *, apart: bool) -> None:
        """Take a seat in another layout. What is open stays so."""
        shared = options.rendezvous is not None and options.rendezvous is self._options.rendezvous
        meets = options.rendezvous is not None and seat.layout is not None and seat.layout.world_size > 1
        if seat.generation is not None or meets:
            self._where.check_later(seat.generation)
        if not options.pad_rows and seat.layout is not None:
            replace(self._stepping, layout=seat.layout).check_filled()
        if self._amending is not None:
            self._amending.leave(tells=shared)
        with self._changing:
            self._stop()
            self._move(seat.layout, seat.rank, options, apart=apart)
            self._stepping = replace(self._stepping, layout=self.layout, vpp=self.stage_map.vpp)
            self._where.seat, self._where.generation = None, seat.generation

    def _agreed_on(self, first: int | None) -> tuple[int, Ledger]:
        """Where the ranks of this layout go on, and with which amendments. Waits for all of them."""
        ledger = self.ledger
        if self._options.ledger is not None:  # what a rank that is lost has agreed on
            kept = Ledger.read(self._options.ledger, missing_ok=True)
            ledger = kept if kept.begins_with(ledger) else ledger
        meeting = self._meeting()
        if meeting is not None:
            if first is not None and self._entered:
                self._stepping.foresee(first)  # most often all ranks go on there
            again = replace(meeting, name=f"{self._options.name} regroups", number=self._where.generation)
            return agree(again, self.layout.ranks().tolist(), first, ledger)
        if self.layout.world_size > 1:
            raise DeliveryError(
                f"rank {self.rank} needs a way to meet the other ranks of {self.layout}: pass "
                f"rendezvous=<torch.distributed.Store>, or for `regroup` call "
                f"torch.distributed.init_process_group first"
            )
        return first or 0, ledger

    def _begin_with(self, ledger: Ledger, step: int) -> None:
        """All ranks of this layout begin a step with these amendments.

        Raises StateError if this rank has trained without one that holds before.
        """
        if self._amending is not None:
            trained = min(step, self._next_step)
            if late := [each for each in ledger.amendments[len(self.ledger) :] if each.step < trained]:
                raise StateError(
                    f"{self._options.ledger}: a process that took no part has amended the job from step "
                    f"{late[0].step} on, {late[0].change!r}, and this rank has trained the steps before "
                    f"{trained} without that; go back to a checkpoint of step {late[0].step} or before"
                )
            self._amending = self._amends(ledger)
            self._apply(ledger)
            self._begins_as = self.recipe

    def _go_on_at(self, step: int) -> None:
        """The next loop begins at a step that all have agreed on, or that was loaded."""
        where = self._where
        with self._changing:
            self._stop()
            self._next_step, self._loaded = step, True
            self._told_end.clear()
            where.committed = None if where.committed is None else step
            where.left = where.asked = None

    @property
    def _run_name(self) -> str:
        name, generation = super()._run_name, self._where.generation
        return name if generation is None else f"{name}, generation {generation}"

    def _stop(self) -> None:
        if self._run is not None:
            self._where.left = self._run.step_in_loop
        super()._stop()
