"""meshfeed roles: who opens storage, who receives what from whom, how many bytes a step moves."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from meshfeed.cli.command import OK, Console, Table, add_command, add_delivery, numbers, print_json, whole
from meshfeed.deliver import can_share
from meshfeed.layout import Layout
from meshfeed.report.words import counted
from meshfeed.roles import Field, Role, Roles, StageMap, assign_roles, choose_delivery
from meshfeed.sequence import Windows

_MOST_ROWS = 64

_KEYS = {
    "layout, delivery": "as text; the delivery that --delivery auto chose",
    "ranks": "one object per rank, with the keys below",
    "rank, coord, node": "which, where in tp, cp, dp and pp, and on which node",
    "reads, source, from": "whether it opens storage, whose bytes it has, and who hands them to it",
    "peers, nodes, group, ...": "its delivery group",
    "fields": "what it receives",
    "read_bytes, received_bytes, network_bytes": "per step: from storage; from peers; of that, by network",
}


def add_parser(subparsers: Any) -> None:
    """Add `roles` to argparse's subparsers."""
    parser = add_command(
        subparsers,
        "roles",
        run,
        help="who opens storage, who receives what from whom, bytes per step",
        description="Print the role of every rank of a layout. Opens nothing and contacts no rank.",
        examples="""
            meshfeed roles tp2-cp2-dp2-pp2
            meshfeed roles tp8-cp4-dp32-pp16 --ranks-per-node 8 --delivery share
            meshfeed roles tp2-pp4 --stages 'Et*3|t*4|m|L' --reads 0,2 --delivery broadcast --json
        """,
        keys=_KEYS,
    )
    parser.add_argument(
        "layout", metavar="LAYOUT", help="layout, such as tp2-cp2-dp2-pp2; the first dimension varies fastest"
    )
    parser.add_argument(
        "--ranks-per-node", type=whole(1), default=8, metavar="N", help="ranks that share a machine (8)"
    )
    add_delivery(parser)
    parser.add_argument(
        "--vpp", type=whole(1), default=1, metavar="N", help="virtual stages per pipeline rank (1)"
    )
    parser.add_argument(
        "--mtp", type=numbers(0), default=(), metavar="N,...", help="stages with an MTP block, such as 6,7"
    )
    parser.add_argument(
        "--stages", metavar="TEXT", help="Megatron's pipeline layout string, instead of --vpp and --mtp"
    )
    parser.add_argument(
        "--reads", type=numbers(0), metavar="N,...", help="the only ranks that may open storage, such as 0,4"
    )
    parser.add_argument(
        "--length", type=whole(1), default=4096, metavar="N", help="tokens per sequence (4096)"
    )
    parser.add_argument(
        "--sequences", type=whole(1), default=256, metavar="N", help="sequences per global batch (256)"
    )
    parser.add_argument(
        "--token-bytes", type=whole(1), default=2, metavar="N", help="bytes of a stored token (2)"
    )
    parser.add_argument("--rank", type=whole(0), metavar="N", help="show this rank only")
    parser.add_argument("--all", action="store_true", help=f"show every rank (default: {_MOST_ROWS})")


@dataclass(frozen=True, slots=True)
class _Bytes:
    """What a rank moves in one step of stored tokens: from storage, from peers, and of that by network."""

    read: int
    received: int
    network: int


def run(args: argparse.Namespace) -> int:
    """Print the table; 0. Raises LayoutError or RoleError."""
    layout = Layout.parse(args.layout, ranks_per_node=args.ranks_per_node)
    stage_map = StageMap(pp=layout.pp, vpp=args.vpp, mtp=args.mtp, layout=args.stages)
    fields = Windows(args.length).fields
    delivery = args.delivery
    if delivery == "auto":
        delivery = choose_delivery(layout, stage_map, fields, args.reads, can_share=can_share() is None)
    roles = assign_roles(layout, stage_map, fields, delivery, args.reads)
    sequence_bytes = (args.length + 1) * args.token_bytes * args.sequences // layout.dp
    if args.rank is not None:
        layout.coord(args.rank)  # or it is refused now
    shown = [args.rank] if args.rank is not None else roles.ranks.tolist()
    rows = _rows(layout, roles, shown, sequence_bytes)
    if args.json:
        facts = {"layout": str(layout), "delivery": delivery, "ranks": [_json(layout, *row) for row in rows]}
        print_json(facts, indent=None if len(shown) > _MOST_ROWS else 2)
        return OK
    _print(layout, delivery, fields, roles, rows, len(shown) if args.all else _MOST_ROWS)
    return OK


def _rows(
    layout: Layout, roles: Roles, ranks: list[int], sequence_bytes: int
) -> Iterator[tuple[Role, _Bytes]]:
    """Each role with its bytes per step: a group holds the cp slices of all its ranks."""
    cp_of = dict(zip(roles.ranks.tolist(), layout.coords()[:, 1].tolist()))
    for rank in ranks:
        role = roles[rank]
        slices = {cp_of[peer] for peer in role.peers or (rank,)}
        held = sequence_bytes * len(slices) // layout.cp
        moved = 0 if role.source is None else held
        received = 0 if role.reads else moved
        crosses = role.giver is not None and layout.node(role.giver) != layout.node(rank)
        yield role, _Bytes(moved if role.reads else 0, received, received if crosses else 0)


def _json(layout: Layout, role: Role, moved: _Bytes) -> dict[str, Any]:
    coord = layout.coord(role.rank)
    return {
        **asdict(role),
        "coord": coord._asdict(),
        "node": int(layout.node(role.rank)),
        "read_bytes": moved.read,
        "from": role.giver,
        "received_bytes": moved.received,
        "network_bytes": moved.network,
    }


def _print(
    layout: Layout,
    delivery: str,
    fields: tuple[Field, ...],
    roles: Roles,
    rows: Iterator[tuple[Role, _Bytes]],
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
    for at, (role, moved) in enumerate(rows):
        if at == most:
            break
        giver = "-" if role.giver is None or role.reads else str(role.giver)
        table.add_row(
            str(role.rank),
            str(layout.node(role.rank)),
            " ".join(str(at) for at in layout.coord(role.rank)),
            "[green]yes[/green]" if role.reads else "-",
            f"{giver} (net)" if moved.network else giver,
            ", ".join(role.fields) or "-",
            f"{moved.read or moved.received:,}",
        )
    console.print(table)
    if len(roles) > most:
        console.print(f"[dim]{len(roles) - most:,} ranks more: --all, --rank or --json[/dim]")
