"""A package that adds a store format, a tokenizer and a rule: the one on the page, found as an installed one."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import meshfeed as mf
import world
from meshfeed import plugins
from meshfeed.cli.rule_names import rule_named

PAGE = Path(__file__).parents[2] / "docs/extending.md"
BLOCK = re.compile(r'```(?:python|toml)(?: title="([^"]+)")?\n(.*?)```', re.S)


def installed(folder: Path) -> Path:
    """The page's package as pip installs it: its module, and its metadata beside."""
    blocks = dict(BLOCK.findall(PAGE.read_text()))
    project = tomllib.loads(blocks["pyproject.toml"])["project"]
    for module in ("rows.py", "heads.py"):
        (folder / module).write_text(blocks[module])
    metadata = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups]
    (metadata / "entry_points.txt").write_text("".join(lines))
    return folder


@pytest.fixture
def package(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = installed(tmp_path_factory.mktemp("site"))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)  # of the processes that tokenize
    plugins.registered.cache_clear()
    yield folder
    plugins.registered.cache_clear()
    for module in ("rows", "heads"):
        sys.modules.pop(module, None)


def test_the_page_passes_the_laws(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(PAGE.read_text())
    (code,) = [text for title, text in blocks if not title]
    exec(compile(code, PAGE.name, "exec"), {"__name__": "page"})


def test_its_tokenizer_reads_text(package: Path, tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text('{"text": "ab"}\n{"text": "\u00e9"}\n')
    with mf.open(tmp_path / "docs.jsonl", tokenizer="letters:", cache=tmp_path / "cache") as store:
        assert store.read(0, 0, 2).tolist() == [97, 98]
        assert store.read(1, 0, 1).tolist() == [233]
    with pytest.raises(mf.errors.MissingError, match="missing"):
        mf.open(tmp_path / "docs.jsonl", tokenizer="unknown:", cache=tmp_path / "cache")


def trained(rank: int, site: str, path: str, rule: str) -> list[list[int]]:
    sys.path.insert(0, site)
    recipe = mf.Recipe(data=mf.open(path), sequence=rule_named(rule), batch=mf.Batch(sequences=8), epochs=1)
    packing = mf.Packing(capacity=64) if recipe.sequence.packed else None
    with mf.Feed(recipe, mf.Layout(dp=2), rank=rank, packing=packing) as feed:
        return [microbatch["tokens"].tolist() for step in feed for microbatch in step.microbatches]


def test_two_processes_train_on_it(package: Path, tmp_path: Path) -> None:
    rows = np.arange(48 * 16, dtype="uint16").reshape(48, 16)
    np.save(tmp_path / "corpus.npy", rows)
    ranks = world.run(trained, 2, str(package), str(tmp_path / "corpus.npy"), "windows(16)")
    windows = [window for rank in ranks for microbatch in rank for window in microbatch]
    assert sorted(windows) == rows.tolist()
    ranks = world.run(trained, 2, str(package), str(tmp_path / "corpus.npy"), "heads(5)")
    tokens = [token for rank in ranks for microbatch in rank for pack in microbatch for token in pack]
    assert sorted(tokens) == sorted(rows[:, :5].reshape(-1).tolist())


def test_a_path_of_no_format_names_what_each_expects(package: Path, tmp_path: Path) -> None:
    with pytest.raises(
        mf.errors.MissingError, match=r"\.bin/\.idx pair.*dataset\.json.*MDS.*\.jsonl.*a \.npy file of rows"
    ):
        mf.open(tmp_path)
    (tmp_path / "x.npy").write_bytes(b"")
    with pytest.raises(
        mf.errors.OptionError, match="rows has no option tokenizer; leave out tokenizer='bytes'"
    ):
        np.save(tmp_path / "x.npy", np.zeros((2, 2), np.uint16))
        mf.open(tmp_path / "x.npy", tokenizer="bytes")


def test_a_format_that_cannot_be_imported_is_named(package: Path, tmp_path: Path) -> None:
    (package / "rows.py").write_text("import a_package_that_is_missing\n")
    with pytest.raises(
        mf.errors.OptionError, match=r"'rows' of meshfeed-rows cannot be imported.*a_package_that"
    ):
        mf.open(tmp_path)
