"""The virtual dataloader: the same loop on every rank, with exactly the rank's own tensors.

A Feed owns what is open, and begins runs. Nothing changes within a run: whatever changes ends one and begins
the next, whose ranks compare what it begins with. `reading` has the path of a sequence within a run.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store as Rendezvous

from meshfeed.amendments import Ledger
from meshfeed.deliver import Meeting
from meshfeed.errors import (
    DeliveryError,
    LayoutError,
    MeshfeedError,
    OptionError,
    PeerError,
    RecipeError,
    StateError,
)
from meshfeed.feed.batch import Step, empty_step
from meshfeed.feed.device import OnHost
from meshfeed.feed.launch import given_layout
from meshfeed.feed.loop import FeedRun
from meshfeed.feed.options import FeedOptions, check_recipe
from meshfeed.feed.place import RankPlace
from meshfeed.feed.reading import SequenceProducer, check_stores
from meshfeed.feed.source import StepSource
from meshfeed.feed.stepping import Stepping, ranks_beside
from meshfeed.feed.terms import Terms
from meshfeed.fetched import cut_by_shards, warning_of
from meshfeed.layout import Layout
from meshfeed.machine import Machine
from meshfeed.metrics import Sink
from meshfeed.order import has_step, is_over_early, num_positions, num_steps
from meshfeed.plan import CpSplit, Packing
from meshfeed.plan.types import Encoder, NoLoss
from meshfeed.recipe import Change, Recipe, entered
from meshfeed.roles import StageMap
from meshfeed.sequence import SequenceRule, TakesParts, contents_of, opened, run_by
from meshfeed.state import State, check_end, check_step
from meshfeed.store import StreamStore
from meshfeed.transport import Transport
from meshfeed.whole import is_whole, whole, whole_numbers

_log = logging.getLogger("meshfeed")


class Feed(StepSource[RankPlace]):
    """One rank's view of the training stream.

    The constructor reads the ledger, if there is one, and what its amendments name. Entering (`with`, or the
    first iteration) opens what this rank's role needs; leaving closes it. `iter(feed)` waits for the peers to
    join and starts to read, so all ranks call it at the same point of the program; so does the first `next`
    after `amend`. Any other `next` waits for data alone.

    Args:
        recipe: what to train on; equal on every rank.
        layout: the arrangement of the ranks, or a torch DeviceMesh, which `Layout.from_device_mesh` reads;
            None for one process.
        rank: this process's global rank; None asks torch.distributed, then the launcher.
        device: of the tensors.
        stage_map: which pipeline stages embed, compute loss, predict further tokens; None for the plain
            pipeline of the layout.
        micro_batch_size: sequences per microbatch and data-parallel rank, for sequences of one length; None
            for 1, and with a packing, which decides it.
        pad_rows: fill microbatches with dummy rows, which have no tokens and bear no loss, if the sequences
            of a step are not a multiple of micro_batch_size x dp. A mean over rows is wrong then: divide by
            `step.valid_tokens`. `Samples` has no dummy rows: some ranks get fewer rows, or none. Without it
            such a step is refused when the feed is entered.
        packing: how sequences of different lengths, such as `Documents`, become microbatches.
        cp_split: how context parallelism splits a sequence, "zigzag" or "contiguous", or a pack as a whole,
            "pack_contiguous".
        no_loss: a step in which no token bears loss is refused before it is read ("error"), since its mean
            loss is 0/0; or it is given as any other, with `step.valid_tokens == 0` ("allow").
        encoder: whether each rank of a cp group encodes all images, audio and video of its pack ("with
            sample"), or the group shares them ("group"), or all dp and cp ranks share those of a microbatch
            ("balanced"). Where they are shared, the loop calls `exchange_encoded`.
        machine: how this rank's machine makes items, decodes parts and keeps indices; see `Machine`. Ranks
            may differ in it.
        transport: how batches come to this rank: the delivery, who may read, how far ahead, where ranks meet
            and how long they wait; see `Transport`.
        vocab_size: the model's. StoreError for a token that is not below it: when the feed is entered, if the
            index of a store holds its largest token (JSONL, Parquet, text), else when the token is read.
            None for no check.
        verify: compare digests across replicas at the end of every step.
        metrics: one or several sinks for the costs of each step, such as a `metrics.RunLog`.
        ledger: path of the file that keeps the job's amendments, beside the checkpoints, on storage that all
            ranks read: see `amend`. Read at once; one that does not exist yet has none. None: no amendments.

    A loop that is left resumes where it was. A loop after the end of the stream raises StateError (an
    Exchange restarts its iterators instead).

    Errors are MeshfeedErrors: LayoutError if the job does not fit the layout, RoleError if a rank cannot be
    fed, PeerError if a peer is missing or dies, StoreError from storage.
    """

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout | DeviceMesh | None = None,
        rank: int | None = None,
        *,
        device: str | torch.device = "cpu",
        stage_map: StageMap | None = None,
        micro_batch_size: int | None = None,
        pad_rows: bool = False,
        packing: Packing | None = None,
        cp_split: CpSplit = "zigzag",
        no_loss: NoLoss = "error",
        encoder: Encoder = "with sample",
        machine: Machine = Machine(),
        transport: Transport = Transport(),
        vocab_size: int | None = None,
        verify: bool = False,
        metrics: Sink | Sequence[Sink] | None = None,
        ledger: str | PathLike[str] | None = None,
    ) -> None:
        check_recipe(recipe, "a Feed")
        (rank,) = whole_numbers(LayoutError, 0, optional=["rank"], rank=rank)
        options = self._options = FeedOptions.of(locals())
        super().__init__(options)
        given, self._machine = run_by(recipe, machine, encoder)
        self._terms = Terms.of(given, Ledger() if ledger is None else Ledger.read(ledger, missing_ok=True))
        self._has_met = False  # the other ranks, in a run
        self.packing, self.cp_split = packing, cp_split
        self.micro_batch_size = micro_batch_size or 1
        self._stepping = Stepping(
            recipe=self.recipe,
            layout=given_layout(layout) or Layout(),
            micro_batch_size=self.micro_batch_size,
            packing=packing,
            vpp=1 if stage_map is None else stage_map.vpp,
            cp_split=cp_split,
            no_loss=no_loss,
        )
        self._place = RankPlace(
            given_layout=given_layout(layout),
            given_rank=rank,
            options=options,
            fields=self._stepping.contents.fields,
            name=options.transport.name,
            decoded_is_larger=lambda: _decoded_is_larger(self._stepping),
        )
        self._checks_tokens = False
        self._host, self._resources = OnHost(), contextlib.ExitStack()

    @property
    def recipe(self) -> Recipe:
        """That of the present run, with all amendments."""
        return self._terms.recipe

    @property
    def ledger(self) -> Ledger:
        """The amendments that this rank has made, and those that the file had; empty without one."""
        return self._terms.ledger

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole stream, from the index alone; None if it is endless.

        `len(feed)` is refused, since a stream may have no end.
        """
        return num_steps(self.recipe)

    @property
    def num_sequences(self) -> int | None:
        """Sequences in all these steps; None if the stream is endless."""
        return num_positions(self.recipe)

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the mixture's sources, `Mixture.then` included; one empty name for a store alone.

        With those that amendments have added so far, at the end. `step.sources` has those of a step.
        """
        return self.recipe.source_names

    @property
    def reweigh_names(self) -> dict[str, str]:
        """Each of `sources` -> the name that `Reweigh` takes: itself, or the source that has grown by it."""
        recipe = self.recipe
        return {name: name for name in recipe.source_names} | {
            name: source for source, name in recipe.amendments.grown
        }

    def num_microbatches(self, step: int) -> int | None:
        """Microbatches of a step for each rank, 0 past the end and where an amendment leaves the step out;
        None with packing, which depends on lengths."""
        return replace(self._stepping, layout=self.layout).num_microbatches(step)

    @property
    def encoder_ranks(self) -> tuple[int, ...]:
        """The ranks that share the encoders' work with this one, ascending; see `exchange_encoded`.

        Those of its tp and pp coordinates. A trainer makes their process group once, at its start.
        """
        return tuple(sorted(ranks_beside(self.layout, self._place.coord).tolist()))

    # -- opening and closing --------------------------------------------------------------------------

    def _open(self) -> None:
        cut_by_shards(self.recipe)
        place = self._place
        with contextlib.ExitStack() as stack:
            self._open_stores(stack, self.recipe, self.recipe.sources)
            # otherwise `at` gives the rank later, or the loop is refused
            if place.is_known and place.is_first:
                if self._options.ledger is not None:
                    self.ledger.keep(self._options.ledger)  # or it is refused here
                if warning := warning_of(self.recipe):
                    _log.warning("%s", warning)
                rule = self._stepping.rule
                if place.layout.cp > 1 and isinstance(rule, TakesParts) and rule.encoder == "with sample":
                    _log.warning(
                        "each of %d cp ranks encodes all parts of its pack; where the loop calls "
                        'exchange_encoded, Feed(encoder="group") shares that work among them',
                        place.layout.cp,
                    )
                if is_over_early(self.recipe):
                    _log.warning(
                        "steps=%d is never reached: the stream ends sooner, after its epochs or amounts; "
                        "give more of them, or fewer steps",
                        self.recipe.steps,
                    )
            if not has_step(self.recipe, 0):
                raise RecipeError(
                    f"the stream has no step: its data has no sequence, or ends within the first step of "
                    f"{self.recipe.batch!r}, which last='drop' drops; give more data, epochs or amounts, or "
                    f"a smaller batch"
                )
            self._stepping = replace(self._stepping, opened=stack.enter_context(opened(self.recipe)))
            if place.is_known and not self._options.pad_rows:
                replace(self._stepping, layout=place.layout).check_filled()
            self._resources = stack.pop_all()

    def _open_stores(
        self, stack: contextlib.ExitStack, recipe: Recipe, stores: Sequence[StreamStore]
    ) -> None:
        for store in stores:
            stack.enter_context(store.opened(self._machine))
        if self._options.vocab_size is None or not stores:
            return
        if "tokens" not in {each.name for each in contents_of(recipe).fields if each.stored}:
            raise OptionError(
                f"vocab_size={self._options.vocab_size}: {recipe.sequence.summary()} has no field 'tokens' "
                f"to check; leave it out"
            )
        self._checks_tokens |= check_stores(stores, self._options.vocab_size)

    def _opened_for(self, recipe: Recipe) -> SequenceRule | None:
        """Open what a recipe has more than the present one. Returns its rule, opened; None before all is."""
        if recipe is self.recipe:
            return self._stepping.opened
        if not self._entered:
            return None
        cut_by_shards(recipe)
        known, rule = {id(store) for store in self.recipe.sources}, self._stepping.opened
        with contextlib.ExitStack() as stack:
            self._open_stores(stack, recipe, [each for each in recipe.sources if id(each) not in known])
            if recipe.sequence is not self.recipe.sequence:
                rule = stack.enter_context(opened(recipe))
            self._resources.push(stack.pop_all())
        return rule

    def _close(self, during: BaseException | None) -> None:
        with self._loop.changing:
            run, resources = self._loop.on, self._resources.pop_all()
            self._loop.stop()
            resources.close() if run is None else run.close_with(resources)
            super()._close(during)

    # -- the training loop's side ---------------------------------------------------------------------

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Where to resume: one text of JSON under one key, at most 4 KB, equal on every rank.

        step: the first step that is not trained; None for the first that was not fully handed out. A step
        counts as handed out once all its microbatches were taken, or once the loop has asked for the next
        one.
        """
        try:  # a state needs the ledger, which may have lost amendments, and is worth more than this
            self._keep()
        except StateError as bad:
            _log.error(
                "a state needs the ledger, which cannot be written: %s; it is %s", bad, self.ledger.text
            )
        return State.at(
            self.recipe,
            self.next_step if step is None else step,
            knows_all=bool(self.ledger),
        ).to_json()

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int | None = None) -> None:
        """Resume at a state, under any layout; then start a new loop.

        step: the next step of the model that was loaded with it; None for no check. Raises StateError for a
        state of another step or recipe, a damaged one, or one past the recipe's end; nothing changes then.
        """
        state = State.from_json(state_dict)
        check_step(state.step, step)
        terms, given = self._terms.under(self._kept(state.step)), self._terms.given
        # before all steps, it may have what is amended there, or not
        is_before = state.step == 0 and state.recipe == given.summary(until=0)
        state.check(given if is_before else terms.recipe)
        self._become(terms)
        self._loop.go_to(state.step)

    def __repr__(self) -> str:
        return f"Feed({self.recipe!r}, {self._place.given_layout}, at step {self.next_step})"

    def _has_step(self, step: int) -> bool:
        return has_step(self.recipe, self.recipe.first_given(step))

    def _meets(self, meeting: Meeting | None) -> None:
        """For a rank that comes late: its ledger may have amendments that others made in the present run."""
        is_first, self._has_met = not self._has_met, True
        if meeting is not None and is_first and self.ledger and (count := meeting.said("ledger")):
            made = Ledger(self.ledger.amendments[: int(count)])
            self._become(replace(Terms.of(self._terms.given, made), num_made=self._terms.num_made))

    def _producer(self) -> SequenceProducer:
        return SequenceProducer(
            place=self._place,
            stepping=self._stepping,
            options=self._options,
            left_out=frozenset() if self._loop.given is None else self._loop.given.left_out,
            checks_tokens=self._checks_tokens,
            host=self._host,
        )

    # -- where a run begins ---------------------------------------------------------------------------

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
        """End the present run; the first `next` of what it returns, or a loop over the feed, begins another.

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
            rendezvous: of that arrangement, as in a `Transport`; None for the Feed's.
            readers: of that arrangement, as in a `Transport`.
            leave_out: steps that this run neither reads nor gives, for a trainer that skips them. States
                count them like all others. A later run or loop has them.
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
        skipped = frozenset(map(whole, leave_out))
        if wrong := [each for each in skipped if not is_whole(each, 0)]:
            raise OptionError(f"run(leave_out={wrong!r}): give numbers of steps, from 0")
        terms, ledger = self._terms, self._kept(first)
        if recipe is not None:
            check_recipe(recipe, "run")
            given = run_by(recipe, self._machine, self._options.encoder)[0]
            terms = terms if given is terms.given else Terms.of(given, ledger)
        terms = terms.under(ledger)
        if layout is not None or meet:
            terms = terms.joined
        place = self._place.moved(given_layout(layout), rank, generation, rendezvous, readers)
        moves = place is not self._place
        if first is not None:
            check_end(terms.recipe, first, "the run begins at")
        if moves or (meet and place.generation is not None):
            place.check_after(self._place, generation, keeps_ledger=self._options.ledger is not None)
        if recipe is not None:  # its fields give ranks other roles
            place = replace(place, fields=contents_of(terms.recipe).fields)
        stepping = self._stepping_of(terms.recipe, place.given_layout or self.layout)
        if (moves or meet) and self.ledger:  # the others may lack some, and read them here
            self.ledger.keep(self._options.ledger or "", timeout_s=self._options.transport.timeout_s)
        with self._loop.changing:
            if (run := self._loop.on) is not None:
                why = f"rank {self.rank} has begun another run; call feed.run on all ranks at once"
                run.end_before(run.next_begun, why, without_others=moves or None)
            known = self._loop.known_step
            self._loop.stop()
            self._place, self._terms, self._stepping = place, terms, replace(stepping, layout=place.layout)
        if meet:
            try:
                first = self._met(known if first is None else first)
            except MeshfeedError as error:
                error.add_note(
                    "run: nothing is agreed; this rank has ended its run and stays at the same step: call "
                    "run again on all ranks, with a later generation"
                )
                raise
        return self._loop.give(self._loop.begins_at if first is None else first, terms.recipe, place, skipped)

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
        run, here = self._loop.given, self._place
        if (here.given_layout, here.given_rank, here.generation) != (place, rank, whole(generation)):
            run = self.run(step, layout=place, rank=rank, generation=generation)
        elif run is None or run.next_step != step or not run.can_go_on_at(step):
            self._become(self._terms.under(self._kept(step)))
            run = self._loop.give(step, self.recipe, self._place)
        if not has_step(self.recipe, step):
            raise StateError(
                f"at({step}): the stream has ended before; feed.num_steps has its number of steps"
            )
        if self.recipe.skips(step) or step in run.left_out:
            self._loop.pass_over(step)
            return empty_step(step, self.recipe.source_names_at(step), self.layout)
        return next(run)

    def _met(self, first: int | None) -> int:
        """Where the ranks of this layout go on: at the lowest step. Waits for all of them."""
        place = self._place
        meeting = place.meeting(self._loop.begins_at)
        if meeting is None:
            if place.layout.world_size == 1:
                return first or 0
            raise DeliveryError(
                f"rank {place.rank} needs a way to meet the other ranks of {place.layout}: pass "
                f"rendezvous=<torch.distributed.Store>, or call torch.distributed.init_process_group first"
            )
        if first is not None and self._entered:
            self._stepping.foresee(first)  # most often all ranks go on there
        meeting = replace(meeting, name=f"{meeting.name} meets", number=place.generation)
        own = f"{'-' if first is None else first} {len(self.ledger)} {self.ledger.digest or '-'}"
        told = meeting.told_by_all("run", own, place.layout.ranks().tolist())
        said = {rank: line.split() for rank, line in told.items()}
        _, longest = max((int(count), digest) for _, count, digest in said.values())
        if longest not in ("-", self.ledger.digest):  # its rank has written it before it came
            self._become(self._terms.under(self._kept(self._loop.begins_at)))
        if other := [of for of, (*_, digest) in said.items() if digest not in ("-", *self.ledger.digests)]:
            raise PeerError(
                f"rank {place.rank} knows {len(self.ledger)} amendments of this job, rank {other[0]} others; "
                f"amend on all ranks in the same step, and give all of them one ledger",
                sorted({place.rank, *other}),
            )
        return min((int(step) for step, *_ in said.values() if step != "-"), default=0)

    # -- the recipe -----------------------------------------------------------------------------------

    def amend(self, change: Change, at: int | None = None) -> int:
        """Change the recipe from the next step on: on all ranks, in the same step.

        The change holds from the first step on that the loop was not given yet, or from `at` on. Returns that
        step. The present run ends before that first step, and the loop goes on with the next one. A rank that
        did not amend is named when it asks for that step; that all amended equally is compared there. When
        this returns on the first rank, the ledger has the amendment: a job that resumes has it, under any
        layout.

        change: `Reweigh`, `BatchSize`, `SkipSteps`, `Exclude` or `Grow`. Raises OptionError without a ledger,
        for a step that the loop was given, or rows that do not fill microbatches; RecipeError for a change
        that the recipe cannot have, StoreError for a store that it cannot open, DeliveryError if the ranks'
        rendezvous store does not answer: nothing has changed on this rank then. StateError if the ledger
        cannot be written: the change holds all the same, and the ledger is written with the next state, or
        by the same call again before the next step is taken.
        """
        at, place = whole(at), self._place
        if not isinstance(cast(object, change), Change) or (at is not None and type(at) is not int):
            raise OptionError(
                f"amend({change!r}, at={at!r}): such as amend(mf.amendments.BatchSize(512), at=1000)"
            )
        if self._options.ledger is None:
            raise OptionError(
                "amend: this Feed keeps no ledger; give every rank the same path beside the checkpoints, "
                "mf.Feed(..., ledger=path)"
            )
        run = self._loop.on
        has_begun = place.given_layout is not None or run is not None or self._loop.begins_at
        try:
            behind = run is not None and run.is_left_behind
        except DeliveryError as lost:
            lost.add_note("amend: nothing has changed; the next run meets in that store, too")
            raise
        if behind or (place.options.transport.rendezvous is not None and not has_begun):
            raise OptionError(
                "amend: the other ranks go on without this process, which takes no part in the job, or not "
                "yet, or amends too late; nothing has changed, amend on all that take part, in the same step"
            )
        with self._loop.changing:
            first = self._loop.next_begun
            step = first if at is None else at
            if step < first:
                raise OptionError(
                    f"amend(at={at}): the steps before {first} were begun already; give a later one, or "
                    f"leave at= out"
                )
            self._become(self._terms.amended(change, step, first))
            if (run := self._loop.on) is not None:
                run.end_before(
                    first,
                    f"rank {place.rank} has amended the recipe before step {first}; call feed.amend on all "
                    f"ranks, in the same step",
                )
        _log.info("amended from step %d on: %s", step, json.dumps(self.ledger.lines[-1]))
        try:
            if run is not None and place.is_first:
                began_with = cast(SequenceProducer, run.producer).stepping.recipe.amendments.digests
                run.say("ledger", str(len(began_with) - len(self._terms.given.amendments.digests)))
            self._keep()
        except (StateError, DeliveryError) as bad:
            raise StateError(
                f"amend: the amendment is in force from step {step}; the ledger could not be written: {bad}. "
                f"It is written with the next state, or by the same call again"
            ) from bad
        return step

    def _kept(self, step: int | None) -> Ledger:
        """The ledger for a run from a step on, None for from here on. Raises as `Terms.kept` does."""
        trained = self.next_step if step is None else min(step, self.next_step)
        return self._terms.kept(self._options.ledger, trained)

    def _become(self, terms: Terms) -> None:
        """Take over amendments, for the next run. Raises for what cannot be; nothing has changed then."""
        if terms is not self._terms:
            stepping = self._stepping_of(terms.recipe, self.layout)
            self._terms, self._stepping = terms, stepping

    def _stepping_of(self, recipe: Recipe, layout: Layout) -> Stepping:
        """For a recipe, all that it has more than the present one opened.

        Raises unless it can have its amounts, sizes and columns, and its rows fill microbatches.
        """
        if recipe is self.recipe and layout == self._stepping.layout:
            return self._stepping
        num_positions(recipe)
        stepping = replace(self._stepping, recipe=recipe, layout=layout, opened=None)
        if not self._options.pad_rows:
            stepping.check_filled()
        return replace(stepping, opened=self._opened_for(recipe))

    def _keep(self) -> None:
        """On the first rank: write the ledger, unless its file has it. Raises StateError."""
        path, place = self._options.ledger, self._place
        if path is not None and self.ledger and place.is_known and place.is_first:
            self.ledger.keep(path, timeout_s=self._options.transport.timeout_s)


def _decoded_is_larger(stepping: Stepping) -> bool:
    """See `choose_delivery`."""
    rule = stepping.rule
    if not isinstance(rule, TakesParts):
        return False
    with entered(stepping.recipe):  # the sizes are in their indices
        return rule.decoded_is_larger(stepping.recipe)
