"""A user's own iterator on every rank of an N-D-parallel job: lengths gathered, planned, rerouted, delivered.

The way of an item is `Exchange._made`: pull, gather, plan, reroute, deliver, build, place. From the plan
on, all is what a `Feed` does with lengths from an index, by the same functions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch.distributed.distributed_c10d import Store

from meshfeed.batch import Step
from meshfeed.columns import Columns
from meshfeed.deliver import Digester, Digests, EndOfStream, Meeting, make_delivery
from meshfeed.device import Placer
from meshfeed.errors import DeliveryError, OptionError, RecipeError, RoleError, StateError
from meshfeed.exchange.delivery import ExchangeDelivery
from meshfeed.exchange.item_source import ItemSource
from meshfeed.exchange.keys import Keys
from meshfeed.exchange.lengths import Bytes, GatheredLengths, Report
from meshfeed.exchange.membership import Membership
from meshfeed.exchange.routing import Shipment
from meshfeed.exchange.steps import Received, compared, gather_reports, packed, plan, portions, reroute
from meshfeed.launch import check_arguments, check_counts, check_flags
from meshfeed.layout import Layout
from meshfeed.metrics import Meter, RunStart, Sink, StageClock
from meshfeed.plan import CpSplit, Packing, StepPlan
from meshfeed.roles import DeliveryName, Field, Role, Roles, StageMap
from meshfeed.run import Item, Made, Run, StepEnd, StepStart
from meshfeed.source import StepSource
from meshfeed.stepping import GlobalBatch

Uneven = Literal["drain", "drop", "error"]
"""drain: who has come to an end gives nothing more; the steps go on, smaller, until all have.
drop: the first step that some iterator cannot fill is the end; what was pulled for it is told in `left_over`.
error: iterators that end in different steps are an error."""


class Exchange(StepSource[ExchangeDelivery]):
    """One rank's view of what iterators of data-parallel ranks give; lengths are known only once they are
    read.

    Every rank makes one with equal arguments but for its iterator. Step by step, each owner of an iterator
    pulls its items; all learn their lengths, plan, and send each item to where the plan has it. Equal items
    in equal order make the very microbatches that a `Feed` makes of them.

    Use it in a `with`: a loop that is left by `break` keeps its place for the next one, and its peers wait
    for that, until the `with` ends or `close` lets them go. A loop after the end of another begins a new
    round of what can be iterated again, such as a list, and steps go on counting; a generator has no more.

    Args:
        iterator: what this rank gives: an iterable of items (see `Keys`) or of lists of them; None where it
            gives none. Ranks of one data-parallel rank that all have one must give the same items; their
            lengths and some of their numbers are compared every step.
        layout: where the ranks stand; None for one process.
        rank: this process's global rank; None asks torch.distributed, then the launcher.
        packing: how items become microbatches.
        keys: what items hold.
        pulls: elements of its iterator, items or lists, that each owner pulls for a step.
        uneven: what becomes of iterators that do not end together; see `Uneven`.
        owners: the ranks that have an iterator, such as tp rank 0 of the first and last stage; the others
            get theirs by `delivery` from one of them, as do owners that another one can serve. None where
            each rank that needs items has its own, and nothing is delivered.
        delivery: how, "broadcast", "share", "tree" or "auto"; without owners, "direct".
        name: tells it from another with equal arguments, so that ranks which begin them in different orders
            are refused.
        prefetch: microbatches made ahead on a thread, which then pulls from the iterator; 0 pulls when a
            step is asked for, on the caller's thread.

    The other arguments are those of a `Feed`.

    Attributes:
        left_over: data-parallel rank -> items that were pulled and are in no step; under uneven="drop", at
            the end.

    A microbatch's `draws` tell data-parallel rank (`source`) and number in its iterator (`index`) of each
    item. An item without a token is in no microbatch, whatever else it holds; a step's `stats["empty"]` names
    it as (data-parallel rank, 0, number). Errors are MeshfeedErrors, the same on every rank: DeliveryError
    where an iterator raises (its own error is the cause, on its own rank), StoreError for an item that cannot
    be, PlanError for one that is too long, RoleError where nobody has an iterator or one is not asked for,
    PeerError for a lost rank and for ranks whose items differ and must not, VerifyError by `verify`.
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
        verify: bool = False,
        timeout_s: float = 1800.0,
        rendezvous: Store | None = None,
        wait_for_all: bool = False,
        metrics: Sink | Sequence[Sink] | None = None,
        name: str = "",
    ) -> None:
        check_arguments(layout, delivery, device, timeout_s, name)
        _check_kinds(packing=(packing, Packing), keys=(keys or Keys(), Keys))
        check_counts(0, prefetch=prefetch)
        check_flags(verify=verify, wait_for_all=wait_for_all)
        check_counts(1, pulls=pulls)
        if uneven not in get_args(Uneven):
            raise OptionError(f"uneven={uneven!r}: choose one of {', '.join(get_args(Uneven))}")
        super().__init__(
            layout,
            rank,
            name="(exchange)",  # all ranks wait for each other, so they begin all exchanges in one order
            delivery=delivery,
            device=device,
            stage_map=stage_map,
            readers=owners,
            packing=packing,
            cp_split=cp_split,
            prefetch=prefetch,
            verify=verify,
            timeout_s=timeout_s,
            rendezvous=rendezvous,
            wait_for_all=wait_for_all,
            metrics=metrics,
        )
        self._packing: Packing = packing
        self._keys, self._uneven = keys or Keys(), uneven
        self._agreed_here = {
            "name": repr(name),
            "keys": str(self._keys),
            "pulls": str(pulls),
            "uneven": uneven,
        }
        self.left_over: dict[int, int] = {}
        self._puller = ItemSource(iterator, self._keys, pulls)
        self._at_rest = threading.Event()  # no producer is in the iterator
        self._at_rest.set()

    # -- what this rank is ----------------------------------------------------------------------------

    @cached_property
    def roles(self) -> Roles:
        """Every rank's role. Raises RoleError where its owners cannot serve all ranks."""
        try:
            return super().roles
        except RoleError as unserved:
            if self._readers is None:
                raise
            raise RoleError(
                f"owners={sorted(self._readers)} do not serve all ranks: a delivery goes to ranks of the "
                f"owner's own data-parallel rank alone (under 'share' of its node, under 'dynamic_cp' of its "
                f"cp rank); name an owner for each, whose iterator may be None, or give every rank its own "
                f"and owners=None"
            ) from unserved

    @cached_property
    def role(self) -> Role:
        """This rank's role. Raises RoleError where it has an iterator that nobody asks for."""
        if self._puller.owns and self._readers is not None and self.rank not in self._readers:
            raise RoleError(
                f"rank {self.rank} has an iterator, but owners={sorted(self._readers)}; name it, or pass None"
            )
        role = super().role
        if self._puller.owns and self._readers is None and not role.reads:
            raise RoleError(
                f"rank {self.rank} has an iterator, but would get its items from rank {role.source} by "
                f"{self.delivery!r}; name the ranks that have one as `owners`, or pass None there"
            )
        return role

    @property
    def _fields(self) -> Sequence[Field]:
        return self._keys.fields

    @property
    def _origin(self) -> str:
        return "its own iterator has not given it; look at what the iterator waits for"

    @property
    def _compared(self) -> Sequence[str]:
        return compared(self._keys)

    @property
    def _agreed(self) -> Mapping[str, str]:
        return self._agreed_here

    def _chosen_delivery(self) -> DeliveryName:
        return "direct" if self._readers is None else super()._chosen_delivery()

    @cached_property
    def _membership(self) -> Membership:
        """The exchange that this rank takes part in, or gets its items from."""
        source = self.role.source
        membership = Membership.of(self.layout, self.roles, self.rank if source is None else source)
        if membership is None:
            raise RoleError(f"rank {source} gives rank {self.rank} its items, but exchanges none")
        return membership

    @cached_property
    def _wanted(self) -> frozenset[str]:
        """The fields that any rank served by this exchange needs."""
        members = [self.roles[rank] for rank in self._membership.ranks]
        served = {rank for role in members for rank in (role.rank, *role.peers)}
        return frozenset(name for rank in served for name in self.roles[rank].fields)

    # -- the training loop's side ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The first step that was not handed out whole (see `Feed.state_dict`), and the iterator's own state.

        That is its `state_dict()` where it has one, as it was after the last item before that step. It
        differs from rank to rank and is good under the same layout.
        """
        return self._puller.state(self._step)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where a state was taken; iterate anew afterwards.

        An iterator without `load_state_dict` must be handed over standing there. Raises StateError for what
        `state_dict` did not give, and where the iterator does not return from its current item; it is
        not touched then.
        """
        self._puller.check(state_dict)
        self._stop()
        if not self._at_rest.is_set():
            raise StateError(
                f"rank {self.rank}: the iterator is still at an item that was asked for ahead, and cannot be "
                f"set back under it; load the state again once it has returned"
            )
        self._puller.check(state_dict)  # again: it may have run on to its end before it stopped
        self._puller.load(state_dict)
        self._next_step, self._loaded = state_dict["step"], True

    def _steps(self, run: Run, view: int, num_views: int) -> Iterator[Step]:
        yield from super()._steps(run, view, num_views)
        self._puller.handed_end()

    def _about(self, step: int) -> RunStart:
        return RunStart.here(step, self.layout, self.rank, self.delivery)

    # -- the producer's side --------------------------------------------------------------------------

    def _new_delivery(self, meeting: Meeting | None, patience_s: float | None) -> ExchangeDelivery:
        delivery = make_delivery(self.delivery, self.role, meeting, num_slots=2, patience_s=patience_s)
        return ExchangeDelivery(self.rank, self._membership, delivery, meeting, patience_s)

    def _items(
        self, start: int, delivery: ExchangeDelivery, placer: Placer, clock: StageClock
    ) -> Iterator[Item]:
        self._at_rest = at_rest = threading.Event()
        at_rest.set()
        return _telling(self._made(start, delivery, placer, clock), at_rest)

    def _made(
        self, start: int, delivery: ExchangeDelivery, placer: Placer, clock: StageClock
    ) -> Iterator[Item]:
        """The way of every item, from the iterator to the device."""
        meter, step, ended = Meter([], delivery.group.traffic, delivery.traffic), start, False
        while not ended:
            told, planned = None, None
            if self.role.reads:
                told, planned = self._exchanged(step, delivery, clock)
            with clock.stage("deliver"):
                columns = delivery.deliver(told, 0)
            if told is None:
                with clock.stage("plan"):
                    planned = self._told(step, columns)
            if planned is None:
                break
            batch, received = planned
            yield StepStart(batch, batch.facts())
            digester = Digester(self._compared) if self._verify else None
            for portion in portions(batch, self.layout, self.rank, self._cp_split):
                with clock.stage("build"):
                    made, ticket = packed(received, portion, self._keys, self.role.fields, placer, digester)
                yield Made(made, ticket, meter.take())
            yield StepEnd(step, digester.digests() if digester else None, _not_again)
            ended, step = received.gathered.ended, step + 1
        self._puller.restart(step)

    def _exchanged(
        self, step: int, delivery: ExchangeDelivery, clock: StageClock
    ) -> tuple[Columns, tuple[GlobalBatch, Received] | None]:
        """A step among the members: what peers must be told; the plan and the bytes, None at the end."""
        try:
            if delivery.interrupted:
                delivery.leave()
            with clock.stage("read"):
                pulled = self._puller.pull(
                    step, self.rank, self._wanted, self._run.step if self._run else step
                )
                self._record(pulled.error)
            with clock.stage("exchange"):
                reports = gather_reports(pulled, delivery.group)
            with clock.stage("plan"):
                gathered = GatheredLengths.of(reports, self._membership)
            served = reports if self.role.peers else ()
            told = np.frombuffer(b"".join(report.encode() for report in served), np.uint8)
            if self._is_end(gathered):
                delivery.over()
                delivery.agreement.check(step, gathered, reports)
                return {"reports": told}, None
            with clock.stage("plan"):
                batch = self._plan(gathered, step)
            with clock.stage("exchange"):
                received = reroute(
                    pulled, gathered, batch.plan, self._membership, delivery.group, split=self._cp_split
                )
                if gathered.ended:
                    delivery.over()
                delivery.agreement.check(
                    step, gathered, reports
                )  # last, so that no collective is left half-done
        except EndOfStream as end:
            delivery.end(end)
        except Exception as error:
            delivery.fail(error, 0)
            raise
        return {"reports": told, "data": received.data}, (batch, received)

    def _told(self, step: int, columns: Columns) -> tuple[GlobalBatch, Received] | None:
        """The same on a rank that another one serves, out of what that one has delivered."""
        membership, at = self._membership, 0
        reports: list[Report] = []
        told = cast(Bytes, np.asarray(columns["reports"]))
        while at < told.size:
            report, size = Report.decode(told[at:])
            reports.append(report)
            at += size
        gathered = GatheredLengths.of(reports, membership)
        if self._is_end(gathered):
            return None
        batch = self._plan(gathered, step)
        member = next(m for m, rank in enumerate(membership.ranks) if rank == self.role.source)
        shipment = Shipment.to(gathered, batch.plan, membership, member, self._cp_split)
        return batch, Received(gathered, shipment, cast(Bytes, np.asarray(columns["data"])))

    def _plan(self, gathered: GatheredLengths, step: int) -> GlobalBatch:
        layout, vpp, length = self.layout, self.stage_map.vpp, self._keys.length
        if len(gathered):
            self._keys.check_present(gathered.names, self._wanted, step)
        made = self._made_plan(gathered)
        return plan(
            gathered,
            self._packing,
            self._membership,
            layout=layout,
            vpp=vpp,
            step=step,
            length=length,
            made=made,
        )

    def _made_plan(self, gathered: GatheredLengths) -> StepPlan | None:
        """The plan, where it is not left to the planner."""
        return None

    def _is_end(self, gathered: GatheredLengths) -> bool:
        """Whether this is no step but the end. Raises RecipeError where iterators must not end like this."""
        if self._uneven == "error" and gathered.short and not gathered.ended:
            first = self._membership.ranks[gathered.holders[gathered.short[0]][0]]
            raise RecipeError(
                f"rank {first}: the iterators of data-parallel ranks {list(gathered.short)} have ended, "
                f"others have not; make them equally long, or choose uneven='drain' or 'drop'"
            )
        if self._uneven == "drop" and gathered.short:
            owners, counts = np.unique(gathered.draws.source, return_counts=True)
            self.left_over = dict(zip(owners.tolist(), counts.tolist()))
            return True
        return gathered.ended and not len(gathered)


def _check_kinds(**given: tuple[object, type]) -> None:
    for name, (value, kind) in given.items():
        if not isinstance(value, kind):
            raise OptionError(
                f"{name} is a {type(value).__name__}, {value!r}; make it a {kind.__name__}(...)"
            )


def _not_again() -> Digests:
    raise DeliveryError("an iterator gives its items once, so they cannot be read again")


def _telling(items: Iterator[Item], at_rest: threading.Event) -> Iterator[Item]:
    """The same items; the event is clear from when the first is asked for until their making has ended."""
    at_rest.clear()
    try:
        yield from items
    finally:
        at_rest.set()
