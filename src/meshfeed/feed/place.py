"""Where one rank is in a job: which of its ranks it is, what it gets there, and from whom."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch.distributed.distributed_c10d import Store as Rendezvous

from meshfeed.deliver import Meeting, can_share, default_store, ranks_in_words
from meshfeed.errors import DeliveryError, LayoutError, OptionError
from meshfeed.feed.launch import check_rank, num_processes, this_layout, this_rank
from meshfeed.feed.options import Options
from meshfeed.feed.stepping import cp_groups_of
from meshfeed.layout import Coord, Layout
from meshfeed.roles import DeliveryName, Field, Role, Roles, StageMap, assign_roles, choose_delivery


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """The place of this process in a run. Another layout, rank or field makes another place.

    What follows from its attributes is worked out when it is asked for: a Feed may be made before its rank
    is known. Raises LayoutError if the job does not fit the layout, RoleError if a rank cannot be fed.

    Attributes:
        given_layout: None for one process.
        given_rank: None asks torch.distributed, then the launcher.
        options: of the Feed or Exchange.
        fields: that roles are assigned for.
        name: of the source whose runs these are: all ranks begin the runs of a name in the same order.
        decoded_is_larger: see `choose_delivery`.
        apart: torch.distributed's default group is of other processes, or numbers them otherwise.
        generation: the number of the arrangement that it is in; None for the one that the job began with.
    """

    given_layout: Layout | None
    given_rank: int | None
    options: Options
    fields: Sequence[Field]
    name: str
    decoded_is_larger: Callable[[], bool] = lambda: False
    apart: bool = False
    generation: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether this process's rank is known yet; see `Feed.at`."""
        return self.given_layout is not None or num_processes() == 1

    @cached_property
    def rank(self) -> int:
        """This process's global rank."""
        return this_rank(self.given_rank, self.given_layout or Layout())

    @cached_property
    def layout(self) -> Layout:
        """The layout; an omitted node size comes from the launcher."""
        return this_layout(self.given_layout, self.given_rank, apart=self.apart)

    @property
    def coord(self) -> Coord:
        """This rank's. Raises LayoutError if the layout does not contain the rank."""
        return self.layout.coord(self.rank)

    @property
    def is_first(self) -> bool:
        """Whether it is the layout's first rank, which warns and keeps the ledger for all."""
        return self.rank == min(self.layout.ranks().tolist())

    @cached_property
    def stage_map(self) -> StageMap:
        """The pipeline's stages."""
        return self.options.stage_map or StageMap(pp=(self.given_layout or Layout()).pp)

    @property
    def readers(self) -> frozenset[int] | None:
        """Ranks that may read; None for no choice."""
        readers = self.options.transport.readers
        return None if readers is None else frozenset(readers)

    @cached_property
    def delivery(self) -> DeliveryName:
        """The delivery's name, with "auto" resolved."""
        if self.options.transport.delivery != "auto":
            return self.options.transport.delivery
        return choose_delivery(
            self.layout,
            self.stage_map,
            self.fields,
            self.readers,
            can_share=can_share() is None,
            decoded_is_larger=self.decoded_is_larger(),
        )

    @cached_property
    def roles(self) -> Roles:
        """Every rank's role; a rank that `reads` opens storage or is a member of the exchange."""
        packing = self.options.packing
        return assign_roles(
            self.layout,
            self.stage_map,
            self.fields,
            self.delivery,
            self.readers,
            shares_packs=packing is None or packing.policy != "dynamic_cp",
        )

    @cached_property
    def role(self) -> Role:
        """This rank's role. Raises LayoutError if the layout does not contain the rank."""
        _ = self.coord
        return self.roles[self.rank]

    @cached_property
    def cp_groups(self) -> dict[int, tuple[int, ...]]:
        """The context-parallel groups that this rank can be in; see `Feed.cp_groups`."""
        return cp_groups_of(self.layout, self.options.packing, self.coord)

    @property
    def meets_stages(self) -> bool:
        """Whether this rank shares a reader with another pipeline stage."""
        return any(self.layout.coord(peer).pp != self.coord.pp for peer in self.role.peers)

    def served(self) -> tuple[list[int], frozenset[str]]:
        """The cp coordinates of all ranks that this rank's reader serves, and the fields that they need."""
        peers = [rank for rank in self.role.peers if self.roles[rank].source is not None]
        ranks = {self.rank, *peers}
        fields = frozenset(name for rank in ranks for name in self.roles[rank].fields)
        return sorted({self.layout.coord(rank).cp for rank in ranks}), fields

    def hidden_from(self, num_views: int) -> list[frozenset[str]]:
        """The fields that each virtual stage of this rank does not need; none for a view of all stages."""
        if num_views == 1:
            return [frozenset()]
        every, pp = frozenset(field.name for field in self.fields), self.coord.pp
        needed = [self.stage_map.fields_of(self.fields, pp, stage) for stage in range(num_views)]
        return [every - {field.name for field in some} for some in needed]

    def check_rank(self) -> None:
        """Raises LayoutError if torch.distributed gives this process another rank."""
        if self.options.transport.rendezvous is None and not self.apart:
            check_rank(self.given_rank)

    def moved(
        self,
        layout: Layout | None,
        rank: int | None,
        generation: int | None,
        rendezvous: Rendezvous | None,
        readers: Iterable[int] | None,
    ) -> RankPlace:
        """In another layout, or of another generation of the same; else the present one."""
        if layout is None:
            here = self.given_layout or Layout()
            return self if generation is None else replace(self, given_layout=here, generation=generation)
        transport = self.options.transport
        transport = replace(transport, rendezvous=rendezvous or transport.rendezvous, readers=readers)
        return replace(
            self,
            given_layout=layout,
            given_rank=rank,
            options=replace(self.options, transport=transport),
            apart=rank is not None,
            generation=generation,
        )

    def check_after(self, place: RankPlace, generation: Any, *, keeps_ledger: bool) -> None:
        """Raises OptionError or DeliveryError if ranks cannot begin a run here after one in another place.

        generation: as given for this one. keeps_ledger: ranks that meet compare theirs.
        """
        layout = self.given_layout or place.layout
        several, store = layout.world_size > 1, self.options.transport.rendezvous
        before = -1 if place.generation is None else place.generation
        if (generation is not None or (several and store is not None)) and (
            type(generation) is not int or generation <= before
        ):
            raise OptionError(f"generation={generation!r}: give a whole number above {before}")
        if several and keeps_ledger and self.apart and store is None:
            raise DeliveryError(
                f"ranks of {layout} that keep a ledger compare it: pass rendezvous=<torch.distributed.Store> "
                f"to run, or in the Feed's transport"
            )

    def meeting(self, step: int) -> Meeting | None:
        """Where the ranks of a run from this step on meet; None for one process."""
        transport, name, num_ranks = self.options.transport, self.name, 2
        store = transport.rendezvous or (None if self.apart else default_store())
        if self.generation is not None:
            name = f"{name}, generation {self.generation}"
        with contextlib.suppress(LayoutError):  # other ranks may have a valid layout
            num_ranks, ranks = self.layout.world_size, self.layout.ranks().tolist()
            if num_ranks < num_processes() or ranks[-1] >= num_ranks:  # only these ranks of the job begin it
                name = f"{name} of {ranks_in_words(ranks)}"
        if store is None or num_ranks == 1:
            return None
        # In torch.distributed's store it is torch.distributed's rank, whatever rank it was given by mistake.
        rank = self.rank if transport.rendezvous is not None else this_rank(None, Layout())
        return Meeting(store, rank, transport.timeout_s, name, step, num_ranks)

    def agreed(self) -> Mapping[str, str]:
        """What all ranks of a run must agree on, as far as it follows from the place."""
        grid = zlib.crc32(self.layout.grid().tobytes())  # a layout's text does not contain its table
        per_node, world_size = "any", self.layout.world_size
        if self.delivery in ("share", "tree"):
            # it determines the readers, and launchers may start unequal numbers
            per_node = str(min(self.layout.ranks_per_node or world_size, world_size))
        return {
            "layout": f"{self.layout} with ranks {grid:08x}",
            "ranks": ranks_in_words(self.layout.ranks().tolist()),
            "stage_map": str(self.stage_map),
            "packing": str(self.options.packing),
            "cp_split": self.options.cp_split,
            "delivery": self.delivery,
            "ranks_per_node": per_node,
            "readers": str(self.readers and sorted(self.readers)),
            "verify": str(self.options.verify),
        }
