"""The design page lists what a contributor must know, and each term is a class or function of that name."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import meshfeed

SOURCE = Path(meshfeed.__file__).parent
OUTER = {"cli", "formats", "integrations", "prepare", "processors", "report", "sinks"}
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "design.md").read_text()
SECTION = PAGE.partition("## Terms\n")[2].partition("\n## ")[0]
TABLES = ["".join(table) for table in re.findall(r"((?:^\|.*\n?)+)", SECTION, re.MULTILINE)]
MOST = (35, 10, 14)
"""Terms of a window; of a packed document beside these; of an image beside these."""


def terms(table: str) -> list[str]:
    return re.findall(r"`(\w+)`", table)


@pytest.mark.parametrize("at", range(3))
def test_the_terms_are_few_and_stand_once(at: int) -> None:
    before = [name for table in TABLES[:at] for name in terms(table)]
    mine = terms(TABLES[at])
    assert len(TABLES) == 3 and 8 <= len(mine) <= MOST[at]
    assert len(set(mine + before)) == len(mine + before)


def test_each_term_is_a_class_or_function() -> None:
    defined = {
        node.name
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] not in OUTER
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    assert [name for table in TABLES for name in terms(table) if name not in defined] == []


def test_the_files_that_the_page_names_are_there() -> None:
    named = set(re.findall(r"`((?:\w+/)*\w+\.(?:py|c))\b", PAGE))
    assert len(named) > 20
    there = [name for name in named if (ROOT / name).exists() or list(SOURCE.rglob(name))]
    assert sorted(named) == sorted(there)


def test_the_tables_of_packages_follow_the_layers_of_the_imports() -> None:
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in rules if each.get("containers") == ["meshfeed"])
    layer_of = {name: at for at, layer in enumerate(layers) for name in layer.split(" | ")}
    core, around, outer = re.findall(
        r"^\| package \| does \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE
    )
    cells = [row.split("|")[1] for row in (outer + around + core).splitlines()]
    named = [name for cell in cells for name in re.findall(r"`(\w+)/?`", cell) if name != "__main__"]
    assert sorted(named) == sorted(layer_of)
    assert [layer_of[name] for name in named] == sorted(layer_of[name] for name in named)
