"""meshfeed trace: which documents a step saw, where a document went. No log: order is a function."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

import meshfeed as mf
from meshfeed.cli import recipes
from meshfeed.cli.command import OK, Console, print_json
from meshfeed.cli.document_trace import sequences_with
from meshfeed.cli.holders import Holders, Line, table_of, with_origins
from meshfeed.cli.options import Command, argument, given, option, refuse_given
from meshfeed.cli.packing import JobOptions
from meshfeed.cli.recipes import NUM_POSITIONS, RecipeOptions
from meshfeed.errors import MeshfeedError
from meshfeed.multimodal import Multimodal
from meshfeed.order import position_of, steps_of
from meshfeed.recipe import Rule, entered


@dataclass(frozen=True, kw_only=True)
class Trace(Command, JobOptions, RecipeOptions):
    """Work out from the recipe alone what a job sees, whether it has run or not. --json prints one object
    per line, each a piece of a document.
    """

    examples = """
        meshfeed trace recipe.py --step 1200
        meshfeed trace recipe.py --step 1200 --layout tp2-dp4 --rank 5
        meshfeed trace corpus --step 7 --layout cp2-dp4 --capacity 16384 --policy dynamic_cp --json
        meshfeed trace recipe.py --document code:51823 --document docs:7 --epochs 0:2 --layout tp2-dp4
    """
    keys = {
        "step, place": "the step, and which of its sequences; null where a document never comes, or the step "
        "is skipped",
        "source, epoch, index": "which sequence it is; source is '' for a single store",
        "document, tokens": "which document of the source, and which of its tokens, as first:stop",
        "parts": "of mf.Multimodal: images, audio and video there, each as number, kind, file and bytes",
        "origin": "of a store that meshfeed prepare made on this disk: file, and line, row, item or sample",
        "microbatch": "which of the step's; null where the packing is not known",
        "ranks": "global ranks whose context-parallel slice has some of these tokens, all of tp and pp",
    }

    recipe: str = argument("RECIPE", recipes.HELP)
    step: int | None = option("show the documents of this step", least=0)
    document: list[str] | None = option(
        "show where document N of source NAME went (N alone for a single store); may be repeated",
        metavar="NAME:N",
    )
    epochs: range | None = option("epochs to search for --document, such as 0:2 (0:1)")
    rank: int | None = option("show only what this rank holds", least=0)
    micro_batch_size: int | None = option("sequences per microbatch, where all have one length (1)")

    def run(self) -> int:
        if len(given(self, ("step", "document"))) != 1:
            raise MeshfeedError("give one of --step, --document")
        recipe = self.recipe_of(self.recipe, None if self.step is None else self.step + 1)
        self._refuse_ignored(recipe.sequence)
        with entered(recipe):
            if self.step is not None:
                lines = self._of_step(recipe, self.step)
            else:
                lines = self._of_documents(recipe, self.document or [])
        lines = list(with_origins(recipe, lines))
        if self.json:
            for line in lines:
                print_json(line, indent=None)
        else:
            Console().print(table_of(lines) if lines else "nothing")
        return OK

    def _refuse_ignored(self, rule: Rule) -> None:
        self.refuse_ignored(rule)
        if self.document is None:
            refuse_given(self, ("epochs",), "is of --document; a step names its epochs itself")
        elif rule.packed and self.capacity is None:
            why = "needs --capacity N, and --policy, as the job has: they decide the ranks"
            refuse_given(self, ("rank", "layout", "vpp", "cp_split", "encoder"), why)

    def _holders(self, recipe: mf.Recipe) -> Holders:
        return Holders(self.stepping_of(recipe, self.micro_batch_size or 1))

    def _of_step(self, recipe: mf.Recipe, step: int) -> list[Line]:
        if recipe.skips(step):
            raise MeshfeedError(f"step {step}: an amendment skips it, to step {recipe.first_given(step)}")
        holders = self._holders(recipe)
        found = holders.of_step(step)
        if found is None:
            raise MeshfeedError(f"step {step}: the stream ends before")
        if self.rank is None:
            return [line for line in found if line["ranks"]]
        return holders.held_by(step, holders.stepping.layout.coord(self.rank))

    def _of_documents(self, recipe: mf.Recipe, documents: Iterable[str]) -> list[Line]:
        lines: list[Line] = []
        for text in documents:
            source, document = _document(recipe, text)
            epochs = self.epochs or range(1)
            if epochs[-1] * recipe.sequence.num_sequences(recipe.sources[source]) >= NUM_POSITIONS:
                raise MeshfeedError(
                    f"--epochs {epochs[-1]}: beyond the 2**62 positions of the stream; name an earlier one"
                )
            for epoch in epochs:
                for index in sequences_with(recipe, source, document, epoch).tolist():
                    lines.append(_where(recipe, source, epoch, index) | {"document": document})
        parts: Line = {"parts": []} if isinstance(recipe.sequence, Multimodal) else {}
        nowhere: Line = {"tokens": None, **parts, "microbatch": None, "ranks": []}
        if self.capacity is None and recipe.sequence.packed:
            return [line | nowhere | {"ranks": None} for line in lines]
        holders = self._holders(recipe)
        if self.rank is not None:
            holders.stepping.layout.coord(self.rank)  # or it is refused now
        steps = {line["step"] for line in lines} - {None}
        seen = {step: holders.of_step(step) or [] for step in sorted(steps)}
        told: list[Line] = []
        for line in lines:
            here = [
                each
                for each in seen.get(line["step"], ())
                if (each["place"], each["document"]) == (line["place"], line["document"])
            ]
            if not here:  # never drawn, or a sequence without a token, which no rank gets
                told.append(line | nowhere)
            told += [each for each in here if self.rank is None or self.rank in each["ranks"]]
        return told


def _where(recipe: mf.Recipe, source: int, epoch: int, index: int) -> Line:
    """Where a sequence comes, as the first part of a line."""
    position = position_of(recipe, source, epoch, index)
    step = place = None
    if position is not None:
        step, place = (int(each[0]) for each in steps_of(recipe, np.array([position])))
        if recipe.skips(step):
            step = place = None
    name = recipe.source_names[source] or ""
    return {"step": step, "place": place, "source": name, "epoch": epoch, "index": index}


def _document(recipe: mf.Recipe, text: str) -> tuple[int, int]:
    name, _, number = text.rpartition(":")
    if name not in recipe.source_names or not number.isdecimal():
        names = ", ".join(f"{each}:NUMBER" if each else "NUMBER" for each in recipe.source_names[:8])
        raise MeshfeedError(f"--document {text}: write {names}")
    return recipe.source_names.index(name), int(number)
