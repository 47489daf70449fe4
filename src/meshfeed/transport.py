"""How ranks get what others of them have read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from meshfeed.errors import OptionError, RoleError
from meshfeed.roles import DeliveryName
from meshfeed.whole import is_number, is_whole, of_kind, settle, whole, whole_numbers

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """How batches come to a rank: `Feed(transport=mf.Transport(delivery="share"))`.

    No sequence depends on it, so it is not part of a recipe. Ranks agree on the delivery, readers and name.

    Attributes:
        delivery: "direct", "broadcast", "share", "tree", or "auto" (see `roles.choose_delivery`). An Exchange
            without readers is "direct".
        readers: ranks that may open storage; None leaves the choice to meshfeed. For an Exchange the ranks
            that have an iterator, such as tp rank 0 of the first and last stage: the others, and readers that
            another one can serve, get their items by `delivery`; None: each rank that needs items has its own
            iterator, and nothing is delivered.
        prefetch: reads made ahead on a thread, each of a microbatch or of several small ones; None for 2, and
            for 0 of an Exchange, whose thread would pull from the iterator. 0 reads on request, except one
            ahead if pipeline stages share a reader, since a stage may ask for a microbatch only after another
            has trained on it.
        read_ahead_bytes: bytes of later steps to announce to remote storage, in addition to the one step that
            is always announced; per reader. An Exchange has no storage.
        timeout_s: how long to wait for peers to join, and for a batch that the loop asks for.
        rendezvous: a torch.distributed Store through which peers meet; None takes that of the default
            process group.
        name: needed for a feed that only some ranks iterate, or that ranks iterate in different orders. When
            a run begins, ranks compare their arguments in the n-th run of feeds of one name. Exchanges of all
            names are begun in one order; another name than that of the other ranks is refused.

    Raises OptionError for other values, RoleError for another delivery.
    """

    delivery: DeliveryName | Literal["auto"] = "auto"
    readers: Iterable[int] | None = None
    prefetch: int | None = None
    read_ahead_bytes: int = 256 << 20
    timeout_s: float = 1800.0
    rendezvous: Store | None = None
    name: str = ""

    def __post_init__(self) -> None:
        settle(self)
        known = ("auto", *get_args(DeliveryName))
        if self.delivery not in known:
            raise RoleError(f"delivery={self.delivery!r}: choose one of {', '.join(known)}")
        if (readers := self.readers) is not None:
            of_kind(OptionError, Iterable, readers=readers)
            given = [*map(whole, readers)]
            if not all(is_whole(each, 0) for each in given):
                raise OptionError(f"readers={readers!r}: give ranks, such as readers=[0, 8], or None")
            object.__setattr__(self, "readers", frozenset(given))
        counts = {"prefetch": self.prefetch, "read_ahead_bytes": self.read_ahead_bytes}
        whole_numbers(OptionError, 0, optional=["prefetch"], **counts)
        if not is_number(self.timeout_s) or not self.timeout_s:
            raise OptionError(f"timeout_s={self.timeout_s!r}: give seconds, more than 0")
        of_kind(OptionError, str, name=self.name)
