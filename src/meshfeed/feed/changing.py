"""Where a run of a feed begins: at a step, with a recipe, in a place. Nothing changes within a run.

Whatever changes ends one run and begins the next. When it begins, its ranks compare what it begins with: see
`StepSource._compare`.
"""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, cast

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store as Rendezvous

from meshfeed.amendments import Ledger
from meshfeed.deliver import Delivery
from meshfeed.errors import DeliveryError, MeshfeedError, OptionError, PeerError, StateError
from meshfeed.feed.batch import Step, empty_step
from meshfeed.feed.launch import given_layout, num_processes
from meshfeed.feed.options import FeedOptions, check_recipe
from meshfeed.feed.source import StepSource
from meshfeed.feed.stepping import Stepping
from meshfeed.layout import Layout
from meshfeed.order import extend, has_step, num_positions
from meshfeed.recipe import Amendment, Change, Recipe
from meshfeed.sequence import SequenceRule
from meshfeed.state import check_end
from meshfeed.whole import whole

_log = logging.getLogger("meshfeed")


class FeedRun(Iterator[Step]):
    """A run of a feed: its steps, from one on. Nothing changes it; another run of the feed ends it.

    The first `next` begins it, and waits for the ranks that this one shares reads with. `with` ends it. An
    amendment goes on from it, in the same loop.

    Attributes:
        step: where it begins.
        recipe, layout, rank: of it.
    """

    def __init__(
        self,
        feed: ChangingSource,
        step: int,
        begin: Callable[[], Iterator[Step]],
        end: Callable[[BaseException | None], object],
    ) -> None:
        self.step, self.recipe, self.layout, self.rank = step, feed.recipe, feed.layout, feed.rank
        self._begin, self._end, self._next = begin, end, step
        self._steps: Iterator[Step] | None = None

    def __next__(self) -> Step:
        try:
            self._steps = self._steps or self._begin()
            step = next(self._steps)
        except StopIteration:
            raise
        except Exception:
            self._steps = None  # it is not at its end: asked again, it goes on, or says why not
            raise
        self._next = step.index + 1
        return step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(error)

    def is_at(self, step: int) -> bool:
        """Whether it gives this step next, or those after it that are not left out."""
        return self._next == step

    def pass_over(self, step: int) -> None:
        """A step that it leaves out is over."""
        self._next = step + 1


class ChangingSource(StepSource[Delivery, FeedOptions]):
    """The steps of a recipe, in runs that differ in what they begin with.

    Args:
        recipe: without the amendments of the ledger.
        layout, rank, options: see `StepSource`.

    Attributes:
        recipe: that of the present run, with all amendments.
        ledger: the amendments that this rank has made, and those that the file had; empty without one.
    """

    def __init__(
        self, recipe: Recipe, layout: Layout | DeviceMesh | None, rank: int | None, options: FeedOptions
    ) -> None:
        super().__init__(layout, rank, options)
        self.ledger = Ledger() if options.ledger is None else Ledger.read(options.ledger, missing_ok=True)
        self._given, self.recipe = recipe, recipe.amended(self.ledger) if self.ledger else recipe
        self._left_out = frozenset[int]()
        self._told_end = set[int | None]()  # virtual stages whose loop got nothing, at a loaded state
        self._left: int | None = None  # the step that the last loop was in
        self._generation: int | None = None  # of the last arrangement that this rank has moved to
        self._present: FeedRun | None = None
        self._stepping = Stepping(
            recipe=self.recipe,
            layout=self._given_layout or Layout(),
            micro_batch_size=options.micro_batch_size or 1,
            packing=options.packing,
            vpp=self.stage_map.vpp,
            cp_split=options.cp_split,
        )

    @abstractmethod
    def _as_run(self, recipe: Recipe) -> Recipe:
        """The recipe, its rule set as this source runs it. Raises OptionError."""

    @abstractmethod
    def _opened_for(self, recipe: Recipe) -> SequenceRule | None:
        """Open what a recipe has more than the present one. Returns its rule, opened; None before all is."""

    # -- where a run begins -------------------------------------------------------------------------------

    def run(
        self,
        step: int | None = None,
        *,
        recipe: Recipe | None = None,
        layout: Layout | DeviceMesh | None = None,
        rank: int | None = None,
        generation: int | None = None,
        rendezvous: Rendezvous | None = None,
        readers: Iterable[int] | None = None,
        leave_out: Iterable[int] = (),
        meet: bool = False,
    ) -> FeedRun:
        """End the present run and begin another, with all that is open: stores, caches, indices, decoders.

            with feed.run(1000, recipe=other) as run:
                for step in run: ...

        Every rank of the run calls it with equal arguments, but for its rank. They are compared when the run
        begins, as those of a Feed are. Raises for arguments that cannot be; nothing has changed then.

        Args:
            step: the first step; None for the first one that was not fully handed out.
            recipe: None for the same one. Without the ledger's amendments, as for a Feed.
            layout: another arrangement of the ranks, after some were lost or have come; None for the same.
            rank: this process's in that. With it, torch.distributed's default group is not asked for
                anything.
            generation: the number of that arrangement, equal on its ranks and higher each time. Needed where
                they meet: for a delivery other than "direct", and with a rendezvous. A ledger needs that.
            rendezvous: of that arrangement, as for a Feed; None for the Feed's.
            readers: of that arrangement, as for a Feed.
            leave_out: steps that this run neither reads nor gives, for a trainer that skips them. States
                count them like all others.
            meet: wait here for all ranks, and begin at the lowest step that one of them gives: after a
                failure they may be one step apart. `step` is then the first that this rank's model has not
                taken; None for the step that its loop was in. A Feed that has neither trained nor loaded a
                state follows the others. The run's `step` has the result.
        """
        first, rank, generation = whole(step), whole(rank), whole(generation)
        if step is not None and (type(first) is not int or first < 0):
            raise OptionError(f"run({step!r}): give the number of a step, from 0, or None")
        if layout is None and not (rank is rendezvous is readers is None):
            raise OptionError("run: rank, rendezvous and readers are of another layout; give it")
        here = (self._given_layout or Layout(), self._given_rank)
        place, seat = (given_layout(layout), rank) if layout is not None or generation is None else here
        ledger = self._latest_ledger(self.next_step if first is None else first)
        given, skipped = self._given, frozenset(map(whole, leave_out))
        if recipe is not None:
            check_recipe(recipe, "run")
            given = self._as_run(recipe)
        made = self._amended(ledger) if given is self._given else given.amended(ledger)
        if made is not self.recipe or place is not None:
            self._check(made, place or self.layout)
        if first is not None:
            check_end(made, first, "the run begins at")
        options, apart = self._options, self._apart
        if layout is not None:
            rendezvous = rendezvous or options.transport.rendezvous
            transport = replace(options.transport, rendezvous=rendezvous, readers=readers)
            options = replace(options, transport=transport)
            apart = rank is not None
        if place is not None or (meet and self._generation is not None):
            self._check_place(place or self.layout, generation, options, apart=apart)
        opened = self._opened_for(made)
        with self._changing:
            if self._run is not None:
                why = f"rank {self._run.rank} has begun another run; call feed.run on all ranks at once"
                self._run.end_before(self._run.next_begun, why, without_others=place is not None)
            known = self._known_step()
            self._stop()
            if place is not None:
                self._move(place, seat, options, apart=apart)
                self._generation = generation
            elif recipe is not None:  # its fields give ranks other roles
                self._move(self._given_layout, self._given_rank, options, apart=apart)
            self._become(made, given, ledger, opened)
        if meet:
            first = self._met(known if first is None else first)
        return self._begun_at(self._next_step if first is None else first, skipped)

    def _begun_at(self, step: int, skipped: frozenset[int] = frozenset()) -> FeedRun:
        self._go_on_at(step)
        self._left_out = skipped
        run = FeedRun(self, self._next_step, lambda: self._steps_in(run), lambda error: self._end(run, error))
        self._present = run
        return run

    def at(self, step: int, layout: Layout | DeviceMesh, rank: int, *, generation: int | None = None) -> Step:
        """One step, where it is known only when it begins who takes part in it, as with torchft's manager.

        Every rank that takes part asks for it, with the layout of this step and its rank there; others do
        not ask. A run goes on while neither changes and the steps follow one another; otherwise another one
        begins, by `run(step, layout=layout, rank=rank, generation=generation)`. A step that was not committed
        is asked for again. A step that an amendment leaves out has no microbatches, and has cost nothing.

        Raises OptionError for other arguments, StateError past the end of the stream.
        """
        step, rank, place = whole(step), whole(rank), given_layout(layout)
        if type(step) is not int or step < 0 or type(rank) is not int or place is None:
            raise OptionError(
                f"at({step!r}, rank={rank!r}): give the number of the step, the layout, and this process's "
                f"rank in it; a process that takes no part in the step does not ask for it"
            )
        run, here = self._present, (self._given_layout, self._given_rank, self._generation)
        if here != (place, rank, whole(generation)):
            run = self.run(step, layout=place, rank=rank, generation=generation)
        elif run is None or not run.is_at(step):
            self._read_ledger(step)
            run = self._begun_at(step)
        if not has_step(self.recipe, step):
            raise StateError(
                f"at({step}): the stream has ended before; feed.num_steps has its number of steps"
            )
        if self.recipe.skips(step) or step in self._left_out:
            run.pass_over(step)
            with self._changing:
                if self._run is None:
                    self._next_step = step + 1
                else:
                    self._run.pass_over(step)
            return empty_step(step, self.recipe.source_names_at(step), self.layout)
        return next(run)

    def _known_step(self) -> int | None:
        """The step that this rank would go on at; None if it has neither trained nor loaded a state."""
        if self._run is not None:
            return self._run.step_in_loop
        if self._left is not None:
            return self._left
        return self._next_step if self._next_step or self._loaded else None

    def _check_place(self, layout: Layout, generation: Any, options: FeedOptions, *, apart: bool) -> None:
        """Raises OptionError or DeliveryError for a place that its ranks cannot begin a run in."""
        several, store = layout.world_size > 1, options.transport.rendezvous
        before = -1 if self._generation is None else self._generation
        if (generation is not None or (several and store is not None)) and (
            type(generation) is not int or generation <= before
        ):
            raise OptionError(f"generation={generation!r}: give a whole number above {before}")
        if several and options.ledger is not None and apart and store is None:
            raise DeliveryError(
                f"ranks of {layout} that keep a ledger compare it: pass rendezvous=<torch.distributed.Store> "
                f"to run, or in the Feed's transport"
            )

    def _met(self, first: int | None) -> int:
        """Where the ranks of this layout go on: at the lowest step. Waits for all of them."""
        try:
            return self._lowest(first)
        except MeshfeedError as error:
            error.add_note(
                "run: nothing is agreed; this rank has ended its run and stays at the same step: call run "
                "again on all ranks, with a later generation"
            )
            raise

    def _lowest(self, first: int | None) -> int:
        meeting = self._meeting()
        if meeting is None:
            if self.layout.world_size == 1:
                return first or 0
            raise DeliveryError(
                f"rank {self.rank} needs a way to meet the other ranks of {self.layout}: pass "
                f"rendezvous=<torch.distributed.Store>, or call torch.distributed.init_process_group first"
            )
        if first is not None and self._entered:
            self._stepping.foresee(first)  # most often all ranks go on there
        if self.ledger:  # the others may lack some, of which they read here when all have met
            self.ledger.keep(self._options.ledger or "", timeout_s=self._options.transport.timeout_s)
        meeting = replace(meeting, name=f"{meeting.name} meets", number=self._generation)
        prefix, rank, ranks = meeting.prefix, self.rank, self.layout.ranks().tolist()
        line = f";{rank} {'-' if first is None else first} {len(self.ledger)} {self.ledger.digest or '-'}"

        def tell(store: Any) -> bool:
            store.append(f"{prefix}/first", line)
            return store.get(f"{prefix}/first").decode().count(f";{rank} ") == 1

        if not meeting.call(tell):
            raise self._claimed_twice([rank, rank])
        meeting.meet("run", ranks)
        text = meeting.call(lambda store: store.get(f"{prefix}/first")).decode()
        told = [each.split() for each in text.split(";")[1:]]
        if len(told) > len(ranks):
            raise self._claimed_twice([int(of) for of, *_ in told])
        _, longest = max((int(count), digest) for _, _, count, digest in told)
        if longest not in ("-", self.ledger.digest):  # its rank has written it before it came
            self._read_ledger(self._next_step)
        if other := [int(of) for of, _, _, digest in told if digest not in ("-", *self.ledger.digests)]:
            raise PeerError(
                f"rank {rank} knows {len(self.ledger)} amendments of this job, rank {other[0]} others; amend "
                f"on all ranks in the same step, and give all of them one ledger",
                sorted({rank, *other}),
            )
        return min((int(step) for _, step, *_ in told if step != "-"), default=0)

    def _claimed_twice(self, ranks: Sequence[int]) -> PeerError:
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        return PeerError(
            f"two processes are rank {twice[0]} of generation {self._generation}, or its number was used "
            f"before; give each process its own rank, and a new number",
            twice,
        )

    def _go_on_at(self, step: int) -> None:
        """The next run begins at this step."""
        with self._changing:
            self._stop()
            self._next_step, self._loaded = step, True
            self._told_end.clear()
            self._left = self._present = None
            self._left_out = frozenset()

    def _steps_in(self, run: FeedRun) -> Iterator[Step]:
        """The steps of a run that nobody has ended."""
        if self._present is not run:
            raise StateError("another run of this feed has begun since; take the steps of that one")
        return iter(self)

    def _end(self, run: FeedRun, error: BaseException | None) -> None:
        if self._present is run:
            if isinstance(error, Exception) and self._run is not None:
                self._run.tell(error)
            self._stop()

    # -- the recipe ---------------------------------------------------------------------------------------

    def amend(self, change: Change, at: int | None = None) -> int:
        """Change the recipe from the next step on: on all ranks, in the same step.

        The change holds from the first step on that the loop was not given yet, or from `at` on. Returns that
        step. The present run ends before that first step, and the loop goes on with the next one, whose ranks
        compare their recipes: one that did not amend is named. The ledger has the amendment when this
        returns: a job that resumes has it, under any layout.

        change: `Reweigh`, `BatchSize`, `SkipSteps`, `Exclude` or `Grow`. Raises OptionError without a ledger,
        for a step that the loop was given, or rows that do not fill microbatches; RecipeError for a change
        that the recipe cannot have, StoreError for a store that it cannot open: nothing has changed on this
        rank then. StateError if the ledger cannot be written: the change holds all the same, and the ledger
        is written with the next state, or by the same call again, which makes no other amendment.
        """
        at = whole(at)
        if not isinstance(cast(object, change), Change) or (at is not None and type(at) is not int):
            raise OptionError(
                f"amend({change!r}, at={at!r}): such as amend(mf.amendments.BatchSize(512), at=1000)"
            )
        if self._options.ledger is None:
            raise OptionError(
                "amend: this Feed keeps no ledger; give every rank the same path beside the checkpoints, "
                "mf.Feed(..., ledger=path)"
            )
        has_begun = self._given_layout is not None or self._run is not None or self._next_step
        behind = self._run is not None and self._run.is_left_behind
        if behind or (self._options.transport.rendezvous is not None and not has_begun):
            raise OptionError(
                "amend: this process takes no part in the job, or not yet; nothing has changed, amend on the "
                "ranks that do, in the same step"
            )
        with self._changing:
            first = self._next_step if self._run is None else self._run.next_begun
            step = first if at is None else at
            if step < first:
                raise OptionError(
                    f"amend(at={at}): the steps before {first} were begun already; give a later one, or "
                    f"leave at= out"
                )
            ledger = self.ledger.added(Amendment(step, change, None if step == first else first))
            again = Ledger(self.ledger.amendments[:-1]).added(ledger.amendments[-1])
            if not self.ledger or again.digest != self.ledger.digest:  # else the same in the same step
                self._become(*self._under(ledger))
            if self._run is not None:
                self._run.end_before(
                    first,
                    f"rank {self.rank} has amended the recipe before step {first}; call feed.amend on all "
                    f"ranks, in the same step",
                )
        _log.info("amended from step %d on: %s", step, json.dumps(self.ledger.lines[-1]))
        try:
            self._keep()
        except StateError as bad:
            raise StateError(
                f"amend: the amendment is in force from step {step}; the ledger could not be written: {bad}. "
                f"It is written with the next state, or by the same call again"
            ) from bad
        return step

    def _under(self, ledger: Ledger) -> tuple[Recipe, Recipe, Ledger, SequenceRule | None]:
        """What `_become` takes for a longer ledger. Raises for one that cannot be."""
        recipe = self._amended(ledger)
        self._check(recipe, self.layout)
        return recipe, self._given, ledger, self._opened_for(recipe)

    def _amended(self, ledger: Ledger) -> Recipe:
        further = ledger.amendments[len(self.ledger) :]
        if not further:
            return self.recipe
        recipe, before = self.recipe, self.recipe
        if all(each.step >= max((each.step for each in self.ledger), default=0) for each in further):
            recipe = before.amended(further)
        else:
            before = self._given
            recipe = before.amended(ledger)
        extend(recipe, before)
        return recipe

    def _check(self, recipe: Recipe, layout: Layout) -> None:
        """Raises unless a recipe can have its amounts, sizes and columns, and its rows fill microbatches."""
        num_positions(recipe)
        stepping = replace(self._stepping, layout=layout, recipe=recipe, opened=None)
        if not self._options.pad_rows:
            stepping.check_filled()

    def _become(self, recipe: Recipe, given: Recipe, ledger: Ledger, opened: SequenceRule | None) -> None:
        self._stepping = replace(
            self._stepping, recipe=recipe, layout=self.layout, vpp=self.stage_map.vpp, opened=opened
        )
        self.recipe, self._given, self.ledger = recipe, given, ledger

    def _read_ledger(self, step: int) -> None:
        """Take over what `_latest_ledger` finds."""
        if (ledger := self._latest_ledger(step)) is not self.ledger:
            self._become(*self._under(ledger))

    def _latest_ledger(self, step: int) -> Ledger:
        """What the ledger's file has, if it goes on from this rank's, before a run from a step on.

        Raises StateError if it has more for steps which this rank has trained without it.
        """
        if self._options.ledger is None:
            return self.ledger
        kept = Ledger.read(self._options.ledger, missing_ok=True)
        further = kept.amendments[len(self.ledger) :]
        if not further or not kept.begins_with(self.ledger):
            return self.ledger
        trained = min(step, self.next_step)
        if late := [each for each in further if each.step < trained]:
            raise StateError(
                f"{self._options.ledger}: others have amended the job from step {late[0].step} on, "
                f"{late[0].change!r}, and this rank has trained the steps before {trained} without that; go "
                f"back to a checkpoint of step {late[0].step} or before"
            )
        return kept

    def _keep(self) -> None:
        """On the first rank: write the ledger, unless its file has it. Raises StateError."""
        placed = self._given_layout is not None or num_processes() == 1
        if self._options.ledger is not None and self.ledger and placed and self._is_first:
            self.ledger.keep(self._options.ledger, timeout_s=self._options.transport.timeout_s)

    def _keep_for_a_state(self) -> None:
        """Look at the ledger that a state needs, and write it again if it has lost amendments.

        The state is worth more than this, so an error is logged, with the amendments.
        """
        try:
            self._keep()
        except StateError as bad:
            _log.error(
                "a state needs the ledger, which cannot be written: %s; it is %s", bad, self.ledger.text
            )

    @property
    def _is_first(self) -> bool:
        return self.rank == min(self.layout.ranks().tolist())

    @property
    def _run_name(self) -> str:
        name, generation = super()._run_name, self._generation
        return name if generation is None else f"{name}, generation {generation}"

    def _stop(self) -> None:
        if self._run is not None:
            self._left = self._run.step_in_loop
        super()._stop()
