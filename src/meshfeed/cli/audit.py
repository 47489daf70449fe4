"""meshfeed audit: what a job drew of each source, from the recipe alone, with a digest to compare."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from meshfeed.cli import recipes
from meshfeed.cli.command import OK, Console, Table, print_json, say
from meshfeed.cli.options import Command, argument, option
from meshfeed.cli.recipes import RecipeOptions, until_of
from meshfeed.sequence.drawn import drawn_of_sources
from meshfeed.summary import digest_of


@dataclass(frozen=True, kw_only=True)
class Audit(Command, RecipeOptions):
    """sequences and tokens that a job drew of each source, with a digest to compare

    Work out from recipe and index alone what the steps before --until drew. Two people who get the same
    digest have the same data, the same recipe up to that step, and the same figures.
    """

    examples = """
        meshfeed audit recipe.py --until 120000
        meshfeed audit recipe.py --until 120000 --json
        meshfeed audit corpus --until 500 --sequences 512 --window 4096
    """
    keys = {
        "until": "the first step that does not count",
        "recipe": "digest of all that decides the steps before it, and of no later change",
        "sources": "one object for each, with the keys below",
        "source, data": "its name, '' for a store alone; its fingerprint",
        "sequences, epochs, tokens": "drawn of it; tokens before a packing pads or truncates any",
        "sequences, tokens": "of all sources",
        "digest": "of everything above but the epochs, which are rounded",
    }

    recipe: str = argument("RECIPE", recipes.HELP)
    until: int | None = option("only steps before this one (all)")

    def run(self) -> int:
        recipe = self.recipe_of(self.recipe)
        until = until_of(recipe, self.until, "does not count")
        with contextlib.ExitStack() as stack:
            for store in recipe.sources:
                stack.enter_context(store)
            sequences, tokens = drawn_of_sources(recipe, until)
            sizes = [recipe.sequence.num_sequences(store) for store in recipe.sources]
        columns = recipe.source_names, recipe.sources, sequences.tolist(), tokens.tolist()
        sources: list[dict[str, Any]] = [
            {"source": name, "data": store.fingerprint, "sequences": count, "tokens": held}
            for name, store, count, held in zip(*columns)
        ]
        told: dict[str, Any] = {
            "until": until,
            "recipe": digest_of(recipe.summary(until)),
            "sources": sources,
            "sequences": int(sequences.sum()),
            "tokens": int(tokens.sum()),
        }
        told["digest"] = digest_of(told)
        for each, size in zip(sources, sizes):
            each["epochs"] = each["sequences"] / size
        if self.json:
            print_json(told)
        else:
            _print(told)
        return OK


def _print(told: dict[str, Any]) -> None:
    table = Table("source", "sequences", "epochs", "tokens", "of all tokens")
    for each in told["sources"]:
        share = each["tokens"] / max(told["tokens"], 1)
        figures = f"{each['sequences']:,}", f"{each['epochs']:.3f}", f"{each['tokens']:,}", f"{share:.4%}"
        table.add_row(each["source"] or "-", *figures)
    table.add_row("all", f"{told['sequences']:,}", "", f"{told['tokens']:,}", "")
    Console().print(table)
    say(f"\nbefore step {told['until']}; digest {told['digest']}")
