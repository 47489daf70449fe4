"""A user's own iterator on every rank of an N-D-parallel job: lengths gathered, planned, rerouted, delivered.

The way of an item is `Exchange._items`: pull, gather, plan, reroute, deliver, build, place. From the plan
on, all is what a `Feed` does with lengths from an index, by the same functions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal, Self, cast, get_args

import numpy as np
import torch
from torch.distributed.distributed_c10d import Store

from meshfeed.batch import Step
from meshfeed.columns import Columns
from meshfeed.deliver import EndOfStream, Meeting, can_share, default_store, make_delivery
from meshfeed.device import Placer, placer_of
from meshfeed.errors import RecipeError, RoleError, StateError
from meshfeed.exchange.census import Bytes, Census, Report
from meshfeed.exchange.keys import Keys
from meshfeed.exchange.pulling import Puller
from meshfeed.exchange.routing import Shipment
from meshfeed.exchange.seats import Seats
from meshfeed.exchange.steps import Received, gather_reports, packed, plan, portions, reroute
from meshfeed.exchange.ways import Ways
from meshfeed.launch import check_arguments, this_layout, this_rank
from meshfeed.layout import Layout
from meshfeed.plan import CpSplit, Packing
from meshfeed.prefetch import StageClock
from meshfeed.roles import DeliveryName, Role, Roles, StageMap, assign_roles, choose_delivery
from meshfeed.run import COUNTERS, Item, Made, Meter, Run, StepEnd, StepStart, VirtualStage, views_of
from meshfeed.stepping import GlobalBatch, cp_groups_of

Uneven = Literal["drain", "drop", "error"]
"""drain: who has come to an end gives nothing more; the steps go on, smaller, until all have.
drop: the first step that some iterator cannot fill is the end; what was pulled for it is told in `left_over`.
error: iterators that end in different steps are an error."""


class Exchange:
    """One rank's view of what iterators of data-parallel ranks give; lengths are known only once they are
    read.

    Every rank makes one with equal arguments but for its iterator. Step by step, each owner of an iterator
    pulls its items; all learn their lengths, plan, and send each item to where the plan has it. Equal items
    in equal order make the very microbatches that a `Feed` makes of them.

    Args:
        iterator: what this rank gives: an iterable of items (see `Keys`) or of lists of them; None where it
            gives none. Ranks of one data-parallel rank that all have one must give the same items.
        layout: where the ranks stand; None for one process.
        rank: this process's global rank; None asks torch.distributed, then $RANK, then takes 0.
        packing: how items become microbatches.
        keys: what items hold.
        pulls: elements of its iterator, items or lists, that each owner pulls for a step.
        uneven: what becomes of iterators that do not end together; see `Uneven`.
        owners: the ranks that have an iterator, such as tp rank 0 of the first and last stage; the others
            get theirs by `delivery` from one of them, as do owners that another one can serve. None where
            each rank that needs items has its own, and nothing is delivered.
        delivery: how, "broadcast", "share", "tree" or "auto"; without owners, "direct".
        device, stage_map, cp_split, timeout_s, rendezvous: as for a `Feed`.
        prefetch: microbatches made ahead on a thread, which then pulls from the iterator; 0 pulls when a
            step is asked for, on the caller's thread.

    Attributes:
        left_over: data-parallel rank -> items that were pulled and are in no step; under uneven="drop", at
            the end.

    A microbatch's `draws` tell data-parallel rank (`source`) and number in its iterator (`index`) of each
    item. An item without a token is in no microbatch, whatever else it holds; a step's `stats["empty"]` names
    it as (data-parallel rank, 0, number). Errors are MeshfeedErrors, the same on every rank whichever rank's
    iterator raises: StoreError for an item that cannot be, PlanError for one that is too long, RoleError
    where nobody has an iterator, PeerError for a lost rank.
    """

    def __init__(
        self,
        iterator: Iterable[Any] | None,
        layout: Layout | None = None,
        rank: int | None = None,
        *,
        packing: Packing,
        keys: Keys | None = None,
        pulls: int = 1,
        uneven: Uneven = "drain",
        owners: Iterable[int] | None = None,
        delivery: DeliveryName | Literal["auto"] = "auto",
        device: str | torch.device = "cpu",
        stage_map: StageMap | None = None,
        cp_split: CpSplit = "zigzag",
        prefetch: int = 0,
        timeout_s: float = 1800.0,
        rendezvous: Store | None = None,
    ) -> None:
        check_arguments(layout, delivery, device)
        if prefetch < 0 or pulls < 1 or timeout_s <= 0:
            raise RecipeError(
                f"prefetch={prefetch} counts from 0, pulls={pulls} from 1, timeout_s={timeout_s} is positive"
            )
        if uneven not in get_args(Uneven):
            raise RecipeError(f"uneven={uneven!r}: choose one of {', '.join(get_args(Uneven))}")
        self._given_layout, self._given_rank, self._given_delivery = layout or Layout(), rank, delivery
        self._packing, self._keys, self._uneven = packing, keys or Keys(), uneven
        self._owners = None if owners is None else frozenset(owners)
        self._device = device
        self._cp_split: CpSplit = cp_split
        self._prefetch, self._timeout_s, self._rendezvous = prefetch, timeout_s, rendezvous
        self.stage_map = stage_map or StageMap(pp=self._given_layout.pp)
        self.left_over: dict[int, int] = {}
        self._puller = Puller(iterator, self._keys, pulls)
        self._next_step, self._loaded = 0, False
        self._run: Run | None = None
        self._at_rest = threading.Event()  # no producer is in the iterator
        self._at_rest.set()
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
    def delivery(self) -> DeliveryName:
        """How items reach the ranks beside those that exchange them; what "auto" came to."""
        if self._given_delivery != "auto":
            return cast(DeliveryName, self._given_delivery)
        if self._owners is None:
            return "direct"
        return choose_delivery(
            self.layout, self.stage_map, self._keys.fields, self._owners, can_share=can_share() is None
        )

    @cached_property
    def roles(self) -> Roles:
        """Every rank's role; who `reads` takes part in the exchange."""
        shares_packs = self._packing.policy != "dynamic_cp"
        return assign_roles(
            self.layout,
            self.stage_map,
            self._keys.fields,
            self.delivery,
            self._owners,
            shares_packs=shares_packs,
        )

    @cached_property
    def role(self) -> Role:
        """This rank's role. Raises RoleError where it has an iterator that nobody asks for."""
        if self._puller.owns and self._owners is not None and self.rank not in self._owners:
            raise RoleError(
                f"rank {self.rank} has an iterator, but owners={sorted(self._owners)}; name it, or pass None"
            )
        role = self.roles[self.rank]
        if self._puller.owns and self._owners is None and not role.reads:
            raise RoleError(
                f"rank {self.rank} has an iterator, but would get its items from rank {role.source} by "
                f"{self.delivery!r}; name the ranks that have one as `owners`, or pass None there"
            )
        return role

    @cached_property
    def cp_groups(self) -> dict[int, tuple[int, ...]]:
        """The context-parallel groups that this rank can be in; see `Feed.cp_groups`."""
        return cp_groups_of(self.layout, self._packing, self.layout.coord(self.rank))

    @cached_property
    def _seats(self) -> Seats:
        """The exchange that this rank takes part in, or gets its items from."""
        source = self.role.source
        seats = Seats.of(self.layout, self.roles, self.rank if source is None else source)
        if seats is None:
            raise RoleError(f"rank {source} gives rank {self.rank} its items, but exchanges none")
        return seats

    @cached_property
    def _wanted(self) -> frozenset[str]:
        """The fields that any rank served by this exchange needs."""
        members = [self.roles[rank] for rank in self._seats.ranks]
        served = {rank for role in members for rank in (role.rank, *role.peers)}
        return frozenset(name for rank in served for name in self.roles[rank].fields)

    # -- the training loop's side ---------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, and let the peers go. May be iterated again: the next step is the one not handed out yet."""
        if self._run is not None:
            self._next_step = self._run.step
            self._run.stop()
            self._run = None

    def __iter__(self) -> Iterator[Step]:
        return self._steps(None)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank after the steps handed out so far: the next step, and the iterator's own
        state.

        That is its `state_dict()` where it has one, as it was after its last item of these steps. It
        differs from rank to rank and is good under the same layout.
        """
        step = self._run.step if self._run is not None else self._next_step
        return {"version": 1, "step": step, **self._puller.state(step)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where a state was taken; iterate anew afterwards.

        An iterator without `load_state_dict` must be handed over standing there. Raises StateError for what
        `state_dict` did not give, and where the iterator does not return from its current item; it is
        not touched then.
        """
        self._puller.check(state_dict)
        self.close()
        if not self._at_rest.is_set():
            raise StateError(
                f"rank {self.rank}: the iterator is still at an item that was asked for ahead, and cannot be "
                f"set back under it; load the state again once it has returned"
            )
        self._puller.load(state_dict)
        self._next_step, self._loaded = state_dict["step"], True

    def _steps(self, virtual_stage: int | None) -> Iterator[Step]:
        view, num_views = (0, 1) if virtual_stage is None else (virtual_stage, self.stage_map.vpp)
        if self._run is None or not self._run.join(view, num_views):
            self.close()
            self._run = self._new_run(None if virtual_stage is None else self.stage_map)
            self._run.join(view, num_views)
        yield from self._run.steps(view)
        self._puller.handed_end()
        if num_views == 1:
            self.close()

    def _new_run(self, by_stage: StageMap | None) -> Run:
        role, meeting, clock = self.role, self._meeting(), StageClock()
        patience_s = None if self._prefetch else self._timeout_s
        delivery = make_delivery(self.delivery, role, meeting, num_slots=2, patience_s=patience_s)
        ways = Ways(self.rank, self._seats, delivery, meeting, patience_s)
        placer = placer_of(self._device)
        loaded, self._loaded = self._loaded, False
        self._at_rest = at_rest = threading.Event()
        at_rest.set()
        items = self._items(self._next_step, ways, placer, clock)
        return Run(
            start=self._next_step,
            items=_telling(items, at_rest),
            clock=clock,
            delivery=ways,
            verifier=None,
            meeting=meeting,
            check=lambda: meeting.check_start(self.rank) if meeting is not None and loaded else None,
            placer=placer,
            role=role,
            views=views_of(self._keys.fields, by_stage, self.layout.coord(self.rank).pp),
            prefetch=self._prefetch,
            timeout_s=self._timeout_s,
        )

    def _meeting(self) -> Meeting | None:
        store = self._rendezvous or default_store()
        topic = (
            f"exchange {self.layout}, {self._packing}, {self._keys}, {self._cp_split}, {self._uneven}, "
            f"delivery {self.delivery}, owners {self._owners and sorted(self._owners)}, {self.stage_map}"
        )
        ranks = self.roles.ranks.tolist()
        return None if store is None else Meeting(store, self._timeout_s, topic, self._next_step, ranks)

    # -- the producer's side --------------------------------------------------------------------------

    def _items(self, start: int, ways: Ways, placer: Placer, clock: StageClock) -> Iterator[Item]:
        """The way of every item, from the iterator to the device."""
        meter, step, ended = Meter([], ways.group.traffic, ways.traffic), start, False
        while not ended:
            told, planned = None, None
            if self.role.reads:
                told, planned = self._exchanged(step, ways, clock)
            with clock.stage("deliver"):
                columns = ways.deliver(told, 0)
            if told is None:
                planned = self._told(step, columns)
            if planned is None:
                break
            batch, received = planned
            yield StepStart(batch, {"exposed_wait_s": {}, **dict.fromkeys(COUNTERS, 0), **batch.facts()})
            for portion in portions(batch, self.layout, self.rank, self._cp_split):
                with clock.stage("build"):
                    made, ticket = packed(received, portion, self._keys, self.role.fields, placer)
                yield Made(made, ticket, meter.take())
            yield StepEnd(step, None, lambda: np.zeros(0, np.int64))
            ended, step = received.census.ended, step + 1
        self._puller.restart(step)

    def _exchanged(
        self, step: int, ways: Ways, clock: StageClock
    ) -> tuple[Columns, tuple[GlobalBatch, Received] | None]:
        """A step among the members: what peers must be told; the plan and the bytes, None at the end."""
        try:
            if ways.interrupted:
                ways.leave()
            with clock.stage("read"):
                pulled = self._puller.pull(
                    step, self.rank, self._wanted, self._run.step if self._run else step
                )
            with clock.stage("exchange"):
                reports = gather_reports(pulled.report, ways.group)
            census = Census.of(reports, self._seats)
            told = np.frombuffer(b"".join(report.encode() for report in reports), np.uint8)
            if self._is_end(census):
                return {"reports": told}, None
            with clock.stage("plan"):
                batch = self._plan(census, step)
            with clock.stage("exchange"):
                received = reroute(pulled, census, batch.plan, self._seats, ways.group, split=self._cp_split)
        except EndOfStream as end:
            ways.end(end)
        except Exception as error:
            ways.fail(error, 0)
            raise
        return {"reports": told, "data": received.data}, (batch, received)

    def _told(self, step: int, columns: Columns) -> tuple[GlobalBatch, Received] | None:
        """The same on a rank that another one serves, out of what that one has delivered."""
        seats, at = self._seats, 0
        reports: list[Report] = []
        told = cast(Bytes, np.asarray(columns["reports"]))
        while at < told.size:
            report, size = Report.decode(told[at:])
            reports.append(report)
            at += size
        census = Census.of(reports, seats)
        if self._is_end(census):
            return None
        batch = self._plan(census, step)
        member = next(m for m, rank in enumerate(seats.ranks) if rank == self.role.source)
        shipment = Shipment.to(census, batch.plan, seats, member, self._cp_split)
        return batch, Received(census, shipment, cast(Bytes, np.asarray(columns["data"])))

    def _plan(self, census: Census, step: int) -> GlobalBatch:
        layout, vpp, length = self.layout, self.stage_map.vpp, self._keys.length
        return plan(census, self._packing, self._seats, layout=layout, vpp=vpp, step=step, length=length)

    def _is_end(self, census: Census) -> bool:
        """Whether this is no step but the end. Raises RecipeError where iterators must not end like this."""
        if self._uneven == "error" and census.short and not census.ended:
            first = self._seats.ranks[census.holders[census.short[0]][0]]
            raise RecipeError(
                f"rank {first}: the iterators of data-parallel ranks {list(census.short)} have ended, others "
                f"have not; make them equally long, or choose uneven='drain' or 'drop'"
            )
        if self._uneven == "drop" and census.short:
            owners, counts = np.unique(census.draws.source, return_counts=True)
            self.left_over = dict(zip(owners.tolist(), counts.tolist()))
            return True
        return census.ended and not len(census)


def _telling(items: Iterator[Item], at_rest: threading.Event) -> Iterator[Item]:
    """The same items; the event is clear from when the first is asked for until their making has ended."""
    at_rest.clear()
    try:
        yield from items
    finally:
        at_rest.set()
