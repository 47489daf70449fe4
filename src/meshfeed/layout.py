"""rank <-> (tp, cp, dp, pp) for any order, any mesh, any table.

A layout is a grid of ranks whose axes are the parallel dimensions. Everything here is a view of that grid: a
coordinate is a cell of it, a group is a line, a plane or a box in it.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Ints, Longs
from meshfeed.errors import LayoutError
from meshfeed.intervals import distinct
from meshfeed.whole import is_whole, of_kind, settle

DIMS = ("tp", "cp", "dp", "pp")
"""The dimensions that decide what data a rank needs; the columns of `Layout.coords`."""

MEGATRON_ORDER = "tp-cp-ep-dp-pp"

# DeviceMesh dimension names -> ours. Several dp dims (hsdp) fold into one, slowest first.
_MESH_DIMS = {
    "tp": "tp", "cp": "cp", "pp": "pp", "dp": "dp", "ddp": "dp", "fsdp": "dp",
    "dp_replicate": "dp", "dp_shard": "dp", "dp_shard_mod_ep": "dp", "dp_shard_in_ep": "dp",
}  # fmt: skip


class Coord(NamedTuple):
    """A rank's coordinate in the layout, each from 0."""

    tp: int
    cp: int
    dp: int
    pp: int

    def __str__(self) -> str:
        return "-".join(f"{dim}{at}" for dim, at in zip(DIMS, self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The N-D arrangement of a job's ranks.

    Attributes:
        tp, cp, dp, pp: sizes of the tensor, context, data and pipeline dimensions.
        ep: expert-parallel size; it divides tp x cp x dp and does not change which rank needs which data.
        order: dimensions, fastest-varying first, as in Megatron-core. A dimension of size 1 may be omitted.
        ranks_per_node: consecutive global ranks on one machine; None if unknown (a Feed then asks the
            launcher).
        table: the global rank of every cell of the grid, fastest dimension first; None for 0, 1, 2, ...

    Raises LayoutError for sizes below 1, an unknown or missing dimension, or a table that does not fit.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    order: str = MEGATRON_ORDER
    ranks_per_node: int | None = None
    table: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        settle(self)
        for name in (*DIMS, "ep", *(() if self.ranks_per_node is None else ("ranks_per_node",))):
            size = getattr(self, name)
            if not is_whole(size):
                raise LayoutError(f"{name}={size!r}: give a whole number from 1")
        of_kind(LayoutError, str, order=self.order)
        listed = self.order.lower().split("-")
        unknown = [dim for dim in listed if dim not in (*DIMS, "ep")]
        if unknown or len(set(listed)) != len(listed):
            raise LayoutError(f"order {self.order!r}: each of tp, cp, ep, dp, pp at most once, joined by '-'")
        for dim in (*DIMS, "ep"):
            if dim not in listed and getattr(self, dim) > 1:
                raise LayoutError(
                    f"order {self.order!r} leaves out {dim}, whose size is {getattr(self, dim)}; add it"
                )
        if (self.tp * self.cp * self.dp) % self.ep:
            raise LayoutError(f"ep={self.ep} does not divide tp*cp*dp={self.tp * self.cp * self.dp}")
        if self.table is not None and not len(self.table) == len(set(self.table)) == self.world_size:
            raise LayoutError(
                f"table has {len(self.table)} ranks, {len(set(self.table))} distinct ranks, for "
                f"{self.world_size} cells (tp{self.tp} x cp{self.cp} x dp{self.dp} x pp{self.pp})"
            )
        if self.table is not None and np.asarray(self.table).dtype.kind != "i":
            raise LayoutError(f"table {str(self.table)[:80]}: ranks are whole numbers")
        if self.table is not None and min(self.table) < 0:
            raise LayoutError(f"table holds rank {min(self.table)}; ranks count from 0")

    # -- constructors -------------------------------------------------------------------------------

    @classmethod
    def parse(cls, text: str, *, ranks_per_node: int | None = None) -> Layout:
        """Read "tp2-cp2-dp2-pp2": sizes and order in one, the first dimension varying fastest.

        Raises LayoutError for anything else.
        """
        sizes: dict[str, Any] = {}
        for part in text.lower().split("-"):
            match = re.fullmatch(r"(tp|cp|dp|pp|ep)(\d+)", part)
            if match is None or match[1] in sizes:
                raise LayoutError(
                    f"layout {text!r}: cannot read {part!r}; write each of tp, cp, dp, pp, ep at most "
                    f"once with its size, joined by '-', as in 'tp2-cp2-dp4-pp2'"
                )
            sizes[match[1]] = int(match[2])
        order = "-".join(sizes)
        return cls(**sizes, order=order, ranks_per_node=ranks_per_node)

    @classmethod
    def from_device_mesh(
        cls, mesh: Any, *, names: Mapping[str, str] | None = None, ranks_per_node: int | None = None
    ) -> Layout:
        """The layout of a torch DeviceMesh, read by its dimension names.

        names: further mesh dimension names -> "tp", "cp", "dp" or "pp". Several mesh dimensions that
        mean dp (hsdp's dp_replicate and dp_shard) become one, in the mesh's order.
        Raises LayoutError for a mesh without names, with an unknown name, or that is a slice along a dp one.
        """
        ranks = np.asarray(mesh.mesh)
        mesh_dims: Sequence[str] | None = mesh.mesh_dim_names
        if mesh_dims is None:
            raise LayoutError("the DeviceMesh has no mesh_dim_names; name its dimensions tp, cp, dp, pp")
        meaning = {**_MESH_DIMS, **(names or {})}
        for dim in mesh_dims:
            if meaning.get(dim) not in DIMS:
                raise LayoutError(
                    f"DeviceMesh dimension {dim!r} is unknown; give Layout.from_device_mesh "
                    f"names={{{dim!r}: 'dp'}} or similar"
                )
        root: Any = mesh
        if hasattr(mesh, "_get_root_mesh"):
            root = mesh._get_root_mesh()
        elif known := getattr(sys.modules.get(type(mesh).__module__), "_mesh_resources", None):
            root = known.get_root_mesh(mesh)  # before torch 2.9
        held = np.isin(np.asarray(root.mesh), ranks)
        for dim, size, at in zip(root.mesh_dim_names or (), held.shape, held.nonzero()):
            if meaning.get(dim) == "dp" and distinct(at).size < size:
                raise LayoutError(
                    f"the DeviceMesh is a slice along {dim!r}, whose {size} slices would all get the same "
                    f"data; give a mesh with this dimension, or names={{{dim!r}: 'tp'}} if that is wanted"
                )
        slowest_first = DIMS[::-1]
        axes = [[a for a, name in enumerate(mesh_dims) if meaning[name] == dim] for dim in slowest_first]
        sizes: dict[str, Any] = {
            dim: math.prod(ranks.shape[a] for a in at) for dim, at in zip(slowest_first, axes)
        }
        table = ranks.transpose([a for at in axes for a in at]).ravel().tolist()
        return cls(**sizes, order="-".join(DIMS), ranks_per_node=ranks_per_node, table=tuple(table))

    @classmethod
    def from_groups(
        cls, groups: Mapping[str, Sequence[int]], *, ep: int = 1, ranks_per_node: int | None = None
    ) -> Layout:
        """The layout in which one rank has these process groups.

        groups: "tp", "cp", "dp", "pp" -> the global ranks of that rank's group, in order. Others, such as
        "dp-cp", are checked. One rank's groups determine the layout if ranks are evenly spaced along every
        dimension, as in every order of Megatron-core, also on a subset of the job's ranks. A dimension may
        combine several, such as dp an outer and an inner one.
        Raises LayoutError if groups are missing, do not share exactly one rank, or are not evenly spaced.
        """
        rank = common_rank_of(groups)
        sizes: dict[str, Any] = {dim: len(groups[dim]) for dim in DIMS}
        grid = np.full(1, rank)
        for dim in DIMS:
            grid = np.add.outer(np.array(groups[dim]) - rank, grid).ravel()
        if distinct(grid).size < grid.size:
            shown = ", ".join(f"{dim} {_shown(groups[dim])}" for dim in DIMS)
            raise LayoutError(f"the groups {shown} of rank {rank} put a rank into two cells of the grid")
        wide = [dim for dim in DIMS if sizes[dim] > 1]
        in_turn = iter(sorted(wide, key=lambda dim: groups[dim][1] - groups[dim][0]))
        order = [next(in_turn) if dim in wide else dim for dim in MEGATRON_ORDER.split("-")]
        layout = cls(**sizes, ep=ep, order="-".join(order), ranks_per_node=ranks_per_node)
        slowest_first = [layout.dims[::-1].index(dim) for dim in DIMS[::-1]]
        if not np.array_equal(layout.grid().transpose(slowest_first).ravel(), grid):
            layout = cls(**sizes, ep=ep, ranks_per_node=ranks_per_node, table=tuple(grid.tolist()))
        for dims, ranks in groups.items():
            if sorted(ranks) != sorted(layout.group_of(rank, dims).tolist()):
                raise LayoutError(
                    f"rank {rank} has the {dims} group {_shown(ranks)}, but its tp, cp, dp and pp groups "
                    f"imply {_shown(layout.group_of(rank, dims).tolist())}; pass groups of one arrangement"
                )
        return layout

    # -- queries ------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks: tp * cp * dp * pp."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def dims(self) -> tuple[str, ...]:
        """The data dimensions, fastest-varying first."""
        listed = [dim for dim in self.order.lower().split("-") if dim != "ep"]
        return (*listed, *(dim for dim in DIMS if dim not in listed))

    def ranks(self) -> Longs:
        """All global ranks, ascending; int64 [world_size]."""
        return np.arange(self.world_size) if self.table is None else np.sort(np.array(self.table, np.int64))

    def grid(self) -> Longs:
        """The ranks as an array whose axes are `dims` reversed, so that C order is the order of `table`."""
        slots = np.arange(self.world_size) if self.table is None else np.array(self.table, np.int64)
        return slots.reshape([getattr(self, dim) for dim in reversed(self.dims)])

    def coords(self, ranks: npt.ArrayLike | None = None) -> Ints:
        """Coordinates of some ranks (of `ranks()` when None); int32 [n, 4], columns tp, cp, dp, pp.

        Raises LayoutError for a rank that is not in the layout.
        """
        wanted = self.ranks() if ranks is None else np.atleast_1d(np.asarray(ranks, np.int64))
        sizes = [getattr(self, dim) for dim in reversed(self.dims)]
        at = dict(zip(reversed(self.dims), np.unravel_index(self._slots(wanted), sizes)))
        return np.stack([at[dim] for dim in DIMS], axis=1).astype(np.int32)

    def coord(self, rank: int) -> Coord:
        """The coordinate of one rank. Raises LayoutError if it is not in the layout."""
        return Coord(*self.coords(rank)[0].tolist())

    def rank_of(self, coord: Coord) -> int:
        """The global rank at a coordinate. Raises LayoutError for a coordinate outside the layout."""
        for dim, at in zip(DIMS, coord):
            if not 0 <= at < getattr(self, dim):
                raise LayoutError(f"coordinate {coord}: {dim} must be in 0..{getattr(self, dim) - 1}")
        at_dim = coord._asdict()
        return int(self.grid()[tuple(at_dim[dim] for dim in reversed(self.dims))])

    def groups(self, dims: str) -> Longs:
        """All groups along some dimensions, such as "tp" or "dp-cp"; int64 [num_groups, group_size].

        Groups, and ranks within a group, follow `order`, as in Megatron-core's RankGenerator.
        Raises LayoutError for an unknown dimension.
        """
        wanted = self._group_dims(dims)
        grid = self.grid()
        names = self.dims[::-1]
        inside = [a for a, dim in enumerate(names) if dim in wanted]
        across = [a for a, dim in enumerate(names) if dim not in wanted]
        size = math.prod(grid.shape[a] for a in inside)
        return grid.transpose([*across, *inside]).reshape(-1, size)

    def group_of(self, rank: int, dims: str) -> Longs:
        """The group of a rank along some dimensions; int64 [group_size]."""
        wanted = self._group_dims(dims)
        coord = self.coord(rank)._asdict()
        at = tuple(slice(None) if dim in wanted else coord[dim] for dim in reversed(self.dims))
        return self.grid()[at].ravel()

    def node(self, ranks: npt.ArrayLike) -> Longs:
        """The node of each rank; int64, of the shape of `ranks`. An unknown node size means one node."""
        ranks = np.asarray(ranks, np.int64)
        return np.zeros_like(ranks) if self.ranks_per_node is None else ranks // self.ranks_per_node

    def check_world(self, world_size: int) -> None:
        """Raises LayoutError if a job of `world_size` processes does not fit this layout."""
        if self.table is None and self.world_size != world_size:
            raise LayoutError(
                f"layout {self} needs {self.world_size} ranks, the job has {world_size}; "
                f"change a dimension so that tp*cp*dp*pp = {world_size}"
            )
        if self.table is not None and max(self.table) >= world_size:
            raise LayoutError(f"layout {self} names rank {max(self.table)}, the job has {world_size} ranks")

    def __str__(self) -> str:
        split = [f"{dim}{getattr(self, dim)}" for dim in self.dims if getattr(self, dim) > 1]
        return "-".join(split) or "dp1"

    def _slots(self, ranks: Longs) -> Longs:
        if self.table is None:
            inside = (ranks >= 0) & (ranks < self.world_size)
            slot = ranks
        else:
            table = np.array(self.table, np.int64)
            by_rank = np.argsort(table)
            at = np.searchsorted(table, ranks, sorter=by_rank).clip(max=table.size - 1)
            slot = by_rank[at]
            inside = table[slot] == ranks
        if not inside.all():
            raise LayoutError(f"rank {int(ranks[~inside][0])} is not in layout {self}")
        return slot

    def _group_dims(self, dims: str) -> set[str]:
        wanted = set(dims.lower().split("-"))
        if not wanted <= set(DIMS):
            raise LayoutError(f"groups({dims!r}): dimensions are {', '.join(DIMS)}, joined by '-'")
        return wanted


def common_rank_of(groups: Mapping[str, Sequence[int]]) -> int:
    """The one rank in the groups of all dimensions. Raises LayoutError for groups that form no grid."""
    if missing := [dim for dim in DIMS if not groups.get(dim)]:
        raise LayoutError(f"no {missing[0]!r} group among {sorted(groups)}; give tp, cp, dp and pp")
    common = set.intersection(*(set(groups[dim]) for dim in DIMS))
    if len(common) != 1:
        shown = ", ".join(f"{dim} {_shown(groups[dim])}" for dim in DIMS)
        raise LayoutError(
            f"the groups {shown} share {len(common)} ranks; the groups of one rank share exactly that rank"
        )
    for dim in DIMS:
        if not _is_even(np.array(groups[dim])):
            raise LayoutError(
                f"the {dim} group {_shown(groups[dim])} is not evenly spaced, so one rank cannot infer the "
                f"others' coordinates; pass Layout(..., table=...)"
            )
    return common.pop()


def _is_even(ranks: Longs) -> bool:
    """Whether ranks are evenly spaced, or form evenly spaced runs: [0 2 8 10]."""
    apart = np.diff(ranks)
    if not apart.size or (apart == apart[0]).all():
        return True
    run = int(np.argmax(apart != apart[0])) + 1
    if ranks.size % run:
        return False
    rows = ranks.reshape(-1, run)
    return bool((rows - rows[:, :1] == rows[0] - rows[0, 0]).all()) and _is_even(rows[:, 0])


def _shown(ranks: Sequence[int]) -> str:
    """A group for an error message, shortened."""
    text = ", ".join(map(str, ranks[:8]))
    return f"[{text}{', ...' if len(ranks) > 8 else ''}]"
