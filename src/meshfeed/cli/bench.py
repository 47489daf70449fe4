"""meshfeed bench: figures of this machine beside what meshfeed aims at."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from rich.text import Text

from meshfeed.cli import calibrate, figures
from meshfeed.cli.command import OK, WRONG, Console, Table, add_command, print_json
from meshfeed.cli.figures import Figure
from meshfeed.errors import MeshfeedError

_KEYS = {
    "figures": "one object for each figure, of the keys below",
    "name, what": "which, and what was measured against what",
    "value, unit": "of the figure; value is null where it could not be taken",
    "aim, at_least": "what it should reach, from below (true) or from above",
    "holds": "whether it does; null where nothing was measured",
    "note": "why there is no value",
}


def add_parser(subparsers: Any) -> None:
    """Add `bench` to argparse's subparsers."""
    known = tuple(figures.MEASURES)
    parser = add_command(
        subparsers,
        "bench",
        run,
        help="figures of this machine beside their aims; calibrate: time a layer for the planner",
        description="Take short forms of meshfeed's benchmarks: a minute for all of them. Figures are "
        "ratios within one run where they can be. Other programs on the machine disturb them.",
        examples="""
            meshfeed bench
            meshfeed bench --only read,planner --json
            meshfeed bench calibrate --device cuda --out layer_cost.csv
        """,
        wrong="some figure falls short of its aim",
        keys=_KEYS,
    )
    parser.add_argument(
        "--only", metavar="NAME,...", help=f"only these of {', '.join(known)}; several are joined by commas"
    )
    calibrate.add_parser(parser.add_subparsers(metavar="[calibrate]"))


def run(args: argparse.Namespace) -> int:
    """Print the figures; 1 where one falls short. Raises MeshfeedError for a name that is none."""
    chosen = tuple(figures.MEASURES) if args.only is None else tuple(args.only.split(","))
    for name in chosen:
        if name not in figures.MEASURES:
            raise MeshfeedError(f"--only {name}: choose from {', '.join(figures.MEASURES)}")
    taken: list[Figure] = []
    console = Console(stderr=True)
    for name in chosen:
        with console.status(f"measuring: {name}"):
            taken += figures.MEASURES[name]()
    if args.json:
        print_json({"figures": [asdict(figure) | {"holds": figure.holds} for figure in taken]})
    else:
        _print(taken)
    return WRONG if any(figure.holds is False for figure in taken) else OK


def _print(taken: list[Figure]) -> None:
    table = Table("", "what", "figure", "aim")
    for column in table.columns[2:]:
        column.justify = "right"
    marks = {True: Text("holds", "green"), False: Text("short", "red"), None: Text("-")}
    for figure in taken:
        sign = "≥" if figure.at_least else "≤"
        value = figure.note if figure.value is None else f"{figure.value:.5g} {figure.unit}"
        table.add_row(marks[figure.holds], figure.what, value, f"{sign} {figure.aim:g} {figure.unit}")
    Console().print(table)
