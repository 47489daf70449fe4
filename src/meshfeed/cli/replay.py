"""meshfeed replay: the very tensors of a rank's steps, in files."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

import meshfeed as mf
from meshfeed.cli import recipes
from meshfeed.cli.command import OK, print_json, say
from meshfeed.cli.options import Command, argument, option, refuse_given, required
from meshfeed.cli.packing import JobOptions
from meshfeed.cli.recipes import RecipeOptions
from meshfeed.errors import MeshfeedError
from meshfeed.feed.nested import changed
from meshfeed.files import typed_errors
from meshfeed.files.local.durable import durable_file, sync
from meshfeed.order import num_steps
from meshfeed.report.words import counted
from meshfeed.sequence import SequenceRule
from meshfeed.simulation import SimulatedStep

_INDEX = "index.json"


@dataclass(frozen=True, kw_only=True)
class Replay(Command, JobOptions, RecipeOptions):
    """write the very tensors that a rank got in some steps

    Make the microbatches of one rank again, equal bit for bit to what its feed gave. DIR gets a file for
    each step, which torch.load reads without meshfeed: a list with a dict of each microbatch, field name to
    tensor, on the CPU; and index.json, which names the sequences in them. DIR appears whole, or not at all.
    """

    examples = """
        meshfeed replay recipe.py --steps 1200:1203 --rank 5 --out replayed --layout tp2-cp2-dp8
        meshfeed replay recipe.py --steps 7 --rank 0 --out replayed --layout cp2-dp4 --capacity 16384
        meshfeed replay corpus --steps 0:4 --rank 3 --out made --window 4096 --layout dp2-pp2 --stages 'Et|L'
    """
    keys = {
        "recipe, layout, rank, coord": "fingerprint of the recipe; the rank, and where it is in the layout",
        "steps": "one object for each, with the keys below, as in index.json",
        "step, file, tokens, valid_tokens": "its file; tokens of the global batch, and those that bear loss",
        "microbatches": "of a step: for each, the [source, epoch, index] of its sequences",
    }

    recipe: str = argument("RECIPE", recipes.HELP)
    steps: range = required("steps to write, such as 1200:1203")
    rank: int = required("the global rank", least=0)
    out: Path = required("the folder to make", metavar="DIR")
    micro_batch_size: int | None = option("sequences per microbatch, where all have one length (1)")
    mtp: tuple[int, ...] = option("stages with an MTP block, such as 6,7", default=(), least=0)
    stages: str | None = option(
        "Megatron's pipeline layout string, instead of --vpp and --mtp", metavar="TEXT"
    )

    def run(self) -> int:
        recipe = self.recipe_of(self.recipe)
        rule = cast(SequenceRule, recipe.sequence)
        self.refuse_ignored(rule)
        if rule.packed:
            refuse_given(
                self, ("micro_batch_size",), f"is of sequences of one length, not of {rule.summary()}"
            )
        stepping, end = self.stepping_of(recipe, self.micro_batch_size or 1), num_steps(recipe)
        if end is not None and self.steps.stop > end:
            raise MeshfeedError(
                f"--steps {self.steps.start}:{self.steps.stop}: the stream ends at step {end}"
            )
        begin, stop = self.steps.start, self.steps.stop
        if (given := recipe.first_given(begin)) >= stop:
            raise MeshfeedError(f"--steps {begin}:{stop}: an amendment skips them, to step {given}")
        made = mf.simulate(
            recipe,
            stepping.layout,
            self.steps,
            ranks=[self.rank],
            stage_map=mf.StageMap(pp=stepping.layout.pp, vpp=self.vpp, mtp=self.mtp, layout=self.stages),
            micro_batch_size=stepping.micro_batch_size,
            packing=stepping.packing,
            cp_split=self.cp_split,
            encoder=self.encoder or "with sample",
        )
        with _whole_folder(self.out) as folder:
            answer = {
                "recipe": recipe.fingerprint,
                "layout": str(stepping.layout),
                "rank": self.rank,
                "coord": stepping.layout.coord(self.rank)._asdict(),
            }
            index: dict[str, Any] = answer | {"steps": [_written(folder, step) for step in made]}
            with durable_file(folder / _INDEX) as stream:
                stream.write(json.dumps(index, indent=1).encode() + b"\n")
        if self.json:
            print_json(index)
        else:
            say(f"{self.out}: {counted(len(index['steps']), 'step')} of rank {self.rank}")
        return OK


def _written(folder: Path, step: SimulatedStep) -> dict[str, Any]:
    """Write a step's file; returns its entry of the index."""
    name = f"step-{step.batch.step:08}.pt"
    fields = [
        {name: changed(value, _apart) for name, value in microbatch.items()}
        for microbatch in step.microbatches
    ]
    with durable_file(folder / name) as stream:
        torch.save(fields, stream)
    draws = [each.draws for each in step.microbatches]
    return {
        "step": step.batch.step,
        "file": name,
        "tokens": step.batch.tokens,
        "valid_tokens": step.batch.valid_tokens,
        "microbatches": [
            [*map(list, zip(each.source.tolist(), each.epoch.tolist(), each.index.tolist()))]
            for each in draws
        ],
    }


def _apart(value: Any) -> Any:
    """A tensor without the rest of its storage, which torch.save would write, too."""
    return value.clone() if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def _whole_folder(out: Path) -> Generator[Path, None, None]:
    """A new folder to fill, which becomes `out` at a clean end of `with`, and is removed otherwise."""
    if out.exists():
        raise MeshfeedError(f"--out {out}: exists already; name a folder to make")
    if not out.parent.is_dir():
        raise MeshfeedError(f"--out {out}: {out.parent} is no folder; make it, or name another")
    partial = out.with_name(f"{out.name}.{secrets.token_hex(4)}.tmp")
    with typed_errors(out.parent):
        partial.mkdir()
    try:
        yield partial
        with typed_errors(out):
            sync(partial)
            partial.rename(out)
            sync(out.absolute().parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
