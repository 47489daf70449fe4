"""The path of an item: pull, gather, plan, reroute, deliver, build, place.

From the plan on, it calls the same functions as a `Feed` with lengths from an index.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, cast

import numpy as np

from meshfeed.arrays import Bytes, Columns
from meshfeed.deliver import Digester, Digests, EndOfStream, Meeting, make_delivery
from meshfeed.errors import DeliveryError, RecipeError
from meshfeed.exchange.delivery import ExchangeDelivery
from meshfeed.exchange.item_source import ItemSource
from meshfeed.exchange.items import Given, nothing
from meshfeed.exchange.keys import Keys
from meshfeed.exchange.lengths import NO_BYTES, GatheredLengths, columns_of, reports_of
from meshfeed.exchange.place import ExchangePlace
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
from meshfeed.feed.run import Item, Made, Producer, Run, StepEnd, StepStart
from meshfeed.feed.stepping import GlobalBatch
from meshfeed.metrics import Meter, RunStart
from meshfeed.plan import Packing, StepPlan

Uneven = Literal["drain", "drop", "error"]
"""drain: continue with smaller steps until all iterators are exhausted.
drop: end at the first step that an iterator cannot fill; `left_over` counts the items pulled for it.
error: iterators that end in different steps are an error."""


class ItemProducer(Producer[ExchangePlace]):
    """The producer of an Exchange.

    Args:
        place: this rank's.
        puller: this rank's iterator.
        packing, keys, uneven, left_over: of the exchange.
        made_plan: a finished plan of a step; None where the planner is called.
    """

    origin = "its own iterator has not returned it; check what the iterator waits for"

    def __init__(
        self,
        place: ExchangePlace,
        puller: ItemSource,
        *,
        packing: Packing,
        keys: Keys,
        uneven: Uneven,
        left_over: dict[int, int],
        made_plan: Callable[[GatheredLengths], StepPlan | None],
    ) -> None:
        self.place, self.puller, self.packing, self.keys = place, puller, packing, keys
        self.uneven: Uneven = uneven
        self.left_over, self.made_plan = left_over, made_plan
        self.depth = place.options.transport.prefetch or 0
        self.compared = [*compared(keys), *(f"{key.name} of its iterator" for key in keys.declared)]

    def agreed(self) -> Mapping[str, str]:
        name, keys = repr(self.place.options.transport.name), str(self.keys)
        return {"name": name, "keys": keys, "pulls": str(self.puller.pulls), "uneven": self.uneven}

    def about(self, step: int) -> RunStart:
        return RunStart.here(step, self.place.layout, self.place.rank, self.place.delivery)

    def new_delivery(self, meeting: Meeting | None, patience_s: float | None) -> ExchangeDelivery:
        place = self.place
        delivery = make_delivery(
            place.delivery,
            place.role,
            meeting,
            num_slots=2,
            patience_s=patience_s,
            across_nodes=not any(place.membership.served_directly),
        )
        return ExchangeDelivery(place.rank, place.membership, delivery, meeting, patience_s)

    def items(self, run: Run) -> Iterator[Item]:
        self.puller.busy = threading.Lock()
        with self.puller.busy:
            yield from self._made(run)

    def _made(self, run: Run) -> Iterator[Item]:
        """The path of every item, from the iterator to the device."""
        delivery, clock, placer = cast(ExchangeDelivery, run.delivery), run.clock, run.placer
        meter, step, ended = Meter((), delivery.group.traffic, delivery.traffic), run.first, False
        place, split = self.place, self.place.options.cp_split
        while not ended:
            message, planned = None, None
            if place.in_group:
                message, planned = self._exchanged(step, delivery, run)
            with clock.stage("deliver"):
                columns = delivery.deliver(message, 0)
            if message is None:
                with clock.stage("plan"):
                    planned = self._received(step, columns)
            if planned is None:
                break
            batch, received = planned
            yield StepStart(batch, run.recorder.new_costs(batch.stats))
            digester = Digester(self.compared) if place.options.verify else None
            with clock.stage("build"):
                mine = portions(batch, place.layout, place.coord, split)
                built = packed(received, mine, self.keys, place.role.fields, placer, digester)
            for _ in mine:
                with clock.stage("build"):
                    made, ticket = next(built)
                yield Made(made, ticket, meter.take())
            yield StepEnd(step, self._digests(digester, step, run) if digester else None, _not_again)
            ended, step = received.gathered.ended, step + 1
        self.puller.ends_before(step)

    def _exchanged(
        self, step: int, delivery: ExchangeDelivery, run: Run
    ) -> tuple[Columns, tuple[GlobalBatch, Received] | None]:
        """A step in the group: the message for the peers; the plan and the bytes, None at the end."""
        clock, place = run.clock, self.place
        try:
            if delivery.interrupted:
                delivery.leave()
            with clock.stage("read"):
                pulled = self._pull(step, run)
                if pulled.error is not None and isinstance(own := pulled.error.__cause__, Exception):
                    run.record(own)
            with clock.stage("exchange"):
                # those served directly give nothing
                reports = gather_reports(pulled, delivery.group)[: len(place.membership.ranks)]
            with clock.stage("plan"):
                gathered = GatheredLengths.of(reports, place.membership)
            message = columns_of(reports) if place.role.peers else {}
            if self._is_end(gathered):
                delivery.is_over = True
                delivery.agree(step, gathered, reports)
                return message, None
            with clock.stage("plan"):
                batch = self._plan(gathered, step, self.made_plan(gathered))
            with clock.stage("exchange"):
                received = reroute(
                    pulled,
                    gathered,
                    batch.plan,
                    place.membership,
                    delivery.group,
                    split=place.options.cp_split,
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

    def _pull(self, step: int, run: Run) -> Given:
        if not self.place.role.reads:
            return nothing()
        place, digested = self.place, "none"
        if place.membership.has_copies:
            digested = "all" if place.options.verify else "some"
        return self.puller.pull(step, place.rank, place.wanted, run.step, digested=digested)

    def _digests(self, digester: Digester, step: int, run: Run) -> Digests:
        """Of this rank's fields, and of all that its iterator gave: what one stage alone needs, too."""
        found, given = digester.digests(), self._pull(step, run).digests
        found[found.size - len(given) :] = given
        return found

    def _received(self, step: int, columns: Columns) -> tuple[GlobalBatch, Received] | None:
        """The same on a rank that another one serves, from the message that was delivered."""
        membership = self.place.membership
        gathered = GatheredLengths.of(reports_of(columns), membership)
        if self._is_end(gathered):
            return None
        made = plan_of(columns, self.packing, self.place.layout, self.place.options.cp_split)
        batch = self._plan(gathered, step, made)
        if not self.keys.any_for(self.place.role.fields, gathered.dtypes.keys()):
            return batch, Received(gathered, NO_PIECES, NO_BYTES)
        member = membership.ranks.index(cast(int, self.place.role.source))
        pieces = Shipment.of(gathered, batch.plan, membership, self.place.options.cp_split, member)
        return batch, Received(gathered, pieces.received_by(member), cast(Bytes, np.asarray(columns["data"])))

    def _receivers(self, gathered: GatheredLengths) -> list[list[int]]:
        """For each member, the ranks that get what it gets: only those that need a key; see `reroute`."""
        there, num_members = gathered.dtypes.keys(), len(self.place.membership.ranks)
        return [
            [at for at in indices if at < num_members or self.keys.any_for(self.place.passed_on[at], there)]
            for indices in self.place.membership.receivers()
        ]

    def _plan(self, gathered: GatheredLengths, step: int, made: StepPlan | None) -> GlobalBatch:
        if len(gathered):
            self.keys.check_present(gathered.dtypes.keys(), self.place.wanted, step)
        batch = plan(
            gathered,
            self.packing,
            self.place.membership,
            layout=self.place.layout,
            vpp=self.place.stage_map.vpp,
            step=step,
            length=self.keys.length,
            made=made,
            split=self.place.options.cp_split,
        )
        if self.place.options.no_loss == "error" and batch.plan.num_microbatches:  # or it has no item
            batch.check_loss(self.packing)
        return batch

    def _is_end(self, gathered: GatheredLengths) -> bool:
        """Whether this is the end and not a step. Raises RecipeError if uneven="error" forbids this end."""
        if self.uneven == "error" and gathered.short and not gathered.ended:
            first = self.place.membership.ranks[gathered.holders[gathered.short[0]][0]]
            raise RecipeError(
                f"rank {first}: the iterators of data-parallel ranks {list(gathered.short)} have ended, "
                f"others have not; make them equally long, or choose uneven='drain' or 'drop'"
            )
        if self.uneven == "drop" and gathered.short:
            owners, counts = np.unique(gathered.draws.source, return_counts=True)
            self.left_over.clear()
            self.left_over.update(zip(owners.tolist(), counts.tolist()))
            return True
        return gathered.ended and not len(gathered)


def _not_again() -> Digests:
    raise DeliveryError("an iterator gives each item once, so items cannot be read again")
