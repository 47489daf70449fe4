"""meshfeed roles: who opens storage, who receives what from whom, how many bytes a step moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from meshfeed.cli.command import OK, Console, Table, print_json
from meshfeed.cli.options import Command, argument, option
from meshfeed.cli.packing import refuse_stages
from meshfeed.deliver import can_share
from meshfeed.errors import MeshfeedError
from meshfeed.layout import Layout
from meshfeed.report.words import counted
from meshfeed.roles import DeliveryName, Field, Roles, StageMap, assign_roles, choose_delivery
from meshfeed.sequence import Windows

DeliveryChoice = Literal["auto", "direct", "broadcast", "share", "tree"]

_MOST_ROWS, _MOST_RANKS = 64, 1 << 20


@dataclass(frozen=True, kw_only=True)
class ShowRoles(Command):
    """Print the role of every rank of a layout. Opens nothing and contacts no rank."""

    examples = """
        meshfeed roles tp2-cp2-dp2-pp2
        meshfeed roles tp8-cp4-dp32-pp16 --ranks-per-node 8 --delivery share
        meshfeed roles tp2-pp4 --stages 'Et*3|t*4|m|L' --reads 0,2 --delivery broadcast --json
    """
    keys = {
        "layout, delivery": "as text; the delivery that --delivery auto chose",
        "ranks": "one object per rank, with the keys below",
        "rank, coord, node": "which, where in tp, cp, dp and pp, and on which node",
        "reads, source, from": "whether it opens storage, whose bytes it has, and who hands them to it",
        "peers, nodes, group, ...": "its delivery group",
        "fields": "what it receives",
        "read_bytes, received_bytes, network_bytes": "per step: from storage; from peers; by network",
    }

    layout: str = argument("LAYOUT", "layout, such as tp2-cp2-dp2-pp2; the first dimension varies fastest")
    ranks_per_node: int = option("ranks that share a machine", default=8)
    delivery: DeliveryChoice = option("how bytes reach the ranks", default="auto")
    vpp: int = option("virtual stages per pipeline rank", default=1)
    mtp: tuple[int, ...] = option("stages with an MTP block, such as 6,7", default=(), least=0)
    stages: str | None = option(
        "Megatron's pipeline layout string, instead of --vpp and --mtp", metavar="TEXT"
    )
    reads: tuple[int, ...] | None = option("the only ranks that may open storage, such as 0,4", least=0)
    length: int = option("tokens per sequence", default=4096)
    sequences: int = option("sequences per global batch", default=256)
    token_bytes: int = option("bytes of a stored token", default=2)
    rank: int | None = option("show this rank only", least=0)
    all: bool = option(f"show every rank (default: {_MOST_ROWS})", default=False)

    def run(self) -> int:
        layout = Layout.parse(self.layout, ranks_per_node=self.ranks_per_node)
        if layout.world_size > _MOST_RANKS:
            raise MeshfeedError(
                f"layout {layout}: {layout.world_size:,} ranks; give one of up to {_MOST_RANKS:,}"
            )
        refuse_stages(self, layout)
        stage_map = StageMap(pp=layout.pp, vpp=self.vpp, mtp=self.mtp, layout=self.stages)
        fields = Windows(self.length).fields
        delivery = self.delivery
        if delivery == "auto":
            delivery = choose_delivery(layout, stage_map, fields, self.reads, can_share=can_share() is None)
        roles = assign_roles(layout, stage_map, fields, delivery, self.reads)
        if self.rank is not None:
            layout.coord(self.rank)  # or it is refused now
        shown = [self.rank] if self.rank is not None else roles.ranks.tolist()
        rows = self._rows(layout, roles, shown)
        if self.json:
            facts = {"layout": str(layout), "delivery": delivery, "ranks": list(rows)}
            print_json(facts, indent=None if len(shown) > _MOST_ROWS else 2)
        else:
            _print(layout, delivery, fields, roles, rows, len(shown) if self.all else _MOST_ROWS)
        return OK

    def _rows(self, layout: Layout, roles: Roles, ranks: list[int]) -> Iterator[dict[str, Any]]:
        """Each rank by the keys of --json; bytes per step: a group holds the cp slices of all its ranks."""
        sequence_bytes = (self.length + 1) * self.token_bytes * self.sequences // layout.dp
        cp_of = dict(zip(roles.ranks.tolist(), layout.coords()[:, 1].tolist()))
        for rank in ranks:
            role, node = roles[rank], layout.node(rank)
            slices = {cp_of[peer] for peer in role.peers or (rank,)}
            moved = 0 if role.source is None else sequence_bytes * len(slices) // layout.cp
            crosses = role.giver is not None and layout.node(role.giver) != node
            yield {
                **asdict(role),
                "coord": layout.coord(rank)._asdict(),
                "node": int(node),
                "read_bytes": moved if role.reads else 0,
                "from": role.giver,
                "received_bytes": 0 if role.reads else moved,
                "network_bytes": moved if crosses and not role.reads else 0,
            }


def _print(
    layout: Layout,
    delivery: DeliveryName,
    fields: tuple[Field, ...],
    roles: Roles,
    rows: Iterator[dict[str, Any]],
    most: int,
) -> None:
    console = Console()
    readers = int(roles.reads.sum())
    idle = int((roles.source < 0).sum())
    nodes = len(set(layout.node(roles.ranks).tolist()))
    console.print(
        f"[bold]{layout}[/bold]: {counted(layout.world_size, 'rank')} on {counted(nodes, 'node')}, delivery "
        f"[bold]{delivery}[/bold]: storage is opened by {counted(readers, 'rank')}, "
        f"{len(roles) - readers - idle:,} receive from them, {idle:,} need nothing that is stored"
    )
    if delivery == "tree":
        leaders = sum(role.levels[0] is not None for role in roles) - readers
        console.print(
            f"[dim]tree: a copy over the network to {counted(max(leaders, 0), 'leader')}, shared memory "
            f"within the nodes[/dim]"
        )
    computed = ", ".join(field.name for field in fields if not field.stored)
    console.print(f"[dim]computed by every rank for itself, never sent: {computed}[/dim]")
    table = Table("rank", "node", "tp cp dp pp", "opens", "from", "fields", "bytes/step")
    for row, _ in zip(rows, range(most)):
        giver = "-" if row["from"] is None or row["reads"] else str(row["from"])
        table.add_row(
            str(row["rank"]),
            str(row["node"]),
            " ".join(map(str, row["coord"].values())),
            "[green]yes[/green]" if row["reads"] else "-",
            f"{giver} (net)" if row["network_bytes"] else giver,
            ", ".join(row["fields"]) or "-",
            f"{row['read_bytes'] or row['received_bytes']:,}",
        )
    console.print(table)
    if len(roles) > most:
        console.print(f"[dim]{len(roles) - most:,} ranks more: --all, --rank or --json[/dim]")
