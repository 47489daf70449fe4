"""meshfeed plan: how balanced steps will be, before anything is trained."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

import meshfeed as mf
from meshfeed.cli import recipes
from meshfeed.cli.command import OK, Console, Table, print_json, write_text
from meshfeed.cli.options import Command, argument, option, refuse_given, required
from meshfeed.cli.packing import JobOptions
from meshfeed.cli.recipes import RecipeOptions
from meshfeed.errors import MeshfeedError
from meshfeed.feed.stepping import GlobalBatch
from meshfeed.fetched import warning_of
from meshfeed.multimodal.encoders import EncoderPlan
from meshfeed.plan import Account, StepPlan, account_of, plan_step
from meshfeed.recipe import entered
from meshfeed.report.loads import Load, loads_of
from meshfeed.report.plan import page
from meshfeed.report.words import counted
from meshfeed.sequence import TakesParts


@dataclass(frozen=True, kw_only=True)
class Plan(Command, JobOptions, RecipeOptions):
    """Plan the packed steps of a recipe, of a token store's documents, or of bare lengths. Reads the index
    alone.
    """

    examples = """
        meshfeed plan corpus --layout tp2-cp2-dp8 --capacity 16384 --sequences 512 --steps 0:4
        meshfeed plan corpus --layout dp64 --capacity 8192 --policy dynamic_cp --html plan.html
        meshfeed plan recipe.py:packed --layout dp64 --capacity 8192 --cost layer_cost.csv --json
        meshfeed plan --lengths lengths.txt --first 4096 --layout dp256 --capacity 16384 --json
    """
    keys = {
        "steps": "one object per step, with the keys below; with --lengths, that object alone",
        "step, sequences, tokens, sum_sq, pairs": "what the step holds",
        "microbatches, padding": "number of microbatches; share of tokens that is padding",
        "E, max_over_mean": "work over time of all ranks, and the busiest rank's work over the mean",
        "objective, lower_bound, objective_over_bound": "time of the step, and the least of any plan",
        "largest_load, largest_rank_tokens": "largest of one rank in one microbatch",
        "oversize, empty": "indices of sequences that are too long; number of sequences without a token",
        "valid_tokens, cut_loss": "of a recipe: tokens with loss; sequences that truncation left none",
        "empty_microbatches": "number of microbatches without a sequence on any rank",
        "planning_s": "seconds that planning took",
        "sources": "name -> sequences and epochs of a mixture up to the step, skipped steps too",
        "loads": "of language model and encoders: max_over_mean of the busiest rank, lower_bound",
    }

    recipe: str | None = argument("RECIPE", recipes.HELP, nargs="?")
    lengths: Path | None = option("instead of a recipe: a file of lengths, one per line, planned as one step")
    first: int | None = option("use only the first N of --lengths")
    steps: range | None = option("steps of a recipe, such as 0:4 (0:1)")
    html: Path | None = option("draw the first step into this file, rank by rank over time")
    dump: Path | None = option("write the first step's plan as JSON: which rank holds what")
    layout: str = required("layout, such as tp2-cp2-dp8-pp2", metavar="LAYOUT")
    capacity: int = required("padded tokens per rank and microbatch")

    def run(self) -> int:
        if (self.recipe is None) == (self.lengths is None):
            raise MeshfeedError("give either a recipe or --lengths FILE")
        if self.recipe is None:
            why = "is of a recipe or store; --lengths is one step of bare lengths"
            refuse_given(self, ("steps", "encoder", "amendments", *recipes.OF_STORE), why)
        else:
            refuse_given(self, ("first",), "is of --lengths; for a recipe or store there is --steps")
        planned = list(self._of_lengths() if self.recipe is None else self._of_recipe(self.recipe))
        first = planned[0]
        if self.dump:
            write_text(self.dump, json.dumps(_dump(first.plan)))
        if self.html:
            layout = str(mf.Layout.parse(self.layout))
            write_text(
                self.html, page(layout, first.step, first.plan, first.account, first.encoders, first.loads)
            )
        if self.json:
            print_json(
                {"steps": [each.facts for each in planned]} if self.recipe is not None else first.facts
            )
        else:
            _print([each.facts for each in planned])
            if first.note:
                Console().print(first.note)
            if first.loads:
                _print_loads(planned)
        return OK

    def _of_lengths(self) -> Iterator[_Planned]:
        layout, packed = self.parsed_layout(), self.packing_of(self.capacity)
        store = mf.Lengths.from_file(cast(Path, self.lengths))
        lengths = store.lengths(np.arange(store.num_documents))[: self.first]
        began = time.perf_counter()
        plan = plan_step(
            lengths, packed, dp=layout.dp, cp=layout.cp, pp=layout.pp, vpp=self.vpp, cp_split=self.cp_split
        )
        seconds = time.perf_counter() - began
        account = account_of(plan, packed, pp=layout.pp, vpp=self.vpp)
        yield _Planned(step=0, plan=plan, account=account, planning_s=seconds)

    def _of_recipe(self, text: str) -> Iterator[_Planned]:
        packed, recipe = self.packing_of(self.capacity), self.recipe_of(text)
        if not recipe.sequence.packed:
            raise MeshfeedError(
                f"{text}: {recipe.sequence.summary()} has sequences of one length, which need no plan; "
                f"meshfeed trace shows where they go"
            )
        stepping, steps = self.stepping_of(recipe), self.steps or range(1)
        recipe = stepping.recipe  # its rule knows who encodes
        if (first := recipe.first_given(steps.start)) >= steps.stop:
            raise MeshfeedError(f"step {steps.start}: an amendment skips it, to step {first}")
        with entered(recipe):
            # as a job leaves others out
            for step in itertools.chain.from_iterable(recipe.given_steps(first, steps.stop)):
                began = time.perf_counter()
                batch = stepping.global_batch(step)
                seconds = time.perf_counter() - began
                if batch is None and step == first:
                    raise MeshfeedError(f"--steps {steps.start}:{steps.stop}: the stream ends before")
                if batch is None:
                    return
                account = account_of(batch.plan, packed, pp=stepping.layout.pp, vpp=self.vpp)
                rule = recipe.sequence
                encoders = (
                    rule.encoder_plans(recipe, batch.draws, batch.plan)
                    if isinstance(rule, TakesParts)
                    else {}
                )
                loads = loads_of(batch.plan, packed, account, encoders) if encoders else {}
                yield _Planned(
                    step=step,
                    plan=batch.plan,
                    account=account,
                    planning_s=seconds,
                    sources=_drawn(recipe, batch),
                    batch=batch,
                    encoders=encoders,
                    loads=loads,
                    note=warning_of(recipe) or "",
                )


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """A step's plan, and what there is to tell of it. batch: of a recipe. encoders, loads: empty for text.
    note: of storage."""

    step: int
    plan: StepPlan
    account: Account
    planning_s: float
    sources: dict[str, Any] = field(default_factory=dict)
    encoders: Mapping[str, EncoderPlan] = field(default_factory=dict)
    loads: Mapping[str, Load] = field(default_factory=dict)
    note: str = ""
    batch: GlobalBatch | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """For --json; see `Plan.keys`."""
        plan, account = self.plan, self.account
        facts = {
            "step": self.step,
            "sequences": int(np.unique(plan.sequence[plan.microbatch >= 0]).size),
            "microbatches": plan.num_microbatches,
            "tokens": account.tokens,
            "padding": account.padding,
            "E": account.efficiency,
            "objective": account.objective,
            "lower_bound": account.bound,
            "objective_over_bound": account.objective / account.bound if account.bound else 1.0,
            "max_over_mean": account.max_over_mean,
            "largest_load": float(account.loads.max(initial=0.0)),
            "largest_rank_tokens": int(account.rank_tokens.max(initial=0)),
            "sum_sq": account.sum_sq,
            "pairs": account.pairs,
            "oversize": plan.oversize.tolist(),
            "empty": int(plan.empty.size),
            "empty_microbatches": int((~account.loads.any(axis=1)).sum()),
            "planning_s": self.planning_s,
            "sources": self.sources,
        }
        if self.batch is not None:
            facts |= {"valid_tokens": self.batch.valid_tokens, "cut_loss": self.batch.cut_loss.tolist()}
        if self.loads:
            facts["loads"] = {
                name: {"max_over_mean": load.max_over_mean, "lower_bound": load.bound}
                for name, load in self.loads.items()
            }
        return facts


def _drawn(recipe: mf.Recipe, batch: GlobalBatch) -> dict[str, Any]:
    """What each source of a mixture has given when a step is done, in sequences and in epochs."""
    stats = batch.stats()
    if stats.source_drawn is None or stats.source_epochs is None:
        return {}
    of_each = zip(recipe.source_names, stats.source_drawn.tolist(), stats.source_epochs.tolist())
    return {name: {"sequences": count, "epochs": epochs} for name, count, epochs in of_each}


def _dump(plan: StepPlan) -> list[list[dict[str, Any]]]:
    """For each microbatch, its sequences and the dp_cp ranks that hold each."""
    microbatches: list[list[dict[str, Any]]] = [[] for _ in range(plan.num_microbatches)]
    columns = (plan.sequence, plan.start, plan.lengths, plan.microbatch, plan.first_rank, plan.cp_size)
    for sequence, start, length, microbatch, first, size in zip(*(each.tolist() for each in columns)):
        if microbatch >= 0:
            ranks = list(range(first, first + size))
            held = {"sequence": sequence, "cp_ranks": ranks, "start": start, "length": length}
            microbatches[microbatch].append(held)
    return microbatches


def _print(steps: list[dict[str, Any]]) -> None:
    table = Table("step", "seqs", "mbs", "tokens", "padding", "max/mean", "obj/bound", "E", "planned in")
    for facts in steps:
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
    for facts in steps:
        if facts["oversize"] or facts["empty"]:
            step, too_long = facts["step"], len(facts["oversize"])
            console.print(f"step {step}: {too_long} too long, {facts['empty']} without a token")
        if cut := facts.get("cut_loss"):
            console.print(f"step {facts['step']}: {len(cut)} lose all their loss where they are truncated")
        if facts.get("valid_tokens") == 0:
            console.print(f"step {facts['step']}: no token bears loss, and a feed refuses it")
        if facts["empty_microbatches"]:
            of_all = f"{facts['empty_microbatches']:,} of {facts['microbatches']:,}"
            console.print(f"step {facts['step']}: {of_all} microbatches hold no sequence")
    for name, drawn in steps[-1]["sources"].items():
        console.print(
            f"{name}: {counted(int(drawn['sequences']), 'sequence')}, {drawn['epochs']:.3f} epochs "
            f"after step {steps[-1]['step']}"
        )


def _print_loads(planned: list[_Planned]) -> None:
    """How even each load is over all steps, and in the worst of them; beside each the lower bound."""
    table = Table("load", "max/mean", "bound", "worst step", "max/mean", "bound")
    for name in planned[0].loads:
        of_steps = [each.loads[name] for each in planned]
        ratios, bounds = ([getattr(load, what) for load in of_steps] for what in ("max_over_mean", "bound"))
        worst = int(np.argmax(ratios))
        cells = np.mean(ratios), np.mean(bounds), ratios[worst], bounds[worst]
        mean, least, most, least_of_worst = (f"{each:.3f}" for each in cells)
        table.add_row(name, mean, least, str(planned[worst].step), most, least_of_worst)
    console = Console()
    console.print()
    console.print(table)
