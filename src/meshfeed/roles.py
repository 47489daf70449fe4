"""Which ranks open storage, which fields each needs, and which rank sends them: a pure function.

(layout, stage map, fields, delivery) -> one Role per rank. It does not communicate or read the environment,
and the table for 16,384 ranks takes a few array operations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from meshfeed.arrays import Bools, Ints, Longs
from meshfeed.errors import LayoutError, RoleError
from meshfeed.intervals import distinct
from meshfeed.layout import Layout
from meshfeed.whole import is_whole, settle

DeliveryName = Literal["direct", "broadcast", "share", "tree"]
StageKind = Literal["first", "last", "mtp", "all"]
_Members = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A tensor of a microbatch, declared once.

    Attributes:
        name: its key in the microbatch.
        dtype: NumPy name of its element type; "bytes" for byte strings, "any" for any type.
        stages: kinds of pipeline stage that need it: "first" (embedding), "last" (loss), "mtp", "all".
        split: whether context parallelism splits it along the sequence.
        pad: the value of padding.
        stored: whether it needs stored bytes; False for fields computed from lengths alone, such as
            cu_seqlens, which every rank computes for itself.
    """

    name: str
    dtype: str
    stages: tuple[StageKind, ...] = ("all",)
    split: bool = False
    pad: float = 0
    stored: bool = True

    def __post_init__(self) -> None:
        unknown = set(self.stages) - {"first", "last", "mtp", "all"}
        if unknown or not self.stages:
            raise RoleError(f"field {self.name!r}: stages are first, last, mtp, all; got {self.stages!r}")

    def pads(self, dtype: str) -> bool:
        """Whether a type of NumPy has the number that this field is padded with; -100 is none of uint16."""
        kind = np.dtype(dtype).kind
        if kind not in "biu":
            return True
        least, most = (0, 1) if kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        return least <= self.pad <= most and self.pad == int(self.pad)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMap:
    """Which pipeline stage embeds, which computes the loss, which predicts further tokens.

    A *stage* here is global: stage v * pp + p is virtual stage v of pipeline rank p.

    Attributes:
        pp: pipeline ranks.
        vpp: virtual stages per pipeline rank.
        mtp: global stages that hold a multi-token-prediction block.
        layout: Megatron's pipeline layout string instead of vpp and mtp, such as "Et*3|t*4|m|L":
            stages joined by "|", E embedding, t layer, m MTP, L loss, x*n repeats, "," is ignored.

    Raises LayoutError for a string that cannot be read or does not divide by pp.
    """

    pp: int = 1
    vpp: int = 1
    mtp: tuple[int, ...] = ()
    layout: str | None = None

    def __post_init__(self) -> None:
        settle(self)
        if not (is_whole(self.pp) and is_whole(self.vpp)):
            raise LayoutError(f"StageMap(pp={self.pp!r}, vpp={self.vpp!r}): each is a whole number from 1")
        if self.layout is not None:
            if self.vpp != 1 or self.mtp:
                raise LayoutError("StageMap: give either layout or vpp and mtp, not both")
            stages = _parse_stages(self.layout)
            if len(stages) % self.pp:
                raise LayoutError(f"stage layout {self.layout!r} has {len(stages)} stages for pp={self.pp}")
            object.__setattr__(self, "vpp", len(stages) // self.pp)
            object.__setattr__(self, "mtp", tuple(s for s, held in enumerate(stages) if "m" in held))
        if not all(is_whole(stage, 0) and stage < self.num_stages for stage in self.mtp):
            raise LayoutError(f"mtp={self.mtp}: stages go from 0 to pp*vpp-1 = {self.num_stages - 1}")

    def check(self, layout: Layout) -> None:
        """Raises RoleError if the layout has a different number of pipeline ranks."""
        if self.pp != layout.pp:
            raise RoleError(f"the stage map has pp={self.pp}, layout {layout} has pp={layout.pp}")

    @property
    def num_stages(self) -> int:
        """Global stages: pp * vpp."""
        return self.pp * self.vpp

    def kinds(self, pp_rank: int, virtual_stage: int) -> frozenset[StageKind]:
        """The kinds of one stage: "all", and "first", "last", "mtp" where they apply."""
        stage = virtual_stage * self.pp + pp_rank
        kinds: set[StageKind] = {"all"}
        if stage == 0:
            kinds.add("first")
        if stage == self.num_stages - 1:
            kinds.add("last")
        if stage in self.mtp:
            kinds.add("mtp")
        return frozenset(kinds)

    def fields_of(self, fields: Sequence[Field], pp_rank: int, virtual_stage: int) -> tuple[Field, ...]:
        """The fields that one stage needs, in the order declared."""
        kinds = self.kinds(pp_rank, virtual_stage)
        return tuple(field for field in fields if kinds & set(field.stages))

    def fields_of_rank(self, fields: Sequence[Field], pp_rank: int) -> tuple[Field, ...]:
        """The fields that any virtual stage of a pipeline rank needs, in the order declared."""
        needed = {f for v in range(self.vpp) for f in self.fields_of(fields, pp_rank, v)}
        return tuple(field for field in fields if field in needed)


def _parse_stages(text: str) -> list[str]:
    compact = text.replace(",", "").replace(" ", "")
    while match := re.search(r"\(([^()]*)\)\*(\d+)|([A-Za-z|])\*(\d+)", compact):
        piece, times = (match[1], match[2]) if match[2] else (match[3], match[4])
        compact = compact[: match.start()] + piece * int(times) + compact[match.end() :]
    stages = compact.split("|")
    held = "".join(stages)
    if set(held) - set("EtmL") or held.count("E") != 1 or held.count("L") != 1:
        raise LayoutError(f"stage layout {text!r}: letters are E, t, m, L, with one E and one L")
    if not stages[0].startswith("E") or not stages[-1].endswith("L"):
        raise LayoutError(f"stage layout {text!r}: E begins the first stage and L ends the last")
    return stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What one rank reads and receives.

    Attributes:
        rank: global rank.
        reads: whether it opens storage.
        source: the rank that reads its stored bytes (itself if it reads for itself), or None if it needs
            none.
        peers: all ranks of its delivery group, including the source; () without one.
        fields: names of the fields that it receives.
        nodes: under "tree", the same peers node by node, each node's leader first; () otherwise, and for a
            group of one rank.
    """

    rank: int
    reads: bool
    source: int | None
    peers: tuple[int, ...]
    fields: tuple[str, ...]
    nodes: tuple[tuple[int, ...], ...] = ()

    @property
    def giver(self) -> int | None:
        """The rank that sends it its bytes: its node's leader if that is another rank, else the source."""
        node = self._node()
        return node[0] if node and node[0] != self.rank else self.source

    @property
    def levels(self) -> tuple[Role | None, Role | None]:
        """Its roles in a tree: among the nodes' leaders, and within its node; None for a level it is not
        in."""
        node = self._node()
        if not node:
            return None, None
        leads, leaders = node[0] == self.rank, tuple(members[0] for members in self.nodes)
        across = replace(self, peers=leaders, nodes=()) if leads and len(leaders) > 1 else None
        within = replace(self, reads=leads, source=node[0], peers=node, nodes=()) if len(node) > 1 else None
        return across, within

    def _node(self) -> tuple[int, ...]:
        return next((members for members in self.nodes if self.rank in members), ())


class Roles:
    """The role of every rank; indexes by global rank, iterates in rank order.

    Attributes:
        ranks: int64 [n], ascending.
        reads: bool [n].
        source: int64 [n], -1 for none.
        group: delivery group of each rank, -1 for none; int64 [n].
        leader: under "tree", the rank that leads its group on its node; int64 [n], None otherwise.
    """

    def __init__(
        self,
        ranks: Longs,
        reads: Bools,
        source: Longs,
        group: Longs,
        fields: Sequence[tuple[str, ...]],
        leader: Longs | None = None,
    ) -> None:
        self.ranks, self.reads, self.source, self.group, self.leader = ranks, reads, source, group, leader
        self._fields = fields
        self._by_group = np.argsort(group, kind="stable")
        self._group_starts = np.searchsorted(group[self._by_group], np.arange(int(group.max(initial=-1)) + 2))
        self._members_of_group: dict[int, _Members] = {-1: ((), ())}

    def __len__(self) -> int:
        return self.ranks.size

    def __getitem__(self, rank: int) -> Role:
        at = int(np.searchsorted(self.ranks, rank))
        if at == len(self) or self.ranks[at] != rank:
            raise RoleError(f"rank {rank} is not in the layout")
        peers, nodes = self._members(int(self.group[at]))
        return Role(
            rank=rank,
            reads=bool(self.reads[at]),
            source=None if self.source[at] < 0 else int(self.source[at]),
            peers=peers if len(peers) > 1 else (),
            fields=self._fields[at],
            nodes=nodes if len(peers) > 1 else (),
        )

    def __iter__(self) -> Iterator[Role]:
        return (self[rank] for rank in self.ranks.tolist())

    def _members(self, group: int) -> _Members:
        """A group's ranks, and the same node by node."""
        if group not in self._members_of_group:
            start, stop = self._group_starts[group : group + 2]
            mine = self._by_group[start:stop]
            peers: list[int] = self.ranks[mine].tolist()
            node_of: dict[int, list[int]] = {}  # of its leader
            for rank, leader in zip(peers, () if self.leader is None else self.leader[mine].tolist()):
                node_of.setdefault(leader, [leader]).extend([rank] if rank != leader else [])
            self._members_of_group[group] = tuple(peers), tuple(map(tuple, node_of.values()))
        return self._members_of_group[group]


def assign_roles(
    layout: Layout,
    stage_map: StageMap,
    fields: Sequence[Field],
    delivery: DeliveryName,
    readers: Iterable[int] | None = None,
    *,
    shares_packs: bool = True,
) -> Roles:
    """Every rank's role under one delivery.

    direct: every rank that needs stored bytes reads its own. broadcast: one reader per tp group; with
    `readers`, the smallest of tp, tp-cp, tp-pp, tp-cp-pp whose every group has a reader. share: one
    reader per node and data-parallel replica. tree: one reader per data-parallel replica, and a leader on
    each of the replica's other nodes.
    readers: the only ranks that may open storage; None leaves the choice to meshfeed.
    shares_packs: whether the cp ranks of a replica always work on one pack. If cp groups change from
    microbatch to microbatch, each cp rank counts as its own replica. Raises RoleError if a rank needs bytes
    that no allowed reader can send it.
    """
    stage_map.check(layout)
    ranks = layout.ranks()
    coords = layout.coords(ranks)
    needed = [stage_map.fields_of_rank(fields, p) for p in range(layout.pp)]
    names = [tuple(f.name for f in of_stage) for of_stage in needed]
    needs = np.array([any(f.stored for f in of_stage) for of_stage in needed])[coords[:, 3]]
    allowed = np.ones(ranks.size, bool)
    if readers is not None:
        policy = distinct(np.fromiter(readers, np.int64))
        layout.coords(policy)  # refuses ranks that do not exist
        allowed = np.isin(ranks, policy)

    keys = _group_keys(layout, ranks, coords, delivery, readers is not None, shares_packs)
    group, reader = _group_readers(layout, ranks, keys, needs, allowed, delivery)
    member = needs.copy()
    member[reader[needs]] = True  # a reader outside the stages that need bytes joins as their source
    source = np.where(needs, ranks[reader], -1)
    is_reader = np.zeros(ranks.size, bool)
    is_reader[reader[needs]] = True
    source[is_reader] = ranks[is_reader]
    group = np.where(member, group, -1)
    fields_of = [names[p] for p in coords[:, 3].tolist()]
    leader = _leaders(ranks, layout.node(ranks), group, is_reader) if delivery == "tree" else None
    return Roles(ranks, is_reader, source, group, fields_of, leader)


def _group_keys(
    layout: Layout,
    ranks: Longs,
    coords: Ints,
    delivery: DeliveryName,
    has_policy: bool,
    shares_packs: bool,
) -> list[Longs]:
    """Alternative groupings of the ranks, the smallest first: ranks with equal keys may share a reader."""
    _, cp, dp, pp = coords.T.astype(np.int64)
    slices = dp * layout.cp + cp  # equal for ranks with the same slices of the same packs
    replica = dp if shares_packs else slices
    if delivery == "direct":
        return [np.arange(ranks.size)]
    if delivery == "share":
        return [layout.node(ranks) * layout.dp * layout.cp + replica]
    if delivery == "tree":
        return [replica]
    if delivery != "broadcast":
        raise RoleError(f"delivery {delivery!r}: choose 'direct', 'broadcast', 'share' or 'tree'")
    keys = [slices * layout.pp + pp]
    return [*keys, replica * layout.pp + pp, slices, replica] if has_policy else keys


def _group_readers(
    layout: Layout, ranks: Longs, keys: Sequence[Longs], needs: Bools, allowed: Bools, delivery: DeliveryName
) -> tuple[Longs, Longs]:
    """(group of each rank, index in `ranks` of that group's reader), for the first valid grouping."""
    count = ranks.size
    # the first allowed rank of a group reads, those that need the bytes themselves before all others
    preference = np.where(allowed, np.arange(count) + np.where(needs, 0, count), 2 * count)
    unfed = np.zeros(0, np.int64)
    for key in keys:
        group = np.unique(key, return_inverse=True)[1].reshape(-1)
        first = np.full(int(group.max()) + 1, 2 * count)
        np.minimum.at(first, group, preference)
        unfed = np.flatnonzero(needs & (first[group] == 2 * count))
        if not unfed.size:
            return group, first[group] % count
    unserved = int(ranks[unfed[0]])
    where = {"direct": "itself", "share": "its node and replica"}.get(delivery, "its replica")
    raise RoleError(
        f"rank {unserved} ({layout.coord(unserved)}) needs stored fields, but no rank of {where} may read "
        f"under {delivery!r}; add one to `readers` or choose another delivery"
    )


def _leaders(ranks: Longs, node: Longs, group: Longs, is_reader: Bools) -> Longs:
    """The leader of each rank's group on its node: the reader, or else the first rank; int64 [n]."""
    pair = np.unique(np.stack([group, node]), axis=1, return_inverse=True)[1].reshape(-1)
    # of a group's ranks on one node, the reader sorts first, and then the lowest
    order = np.lexsort((ranks, ~is_reader, pair))
    first = np.searchsorted(pair[order], np.arange(int(pair.max(initial=-1)) + 1))
    return ranks[order[first]][pair]


def choose_delivery(
    layout: Layout,
    stage_map: StageMap,
    fields: Sequence[Field],
    readers: Iterable[int] | None = None,
    *,
    can_share: bool,
    decoded_is_larger: bool = False,
) -> DeliveryName:
    """The delivery for "auto": direct for single ranks, share within a node, tree or broadcast across nodes.

    tree if sharing saves network traffic, that is, if some node holds several ranks of a group. broadcast if
    each rank of a group has its own node, or the machine cannot share.
    can_share: whether this machine supports share (memfd and abstract Unix sockets).
    decoded_is_larger: whether readers decode to more bytes than they read. Then share across nodes too: each
        node reads the stored bytes, which is less traffic than to receive what another node has decoded.
    """
    policy = None if readers is None else tuple(readers)
    split = layout.node(layout.groups("tp-cp"))
    if can_share and (decoded_is_larger or (split == split[:, :1]).all()):
        try:
            return _or_direct("share", assign_roles(layout, stage_map, fields, "share", policy))
        except RoleError:
            pass  # the trainer's readers are not on every node
    if can_share:
        roles = assign_roles(layout, stage_map, fields, "tree", policy)
        if roles.leader is not None and (roles.leader != roles.ranks)[roles.group >= 0].any():
            return _or_direct("tree", roles)
    return _or_direct("broadcast", assign_roles(layout, stage_map, fields, "broadcast", policy))


def _or_direct(delivery: DeliveryName, roles: Roles) -> DeliveryName:
    fed = roles.source >= 0
    return "direct" if (roles.source == roles.ranks)[fed].all() else delivery
