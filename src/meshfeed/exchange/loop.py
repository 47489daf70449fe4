"""A user's own iterator on every rank of an N-D-parallel job: gather lengths, plan, reroute, deliver.

`ItemProducer` has the path of an item.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshfeed.errors import LayoutError, OptionError, StateError
from meshfeed.exchange.item_source import ItemSource
from meshfeed.exchange.keys import Keys
from meshfeed.exchange.lengths import GatheredLengths
from meshfeed.exchange.place import ExchangePlace
from meshfeed.exchange.rerouting import ItemProducer, Uneven
from meshfeed.feed.launch import given_layout
from meshfeed.feed.options import Options
from meshfeed.feed.source import StepSource
from meshfeed.layout import Layout
from meshfeed.metrics import Sink
from meshfeed.plan import CpSplit, Packing, StepPlan
from meshfeed.plan.types import NoLoss
from meshfeed.roles import StageMap
from meshfeed.state import check_step
from meshfeed.transport import Transport
from meshfeed.whole import of_kind, whole_numbers


class Exchange(StepSource[ExchangePlace]):
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
            some of the numbers are compared every step, all bytes by `verify`.
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
        no_loss: NoLoss = "error",
        transport: Transport = Transport(),
        verify: bool = False,
        metrics: Sink | Sequence[Sink] | None = None,
    ) -> None:
        of_kind(OptionError, Packing, packing=packing)
        of_kind(OptionError, Keys, keys=keys or Keys())
        (pulls,) = whole_numbers(OptionError, 1, pulls=pulls)
        if uneven not in get_args(Uneven):
            raise OptionError(f"uneven={uneven!r}: choose one of {', '.join(get_args(Uneven))}")
        (rank,) = whole_numbers(LayoutError, 0, optional=["rank"], rank=rank)
        self._options = Options.of(locals())
        super().__init__(self._options)
        self._packing, self._keys = packing, keys or Keys()
        self._uneven: Uneven = uneven
        self.left_over = dict[int, int]()
        self._puller = ItemSource(iterator, self._keys, pulls)
        self._place = self._kind_of_place(
            given_layout=given_layout(layout),
            given_rank=rank,
            options=self._options,
            fields=self._keys.fields,
            name="(exchange)",  # ranks wait for each other, so all of them begin all exchanges in one order
            owns=self._puller.owns,
        )

    _kind_of_place: ClassVar[type[ExchangePlace]] = ExchangePlace

    def _producer(self) -> ItemProducer:
        return ItemProducer(
            place=self._place,
            puller=self._puller,
            packing=self._packing,
            keys=self._keys,
            uneven=self._uneven,
            left_over=self.left_over,
            made_plan=self._made_plan,
        )

    def _made_plan(self, gathered: GatheredLengths) -> StepPlan | None:
        """A finished plan; None calls the planner."""
        return None

    # -- the training loop's side ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The first step that was not fully handed out (see `Feed.state_dict`), and the iterator's own state.

        The latter is the iterator's `state_dict()`, if it has one, after the last item before that step. It
        differs between ranks and is valid for the same layout. torch.distributed.checkpoint keeps one object
        for each key: save it under a key with the rank's number.
        """
        return self._puller.state(self.next_step, self._owner)

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int | None = None) -> None:
        """Resume at a state; then start a new loop.

        step: the next step of the model that was loaded with it; None for no check. An iterator without
        `load_state_dict` must already be at that position. Raises StateError for a state of another step, or
        of another data-parallel rank's iterator, for anything but a result of `state_dict`, or if the
        iterator does not return from its current item; the iterator is unchanged then.
        """
        check_step(self._puller.checked(state_dict, self._owner)["step"], step)
        with self._loop.changing:
            self._loop.stop()
            if self._puller.busy.locked():
                raise StateError(
                    f"rank {self.rank}: the iterator is still producing a prefetched item and cannot be "
                    f"reset; load the state again once it has returned"
                )
            # again: it may have reached its end before it stopped
            told = self._puller.checked(state_dict, self._owner)
            self._puller.load(told)
            self._loop.go_to(told["step"])

    @property
    def _owner(self) -> str:
        """Whose the iterator is; "" without one."""
        place = self._place
        return f"data-parallel rank {place.coord.dp} of {place.layout.dp}" if self._puller.owns else ""

    def _ended(self, by_stages: bool) -> None:
        try:
            super()._ended(by_stages)
        finally:  # a sink may refuse to close
            self._puller.handed_end(self.next_step)
