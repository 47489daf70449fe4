"""The page for contributors names tests that exist, for every package."""

from __future__ import annotations

import re
from pathlib import Path

import meshfeed

SOURCE, ROOT = Path(meshfeed.__file__).parent, Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "contributing.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("|") and "`tests/" in line]
NO_ROW = {"testing", "_examples"}


def test_every_path_is_there() -> None:
    paths = re.findall(r"(?<![\w/])((?:tests|docs)/[\w/.]*\w)", PAGE)
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_make_target_is_there() -> None:
    targets = set(re.findall(r"make ([a-z]+)", PAGE))
    assert {"test", "soak", "dist"} <= targets
    rules = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets <= rules


def test_every_package_has_its_tests() -> None:
    packages = {each.parent.name for each in SOURCE.glob("*/__init__.py")} - NO_ROW
    named = {name for row in ROWS for name in re.findall(r"`(\w+)/`", row.split("|")[1])}
    assert named == packages


def test_every_top_level_test_stands_in_a_row() -> None:
    tests = {f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py")}
    assert len(tests) > 10
    named = {name for row in ROWS for name in re.findall(r"tests/test_\w+\.py", row)}
    assert named == tests


def test_every_module_beside_the_packages_has_its_tests() -> None:
    modules = {path.name for path in SOURCE.glob("*.py")} - {"__init__.py"}
    named = {name for row in ROWS for name in re.findall(r"`(\w+\.py)`", row.split("|")[1])}
    assert named == modules
