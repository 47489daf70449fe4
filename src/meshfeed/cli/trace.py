"""meshfeed trace: which documents a step saw, where a document went. No log: order is a function."""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

import meshfeed as mf
from meshfeed.cli import recipes
from meshfeed.errors import MeshfeedError
from meshfeed.order import Draws, position_of
from meshfeed.plan.policy import Policy
from meshfeed.sequence.trace import Pieces, pieces_of, sequences_with
from meshfeed.stepping import Stepping

_EXAMPLES = """examples:
  meshfeed trace recipe.py --step 1200
  meshfeed trace recipe.py --step 1200 --layout tp2-dp4 --rank 5
  meshfeed trace corpus --step 7 --layout cp2-dp4 --capacity 16384 --policy dynamic_cp --json
  meshfeed trace recipe.py --document code:51823 --epochs 0:2
"""


def add_parser(subparsers: Any) -> None:
    """Add `trace` to argparse's subparsers."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "trace",
        help="which documents a step and rank saw, or where a document went",
        description="Tell what a job saw from its recipe alone, whether it has run or not.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help=recipes.HELP)
    recipes.add_options(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, help="the documents of this step")
    what.add_argument(
        "--document", help="where this document went, as NAME:NUMBER, or NUMBER in a store alone"
    )
    parser.add_argument("--epochs", type=_epochs, default=range(1), help="of --document, as 0:2 (0:1)")
    parser.add_argument("--layout", default="dp1", help="of --step, such as tp2-dp4 (dp1)")
    parser.add_argument("--rank", type=int, help="of --step: only what this rank is handed")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="where sequences stand in rows (1)")
    parser.add_argument("--capacity", type=int, help="where they are packed: padded tokens per rank")
    parser.add_argument(
        "--policy", choices=get_args(Policy), default="balanced", help="of packing (balanced)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table; 0. Raises MeshfeedError."""
    recipe = recipes.recipe_of(args.recipe, args)
    with contextlib.ExitStack() as stack:
        for store in recipe.sources:
            stack.enter_context(store)
        lines = _of_step(recipe, args) if args.document is None else _of_document(recipe, args)
    if args.json:
        for line in lines:
            print(json.dumps(line))
        return 0
    if not lines:
        Console().print("nothing")
        return 0
    table = Table(*lines[0], box=None, pad_edge=False)
    for line in lines:
        table.add_row(*map(str, line.values()))
    Console().print(table)
    return 0


def _of_step(recipe: mf.Recipe, args: argparse.Namespace) -> list[dict[str, Any]]:
    layout = mf.Layout.parse(args.layout)
    packing = None
    if args.capacity is not None:
        packing = mf.Packing(capacity=args.capacity, policy=args.policy)
    stepping = Stepping(
        recipe=recipe,
        layout=layout,
        micro_batch_size=args.micro_batch_size,
        packing=packing,
        cp_split="zigzag",
    )
    batch = stepping.global_batch(args.step)
    if batch is None:
        raise MeshfeedError(f"step {args.step}: the stream ends before")
    coord = None if args.rank is None else layout.coord(args.rank)
    lines: list[dict[str, Any]] = []
    plan, pieces = batch.plan, pieces_of(recipe, batch.draws)
    at = None if coord is None else coord.dp * layout.cp + coord.cp
    for row in np.flatnonzero(plan.microbatch >= 0).tolist():
        first, last = int(plan.first_rank[row]), int(plan.first_rank[row] + plan.cp_size[row] - 1)
        if at is None or first <= at <= last:
            start = int(plan.start[row])
            held = range(start, start + int(plan.lengths[row]))
            where = {"microbatch": int(plan.microbatch[row]), "dp_cp ranks": f"{first}-{last}"}
            lines += [
                where | line for line in _row(recipe, batch.draws, int(plan.sequence[row]), pieces, held)
            ]
    return sorted(lines, key=lambda line: (line["microbatch"], line["place"]))


def _row(recipe: mf.Recipe, draws: Draws, place: int, pieces: Pieces, held: range) -> list[dict[str, Any]]:
    """The documents of some tokens of one sequence of a step."""
    mine = np.flatnonzero(pieces.draw == place)
    sizes = pieces.stop[mine] - pieces.start[mine]
    ends = np.cumsum(sizes)
    lines: list[dict[str, Any]] = []
    for piece, end, size in zip(mine.tolist(), ends.tolist(), sizes.tolist()):
        first, last = max(held.start, end - size), min(held.stop, end)
        if first < last:
            offset = int(pieces.start[piece]) - (end - size)
            lines.append(
                {
                    "place": place,
                    "source": recipe.source_names[draws.source[place]] or "-",
                    "epoch": int(draws.epoch[place]),
                    "index": int(draws.index[place]),
                    "document": int(pieces.document[piece]),
                    "tokens": f"{first + offset}:{last + offset}",
                }
            )
    return lines


def _of_document(recipe: mf.Recipe, args: argparse.Namespace) -> list[dict[str, Any]]:
    source, document = _document(recipe, args.document)
    lines: list[dict[str, Any]] = []
    for epoch in args.epochs:
        for index in sequences_with(recipe, source, document, epoch).tolist():
            position = position_of(recipe, source, epoch, index)
            line: dict[str, Any] = {"epoch": epoch, "index": index, "step": "never", "place": "-"}
            if position is not None:
                step = recipe.batch.step(position)
                line |= {"step": step, "place": position - recipe.batch.position(step)}
            lines.append(line)
    return lines


def _document(recipe: mf.Recipe, text: str) -> tuple[int, int]:
    name, _, number = text.rpartition(":")
    if name not in recipe.source_names or not number.isdecimal():
        names = ", ".join(f"{each}:NUMBER" if each else "NUMBER" for each in recipe.source_names[:8])
        raise MeshfeedError(f"--document {text}: write {names}")
    return recipe.source_names.index(name), int(number)


def _epochs(text: str) -> range:
    start, colon, stop = text.partition(":")
    if not start.isdecimal() or (colon and not stop.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: write first:stop, such as 0:2")
    return range(int(start), int(stop) if colon else int(start) + 1)
