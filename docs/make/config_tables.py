"""Writes the tables of other systems' options into the pages: python docs/make/config_tables.py

A table stands between `<!-- config table: NAME -->` and `<!-- end of config table -->`. NAME is a module
below meshfeed.integrations, such as `transformers` or `megatron.config`. Its rows are that module's
CONFIG_FIELDS, a dict from an option's name to "honoured: how", "refused: what to use instead" or "no effect
on data: why". The dict is read from the source, so that no framework needs to be installed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

DOCS = Path(__file__).parents[1]
SOURCES = DOCS.parent / "src" / "meshfeed" / "integrations"
PAGES = (DOCS / "frameworks.md", DOCS / "frameworks_loops.md")
TREATMENTS = ("honoured", "refused", "no effect on data")
"""How an option can be treated, in the order of a table."""

_TABLE = re.compile(r"(<!-- config table: (\S+) -->\n).*?(<!-- end of config table -->)", re.S)


def config_fields() -> dict[str, dict[str, str]]:
    """The CONFIG_FIELDS of each module that has one, by the module's name below meshfeed.integrations.

    Raises ValueError for one that is not a literal, and for a treatment that is none of TREATMENTS.
    """
    found = {
        ".".join(path.relative_to(SOURCES).with_suffix("").parts): told
        for path in sorted(SOURCES.rglob("*.py"))
        for told in _literals(path)
    }
    for name, fields in found.items():
        for option, told in fields.items():
            treatment, _, note = told.partition(": ")
            if treatment not in TREATMENTS or not note:
                raise ValueError(f"{name}: {option!r}: {told!r} begins with none of {TREATMENTS} and ': '")
    return found


def page(text: str, fields: Mapping[str, Mapping[str, str]]) -> str:
    """The page with its tables made again. Raises KeyError for a table of a module without CONFIG_FIELDS."""
    return _TABLE.sub(lambda found: found[1] + table(fields[found[2]]) + found[3], text)


def names_in(text: str) -> list[str]:
    """The modules whose tables a page has."""
    return [found[2] for found in _TABLE.finditer(text)]


def table(fields: Mapping[str, str]) -> str:
    """Markdown: first what is honoured, then what is refused, then what has no effect; as in the module."""
    rows = [
        f"| `{option}` | {treatment} | {note} |"
        for wanted in TREATMENTS
        for option, (treatment, _, note) in ((name, told.partition(": ")) for name, told in fields.items())
        if treatment == wanted
    ]
    return "\n".join(["| option | | |", "|---|---|---|", *rows]) + "\n"


def _literals(path: Path) -> Iterator[dict[str, str]]:
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = (
            statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        )
        if any(isinstance(target, ast.Name) and target.id == "CONFIG_FIELDS" for target in targets):
            yield ast.literal_eval(statement.value)  # type: ignore[attr-defined]


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(page(each.read_text(encoding="utf-8"), config_fields()), encoding="utf-8")
