"""meshfeed exposure: what a job drew of each source, or which of its steps saw some documents."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import meshfeed as mf
from meshfeed.arrays import Ints, Longs
from meshfeed.cli import recipes
from meshfeed.cli.command import OK, Console, Table, print_json
from meshfeed.cli.holders import Holders, Line, table_of, with_origins
from meshfeed.cli.options import Command, argument, option, refuse_given
from meshfeed.cli.packing import JobOptions
from meshfeed.cli.recipes import RecipeOptions, until_of
from meshfeed.errors import MeshfeedError
from meshfeed.recipe import entered
from meshfeed.report.drawn import drawn_of_sources
from meshfeed.report.exposure import Exposures, exposures
from meshfeed.report.words import counted
from meshfeed.summary import digest_of

_SHOWN = 50  # rows of the table


@dataclass(frozen=True, kw_only=True)
class Exposure(Command, JobOptions, RecipeOptions):
    """Work out from the recipe alone what the steps before --until drew. Without LIST: the sequences and
    tokens of each source, with a digest. Two people who get the same one have the same recipe up to that
    step, the same figures, and stores of the same fingerprints, which have sizes, lengths and some blocks of
    each file, not every byte. With LIST, of documents that are to be removed, one in a line
    (NAME, a tab and its number, or the number for a store alone): which steps saw them, and the last state
    that did not. --json then prints one object per line: first the summary, then each sequence that held a
    token of a document, in the order of training. A window holds its last label, too.
    """

    examples = """
        meshfeed exposure recipe.py --until 120000
        meshfeed exposure recipe.py removal.txt --until 120000 --checkpoint-every 1000
        meshfeed exposure recipe.py removal.txt --until 120000 --json > exposure.jsonl
        meshfeed exposure corpus removal.txt --until 200 --window 4096 --ranks --layout tp2-cp2-dp8
    """
    keys = {
        "until": "the first step that is not looked at",
        "recipe": "without LIST: digest of all that decides the steps before it",
        "sources": "without LIST: one object for each",
        "data, epochs": "of a source: its fingerprint, and what was drawn of it in epochs",
        "digest": "without LIST: of everything above but the epochs, which are rounded",
        "documents, seen": "documents of LIST, each counted once, and how many of them were seen",
        "sequences, tokens": "drawn of a source; or that held the documents, and how many of their tokens",
        "first_step, last_step": "of the steps that held any; null if none did",
        "restart_step": "the last checkpoint that has seen none of them: train on from this step",
        "last_step_with_loss, restart_step_with_loss": "the same of the sequences that are not excluded",
        "step, place": "of a sequence: the step, and which of its sequences",
        "source, epoch, index": "which sequence it is; source is '' for a single store",
        "document": "which document of the source the sequence held",
        "excluded": "whether --amendments had excluded the document by then: its tokens bear no loss",
        "origin": "of a store that prepare made on this disk: file, and line, row, item or sample",
        "ranks": "with --ranks: global ranks that held some of these tokens, all of tp and pp",
    }

    recipe: str = argument("RECIPE", recipes.HELP)
    documents: Path | None = argument(
        "LIST", "a file of documents: NAME<tab>NUMBER or NUMBER, one per line", nargs="?"
    )
    until: int | None = option("only steps before this one, such as that of the last checkpoint (all)")
    checkpoint_every: int | None = option("states are kept at every N-th step (1)")
    ranks: bool = option("name the ranks, too: plans each step that held a document", default=False)
    micro_batch_size: int | None = option("sequences per microbatch, where all have one length (1)")

    def run(self) -> int:
        recipe = self.recipe_of(self.recipe, self.until)
        if not self.ranks:
            names = (*(each.name for each in fields(JobOptions)), "micro_batch_size")
            refuse_given(self, names, "has no effect without --ranks")
        self.refuse_ignored(recipe.sequence)
        until = until_of(recipe, self.until, "was not trained")
        if self.documents is None:
            refuse_given(self, ("ranks", "checkpoint_every"), "has no effect without LIST")
            with entered(recipe):
                drawn = _drawn_of(recipe, until)
            print_json(drawn) if self.json else _print_drawn(drawn)
            return OK
        with entered(recipe):
            sources, documents = documents_in(self.documents, recipe)
            found = exposures(recipe, sources, documents, until)
            ranks = self._ranks(recipe, found) if self.ranks else None
        facts = self._facts(found, documents.size, until)
        lines = with_origins(recipe, _lines(recipe, documents[found.document], found, ranks))
        if self.json:
            print_json(facts, indent=None)
            encode = json.JSONEncoder().encode  # there may be millions of lines
            sys.stdout.writelines(f"{encode(line)}\n" for line in lines)
        else:
            _print(facts, list(islice(lines, _SHOWN)))
        return OK

    def _ranks(self, recipe: mf.Recipe, found: Exposures) -> list[list[int]]:
        holders, ranks = Holders(self.stepping_of(recipe, self.micro_batch_size or 1)), list[list[int]]()
        steps, firsts = np.unique(found.step, return_index=True)
        for step, first, stop in zip(steps.tolist(), firsts, [*firsts[1:], len(found)]):
            these = (each[first:stop] for each in (found.place, found.begin, found.end))
            ranks += holders.holding(step, *these)
        return ranks

    def _facts(self, found: Exposures, num_documents: int, until: int) -> dict[str, Any]:
        first, last, restart = self._ends(found.step, until)
        _, last_with_loss, restart_with_loss = self._ends(found.step[~found.excluded], until)
        return {
            "until": until,
            "documents": num_documents,
            "seen": np.unique(found.document).size,
            "sequences": len(found),
            "tokens": int((found.end - found.begin).sum()),
            "first_step": first,
            "last_step": last,
            "restart_step": restart,
            "last_step_with_loss": last_with_loss,
            "restart_step_with_loss": restart_with_loss,
        }

    def _ends(self, steps: Longs, until: int) -> tuple[int | None, int | None, int]:
        """The first and last of some steps, and the last checkpoint before all of them."""
        first, last = (int(steps[0]), int(steps[-1])) if steps.size else (None, None)
        clean = until if first is None else first
        return first, last, clean - clean % (self.checkpoint_every or 1)


def _drawn_of(recipe: mf.Recipe, until: int) -> dict[str, Any]:
    """What the steps before `until` drew of each source, as JSON."""
    sequences, tokens = drawn_of_sources(recipe, until)
    columns = recipe.source_names, recipe.sources, sequences.tolist(), tokens.tolist()
    sources: list[dict[str, Any]] = [
        {"source": name, "data": store.fingerprint, "sequences": count, "tokens": held}
        for name, store, count, held in zip(*columns)
    ]
    drawn: dict[str, Any] = {"until": until, "recipe": digest_of(recipe.summary(until)), "sources": sources}
    drawn["digest"] = digest_of(drawn)
    for each, store in zip(sources, recipe.sources):
        each["epochs"] = each["sequences"] / recipe.sequence.num_sequences(store)
    return drawn


def _print_drawn(drawn: dict[str, Any]) -> None:
    table = Table("source", "sequences", "epochs", "tokens", "of all tokens")
    sequences, tokens = (sum(each[name] for each in drawn["sources"]) for name in ("sequences", "tokens"))
    for each in drawn["sources"]:
        figures = f"{each['sequences']:,}", f"{each['epochs']:.3f}", f"{each['tokens']:,}"
        table.add_row(each["source"] or "-", *figures, f"{each['tokens'] / max(tokens, 1):.4%}")
    table.add_row("all", f"{sequences:,}", "", f"{tokens:,}", "")
    Console().print(table, f"\nbefore step {drawn['until']}; digest {drawn['digest']}")


def documents_in(path: Path, recipe: mf.Recipe) -> tuple[Ints, Longs]:
    """(source, document) of each line of a file, each document once; [n] each.

    The stores must be entered. Raises MeshfeedError, which names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as bad:
        raise MeshfeedError(f"{path}: {getattr(bad, 'strerror', None) or bad}; give a text file") from bad
    source_of = {name: source for source, name in enumerate(recipe.source_names)}
    sizes = [store.num_documents for store in recipe.sources]
    sources, documents = list[int](), list[int]()
    for number, line in enumerate(lines, 1):
        name, _, digits = line.rstrip().rpartition("\t")
        source = source_of.get(name, -1)
        if source < 0 or not (digits.isascii() and digits.isdigit()):
            if not line.strip():
                continue
            raise MeshfeedError(f"{path}: line {number}: {line!r}; write {_form(recipe.source_names)}")
        document = int(digits)
        if document >= sizes[source]:
            has = f"{recipe.sources[source]!r} has {sizes[source]:,}, counted from 0"
            raise MeshfeedError(f"{path}: line {number}: document {digits}: {has}")
        sources.append(source)
        documents.append(document)
    if not documents:
        raise MeshfeedError(f"{path}: names no document; write {_form(recipe.source_names)}, one per line")
    of, number = np.array(sources, np.int32), np.array(documents, np.int64)
    order = np.lexsort((number, of))
    of, number = of[order], number[order]
    new = np.append(True, (np.diff(of) != 0) | (np.diff(number) != 0))
    return of[new], number[new]


def _form(names: Sequence[str]) -> str:
    """How a line of the list is written."""
    if names == ("",):
        return "the number of a document"
    more = ", ..." if len(names) > 8 else ""
    return f"NAME<tab>NUMBER, where NAME is one of {', '.join(names[:8])}{more}"


def _lines(
    recipe: mf.Recipe, documents: Longs, found: Exposures, ranks: list[list[int]] | None
) -> Iterator[Line]:
    """One line of the answer for each exposure. documents: of each."""
    names, draws = recipe.source_names, found.draws
    each = found.step, found.place, draws.source, draws.epoch, draws.index, documents, found.end - found.begin
    rows = zip(*(column.tolist() for column in (*each, found.excluded)))
    for at, (step, place, source, epoch, index, document, tokens, excluded) in enumerate(rows):
        line = {"step": step, "place": place, "source": names[source], "epoch": epoch, "index": index}
        line |= {"document": document, "tokens": tokens, "excluded": excluded}
        yield line if ranks is None else line | {"ranks": ranks[at]}


def _print(facts: dict[str, Any], lines: list[Line]) -> None:
    console = Console()
    seen = f"{facts['seen']:,} of {counted(facts['documents'], 'document')} seen before step {facts['until']}"
    if not lines:
        console.print(seen)
        return
    console.print(table_of(lines))
    if facts["sequences"] > len(lines):
        console.print(f"... and {facts['sequences'] - len(lines):,} more: --json prints all")
    console.print(
        f"\n{seen}: {counted(facts['tokens'], 'token')}, in {counted(facts['sequences'], 'sequence')} of "
        f"steps {facts['first_step']} to {facts['last_step']}"
    )
    restart, trained = facts["restart_step"], facts["restart_step_with_loss"]
    if (last := facts["last_step_with_loss"]) != facts["last_step"]:
        which = "excluded in all of them" if last is None else f"excluded after step {last}"
        console.print(f"{which}: tokens of an excluded document bear no loss")
    console.print(f"train again from the state of step {restart}, the last that saw none")
    if trained != restart:
        console.print(f"from that of step {trained}, the last that was trained on none")
