"""A user's own iterator on every rank of an N-D-parallel job: gather lengths, plan, reroute, deliver.

`Exchange._made` is the path of an item: pull, gather, plan, reroute, deliver, build, place. From the plan on,
it calls the same functions as a `Feed` with lengths from an index.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from meshfeed.columns import Columns
from meshfeed.deliver import Digester, Digests, EndOfStream, Meeting, levels_of, make_delivery
from meshfeed.errors import DeliveryError, OptionError, RecipeError, RoleError, StateError
from meshfeed.exchange.delivery import ExchangeDelivery
from meshfeed.exchange.item_source import ItemSource
from meshfeed.exchange.items import Given, nothing
from meshfeed.exchange.keys import Keys
from meshfeed.exchange.lengths import NO_BYTES, Bytes, GatheredLengths, columns_of, reports_of
from meshfeed.exchange.membership import Membership
from meshfeed.exchange.routing import NO_PIECES, Shipment
from meshfeed.exchange.steps import (
    Received,
    columns_of_plan,
    compared,
    gather_reports,
    packed,
    plan,
    plan_of,
    portions,
    reroute,
)
from meshfeed.feed.device import Placer
from meshfeed.feed.options import Options
from meshfeed.feed.run import Item, Made, StepEnd, StepStart
from meshfeed.feed.source import StepSource
from meshfeed.feed.stepping import GlobalBatch
from meshfeed.layout import Layout
from meshfeed.metrics import Meter, RunStart, Sink, StageClock
from meshfeed.plan import CpSplit, Packing, StepPlan
from meshfeed.roles import DeliveryName, Field, Role, Roles, StageMap
from meshfeed.state import check_step
from meshfeed.transport import Transport
from meshfeed.whole import of_kind, whole_numbers

Uneven = Literal["drain", "drop", "error"]
"""drain: continue with smaller steps until all iterators are exhausted.
drop: end at the first step that an iterator cannot fill; `left_over` counts the items pulled for it.
error: iterators that end in different steps are an error."""


class Exchange(StepSource[ExchangeDelivery, Options]):
    """Microbatches from iterators of the data-parallel ranks, whose lengths are known only after reading.

    Every rank makes an Exchange with equal arguments, except its iterator. In each step, each rank with an
    iterator pulls its items. All ranks learn the lengths, plan, and send each item to the ranks of the plan.
    The same items in the same order make the same microbatches as a `Feed`.

    Use it in a `with`. A loop left by `break` keeps its position for the next loop, and its peers wait for
    that until the `with` ends or `close` is called. After the end, iterating again restarts a list; a
    generator is exhausted. Step numbers continue.

    Args:
        iterator: an iterable of items (see `Keys`) or of lists of items; None for a rank without one. If
            several ranks of one data-parallel rank have one, they must give the same items; lengths and
            some of the numbers are compared every step.
        layout: the arrangement of the ranks, or a torch DeviceMesh; None for one process.
        rank: this process's global rank; None asks torch.distributed, then the launcher.
        packing: how items become microbatches.
        keys: what items hold.
        pulls: elements of its iterator, items or lists, that each reader pulls for a step.
        uneven: what to do when iterators end at different steps; see `Uneven`.
        transport: which ranks have an iterator (`readers`), and how the others get their items (`delivery`);
            see `Transport`. By default a step is pulled on the caller's thread when it is requested.

    The other arguments are those of a `Feed`.

    Attributes:
        left_over: data-parallel rank -> items that were pulled but are in no step; set at the end under
            uneven="drop".

    A microbatch's `draws` hold the data-parallel rank (`source`) and number in its iterator (`index`) of each
    item. An item without tokens is in no microbatch, whatever else it holds; a step's `stats.empty` lists
    it as (data-parallel rank, 0, number). Errors are MeshfeedErrors, the same on every rank: DeliveryError if
    an iterator raises (on its own rank, the iterator's error is the cause), StoreError for an invalid item,
    PlanError for one that is too long, RoleError if no rank has an iterator or an iterator is unused,
    PeerError for a lost rank or ranks whose items differ, VerifyError by `verify`.
    """

    def __init__(
        self,
        iterator: Iterable[Any] | None,
        layout: Layout | DeviceMesh | None = None,
        rank: int | None = None,
        *,
        packing: Packing,
        keys: Keys | None = None,
        pulls: int = 1,
        uneven: Uneven = "drain",
        device: str | torch.device = "cpu",
        stage_map: StageMap | None = None,
        cp_split: CpSplit = "zigzag",
        transport: Transport = Transport(),
        verify: bool = False,
        metrics: Sink | Sequence[Sink] | None = None,
    ) -> None:
        of_kind(OptionError, Packing, packing=packing)
        of_kind(OptionError, Keys, keys=keys or Keys())
        (pulls,) = whole_numbers(OptionError, 1, pulls=pulls)
        if uneven not in get_args(Uneven):
            raise OptionError(f"uneven={uneven!r}: choose one of {', '.join(get_args(Uneven))}")
        super().__init__(layout, rank, Options.of(locals()))
        self._packing: Packing = packing
        self._keys, self._pulls, self._uneven = keys or Keys(), pulls, uneven
        self.left_over: dict[int, int] = {}
        self._puller = ItemSource(iterator, self._keys, pulls)
        self._busy = threading.Lock()  # held while a producer uses the iterator

    # -- this rank's role -----------------------------------------------------------------------------

    @cached_property
    def roles(self) -> Roles:
        """Every rank's role. Raises RoleError if the readers cannot serve all ranks."""
        try:
            return super().roles
        except RoleError as unserved:
            if self._readers is None:
                raise
            raise RoleError(
                f"readers={sorted(self._readers)} do not serve all ranks: a reader delivers only to its own "
                f"data-parallel rank (under 'share' on its node, under 'dynamic_cp' to its cp rank); name a "
                f"reader for each, whose iterator may be None, or give every rank its own and readers=None"
            ) from unserved

    @cached_property
    def role(self) -> Role:
        """This rank's role. Raises RoleError if it has an iterator that is not used."""
        if self._puller.owns and self._readers is not None and self.rank not in self._readers:
            raise RoleError(
                f"rank {self.rank} has an iterator, but readers={sorted(self._readers)}; name it there, or "
                f"pass None"
            )
        role = super().role
        if self._puller.owns and self._readers is None and not role.reads:
            raise RoleError(
                f"rank {self.rank} has an iterator, but would get its items from rank {role.source} by "
                f"{self.delivery!r}; list the ranks that have one in `readers`, or pass None here"
            )
        return role

    @property
    def _fields(self) -> Sequence[Field]:
        return self._keys.fields

    @property
    def _run_name(self) -> str:
        return "(exchange)"  # ranks wait for each other, so all of them begin all exchanges in one order

    @property
    def _origin(self) -> str:
        return "its own iterator has not returned it; check what the iterator waits for"

    @property
    def _compared(self) -> Sequence[str]:
        return compared(self._keys)

    @property
    def _agreed(self) -> Mapping[str, str]:
        name, keys = repr(self._options.transport.name), str(self._keys)
        return {"name": name, "keys": keys, "pulls": str(self._pulls), "uneven": self._uneven}

    def _chosen_delivery(self) -> DeliveryName:
        return "direct" if self._readers is None else super()._chosen_delivery()

    @cached_property
    def _membership(self) -> Membership:
        """The exchange that this rank is a member of, or gets its items from."""
        source = self.role.source
        membership = Membership.of(self.layout, self.roles, self.rank if source is None else source)
        if len(membership.ranks) == 1:  # its broadcast is the only collective
            return membership
        across = [levels_of(self.delivery, self.roles[rank])[0] for rank in membership.ranks]
        further = (set(role.peers if role else ()) - {rank} for role, rank in zip(across, membership.ranks))
        return replace(membership, served_directly=tuple(tuple(sorted(ranks)) for ranks in further))

    @cached_property
    def _in_group(self) -> bool:
        """Whether this rank takes part in the exchange's collectives."""
        return self.role.reads or self.rank in self._membership.group

    @cached_property
    def _wanted(self) -> frozenset[str]:
        """The fields that any rank served by this exchange needs."""
        members = [self.roles[rank] for rank in self._membership.ranks]
        served = {rank for role in members for rank in (role.rank, *role.peers)}
        return frozenset(name for rank in served for name in self.roles[rank].fields)

    @cached_property
    def _passed_on(self) -> list[frozenset[str]]:
        """The fields that each rank of the group needs, for itself or for the ranks of its node."""
        found: list[frozenset[str]] = []
        for rank in self._membership.group:
            _, within = levels_of(self.delivery, self.roles[rank])
            ranks = (rank,) if within is None else within.peers
            found.append(frozenset(name for each in ranks for name in self.roles[each].fields))
        return found

    # -- the training loop's side ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The first step that was not fully handed out (see `Feed.state_dict`), and the iterator's own state.

        The latter is the iterator's `state_dict()`, if it has one, after the last item before that step. It
        differs between ranks and is valid for the same layout.
        """
        return self._puller.state(self.next_step)

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int | None = None) -> None:
        """Resume at a state; then start a new loop.

        step: the next step of the model that was loaded with it; None for no check. An iterator without
        `load_state_dict` must already be at that position. Raises StateError for a state of another step, for
        anything but a result of `state_dict`, or if the iterator does not return from its current item; the
        iterator is unchanged then.
        """
        check_step(self._puller.checked(state_dict)["step"], step)
        with self._changing:
            self._stop()
            if self._busy.locked():
                raise StateError(
                    f"rank {self.rank}: the iterator is still producing a prefetched item and cannot be "
                    f"reset; load the state again once it has returned"
                )
            told = self._puller.checked(state_dict)  # again: it may have reached its end before it stopped
            self._puller.load(told)
            self._next_step, self._loaded = told["step"], True

    def _ended(self, num_views: int) -> None:
        super()._ended(num_views)
        self._puller.handed_end()

    def _about(self, step: int) -> RunStart:
        return RunStart.here(step, self.layout, self.rank, self.delivery)

    # -- the producer's side --------------------------------------------------------------------------

    def _new_delivery(self, meeting: Meeting | None, patience_s: float | None) -> ExchangeDelivery:
        delivery = make_delivery(
            self.delivery,
            self.role,
            meeting,
            num_slots=2,
            patience_s=patience_s,
            across_nodes=not any(self._membership.served_directly),
        )
        return ExchangeDelivery(self.rank, self._membership, delivery, meeting, patience_s)

    def _items(
        self, start: int, delivery: ExchangeDelivery, placer: Placer, clock: StageClock
    ) -> Iterator[Item]:
        self._busy = threading.Lock()
        with self._busy:
            yield from self._made(start, delivery, placer, clock)

    def _made(
        self, start: int, delivery: ExchangeDelivery, placer: Placer, clock: StageClock
    ) -> Iterator[Item]:
        """The path of every item, from the iterator to the device."""
        meter, step, ended = Meter((), delivery.group.traffic, delivery.traffic), start, False
        coord = self.layout.coord(self.rank)
        while not ended:
            message, planned = None, None
            if self._in_group:
                message, planned = self._exchanged(step, delivery, clock)
            with clock.stage("deliver"):
                columns = delivery.deliver(message, 0)
            if message is None:
                with clock.stage("plan"):
                    planned = self._received(step, columns)
            if planned is None:
                break
            batch, received = planned
            yield StepStart(batch, self._recorder.new_costs(batch.stats))
            digester = Digester(self._compared) if self._options.verify else None
            with clock.stage("build"):
                mine = portions(batch, self.layout, coord, self._options.cp_split)
                built = packed(received, mine, self._keys, self.role.fields, placer, digester)
            for _ in mine:
                with clock.stage("build"):
                    made, ticket = next(built)
                yield Made(made, ticket, meter.take())
            yield StepEnd(step, digester.digests() if digester else None, _not_again)
            ended, step = received.gathered.ended, step + 1
        self._puller.restart(step)

    def _exchanged(
        self, step: int, delivery: ExchangeDelivery, clock: StageClock
    ) -> tuple[Columns, tuple[GlobalBatch, Received] | None]:
        """A step in the group: the message for the peers; the plan and the bytes, None at the end."""
        try:
            if delivery.interrupted:
                delivery.leave()
            with clock.stage("read"):
                pulled = self._pull(step)
                self._record(pulled.error and cast(Exception, pulled.error.__cause__))
            with clock.stage("exchange"):
                # those served directly give nothing
                reports = gather_reports(pulled, delivery.group)[: len(self._membership.ranks)]
            with clock.stage("plan"):
                gathered = GatheredLengths.of(reports, self._membership)
            message = columns_of(reports) if self.role.peers else {}
            if self._is_end(gathered):
                delivery.is_over = True
                delivery.agree(step, gathered, reports)
                return message, None
            with clock.stage("plan"):
                batch = self._plan(gathered, step, self._made_plan(gathered))
            with clock.stage("exchange"):
                received = reroute(
                    pulled,
                    gathered,
                    batch.plan,
                    self._membership,
                    delivery.group,
                    split=self._options.cp_split,
                    receivers=self._receivers(gathered),
                )
                delivery.is_over = gathered.ended or delivery.is_over
                # last, so that no collective is left half-done
                delivery.agree(step, gathered, reports)
        except EndOfStream as end:
            delivery.end(end)
        except Exception as error:
            delivery.fail(error, 0)
            raise
        return {**message, **columns_of_plan(batch.plan), "data": received.data}, (batch, received)

    def _pull(self, step: int) -> Given:
        """The items that this rank gives to a step."""
        if not self.role.reads:
            return nothing()
        run, digested = self._run, self._membership.has_copies
        handed_out = step if run is None else run.step
        return self._puller.pull(step, self.rank, self._wanted, handed_out, digested=digested)

    def _received(self, step: int, columns: Columns) -> tuple[GlobalBatch, Received] | None:
        """The same on a rank that another one serves, from the message that was delivered."""
        membership = self._membership
        gathered = GatheredLengths.of(reports_of(columns), membership)
        if self._is_end(gathered):
            return None
        made = plan_of(columns, self._packing, self.layout, self._options.cp_split)
        batch = self._plan(gathered, step, made)
        if not self._keys.any_for(self.role.fields, gathered.dtypes.keys()):
            return batch, Received(gathered, NO_PIECES, NO_BYTES)
        member = membership.ranks.index(cast(int, self.role.source))
        pieces = Shipment.of(gathered, batch.plan, membership, self._options.cp_split, member)
        return batch, Received(gathered, pieces.received_by(member), cast(Bytes, np.asarray(columns["data"])))

    def _receivers(self, gathered: GatheredLengths) -> list[list[int]]:
        """For each member, the ranks that get what it gets: only those that need a key; see `reroute`."""
        there, num_members = gathered.dtypes.keys(), len(self._membership.ranks)
        return [
            [at for at in indices if at < num_members or self._keys.any_for(self._passed_on[at], there)]
            for indices in self._membership.receivers()
        ]

    def _plan(self, gathered: GatheredLengths, step: int, made: StepPlan | None) -> GlobalBatch:
        if len(gathered):
            self._keys.check_present(gathered.dtypes.keys(), self._wanted, step)
        return plan(
            gathered,
            self._packing,
            self._membership,
            layout=self.layout,
            vpp=self.stage_map.vpp,
            step=step,
            length=self._keys.length,
            made=made,
            split=self._options.cp_split,
        )

    def _made_plan(self, gathered: GatheredLengths) -> StepPlan | None:
        """A finished plan; None calls the planner."""
        return None

    def _is_end(self, gathered: GatheredLengths) -> bool:
        """Whether this is the end and not a step. Raises RecipeError if uneven="error" forbids this end."""
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


def _not_again() -> Digests:
    raise DeliveryError("an iterator gives each item once, so items cannot be read again")
