"""The virtual dataloader: the same loop on every rank, exactly its own tensors in it.

The way of a sequence is `Feed._items`: plan, load, deliver, build, place. It runs ahead on a thread; `run`
hands what it makes to the training loop, and the rest of this file says who this rank is and where it stands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Self, cast

import torch
from torch.distributed.distributed_c10d import Store

from meshfeed.ahead import Ahead, forget
from meshfeed.batch import Step
from meshfeed.deliver import (
    Delivery,
    Digester,
    Digests,
    Meeting,
    Verifier,
    can_share,
    default_store,
    make_delivery,
    tell,
)
from meshfeed.device import OnHost, Placer, microbatches_of, placer_of
from meshfeed.errors import DeliveryError, RecipeError
from meshfeed.launch import check_arguments, this_layout, this_rank
from meshfeed.layout import Layout
from meshfeed.order import num_positions, num_steps
from meshfeed.plan import CpSplit, Packing
from meshfeed.prefetch import StageClock
from meshfeed.recipe import Recipe
from meshfeed.roles import DeliveryName, Role, Roles, StageMap, assign_roles, choose_delivery
from meshfeed.run import COUNTERS, Item, Made, Meter, Run, StepEnd, StepStart, VirtualStage, views_of
from meshfeed.sequence import Columns, Portion, SequenceRule
from meshfeed.state import State
from meshfeed.stepping import Stepping


class Feed:
    """One rank's view of the training stream.

    Construction remembers its arguments; entering (`with`, or the first iteration) opens what this
    rank's role needs, and leaving lets go of it.

    Args:
        recipe: what to train on; equal on every rank.
        layout: where the ranks stand; None for one process.
        rank: this process's global rank; None asks torch.distributed, then $RANK, then takes 0.
        delivery: "direct", "broadcast", "share", "tree", or "auto" (see `roles.choose_delivery`).
        device: where the tensors go.
        stage_map: which pipeline stages embed, compute loss, predict further tokens; None for the plain
            pipeline of the layout.
        reads: ranks that may open storage; None leaves it to meshfeed.
        micro_batch_size: sequences per microbatch and data-parallel rank, for sequences of one length.
        packing: how sequences of different lengths, such as `Documents`, become microbatches.
        cp_split: how context parallelism splits a sequence, "zigzag" or "contiguous".
        prefetch: reads made ahead, on a thread, each of a microbatch or of several small ones; 0 makes them
            when they are asked for.
        read_ahead_bytes: how much of coming steps to announce to storage that is far away, beside one step
            that is always announced ahead; per reader.
        verify: compare digests across replicas at the end of every step.
        timeout_s: how long to wait for peers to join, and for a batch when the loop asks for one.
        rendezvous: a torch.distributed Store through which peers meet; None takes that of the default
            process group.

    Errors are MeshfeedErrors: LayoutError where the job cannot hold the layout, RoleError where a rank
    cannot be fed, PeerError where a peer is missing or dies, StoreError from storage.
    """

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout | None = None,
        rank: int | None = None,
        *,
        delivery: DeliveryName | Literal["auto"] = "auto",
        device: str | torch.device = "cpu",
        stage_map: StageMap | None = None,
        reads: Iterable[int] | None = None,
        micro_batch_size: int = 1,
        packing: Packing | None = None,
        cp_split: CpSplit = "zigzag",
        prefetch: int = 2,
        read_ahead_bytes: int = 256 << 20,
        verify: bool = False,
        timeout_s: float = 1800.0,
        rendezvous: Store | None = None,
    ) -> None:
        check_arguments(layout, delivery, device)
        if {type(prefetch), type(read_ahead_bytes)} != {int} or min(prefetch, read_ahead_bytes) < 0:
            raise RecipeError(
                f"prefetch={prefetch!r} and read_ahead_bytes={read_ahead_bytes!r} are whole numbers from 0"
            )
        if timeout_s <= 0:
            raise RecipeError(f"timeout_s={timeout_s} must be positive")
        self.recipe, self.micro_batch_size, self.packing = recipe, micro_batch_size, packing
        self._given_layout, self._given_rank, self._given_delivery = layout or Layout(), rank, delivery
        self._device, self._given_stage_map = device, stage_map
        self._reads = None if reads is None else frozenset(reads)
        self._stepping = Stepping(
            recipe=recipe,
            layout=self._given_layout,
            micro_batch_size=micro_batch_size,
            packing=packing,
            vpp=self.stage_map.vpp,
            cp_split=cp_split,
        )
        self._prefetch, self._verify, self._timeout_s = prefetch, verify, timeout_s
        self._read_ahead_bytes = read_ahead_bytes
        self._rendezvous = rendezvous
        self._host = OnHost()
        self._resources = contextlib.ExitStack()
        self._entered = False
        self._next_step, self._loaded = 0, False
        self._run: Run | None = None
        self.virtual_stages = tuple(VirtualStage(self._steps, v) for v in range(self.stage_map.vpp))

    # -- what this rank is ----------------------------------------------------------------------------

    @cached_property
    def rank(self) -> int:
        """This process's global rank."""
        return this_rank(self._given_rank)

    @cached_property
    def layout(self) -> Layout:
        """The layout, its node size taken from the launcher where it was not given."""
        return this_layout(self._given_layout, self.rank)

    @cached_property
    def stage_map(self) -> StageMap:
        """Which pipeline stage does what."""
        return self._given_stage_map or StageMap(pp=self._given_layout.pp)

    @cached_property
    def delivery(self) -> DeliveryName:
        """How stored bytes reach this rank; what "auto" came to."""
        if self._given_delivery != "auto":
            return cast(DeliveryName, self._given_delivery)
        return choose_delivery(
            self.layout, self.stage_map, self._rule.fields, self._reads, can_share=can_share() is None
        )

    @cached_property
    def roles(self) -> Roles:
        """Every rank's role."""
        rule, shared = self._rule, self._stepping.shares_packs
        return assign_roles(
            self.layout, self.stage_map, rule.fields, self.delivery, self._reads, shares_packs=shared
        )

    @cached_property
    def role(self) -> Role:
        """This rank's role."""
        return self.roles[self.rank]

    @cached_property
    def cp_groups(self) -> dict[int, tuple[int, ...]]:
        """The context-parallel groups that this rank can be in, size -> global ranks in order of slices.

        A trainer makes them once, at its start; `Microbatch.cp_ranks` is always one of them. With a fixed cp
        there is the one.
        """
        return self._stepping.cp_groups(self.layout.coord(self.rank))

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole stream, told by the index alone; None where it never ends."""
        return num_steps(self.recipe)

    @property
    def num_sequences(self) -> int | None:
        """Sequences that these steps take together; None where the stream never ends."""
        return num_positions(self.recipe)

    def num_microbatches(self, step: int) -> int | None:
        """Microbatches of a step for each rank, 0 past the end; None where lengths decide (packing)."""
        return self._stepping.num_microbatches(step)

    # -- taking and letting go ------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if not self._entered:
            if self.delivery in ("share", "tree") and self.role.peers and (missing := can_share()):
                raise DeliveryError(f"delivery {self.delivery!r}: {missing}; choose 'broadcast' or 'auto'")
            with contextlib.ExitStack() as stack:
                for store in self.recipe.sources:
                    stack.enter_context(store)
                self._resources = stack.pop_all()
            self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop producing, let the peers go, close the files. May be entered again."""
        self._stop()
        self._resources.close()
        self._entered = False

    # -- the training loop's side ---------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        return self._steps(None)

    def state_dict(self) -> dict[str, Any]:
        """The state after the steps handed out so far: at most 4 KB, JSON-able, equal on every rank.

        Taken in the body of the loop over steps, it resumes at the next step.
        """
        step = self._run.step if self._run is not None else self._next_step
        return State(recipe=self.recipe.summary(until=step), step=step).to_json()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where a state was taken, under any layout; iterate anew afterwards.

        Raises StateError for a state of another recipe or a damaged one; nothing is changed then.
        """
        state = State.from_json(state_dict)
        state.check(self.recipe)
        self._stop()
        self._next_step, self._loaded = state.step, True

    def _steps(self, virtual_stage: int | None) -> Iterator[Step]:
        entered_here = not self._entered
        self.__enter__()
        view, num_views = (0, 1) if virtual_stage is None else (virtual_stage, self.stage_map.vpp)
        if self._run is None or not self._run.join(view, num_views):
            self._stop()
            self._run = self._new_run(None if virtual_stage is None else self.stage_map)
            self._run.join(view, num_views)
        yield from self._run.steps(view)
        # An iterator that is dropped midway leaves its run to the next one, or to close.
        if num_views == 1:
            self._stop()
            if entered_here:
                self.close()

    def _new_run(self, by_stage: StageMap | None) -> Run:
        role, fields, clock = self.role, self._rule.fields, StageClock()
        meeting = self._meeting()
        delivery = make_delivery(
            self.delivery,
            role,
            meeting,
            num_slots=self._prefetch + 2,
            patience_s=None if self._prefetch else self._timeout_s,
        )
        placer = placer_of(self._device)
        return Run(
            start=self._next_step,
            items=self._items(self._next_step, delivery, placer, clock),
            clock=clock,
            delivery=delivery,
            verifier=self._new_verifier(meeting),
            meeting=meeting,
            check=self._new_check(meeting),
            placer=placer,
            role=role,
            views=views_of(fields, by_stage, self.layout.coord(self.rank).pp),
            prefetch=self._prefetch,
            timeout_s=self._timeout_s,
        )

    def _new_check(self, meeting: Meeting | None) -> Callable[[], None]:
        """After a state was loaded: whether the whole job goes on from the same step."""
        loaded, self._loaded = self._loaded, False
        if meeting is None or not loaded:
            return lambda: None
        return lambda: meeting.check_start(self.rank)

    def _new_verifier(self, meeting: Meeting | None) -> Verifier | None:
        """Compares with the ranks that hold the same slices, where any of them take stored bytes."""
        replicas = self.layout.group_of(self.rank, "tp-pp").tolist()
        peers = tuple(sorted(rank for rank in replicas if self.roles[rank].source is not None))
        if not self._verify or self.rank not in peers or len(peers) == 1:
            return None
        if meeting is None:
            raise DeliveryError(
                f"verify=True: rank {self.rank} needs a way to meet ranks {peers}: call "
                f"torch.distributed.init_process_group first, or pass rendezvous=<torch.distributed.Store>"
            )
        return Verifier(self.rank, peers, [f.name for f in self._rule.fields], meeting)

    def _meeting(self) -> Meeting | None:
        store = self._rendezvous or default_store()
        topic = (
            f"recipe {self.recipe.fingerprint}, {self._stepping.summary()}, delivery {self.delivery}, "
            f"verify {self._verify}, reads {self._reads and sorted(self._reads)}, {self.stage_map}"
        )
        ranks = self.roles.ranks.tolist()
        return None if store is None else Meeting(store, self._timeout_s, topic, self._next_step, ranks)

    def _stop(self) -> None:
        if self._run is not None:
            self._next_step = self._run.step
            self._run.stop()
            self._run = None
            forget(self.recipe.sources)

    # -- the producer's side --------------------------------------------------------------------------

    @property
    def _rule(self) -> SequenceRule:
        return self._stepping.rule

    def _items(self, start: int, delivery: Delivery, placer: Placer, clock: StageClock) -> Iterator[Item]:
        """The way of every sequence, from its place in the stream to the device."""
        fields = [f.name for f in self._rule.fields]
        meter = Meter(self.recipe.sources, delivery.traffic)
        ahead = Ahead(
            self._stepping,
            self.layout.coord(self.rank),
            self._served(),
            start,
            clock,
            reads=self.role.reads,
            budget_bytes=self._read_ahead_bytes,
        )
        for batch, portions in ahead:
            yield StepStart(batch, {"exposed_wait_s": {}, **dict.fromkeys(COUNTERS, 0), **batch.facts()})
            digester = Digester(fields) if self._verify else None
            for portion in portions:
                columns, hint = None, self._hint(portion)
                if self.role.reads:
                    with clock.stage("read"):
                        columns = self._load(batch.step, portion, delivery, hint)
                with clock.stage("deliver"):
                    columns = delivery.deliver(columns, hint)
                with clock.stage("build"):
                    built = self._rule.build(self.recipe, portion, columns, self.role.fields, placer.allocate)
                    if digester:
                        digester.add(built)
                with clock.stage("copy"):
                    made, ticket = microbatches_of(portion, built, placer)
                yield Made(made, ticket, meter.take())
                ahead.have_read(portion)
            digests = digester.digests() if digester else None
            yield StepEnd(batch.step, digests, lambda again=portions: self._reread(again))

    def _served(self) -> list[int]:
        """The cp coordinates of the ranks that this rank's reader serves, this rank's own included."""
        peers = [rank for rank in self.role.peers if self.roles[rank].source is not None]
        return sorted({self.layout.coord(rank).cp for rank in (self.rank, *peers)})

    def _hint(self, portion: Portion) -> int:
        return 0 if self.role.source is None else self._rule.num_bytes(self.recipe, portion)

    def _load(self, step: int, portion: Portion, delivery: Delivery, hint: int) -> Columns:
        try:
            return self._rule.load(self.recipe, portion, self._host.allocate)
        except Exception as error:
            raise tell(delivery, error, self.rank, step, hint) from error.__cause__ or error

    def _reread(self, portions: Sequence[Portion]) -> Digests:
        """The digests that this rank should have had for a step, from storage again."""
        digester, host = Digester([f.name for f in self._rule.fields]), OnHost()
        for portion in portions:
            alone = replace(portion, held=portion.own)
            columns = self._rule.load(self.recipe, alone, host.allocate)
            digester.add(self._rule.build(self.recipe, alone, columns, self.role.fields, host.allocate))
        return digester.digests()
