"""What a new user reads first: the page of ten minutes runs as it stands, and pages name what there is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import meshfeed as mf
from pages import DOCS, ROOT, run_page


def test_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page("start.md", 9)
    steps = [int(line.split()[0]) for line in (tmp_path / "four.txt").read_text().splitlines()]
    killed = len(steps) - 10
    assert 10 <= killed <= 12 and steps == [*range(killed), *range(10, 20)], "killed at 12, gone on from 10"
    assert names["four"][19] < names["four"][0] - 0.5, "it learns"


def test_the_home_page_says_version_install_and_repository() -> None:
    """While the repository has no public address, it says that; afterwards, all three places have it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    home, site = (DOCS / "index.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    assert f"meshfeed {project['version']}." in home and "\npip install ." in home
    repository = project.get("urls", {}).get("Repository")
    assert ("\nrepo_url:" in site) == (repository is not None)
    assert ("has no public\naddress yet" in home) if repository is None else (repository in home + site)


def test_pages_name_each_public_name_and_no_other() -> None:
    """Beside the reference, which is made from the code, and the changelog, which is history."""
    pages = {path: path.read_text() for path in (ROOT / "README.md", *DOCS.glob("*.md"))}
    code = re.compile(r"```.*?```|`[^`]+`", re.S)
    shown = {
        path.name: {name for block in code.findall(text) for name in re.findall(r"[\w.]+", block)}
        for path, text in pages.items()
    }
    elsewhere = set[str]().union(*(names for page, names in shown.items() if page != "api.md"))
    words = elsewhere | {name.removeprefix("mf.") for name in elsewhere}
    assert [name for name in mf.__all__ if name not in words] == []
    for page, names in shown.items():
        for name in sorted(name for name in names if name.startswith("mf.")):
            found: Any = mf
            for part in name.rstrip(".").split(".")[1:]:
                assert hasattr(found, part), f"{page} names {name}"
                found = getattr(found, part)
    reference = set(re.findall(r"^::: meshfeed\.(\w+)$", pages[DOCS / "api.md"], re.M))
    assert reference - {"errors"} == {*mf.__all__} - {"MeshfeedError"}, "the reference has errors as a module"


def test_pictures_are_what_the_functions_say() -> None:
    drawing: dict[str, Any] = {"__name__": "pictures", "__file__": str(DOCS / "make" / "pictures.py")}
    exec((DOCS / "make" / "pictures.py").read_text(), drawing)
    for name, draw in drawing["PICTURES"].items():
        assert (DOCS / "pictures" / f"{name}.svg").read_text() == draw()
