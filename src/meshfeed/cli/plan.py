"""meshfeed plan: how balanced steps will be, before anything is trained."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

import meshfeed as mf
from meshfeed.cli import packing, recipes
from meshfeed.cli.command import (
    OK,
    Console,
    Table,
    add_command,
    print_json,
    refuse_given,
    span,
    whole,
    write_text,
)
from meshfeed.errors import MeshfeedError
from meshfeed.feed.stepping import GlobalBatch
from meshfeed.plan import Account, StepPlan, account_of, plan_step
from meshfeed.report.plan import Picture, page
from meshfeed.report.words import counted

_KEYS = {
    "steps": "one object per step, with the keys below; with --lengths, that object alone",
    "step, sequences, tokens, sum_sq, pairs": "what the step holds",
    "microbatches, padding": "number of microbatches; share of tokens that is padding",
    "E, max_over_mean": "work over time of all ranks, and the busiest rank's work over the mean",
    "objective, lower_bound, objective_over_bound": "time of the step, and the least that any plan can have",
    "largest_load, largest_rank_tokens": "largest of one rank in one microbatch",
    "oversize, empty": "indices of sequences that are too long; number of sequences without a token",
    "planning_s": "seconds that planning took",
    "sources": "name -> sequences and epochs that a mixture has given when the step is done",
}


def add_parser(subparsers: Any) -> None:
    """Add `plan` to argparse's subparsers."""
    parser = add_command(
        subparsers,
        "plan",
        run,
        help="balance, padding, microbatches of packed steps, as a table and a picture",
        description="Plan the packed steps of a recipe, of a token store's documents, or of bare lengths. "
        "Reads the index alone.",
        examples="""
            meshfeed plan corpus --layout tp2-cp2-dp8 --capacity 16384 --sequences 512 --steps 0:4
            meshfeed plan corpus --layout dp64 --capacity 8192 --policy dynamic_cp --html plan.html
            meshfeed plan recipe.py:packed --layout dp64 --capacity 8192 --cost layer_cost.csv --json
            meshfeed plan --lengths lengths.txt --first 4096 --layout dp256 --capacity 16384 --json
        """,
        keys=_KEYS,
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help=recipes.HELP)
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="instead of a recipe: a file of lengths, one per line, planned as one step",
    )
    parser.add_argument("--first", type=whole(1), metavar="N", help="use only the first N of --lengths")
    parser.add_argument("--steps", type=span, metavar="A:B", help="steps of a recipe, such as 0:4 (0:1)")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="draw the first step into this file, rank by rank over time"
    )
    parser.add_argument(
        "--dump", type=Path, metavar="FILE", help="write the first step's plan as JSON: which rank holds what"
    )
    packing.add_options(parser, required=True)
    recipes.add_options(parser, rules=False)


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
    if args.lengths:
        refuse_given(
            args,
            ("steps", *recipes.OF_STORE),
            "is of a recipe or store; --lengths is one step of bare lengths",
        )
    else:
        refuse_given(args, ("first",), "is of --lengths; for a recipe or store there is --steps")
    planned = list(_of_lengths(args) if args.lengths else _of_recipe(args))
    if args.dump:
        write_text(args.dump, json.dumps(_dump(planned[0].plan)))
    if args.html:
        layout = str(mf.Layout.parse(args.layout))
        write_text(args.html, page(Picture(layout, planned[0].step, planned[0].plan, planned[0].account)))
    if args.json:
        facts = [each.facts() for each in planned]
        print_json(facts[0] if args.lengths else {"steps": facts})
    else:
        _print(planned)
    return OK


def _of_lengths(args: argparse.Namespace) -> Iterator[_Planned]:
    layout, packed = mf.Layout.parse(args.layout), _packing(args)
    store = mf.Lengths.from_file(args.lengths)
    lengths = store.lengths(np.arange(store.num_documents))[: args.first]
    began = time.perf_counter()
    plan = plan_step(lengths, packed, dp=layout.dp, cp=layout.cp, pp=layout.pp, vpp=args.vpp)
    seconds = time.perf_counter() - began
    yield _Planned(0, plan, account_of(plan, packed, pp=layout.pp, vpp=args.vpp), seconds)


def _of_recipe(args: argparse.Namespace) -> Iterator[_Planned]:
    packed = _packing(args)
    recipe = recipes.recipe_of(args.recipe, args)
    if not cast(Any, recipe.sequence).packed:
        raise MeshfeedError(
            f"{args.recipe}: {recipe.sequence.summary()} has sequences of one length, which need no plan; "
            f"meshfeed trace shows where they go"
        )
    stepping = packing.stepping_of(args, recipe, 1)
    with contextlib.ExitStack() as stack:
        for store in recipe.sources:
            stack.enter_context(store)
        steps = args.steps or range(1)
        for step in steps:
            began = time.perf_counter()
            batch = stepping.global_batch(step)
            if batch is None and step == steps.start:
                raise MeshfeedError(f"--steps {steps.start}:{steps.stop}: the stream ends before")
            if batch is None:
                return
            seconds = time.perf_counter() - began
            account = account_of(batch.plan, packed, pp=stepping.layout.pp, vpp=args.vpp)
            yield _Planned(step, batch.plan, account, seconds, _drawn(recipe, batch))


def _packing(args: argparse.Namespace) -> mf.Packing:
    return cast(mf.Packing, packing.packing_of(args))  # --capacity is required here


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
    table = Table(*headers)
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
            f"{name}: {counted(int(drawn['sequences']), 'sequence')}, {drawn['epochs']:.3f} epochs "
            f"after step {planned[-1].step}"
        )
