"""meshfeed plan: how balanced steps will be, before anything is trained."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

import meshfeed as mf
from meshfeed.cli import recipes
from meshfeed.errors import MeshfeedError
from meshfeed.plan import Account, StepPlan, account_of, plan_step
from meshfeed.plan.policy import Oversize, Policy
from meshfeed.report.plan import Picture, page
from meshfeed.stepping import GlobalBatch, Stepping

_EXAMPLES = """examples:
  meshfeed plan corpus --layout tp2-cp2-dp8 --capacity 16384 --sequences 512 --steps 0:4
  meshfeed plan corpus --layout dp64 --capacity 8192 --policy dynamic_cp --html plan.html
  meshfeed plan --lengths lengths.txt --first 4096 --layout dp256 --capacity 16384 --policy dynamic_cp --json
"""


def add_parser(subparsers: Any) -> None:
    """Add `plan` to argparse's subparsers."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="balance, padding, microbatches of packed steps, as a table and a picture",
        description="Plan the packed steps of a recipe, of a token store's documents, or of bare lengths. "
        "Nothing is read but the index.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", help=recipes.HELP)
    parser.add_argument("--lengths", type=Path, help="instead: a file of lengths, one per line, as one step")
    parser.add_argument("--first", type=int, help="only the first so many of --lengths")
    parser.add_argument("--layout", required=True, help="such as tp2-cp2-dp8-pp2")
    parser.add_argument("--vpp", type=int, default=1, help="virtual stages per pipeline rank (1)")
    parser.add_argument("--capacity", type=int, required=True, help="padded tokens per rank and microbatch")
    parser.add_argument("--policy", choices=get_args(Policy), default="balanced", help="(balanced)")
    parser.add_argument("--oversize", choices=get_args(Oversize), default="error", help="(error)")
    parser.add_argument("--alpha", type=float, default=25_100, help="linear over quadratic cost (25100)")
    parser.add_argument(
        "--cost", type=Path, help="instead: layer times, as `meshfeed bench calibrate` writes"
    )
    parser.add_argument("--microbatches", type=int, help="at least so many; else the fewest that hold a step")
    parser.add_argument("--align-sequence", type=int, default=1, help="pad sequences to multiples (1)")
    parser.add_argument("--align-pack", type=int, default=1, help="pad a rank's packs to multiples (1)")
    recipes.add_options(parser)
    parser.add_argument(
        "--steps", type=_steps, default=range(1), help="which steps of a recipe, as 0:4 (0:1)"
    )
    parser.add_argument("--html", type=Path, help="draw the first step's ranks over time into this file")
    parser.add_argument("--dump", type=Path, help="write the first step's plan as JSON: who holds what")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class _Planned:
    step: int
    plan: StepPlan
    account: Account
    seconds: float
    drawn: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """As plain JSON types."""
        tops = self.account.loads.max(axis=1, initial=0.0)
        return {
            "step": self.step,
            "sequences": int(np.unique(self.plan.sequence[self.plan.microbatch >= 0]).size),
            "microbatches": self.plan.num_microbatches,
            "tokens": self.account.tokens,
            "padding": self.account.padding,
            "E": self.account.efficiency,
            "objective": self.account.objective,
            "lower_bound": self.account.bound,
            "objective_over_bound": self.account.objective / self.account.bound
            if self.account.bound
            else 1.0,
            "max_over_mean": self.account.max_over_mean,
            "largest_load": float(tops.max(initial=0.0)),
            "largest_rank_tokens": int(self.account.rank_tokens.max(initial=0)),
            "sum_sq": self.account.sum_sq,
            "pairs": self.account.pairs,
            "oversize": self.plan.oversize.tolist(),
            "empty": int(self.plan.empty.size),
            "planning_s": self.seconds,
            "sources": self.drawn,
        }


def run(args: argparse.Namespace) -> int:
    """Print the table; 0. Raises MeshfeedError."""
    if (args.recipe is None) == (args.lengths is None):
        raise MeshfeedError("give either a recipe or --lengths FILE")
    layout = mf.Layout.parse(args.layout)
    packing = mf.Packing(
        capacity=args.capacity,
        policy=args.policy,
        cost=_cost(args),
        align=mf.Align(sequence=args.align_sequence, pack=args.align_pack),
        oversize=args.oversize,
        microbatches=args.microbatches,
    )
    steps = _of_lengths(args, layout, packing) if args.lengths else _of_recipe(args, layout, packing)
    planned = list(steps)
    if not planned:
        raise MeshfeedError(f"--steps {args.steps.start}:{args.steps.stop}: the stream ends before")
    if args.dump:
        _write(args.dump, json.dumps(_dump(planned[0].plan)))
    if args.html:
        _write(args.html, page(Picture(str(layout), planned[0].step, planned[0].plan, planned[0].account)))
    if args.json:
        facts = [each.facts() for each in planned]
        print(json.dumps(facts[0] if args.lengths else {"steps": facts}))
    else:
        _print(planned)
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise MeshfeedError(f"{path}: {error.strerror}; choose another file to write") from error


def _cost(args: argparse.Namespace) -> mf.CostModel:
    if args.cost is None:
        return mf.CostModel(alpha=args.alpha)
    try:
        with args.cost.open(newline="") as file:
            return mf.CostModel.from_csv(file)
    except (OSError, UnicodeDecodeError, MeshfeedError) as bad:
        raise MeshfeedError(f"--cost {args.cost}: {bad}") from bad


def _of_lengths(args: argparse.Namespace, layout: mf.Layout, packing: mf.Packing) -> Iterator[_Planned]:
    store = mf.Lengths.from_file(args.lengths)
    lengths = store.lengths(np.arange(store.num_documents))[: args.first]
    began = time.perf_counter()
    plan = plan_step(lengths, packing, dp=layout.dp, cp=layout.cp, pp=layout.pp, vpp=args.vpp)
    seconds = time.perf_counter() - began
    yield _Planned(0, plan, account_of(plan, packing, pp=layout.pp, vpp=args.vpp), seconds)


def _of_recipe(args: argparse.Namespace, layout: mf.Layout, packing: mf.Packing) -> Iterator[_Planned]:
    recipe = recipes.recipe_of(args.recipe, args)
    stepping = Stepping(
        recipe=recipe, layout=layout, micro_batch_size=1, cp_split="zigzag", packing=packing, vpp=args.vpp
    )
    with contextlib.ExitStack() as stack:
        for store in recipe.sources:
            stack.enter_context(store)
        for step in args.steps:
            began = time.perf_counter()
            batch = stepping.global_batch(step)
            if batch is None:
                return
            seconds = time.perf_counter() - began
            account = account_of(batch.plan, packing, pp=layout.pp, vpp=args.vpp)
            yield _Planned(step, batch.plan, account, seconds, _drawn(recipe, batch))


def _drawn(recipe: mf.Recipe, batch: GlobalBatch) -> dict[str, dict[str, float]]:
    """What each source of a mixture has given when a step is done, in sequences and in epochs."""
    if batch.drawn is None:
        return {}
    of_each = zip(recipe.source_names, *(each.tolist() for each in batch.drawn))
    return {name: {"sequences": count, "epochs": epochs} for name, count, epochs in of_each}


def _dump(plan: StepPlan) -> list[list[dict[str, Any]]]:
    """For each microbatch, its sequences and the dp_cp ranks that hold each."""
    microbatches: list[list[dict[str, Any]]] = [[] for _ in range(plan.num_microbatches)]
    rows = zip(
        plan.sequence.tolist(),
        plan.start.tolist(),
        plan.lengths.tolist(),
        plan.microbatch.tolist(),
        plan.first_rank.tolist(),
        plan.cp_size.tolist(),
    )
    for sequence, start, length, microbatch, first, size in rows:
        if microbatch >= 0:
            ranks = list(range(first, first + size))
            held = {"sequence": sequence, "cp_ranks": ranks, "start": start, "length": length}
            microbatches[microbatch].append(held)
    return microbatches


def _print(planned: list[_Planned]) -> None:
    headers = ("step", "seqs", "mbs", "tokens", "padding", "max/mean", "obj/bound", "E", "planned in")
    table = Table(*headers, box=None, pad_edge=False)
    for each in planned:
        facts = each.facts()
        table.add_row(
            str(facts["step"]),
            f"{facts['sequences']:,}",
            str(facts["microbatches"]),
            f"{facts['tokens']:,}",
            f"{facts['padding']:.2%}",
            f"{facts['max_over_mean']:.3f}",
            f"{facts['objective_over_bound']:.4f}",
            f"{facts['E']:.4f}",
            f"{facts['planning_s'] * 1e3:.1f} ms",
        )
    console = Console()
    console.print(table)
    for each in planned:
        too_long, empty = each.plan.oversize.size, each.plan.empty.size
        if too_long or empty:
            console.print(f"step {each.step}: {too_long} too long, {empty} without a token")
    for name, drawn in planned[-1].drawn.items():
        console.print(
            f"{name}: {drawn['sequences']:,} sequences, {drawn['epochs']:.3f} epochs "
            f"after step {planned[-1].step}"
        )


def _steps(text: str) -> range:
    start, colon, stop = text.partition(":")
    try:
        first = int(start)
        steps = range(first, int(stop) if colon else first + 1)
    except ValueError as bad:
        raise argparse.ArgumentTypeError(f"{text!r}: write first:stop, such as 0:4") from bad
    if first < 0 or not steps:
        raise argparse.ArgumentTypeError(f"{text!r}: no step; write first:stop, such as 0:4")
    return steps
